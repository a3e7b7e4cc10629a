"""Records the arguments that a model calls its decoder blocks with, using stand-ins for them.

Masks, position embeddings and the like differ from block to block in some families, so nothing is
guessed. What is the same for every sample is kept once, what differs is kept per batch.
"""

import inspect
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

ADDED = "added by the model"
"""Pseudo-argument: what the model itself adds to the states before the block."""


class Stop(Exception):
    """All blocks have been reached."""


class _StandIn(torch.nn.Module):
    """Stands in for a block; models ask their blocks for things such as the kind of attention."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_block", block)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_block"), name)


class _Carried:
    """Stands in for something that a block returns besides the hidden states."""

    def __init__(self, place: int) -> None:
        self.place = place


class Recorder(_StandIn):
    """Keeps a block's arguments, and passes the hidden states on."""

    def __init__(self, block: torch.nn.Module, last: bool, n_outputs: int | None) -> None:
        super().__init__(block)
        self.last, self.n_outputs = last, n_outputs
        self.hidden: torch.Tensor | None = None
        self.arguments: dict[str, Any] = {}

    def forward(self, *values: Any, **named: Any) -> Any:
        hidden, arguments = _by_name(object.__getattribute__(self, "_block"), values, named)
        self.hidden, self.arguments = hidden, arguments
        if self.last:
            raise Stop
        if self.n_outputs is None:
            return hidden
        return hidden, *(_Carried(place) for place in range(1, self.n_outputs))


def _by_name(
    block: torch.nn.Module, values: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The hidden states of a call, and its other arguments by their parameter names."""
    names = list(inspect.signature(block.forward).parameters)
    arguments = dict(zip(names, values, strict=False)) | named
    return arguments.pop(names[0]), arguments


class KnownOutput(_StandIn):
    """Returns a known block output: the one item of a list, which others may replace."""

    def __init__(self, block: torch.nn.Module, known: list[Any]) -> None:
        super().__init__(block)
        self.known = known

    def forward(self, *values: Any, **named: Any) -> Any:
        return self.known[0]


@dataclass
class Call:
    """A block's arguments besides the hidden states."""

    common: dict[str, Any]
    """The same for every sample: recorded for one, they broadcast."""
    varying: dict[str, list[Any]] = field(default_factory=dict)
    """Per batch, in host memory: what differs from sample to sample, such as token ids."""
    first: dict[str, Any] = field(default_factory=dict)
    """The same for the first batch of all ranks."""
    carried: dict[str, int] = field(default_factory=dict)
    """What the previous block returned besides the hidden states, by index."""
    shared: tuple[str, ...] = ()
    """Mappings that blocks write to and later ones read from."""
    repeated: dict[str, Any] = field(default_factory=dict)
    """Which shared ones the model repeats per sample: some blocks concatenate them with others."""

    @property
    def is_plain(self) -> bool:
        """Whether arguments are the same for all samples, independent of earlier blocks."""
        return not (self.varying or self.carried or self.shared)

    def of_batch(self, place: int, n_samples: int, device: torch.device) -> dict[str, Any]:
        """Arguments of one batch, without those from other blocks."""
        varying = {name: _moved(found[place], device) for name, found in self.varying.items()}
        return self._common(n_samples) | varying

    def of_first(self, n_samples: int, device: torch.device) -> dict[str, Any]:
        """Arguments of the first samples."""
        varying = {n: _moved(found[:n_samples], device) for n, found in self.first.items()}
        return self._common(n_samples) | varying

    def _common(self, n_samples: int) -> dict[str, Any]:
        repeated = {n: _repeated(self.common[n], f, n_samples) for n, f in self.repeated.items()}
        return self.common | repeated


def _repeated(value: Any, flags: Any, n_samples: int) -> Any:
    """A value, or its parts, repeated for that many samples where the flags say so; without
    copying.
    """
    if isinstance(flags, list):
        return type(value)(_repeated(v, f, n_samples) for v, f in zip(value, flags, strict=True))
    return value.expand(n_samples, *value.shape[1:]) if flags else value


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


class Recording:
    """Compares the arguments recorded for one sample with those of every batch."""

    def __init__(self, one: list[dict[str, Any]]) -> None:
        self._one = one
        self._batches: list[list[dict[str, Any]]] = []
        self._first: list[dict[str, Any]] | None = None
        self._same: dict[tuple[int, int], bool] = {}
        self._kept: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._repeated: list[dict[str, Any]] | None = None

    def add(self, arguments: list[dict[str, Any]]) -> None:
        """Add the arguments of a batch: what differs from those of one sample is kept."""
        self._alive = [arguments]  # so that no identity is reused meanwhile
        self._same.clear()
        self._kept.clear()
        self._batches.append(self._differing(arguments))
        if self._repeated is None:
            self._repeated = [
                {n: f for n, v in here.items() if n in one and (f := _flags(one[n], v))}
                for one, here in zip(self._one, arguments, strict=True)
            ]

    def begin(self, arguments: list[dict[str, Any]]) -> None:
        """The same for the first samples of all ranks."""
        self._same.clear()
        self._kept.clear()
        self._first = self._differing(arguments)

    def calls(self) -> list[Call]:
        """The calls, by block."""
        calls = []
        for place, one in enumerate(self._one):
            batches = [batch[place] for batch in self._batches]
            names = {name for batch in batches for name in batch}
            first = (self._first or self._batches[0])[place] if self._batches else {}
            carried = {n: v.place for n, v in one.items() if isinstance(v, _Carried)}
            shared = tuple(n for n, v in one.items() if isinstance(v, MutableMapping) and not v)
            apart = {*carried, *shared}
            calls.append(
                Call(
                    {n: v for n, v in one.items() if n not in apart},
                    {n: [batch.get(n, one[n]) for batch in batches] for n in names - apart},
                    {n: v for n, v in first.items() if n not in apart},
                    carried,
                    shared,
                    self._repeated[place] if self._repeated else {},
                )
            )
        return calls

    def _differing(self, arguments: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for one, here in zip(self._one, arguments, strict=True):
            other = {n: v for n, v in here.items() if n in one and not self._is_same(one[n], v)}
            found.append({n: self._on_host(v) for n, v in other.items()})
        return found

    def _on_host(self, value: Any) -> Any:
        if id(value) not in self._kept:
            self._kept[id(value)] = value.cpu() if isinstance(value, torch.Tensor) else value
        return self._kept[id(value)]

    def _is_same(self, one: Any, here: Any) -> bool:
        """Whether the value for one sample, broadcast, equals that of a batch."""
        key = id(one), id(here)
        if key not in self._same:
            self._same[key] = _broadcasts(one, here)
        return self._same[key]


def _flags(one: Any, here: Any) -> Any:
    """Whether a batch has more of a value than one sample; for parts of a tuple, a list of
    flags.
    """
    if isinstance(one, torch.Tensor) and isinstance(here, torch.Tensor):
        return one.dim() == here.dim() > 0 and one.shape[0] == 1 < here.shape[0]
    if type(one) in (tuple, list) and type(here) is type(one) and len(one) == len(here):
        flags = [_flags(*pair) for pair in zip(one, here, strict=True)]
        return flags if any(flags) else False
    return False


def _broadcasts(one: Any, here: Any) -> bool:
    if (one is None) != (here is None):
        return False
    if isinstance(one, torch.Tensor) and isinstance(here, torch.Tensor):
        if one.dim() != here.dim():
            return False
        try:
            return torch.equal(one.expand_as(here), here)
        except RuntimeError:
            return False
    if isinstance(one, tuple | list) and isinstance(here, tuple | list):
        return len(one) == len(here) and all(map(_broadcasts, one, here))
    return True
