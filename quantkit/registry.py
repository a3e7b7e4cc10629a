"""The quantisation methods by name. Listing and checking them needs no torch."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """Where a method lives, and what a recipe may say about it."""

    path: str
    summary: str
    options: tuple[str, ...] = ()
    calibrated: bool = False


METHODS: dict[str, Entry] = {
    "rtn": Entry("quantkit.quantize.methods.rtn:RoundToNearest", "round to nearest"),
}


def load(name: str, options: Mapping[str, Any]) -> Any:
    """The method of that name, with its options."""
    module, _, attribute = METHODS[name].path.partition(":")
    return getattr(importlib.import_module(module), attribute)(**options)


def check_options(name: str, options: Mapping[str, Any]) -> list[str]:
    """What is wrong with a recipe's `options`."""
    known = METHODS[name].options
    has = f"it has: {', '.join(known)}" if known else "it has none"
    unknown = [key for key in options if key not in known]
    return [f"method {name} has no option {key}; {has}" for key in unknown]
