"""Durations as users write them."""

import re

from quantkit.errors import UsageError

UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0}


def seconds(text: str | None, option: str) -> float | None:
    """`500ms` or `0.5s` in seconds; a bare number is seconds."""
    if text is None:
        return None
    matched = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(ms|s|)", text.strip())
    if not matched or float(matched[1]) == 0:
        raise UsageError(f"{option} takes a time such as 500ms or 2s, not '{text}'")
    return float(matched[1]) * UNITS[matched[2]]
