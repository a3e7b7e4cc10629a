"""What an FP8 KV cache needs to know about keys and values, and how to intercept them.

An attention module passes its keys, rotary embedding applied, and its values to a cache and
continues with what the cache returns. So a custom cache sees them as an engine would store them, in
every family: for calibration it observes them, for scoring it rounds them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from quantkit import grid
from quantkit.errors import MethodError
from quantkit.model.shards import DTYPES
from quantkit.model.skeleton import attentions, cache_argument
from quantkit.onepass.padding import Keep, real
from quantkit.onepass.ranks import Ranks
from quantkit.recipe import WeightScheme

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from quantkit.onepass.result import BlockResult
    from quantkit.plan.checkpoint import Plan

Pass = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Takes keys and values [batch, heads, tokens, head width], returns what attention gets."""

GRID = WeightScheme(num_bits=8, type="float", strategy="tensor")


class _Cache:
    """Passes keys and values through a function, and then into the real cache if there is one."""

    def __init__(self, real: Any, function: Pass) -> None:
        self._real = real
        self._function = function

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *arguments: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self._function(keys, values)
        if self._real is None:
            return keys, values
        return self._real.update(keys, values, *arguments, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def intercept(attention: torch.nn.Module, function: Pass) -> "RemovableHandle":
    """Pass an attention module's keys and values through a function."""

    name = cache_argument(attention) or "past_key_values"

    def hook(module: torch.nn.Module, arguments: Any, more: dict[str, Any]) -> Any:
        return arguments, more | {name: _Cache(more.get(name), function)}

    return attention.register_forward_pre_hook(hook, with_kwargs=True)


@dataclass
class Observer:
    """The largest magnitudes that the attention modules of one block would write to a cache."""

    attentions: dict[str, torch.nn.Module]
    keys: dict[str, torch.Tensor] = field(default_factory=dict)
    """Per head."""
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    """Per channel [value heads * width], since folded scales change them per channel."""

    @classmethod
    def of(cls, block: torch.nn.Module, plans: "Sequence[Plan]") -> "Observer":
        """An observer of a block, which observes nothing unless a recipe needs it."""
        return cls(attentions(block) if any(plan.kv_scales for plan in plans) else {})

    @contextmanager
    def watching(self, keep: Keep = None) -> Iterator[None]:
        """Observe the positions to keep in the passes within, whose results do not change."""
        handles = [
            intercept(module, partial(self._see, name, keep))
            for name, module in self.attentions.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def add_up(self, ranks: Ranks, device: torch.device) -> None:
        """Take the maxima over all ranks; the first knows which modules have any."""
        if not self.attentions:
            return
        for largest in (self.keys, self.values):
            shapes = ranks.share({name: found.shape for name, found in largest.items()})
            for name, shape in shapes.items():
                largest.setdefault(name, torch.zeros(shape, device=device))
            ranks.max_([largest[name] for name in shapes])

    def _see(
        self, name: str, keep: Keep, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        _raise(self.keys, name, _real(keys, keep).abs().amax((0, 2, 3)))
        _raise(self.values, name, _real(values, keep).abs().amax((0, 2)).flatten())
        return keys, values


def _real(states: torch.Tensor, keep: Keep) -> torch.Tensor:
    """The real positions of [batch, heads, tokens, width], as if from one sample."""
    if keep is None:
        return states
    return real(states.transpose(1, 2), keep).transpose(0, 1)[None]


def _raise(largest: dict[str, torch.Tensor], name: str, seen: torch.Tensor) -> None:
    largest[name] = torch.maximum(largest[name], seen.float()) if name in largest else seen.float()


def scales(
    observer: Observer, result: "BlockResult", name_of: Callable[[str], str], plan: "Plan"
) -> dict[str, torch.Tensor]:
    """The scales that a checkpoint stores for one block, by their names in files."""
    if not plan.kv_scales:
        return {}
    dtype, shape = DTYPES[plan.kv_scales[0].dtype], plan.kv_scales[0].shape
    found = {}
    for attention in observer.attentions:
        if attention not in observer.keys:
            raise MethodError(f"{name_of(attention)} does not use a KV cache")
        keys, values = observer.keys[attention], observer.values[attention]
        projection = result.linears.get(f"{attention}.v_proj")
        if projection is not None and projection.out_scale is not None:
            values = values / projection.out_scale  # what smoothing folded into the projection
        for kind, largest in (("k", keys), ("v", values)):
            if largest.numel() % shape[0]:
                raise MethodError(
                    f"{name_of(attention)} has heads that the config does not list; use +kv-fp8"
                )
            top = largest.view(shape[0], -1).amax(1).to(dtype).view(shape)
            if not top.isfinite().all():
                raise MethodError(
                    f"keys or values of {name_of(attention)} are not finite on this calibration "
                    "data; the source model is damaged, or overflows in this type"
                )
            found[f"{name_of(attention)}.{kind}_scale"], _ = grid.parameters(-top, top, GRID)
    return found
