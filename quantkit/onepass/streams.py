"""Hidden states on their way through the blocks, and who learns from them.

Recipes that do not propagate share one stream, the source's own. One that propagates has a stream
of its own, which sees the recipe's own quantised blocks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from quantkit.onepass.hidden import HiddenStates
from quantkit.onepass.importance import Importance
from quantkit.onepass.padding import Keep
from quantkit.plan.checkpoint import Plan


@dataclass
class Stream:
    """One set of hidden states: on every rank, those of its share of the samples."""

    hidden: HiddenStates
    indices: list[int]
    """Places of the recipes in the run."""
    propagates: bool
    importance: Importance | None = None
    """Watches the source's own stream, if anybody wants to know."""

    @contextmanager
    def watching(self, block: torch.nn.Module, prefix: str, keep: Keep) -> Iterator[None]:
        """Let the forward pass within be seen, at the positions to keep."""
        with self.importance.watching(block, prefix, keep) if self.importance else nullcontext():
            yield


def streams_of(
    plans: Sequence[Plan], states: HiddenStates, importance: Importance | None
) -> list[Stream]:
    """The shared stream first, if anybody needs it."""
    shared = [i for i, plan in enumerate(plans) if not plan.recipe.propagates]
    own = [i for i, plan in enumerate(plans) if plan.recipe.propagates]
    streams = []
    if shared or importance is not None:
        streams.append(Stream(states.branch(), shared, propagates=False, importance=importance))
    return streams + [Stream(states.branch(), [i], propagates=True) for i in own]
