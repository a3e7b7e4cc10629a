"""What a method is: how it smooths and rounds the linears of a block, and which options it takes.

A method is arithmetic: it opens no file, prints nothing and chooses no path. It smooths (or not),
then rounds; the pass gathers statistics, folds scales, measures errors and writes. This module and
the top of every method's file import nothing heavy, so recipes can be checked without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from quantkit.grid import QuantizedWeight
    from quantkit.methods.statistics import Statistics
    from quantkit.schemes import ActivationScheme, WeightScheme


@dataclass(frozen=True)
class Option:
    """A setting of a recipe's `options`."""

    words: str
    """The values it takes, in words: "true or false"."""
    accepts: Callable[[Any], bool]


PROPAGATE = Option("true or false", lambda value: isinstance(value, bool))
"""Whether later blocks see the recipe's own quantised outputs: an option of the pass."""


@dataclass(frozen=True)
class Cost:
    """Operations for linears that share one input."""

    fast: float = 0.0
    """In the compute dtype, as large matrix products."""
    slow: float = 0.0
    """In float32."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.fast + other.fast, self.slow + other.slow)


@dataclass(frozen=True)
class Linears:
    """Linears that read the same input, as a method sees them."""

    weight: torch.Tensor
    """Their rows stacked, with all scales folded so far; each row may be rounded on its own."""
    dtype: torch.dtype
    """Dtype of the stored weights; scales are rounded to it."""
    scheme: WeightScheme
    options: Mapping[str, Any] = field(default_factory=dict)
    """The options that the recipe sets; defaults are missing."""
    statistics: Statistics | None = None
    """Statistics of their input; None when a recipe needs no data."""
    scale_dtype: torch.dtype | None = None
    """A narrower dtype that the format stores scales in."""
    largest: torch.Tensor | None = None
    """The magnitude that a per-tensor scale must cover, where other tensors share it."""
    activations: ActivationScheme | None = None
    """What the inputs are rounded to at run time; None: not rounded."""
    heights: tuple[int, ...] = ()
    """Rows of each of the linears; empty: there is one linear."""
    is_expert: bool = False
    """One of many small ones, such as experts, each with few tokens."""
    foldable: Callable[[torch.Tensor], torch.Tensor] = lambda values: values
    """Averages per-channel values where the layer that feeds the linears has fewer channels."""
    replay: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The squared error of the block's output with other weights; None where the Gram error is
    exact.
    """

    @property
    def inputs(self) -> Statistics:
        """The statistics, for methods that need them."""
        assert self.statistics is not None
        return self.statistics


@dataclass(frozen=True)
class Rounded:
    """The result of rounding some linears."""

    quantized: QuantizedWeight
    damping: float | None = None
    """The damping that the matrix needed to factor."""
    fallback: bool = False
    """Rounded to nearest, since the method could not be applied."""
    held_out: Mapping[str, torch.Tensor] | None = None
    """Output error of each linear on held-out tokens, by rounding method; the best method was
    taken. None: there was no choice.
    """
    errors: torch.Tensor | None = None
    """The squared error of each output row over all tokens, where the method knows it."""


class Smoothing(Protocol):
    """Chooses scales of input channels; the pass folds their inverse into the preceding layer."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """The parts of `Statistics` that it reads."""

    def cost(self, rows: int, columns: int) -> Cost:
        """For the estimate, and for sharing the work between ranks."""

    def scale(self, linears: Linears) -> torch.Tensor:
        """One scale per input channel, by which the weights' columns will be multiplied."""


class Rounding(Protocol):
    """Chooses the quantised numbers of weights."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """The parts of `Statistics` that it reads; if empty, it works without calibration."""

    def cost(self, rows: int, columns: int) -> Cost:
        """For the estimate, and for sharing the work between ranks."""

    def round(self, linears: Linears) -> Rounded:
        """The quantised weights."""


@runtime_checkable
class BatchRounding(Rounding, Protocol):
    """A rounding that handles many inputs as one batch, such as a layer's experts."""

    def round_batch(self, batch: Sequence[Linears]) -> list[Rounded]:
        """`round` applied to each; all have the same shape and scheme."""


@dataclass(frozen=True)
class Method:
    """One row of the table of methods."""

    summary: str
    """A few words, for lists."""
    explanation: str
    """A sentence or two, for model cards."""
    rounding: Rounding
    smoothing: Smoothing | None = None
    propagates: bool = False
    """Later blocks see the recipe's own quantised outputs, unless the recipe says otherwise."""
    options: Mapping[str, Option] = field(default_factory=dict)
    types: tuple[str, ...] = ("int", "float", "fp4")
    """Number kinds that it can round to, as in a scheme's `kind`."""
    modifiers: tuple[str, ...] = ()
    """Equivalent classes of llm-compressor, in order; empty: that engine has no such method."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics it needs of the linears' inputs; empty for data-free methods."""
        smoothing = self.smoothing.statistics if self.smoothing else ()
        return tuple(dict.fromkeys((*smoothing, *self.rounding.statistics)))

    @property
    def calibrated(self) -> bool:
        return bool(self.statistics)

    def cost(self, rows: int, columns: int) -> Cost:
        """Cost of smoothing and rounding the linears of one input."""
        smoothing = self.smoothing.cost(rows, columns) if self.smoothing else Cost()
        return smoothing + self.rounding.cost(rows, columns)

    def wrong_options(self, name: str, options: Mapping[str, Any]) -> list[str]:
        """What is wrong with a recipe's `options`."""
        has = f"it has: {', '.join(self.options)}" if self.options else "it has none"
        wrong = []
        for key, value in options.items():
            if key not in self.options:
                wrong.append(f"method {name} has no option {key}; {has}")
            elif not self.options[key].accepts(value):
                wrong.append(f"{key} is {self.options[key].words}")
        return wrong
