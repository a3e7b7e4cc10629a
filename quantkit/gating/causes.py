"""What may have gone wrong with a candidate, as far as its report shows."""

from quantkit.gating.text import plain
from quantkit.report import layers
from quantkit.report.document import Entry

STANDS_OUT = 3.0
"""Multiple of the median error of its kind: observed in damaged layers, not in others."""


def cause(entry: Entry) -> str:
    """A short hint at what to look at first, or empty."""
    if entry.made is None or not entry.made.layers:
        return ""
    times = layers.outliers(entry.made.layers)
    odd = {place: ratio for place, ratio in times.items() if ratio > STANDS_OUT}
    if odd:
        return _odd(odd)
    if entry.made.calibration is not None:
        return f"no layer stands out; calibration set: {plain(entry.made.calibration)}"
    return "no layer stands out"


def _odd(odd: dict[tuple[str, str], float]) -> str:
    worst = max(odd.values())
    blocks = {block for block, _ in odd}
    if len(blocks) == 1 and len(odd) > 2:
        (block,) = blocks
        return f"block {block} stands out: {len(odd)} layers are up to {worst:.1f} times as far off"
    block, kind = max(odd, key=lambda place: odd[place])
    more = f", and {len(odd) - 1} more stand out" if len(odd) > 1 else ""
    kind = kind.rpartition(".")[2]
    return f"{plain(kind)} of block {block} stands out: it is {worst:.1f} times as far off{more}"
