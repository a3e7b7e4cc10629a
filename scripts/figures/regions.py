"""What every subject needs: result files, regions by name, numbers and tables as text."""

import functools
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
WIDTH = 110
REGIONS: dict[str, Callable[[], str]] = {}


class FigureError(Exception):
    """A document or a result file is not what it should be."""


def region(function: Callable[[], str]) -> Callable[[], str]:
    """Register what fills the region of this function's name, with `-` for `_`."""
    name = function.__name__.replace("_", "-")
    if name in REGIONS:
        raise FigureError(f"two functions fill the region {name}")
    REGIONS[name] = function
    return function


@functools.cache
def result(name: str) -> Any:
    """A result file by its name without `.json`."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise FigureError(
            f"benchmarks/results/{name}.json is missing: run the program that writes it, or "
            "remove the regions that show it"
        )
    return json.loads(path.read_text(encoding="utf-8"))


def link(text: str, name: str, to_root: str = "../") -> str:
    """A link to a result file, from a page whose way to the root is `to_root`."""
    result(name)
    return f"[{text}]({to_root}benchmarks/results/{name}.json)"


# Numbers: three significant digits, unless a table has a rule of its own.


def number(value: float, digits: int = 3) -> str:
    """Rounded to significant digits, never in powers of ten: 0.156, 27.0, 375, 14,042."""
    if value == 0:
        return "0"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    rounded = round(value, places)
    # 9.996 has become 10.0, which has one place fewer.
    places = digits - 1 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:,.{max(places, 0)}f}"


def seconds(value: float) -> str:
    return f"{number(value * 1000)} ms" if value < 0.1 else f"{number(value)} s"


def times(value: float) -> str:
    return f"{number(value)} times"


def gib(n_bytes: float) -> str:
    return f"{number(n_bytes / 2**30)} GiB"


def gb(n_bytes: float) -> str:
    return f"{number(n_bytes / 1e9)} GB"


def percent(share: float, places: int = 1) -> str:
    """Rounded; nothing is negative zero."""
    return f"{round(100 * share, places) + 0.0:.{places}f}%"


def at_most(share: float, places: int = 0) -> str:
    """For "within ...": rounded up, so that it holds."""
    scale = 10**places
    return f"{math.ceil(100 * share * scale - 1e-9) / scale:.{places}f}%"


def span(values: Iterable[float], shown: Callable[[float], str]) -> str:
    """`0.76 to 1.24%`, or one value where the ends look the same."""
    ordered = sorted(values)
    low, high = shown(ordered[0]), shown(ordered[-1])
    if low == high:
        return low
    unit = high.lstrip("-+0123456789.,")
    return f"{low.removesuffix(unit)} to {high}"


WORDS = [
    "no",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]


def count(value: int) -> str:
    """Small numbers as words."""
    return WORDS[value] if value < len(WORDS) else f"{value:,}"


# Text.


def paragraph(text: str, indent: str = "") -> str:
    """One paragraph, or with an indent one item of a list, in lines of the documents' width."""
    return textwrap.fill(
        " ".join(text.split()),
        WIDTH,
        initial_indent="- " if indent else "",
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def items(*texts: str) -> str:
    """A list."""
    return "\n".join(paragraph(text, "  ") for text in texts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns whose title ends in a colon are right-aligned."""
    titles = [title.removesuffix(":") for title in head]
    rules = ["---:" if title.endswith(":") else "---" for title in head]
    lines = [f"| {' | '.join(titles)} |", f"|{'|'.join(rules)}|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines).replace("|  ", "| ")
