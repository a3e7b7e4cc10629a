"""The plane that lines and scatters are drawn on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from quantkit.page import svg
from quantkit.page.figure import WIDE
from quantkit.page.scale import Axis, Scale, scale

TOP = 30
BOTTOM = 46
RIGHT = 18


@dataclass(frozen=True)
class Plane:
    """Two scales and the picture that they share."""

    width: float
    height: float
    x: Scale
    y: Scale

    def axes(self) -> list[Markup]:
        """Grid, ticks and labels; the y axis' label is above it, so that it reads horizontally."""
        left, right = self.x.start, self.x.end
        top, bottom = self.y.end, self.y.start
        drawn = []
        for tick in self.y.ticks:
            y = self.y(tick)
            drawn.append(svg.line(left, y, right, y, "grid"))
            drawn.append(svg.text(left - 8, y + 4, self.y.tick_text(tick), "end", "tick"))
        for tick in self._x_ticks():
            x = self.x(tick)
            drawn.append(svg.line(x, bottom, x, bottom + 5, "axis"))
            drawn.append(svg.text(x, bottom + 19, self.x.tick_text(tick), "middle", "tick"))
        drawn.append(svg.line(left, bottom, right, bottom, "axis"))
        drawn.append(svg.text(0, top - 16, self.y.axis.label, None, "label"))
        drawn.append(svg.text(right, bottom + 39, self.x.axis.label, "end", "label"))
        return drawn

    def _x_ticks(self) -> list[float]:
        """The ticks whose labels do not overlap."""
        shown: list[float] = []
        edge = float("-inf")
        for tick in self.x.ticks:
            half = svg.text_width(self.x.tick_text(tick)) / 2
            if self.x(tick) - half > edge + 6:
                shown.append(tick)
                edge = self.x(tick) + half
        return shown


def plane(
    width: int,
    xs: Sequence[float | None],
    ys: Sequence[float | None],
    x: Axis,
    y: Axis,
    ends: Literal["padded", "exact"] = "padded",
) -> Plane:
    """A plane that holds some points, with or without padding at both sides."""
    height = 340 if width >= WIDE else 280
    vertical = scale(ys, y, height - BOTTOM, TOP, n_ticks=5)
    margin = max(svg.text_width(vertical.tick_text(tick)) for tick in vertical.ticks)
    left = round(margin + 10)
    n_ticks = 8 if width >= WIDE else 4
    across = scale(xs, x, left, width - RIGHT, n_ticks, ends=ends)
    return Plane(width, height, across, vertical)
