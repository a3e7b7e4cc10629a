"""Lines through points, such as two distributions by their quantiles."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from quantkit.page import axes, svg
from quantkit.page.figure import Key, figure
from quantkit.page.scale import Axis
from quantkit.page.table import Cell, Column, table


@dataclass(frozen=True)
class Series:
    """Points in the order of the line."""

    name: str
    points: Sequence[tuple[float, float]]


def lines(title: str, series: Sequence[Series], x: Axis, y: Axis, *, note: str = "") -> Markup:
    """A figure of one or more lines."""
    keys = [Key(one.name, _sample(number)) for number, one in enumerate(series)]
    return figure(
        title,
        lambda width: _draw(width, title, series, x, y),
        _numbers(title, series, x, y),
        keys=keys if len(series) > 1 else (),
        note=note,
    )


def _sample(number: int) -> Markup:
    stroke = svg.line(0, 7, 28, 7, f"line series-{number % len(svg.SHAPES) + 1}")
    return stroke + svg.marker(number, 14, 7, 3.5)


def _draw(width: int, title: str, series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    kept = [
        (number, one, [(a, b) for a, b in one.points if x.takes(a) and y.takes(b)])
        for number, one in enumerate(series)
    ]
    every = [point for _, _, points in kept for point in points]
    plane = axes.plane(width, [a for a, _ in every], [b for _, b in every], x, y, ends="exact")
    drawn = plane.axes()
    for number, one, points in kept:
        places = [(plane.x(a), plane.y(b)) for a, b in points]
        class_ = f"line series-{number % len(svg.SHAPES) + 1}"
        if places:
            drawn.append(svg.element("path", d=svg.path(places), class_=class_))
        for (a, b), place in zip(points, places, strict=True):
            tooltip = f"{one.name}: {x.label} {x.show(a)}, {y.label} {y.show(b)}"
            drawn.append(svg.with_tooltip(tooltip, svg.marker(number, *place, 3.5)))
    names = ", ".join(one.name for one in series)
    summary = f"{y.label} against {x.label}: {names}."
    return svg.drawing(plane.width, plane.height, title, summary, *drawn)


def _numbers(title: str, series: Sequence[Series], x: Axis, y: Axis) -> Markup:
    columns = [Column("Line"), Column(x.label, numeric=True), Column(y.label, numeric=True)]
    rows: list[list[Cell | str]] = [
        [one.name, Cell(x.show(a), a), Cell(y.show(b), b)] for one in series for a, b in one.points
    ]
    return table(title, columns, rows, dense=True)
