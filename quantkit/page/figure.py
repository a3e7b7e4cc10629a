"""The frame around every figure: caption, legend, and the numbers as a table.

A figure is drawn twice, for wide and for narrow pages, since text that shrinks with a picture
cannot be read on a phone; the style sheet shows the one that fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from quantkit.page import svg
from quantkit.page.markup import render

WIDE = 736
NARROW = 340


@dataclass(frozen=True)
class Key:
    """A line of the legend."""

    name: str
    mark: Markup
    """Drawn around the middle of 28 by 14 units."""


def figure(
    title: str,
    draw: Callable[[int], Markup],
    numbers: Markup,
    *,
    keys: Sequence[Key] = (),
    note: str = "",
) -> Markup:
    """A drawing with everything around it; `draw` is called with the width."""
    legend = [(key.name, _swatch(key.mark)) for key in keys]
    return render(
        "figure.html",
        title=title,
        note=note,
        legend=legend,
        wide=draw(WIDE),
        narrow=draw(NARROW),
        numbers=numbers,
    )


def _swatch(mark: Markup) -> Markup:
    return svg.element("svg", mark, viewBox="0 0 28 14", width=28, height=14, aria_hidden="true")
