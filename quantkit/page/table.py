"""Tables that can be sorted and searched, and that scroll in a box of their own when wide."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup, escape

from quantkit.page.markup import render

LONG = 24
"""In characters; longer texts get more width, and wrap."""
NAME = 16
"""In characters; longer names may be broken."""
DOT = Markup(".<wbr>")
WHOLE = 40
"""Rows up to which a dense table is shown whole: a frame of its own to scroll in hides the rest."""
SHADES = 8
"""Steps of `Cell.shade`, as in the style sheet."""


@dataclass(frozen=True)
class Column:
    """A heading."""

    title: str
    numeric: bool = False
    """Right-aligned, and sorted by value."""
    note: str = ""
    """A few small words below the title."""


@dataclass(frozen=True)
class Cell:
    """A number, or anything more than words."""

    text: str | Markup
    value: float | None = None
    """What to sort by; cells without one come last."""
    tone: Literal["", "good", "bad", "quiet"] = ""
    shade: float | None = None
    """From 0 to 1: how dark its background is."""

    @property
    def shown(self) -> Markup:
        """Its text; a long name may be broken after its dots."""
        text = escape(self.text)
        is_name = len(self.text) > NAME and " " not in self.text
        return text if isinstance(self.text, Markup) or not is_name else text.replace(".", DOT)

    @property
    def order(self) -> str | None:
        """The value to sort by, in full."""
        return repr(self.value) if self.value is not None and math.isfinite(self.value) else None

    @property
    def classes(self) -> str:
        """For the style sheet."""
        step = 0 if self.shade is None else round(min(max(self.shade, 0.0), 1.0) * SHADES)
        # Markup wraps its own lines.
        long = "long" if len(self.text) > LONG and not isinstance(self.text, Markup) else ""
        return " ".join(filter(None, (self.tone, f"shade-{step}" if step else "", long)))


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell | str | Markup]],
    *,
    sortable: bool = True,
    searchable: bool = False,
    dense: bool = False,
    wide: bool = False,
) -> Markup:
    """A table whose first column names the rows; a wide one extends into the margin, and a dense
    one of many rows scrolls in a frame.
    """
    cells = [[c if isinstance(c, Cell) else Cell(c) for c in row] for row in rows]
    return render(
        "table.html",
        caption=caption,
        columns=columns,
        rows=cells,
        sortable=sortable and len(rows) > 1,
        searchable=searchable,
        dense=dense,
        tall=dense and len(rows) > WHOLE,
        wide=wide,
    )
