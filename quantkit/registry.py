"""The quantisation methods by name. Listing and checking them needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.errors import UnknownName

NATIVE = "native"
ENGINES = (NATIVE, "llmcompressor")
"""Who does the arithmetic: quantkit itself, or the optional llm-compressor."""


@dataclass(frozen=True)
class Entry:
    """What a method is made of, and what a recipe may say about it.

    A method smooths (or not), then rounds. Data-free methods have a class of their own instead.
    """

    summary: str
    smoothing: str | None = None
    """`awq` or `smoothquant`: inputs are scaled, the inverse is folded into what feeds them."""
    rounding: str = "rtn"
    """`rtn`, `clip` (scales that clip, judged by the Gram matrix) or `gptq`."""
    propagates: bool = False
    """Later blocks see this recipe's own quantised outputs, unless the recipe says otherwise."""
    options: tuple[str, ...] = ()

    @property
    def calibrated(self) -> bool:
        return self.smoothing is not None or self.rounding != "rtn"


METHODS: dict[str, Entry] = {
    "rtn": Entry("round to nearest"),
    "gptq": Entry(
        "round column by column, let the rest make up for the error",
        rounding="gptq",
        propagates=True,
        options=("propagate",),
    ),
    "awq": Entry(
        "enlarge important channels before rounding, clip by output error",
        smoothing="awq",
        rounding="clip",
        options=("propagate",),
    ),
    "awq-gptq": Entry(
        "AWQ's scales, then GPTQ's rounding",
        smoothing="awq",
        rounding="gptq",
        propagates=True,
        options=("propagate",),
    ),
    "smoothquant-gptq": Entry(
        "move activation outliers into the weights, then GPTQ",
        smoothing="smoothquant",
        rounding="gptq",
        propagates=True,
        options=("propagate", "strength"),
    ),
}


def check_engine(name: str) -> None:
    """Refuse an engine that does not exist."""
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)


def check_options(name: str, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a recipe's `options`."""
    known = METHODS[name].options
    has = f"it has: {', '.join(known)}" if known else "it has none"
    wrong = [f"method {name} has no option {key}; {has}" for key in options if key not in known]
    if not isinstance(options.get("propagate", True), bool):
        wrong.append("propagate is true or false")
    strength = options.get("strength", 0.5)
    if not isinstance(strength, float) or not 0 < strength < 1:
        wrong.append("strength is a number between 0 and 1")
    return wrong
