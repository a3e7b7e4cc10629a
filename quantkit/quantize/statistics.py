"""What a calibration pass keeps of a layer's inputs: enough for every method.

    G = sum of x^T x      m = mean |x|      a = max |x|      n = tokens seen

Linears that read one input share it; they are found by watching which receive the same tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch


@dataclass
class Statistics:
    """Sums over the inputs of one group of linears."""

    gram: torch.Tensor
    total: torch.Tensor
    max_abs: torch.Tensor
    n_tokens: int = 0

    @classmethod
    def zeros(cls, width: int, device: torch.device) -> "Statistics":
        return cls(
            torch.zeros(width, width, device=device),
            torch.zeros(width, device=device),
            torch.zeros(width, device=device),
        )

    def add(self, inputs: torch.Tensor) -> None:
        """Count the tokens of one batch."""
        flat = inputs.reshape(-1, inputs.shape[-1])
        if flat.dtype == torch.float32:
            self.gram.addmm_(flat.t(), flat)
        else:
            # bf16 operands on the tensor cores, float32 sums.
            self.gram += torch.mm(flat.t(), flat, out_dtype=torch.float32)
        magnitude = flat.abs()
        self.total += magnitude.sum(0, dtype=torch.float32)
        torch.maximum(self.max_abs, magnitude.amax(0).float(), out=self.max_abs)
        self.n_tokens += flat.shape[0]

    @property
    def mean_abs(self) -> torch.Tensor:
        return self.total / max(1, self.n_tokens)

    def scaled(self, scale: torch.Tensor) -> "Statistics":
        """The statistics of the same inputs divided by `scale`, channel by channel."""
        return Statistics(
            self.gram / torch.outer(scale, scale),
            self.total / scale,
            self.max_abs / scale,
            self.n_tokens,
        )


@dataclass
class Collector:
    """Watches the linears of one block while batches run through it."""

    linears: dict[str, torch.nn.Linear]
    groups: dict[str, list[str]] = field(default_factory=dict)
    """Linears that share an input, under the name of the first."""
    statistics: dict[str, Statistics] = field(default_factory=dict)
    _alive: dict[int, tuple[str, torch.Tensor]] = field(default_factory=dict)
    """Inputs of the present forward pass by identity; kept, so that no identity is used twice."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Collect from the one forward pass within."""
        handles = [
            linear.register_forward_pre_hook(partial(self._see, name))
            for name, linear in self.linears.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._alive.clear()

    def _see(self, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        (tensor,) = inputs
        leader, _ = self._alive.setdefault(id(tensor), (name, tensor))
        members = self.groups.setdefault(leader, [])
        if name not in members:
            members.append(name)
        if leader == name:
            if name not in self.statistics:
                self.statistics[name] = Statistics.zeros(tensor.shape[-1], tensor.device)
            self.statistics[name].add(tensor)
