"""Points with error bars, and a line through the chosen ones: quality against size."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from quantkit.page import axes, svg
from quantkit.page.axes import Plane
from quantkit.page.figure import Key, figure
from quantkit.page.scale import Axis
from quantkit.page.table import Cell, Column, table

Box = tuple[float, float, float, float]
SMALL = 11
BESIDE = 14
"""A name further from its point than this is joined to it by a line."""
OVERLAP = 6
"""Points nearer than this look like one."""


@dataclass(frozen=True)
class Point:
    """Something measured in two ways."""

    name: str
    x: float
    y: float
    interval: tuple[float, float] | None = None
    """Ends of the error bar, as values of y."""
    group: str = ""
    front: bool = False
    """On the line through the best."""
    is_named: bool = True
    """Whether the chart shows its name; the table below it always does."""
    is_drawn: bool = True
    """Whether the chart shows the point; the table below it always does."""


def scatter(
    title: str, points: Sequence[Point], x: Axis, y: Axis, *, front: str = "", note: str = ""
) -> Markup:
    """A figure of many points; `front` is what the line through the chosen ones is called."""
    groups = list(dict.fromkeys(point.group for point in points))
    keys = [Key(g or "others", svg.marker(n, 14, 7)) for n, g in enumerate(groups)]
    keys = keys if len(groups) > 1 else []
    if front:
        keys.append(Key(front, svg.line(0, 7, 28, 7, "front")))
    shown = [p for p in points if p.is_drawn and x.takes(p.x) and y.takes(p.y)]
    return figure(
        title,
        lambda width: _draw(width, title, shown, groups, x, y),
        _numbers(title, points, x, y, front),
        keys=keys,
        note=note,
    )


def _draw(
    width: int, title: str, points: Sequence[Point], groups: list[str], x: Axis, y: Axis
) -> Markup:
    ends = [end for point in points for end in point.interval or ()]
    plane = axes.plane(width, [p.x for p in points], [*(p.y for p in points), *ends], x, y)
    drawn = plane.axes()
    best = sorted((p for p in points if p.front), key=lambda p: (p.x, p.y))
    if len(best) > 1:
        way = [(plane.x(p.x), plane.y(p.y)) for p in best]
        drawn.append(svg.element("path", d=svg.path(way), class_="front"))
    for point in sorted(points, key=lambda p: p.front):  # the best on top
        drawn.append(_point(plane, point, groups.index(point.group)))
    drawn += _names(plane, points)
    summary = f"{len(points)} points, {y.label} against {x.label}"
    summary += f"; the best are {', '.join(p.name for p in best)}." if best else "."
    return svg.drawing(plane.width, plane.height, title, summary, *drawn)


def _point(plane: Plane, point: Point, series: int) -> Markup:
    x_axis, y_axis = plane.x.axis, plane.y.axis
    tooltip = f"{point.name}: {x_axis.label} {x_axis.show(point.x)}, "
    tooltip += f"{y_axis.label} {y_axis.show(point.y)}"
    x, y = plane.x(point.x), plane.y(point.y)
    drawn = []
    if point.interval is not None and all(map(y_axis.takes, point.interval)):
        low, high = (plane.y(end) for end in point.interval)
        tooltip += f" ({' to '.join(map(y_axis.show, point.interval))})"
        class_ = f"error series-{series % len(svg.SHAPES) + 1}"
        drawn.append(svg.line(x, low, x, high, class_))
        drawn += [svg.line(x - 4, end, x + 4, end, class_) for end in (low, high)]
    return svg.with_tooltip(tooltip, *drawn, svg.marker(series, x, y))


def _names(plane: Plane, points: Sequence[Point]) -> list[Markup]:
    """Names where there is room, the best points' first; the table has all of them."""
    places = [(plane.x(p.x), plane.y(p.y)) for p in points]
    marks: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in places]
    errors = _error_boxes(plane, points)
    best = sorted((p for p in points if p.front), key=lambda p: (p.x, p.y))
    way = [(plane.x(p.x), plane.y(p.y)) for p in best]
    names: list[Box] = []
    drawn = []
    for i in sorted(range(len(points)), key=lambda i: (not points[i].front, i)):
        if not points[i].is_named:
            continue
        name = svg.shorten(points[i].name, 0.4 * plane.width, SMALL)
        wide = svg.text_width(name, SMALL)
        ways: list[tuple[int, int, Box]] = []
        for left, baseline in _around(*places[i], wide):
            box = (left, baseline - 9, left + wide, baseline + 3)
            inside = left >= plane.x.start and box[2] <= plane.width and box[1] >= plane.y.end - 8
            if inside and baseline < plane.y.start and not any(_meet(box, b) for b in names):
                # A name over a mark hides it; one over an error bar is still readable.
                cost = 4 * sum(_meet(box, b) for b in marks) + sum(_meet(box, b) for b in errors)
                # The names of the chosen belong to the line, but are easier to read beside it.
                crossed = any(_crosses(box, *ends) for ends in pairwise(way))
                cost += (2 if points[i].front else 4) * crossed
                cost += 2 * bool(_leader(places[i], box)) + 2 * _misleads(i, places, box)
                ways.append((cost, len(ways), box))
        if ways and (min(ways)[0] < 4 or points[i].front):
            box = min(ways)[2]
            names.append(box)
            drawn += _leader(places[i], box)
            class_ = "point-name best" if points[i].front else "point-name"
            drawn.append(svg.text(box[0], box[3] - 3, name, None, class_))
    return drawn


def _leader(point: tuple[float, float], box: Box) -> list[Markup]:
    """A thin line from a point to its name, if that is not right beside it."""
    end = _nearest(point, box)
    if math.dist(point, end) <= BESIDE:
        return []
    return [svg.line(*point, *end, "leader")]


def _nearest(point: tuple[float, float], box: Box) -> tuple[float, float]:
    """The place in a box that is nearest to a point."""
    return min(max(point[0], box[0]), box[2]), min(max(point[1], box[1]), box[3])


def _misleads(i: int, places: Sequence[tuple[float, float]], box: Box) -> bool:
    """Whether a name looks like that of another point: one that is nearer to it, or in between;
    points that overlap cannot be told apart by any name.
    """
    own, end = places[i], _nearest(places[i], box)
    others = [other for other in places if math.dist(other, own) > OVERLAP]
    return any(
        math.dist(other, _nearest(other, box)) < math.dist(own, end) - 1
        or _crosses((other[0] - 3, other[1] - 3, other[0] + 3, other[1] + 3), own, end)
        for other in others
    )


def _error_boxes(plane: Plane, points: Sequence[Point]) -> list[Box]:
    boxes = []
    for point in points:
        if point.interval is not None and all(map(plane.y.axis.takes, point.interval)):
            x, (bottom, top) = plane.x(point.x), map(plane.y, point.interval)
            boxes.append((x - 2, top, x + 2, bottom))
    return boxes


def _around(x: float, y: float, wide: float) -> list[tuple[float, float]]:
    """Where a name may begin: right, left, above, below, the corners, and further away."""
    return [
        (x + 9, y + 4),
        (x - 9 - wide, y + 4),
        (x - wide / 2, y - 10),
        (x - wide / 2, y + 18),
        (x + 7, y - 8),
        (x + 7, y + 16),
        (x - 7 - wide, y - 8),
        (x - 7 - wide, y + 16),
        *((x + 7, y + away) for away in (-22, 30, -36, 44)),
        *((x - 7 - wide, y + away) for away in (-22, 30, -36, 44)),
    ]


def _meet(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _crosses(box: Box, start: tuple[float, float], end: tuple[float, float]) -> bool:
    """Whether a straight line passes through a box: clip it by each side in turn."""
    low, high = 0.0, 1.0
    for a, b, least, most in (
        (start[0], end[0], box[0], box[2]),
        (start[1], end[1], box[1], box[3]),
    ):
        if a == b:
            if not least < a < most:
                return False
            continue
        first, last = sorted(((least - a) / (b - a), (most - a) / (b - a)))
        low, high = max(low, first), min(high, last)
    return low < high


def _numbers(title: str, points: Sequence[Point], x: Axis, y: Axis, front: str) -> Markup:
    columns = [Column("Name"), Column(x.label, numeric=True), Column(y.label, numeric=True)]
    columns += [Column("From", numeric=True), Column("To", numeric=True)]
    grouped = any(point.group for point in points)
    columns += [Column("Kind")] if grouped else []
    columns += [Column(front)] if front else []
    rows = []
    for point in points:
        low, high = point.interval or (None, None)
        row: list[Cell | str] = [point.name, Cell(x.show(point.x), point.x)]
        row += [Cell(y.show(value), value) for value in (point.y, low, high)]
        row += [point.group] if grouped else []
        row += ["yes" if point.front else ""] if front else []
        rows.append(row)
    return table(title, columns, rows, dense=True)
