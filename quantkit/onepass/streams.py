"""Streams of hidden states through the blocks, and the recipes that learn from each.

Recipes that do not propagate share one stream, the source's own. One that propagates has its own
stream, which sees the recipe's own quantised blocks.
"""

from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from quantkit.model.block_calls import Call
from quantkit.onepass.hidden_states import HiddenStates
from quantkit.onepass.importance import Importance
from quantkit.onepass.padding import Keep
from quantkit.plan.checkpoint import Plan


@dataclass
class Stream:
    """One set of hidden states: on every rank, those of its share of the samples."""

    hidden: HiddenStates
    indices: list[int]
    """Indices of the recipes in the run."""
    propagates: bool
    source: HiddenStates | None = None
    """The source's own states in parallel, where its recipe compares inputs with them."""
    importance: Importance | None = None
    """Observes the source's own stream, where needed."""
    beside: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """By batch, what the last block returned besides the hidden states."""
    shared: dict[int, dict[str, MutableMapping[Any, Any]]] = field(default_factory=dict)
    """By batch, what blocks leave for later ones (keys and values that several layers share)."""

    @contextmanager
    def watching(
        self, block: torch.nn.Module, name_of: Callable[[str], str], keep: Keep
    ) -> Iterator[None]:
        """Observe the forward pass within, at the positions to keep."""
        with self.importance.watching(block, name_of, keep) if self.importance else nullcontext():
            yield

    def arguments(
        self, call: Call, place: int, n_samples: int, device: torch.device
    ) -> dict[str, Any]:
        """A block's arguments for one batch."""
        arguments = call.of_batch(place, n_samples, device)
        for name, output in call.carried.items():
            arguments[name] = self.beside[place][output - 1]
        for name in call.shared:
            mine = self.shared.setdefault(place, {})
            arguments[name] = mine.setdefault(name, UserDict())
        return arguments

    def first_arguments(self, call: Call, n_samples: int, device: torch.device) -> dict[str, Any]:
        """The same for the first samples; what blocks leave for others is a copy."""
        arguments = call.of_first(n_samples, device)
        for name, output in call.carried.items():
            arguments[name] = _first(self.beside[0][output - 1], n_samples)
        for name in call.shared:
            before = self.shared.get(0, {}).get(name, {})
            arguments[name] = UserDict({k: _first(v, n_samples) for k, v in before.items()})
        return arguments


def _first(value: Any, n_samples: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:n_samples]
    if isinstance(value, tuple | list):
        return type(value)(_first(part, n_samples) for part in value)
    return value


def streams_of(
    plans: Sequence[Plan],
    states: HiddenStates,
    importance: Importance | None,
    is_watched: bool = False,
    calls: Sequence[Call] = (),
) -> list[Stream]:
    """All streams, the shared one first, if it is needed.

    Where blocks leave something for later ones, the source's states are not followed in parallel.
    """
    is_simple = not any(call.carried or call.shared for call in calls)
    shared = [i for i, plan in enumerate(plans) if not plan.recipe.propagates]
    own = [i for i, plan in enumerate(plans) if plan.recipe.propagates]
    streams = []
    if shared or importance is not None or is_watched:
        streams.append(Stream(states.branch(), shared, propagates=False, importance=importance))
    return streams + [
        Stream(
            states.branch(),
            [i],
            propagates=True,
            source=states.branch() if is_simple and plans[i].recipe.follows_source else None,
        )
        for i in own
    ]
