"""A value for every pair of two things as shades, such as layers and their kinds of weights."""

import math
from collections.abc import Sequence

from markupsafe import Markup

from quantkit.page import svg
from quantkit.page.figure import WIDE, figure
from quantkit.page.scale import Axis, Scale, scale
from quantkit.page.table import Cell, Column, table

Values = Sequence[Sequence[float | None]]
PALEST = 0.07
LONGEST = 165
"""Maximum width of a name."""
LINE = 12
"""Height of a line of numbers, and width of a vertical name."""
NAME_LINE = 15
"""Height of a line of names, whose letters reach below it."""
STRIP = 220


def heatmap(
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    values: Values,
    axis: Axis,
    *,
    note: str = "",
) -> Markup:
    """A figure of `values[row][column]`; the longer side runs across, but down on a phone and where
    its names would collide.
    """

    def draw(width: int) -> Markup:
        across, down = (columns, rows) if len(columns) >= len(rows) else (rows, columns)
        left = _margin(down, width, len(across))
        is_across = width >= WIDE and _have_room(across, width - left)
        if is_across == (len(columns) >= len(rows)):
            return _draw(width, title, rows, columns, values, axis)
        turned = [[line[place] for line in values] for place in range(len(columns))]
        return _draw(width, title, columns, rows, turned, axis)

    return figure(title, draw, _numbers(title, rows, columns, values, axis), note=note)


def _have_room(names: Sequence[str], width: float) -> bool:
    """Whether every vertical name can be shown; of numbers some are enough."""
    return all(name.isdecimal() for name in names) or width / max(1, len(names)) >= LINE


def _line(names: Sequence[str]) -> int:
    """Height of a row when there are many."""
    return LINE if all(name.isdecimal() for name in names) else NAME_LINE


def _margin(rows: Sequence[str], width: int, n_columns: int) -> float:
    """Width of the rows' names: a third of the figure, or what columns leave if each has a name."""
    left = max(width / 3, width - LINE * n_columns - 8)
    return min(max(map(svg.text_width, rows), default=0), LONGEST, left) + 8


def _draw(
    width: int, title: str, rows: Sequence[str], columns: Sequence[str], values: Values, axis: Axis
) -> Markup:
    left = _margin(rows, width, len(columns))
    cell_width = min((width - left) / max(1, len(columns)), 64)
    cell_height = 22 if len(rows) <= 16 else _line(rows)
    flat = [value for line in values for value in line]
    shades = scale(flat, axis, 0, STRIP, 3)
    drawn, top = _column_names(columns, left, cell_width)
    for y, row in enumerate(rows):
        place = top + y * cell_height
        if y % max(1, round(14 / cell_height)) == 0:
            name = svg.shorten(row, left - 8)
            drawn.append(svg.text(left - 8, place + cell_height / 2 + 4, name, "end", "tick"))
        for x, column in enumerate(columns):
            value = values[y][x]
            drawn.append(
                svg.with_tooltip(
                    f"{row}, {column}: {axis.show(value)}",
                    _cell(left + x * cell_width, place, cell_width, cell_height, value, shades),
                )
            )
    bottom = top + cell_height * len(rows)
    drawn += _strip(shades, left, bottom + 16, width - LINE)
    summary = f"{axis.label} of {len(rows)} by {len(columns)}{_range(rows, columns, values, axis)}."
    return svg.drawing(width, bottom + 68, title, summary, *drawn)


def _cell(
    x: float, y: float, width: float, height: float, value: float | None, shades: Scale
) -> Markup:
    gap = 1 if width > 6 and height > 6 else 0
    known = shades.axis.takes(value)
    return svg.element(
        "rect",
        x=x,
        y=y,
        width=width - gap,
        height=height - gap,
        class_="heat" if known else "heat missing",
        fill_opacity=_opacity(shades(value) / STRIP) if known and value is not None else None,
    )


def _opacity(share: float) -> float:
    return PALEST + (1 - PALEST) * share


def _column_names(columns: Sequence[str], left: float, width: float) -> tuple[list[Markup], float]:
    """Names above their columns, and their height: horizontal, vertical, or only some of them."""
    widest = max(map(svg.text_width, columns), default=0)
    every = 1
    if widest > width - 4:
        if not all(name.isdecimal() for name in columns):
            room = min(widest, LONGEST)
            drawn = []
            for place, name in list(enumerate(columns))[:: math.ceil(LINE / width)]:
                x = left + (place + 0.5) * width + 4
                drawn.append(
                    svg.element(
                        "text",
                        svg.shorten(name, room),
                        transform=f"translate({x:.1f} {room + 2:.1f}) rotate(-90)",
                        class_="tick",
                    )
                )
            return drawn, room + 8
        every = next(n for n in (2, 4, 5, 8, 10, 20, 50, 100, 1000) if n * width > widest + 6)
    return [
        svg.text(left + (place + 0.5) * width, 12, name, "middle", "tick")
        for place, name in enumerate(columns)
        if place % every == 0
    ], 20


def _strip(shades: Scale, x: float, y: float, end: float) -> list[Markup]:
    """The legend of the shades, from `x` or as far left of it as `end` requires."""
    steps, left = 12, min(x, end - STRIP)
    drawn = [
        svg.element(
            "rect",
            x=left + k * STRIP / steps,
            y=y,
            width=STRIP / steps,
            height=10,
            class_="heat",
            fill_opacity=_opacity((k + 0.5) / steps),
        )
        for k in range(steps)
    ]
    edge = -float(STRIP)
    for tick in shades.ticks:
        name = shades.tick_text(tick)
        if shades(tick) - edge > svg.text_width(name) + 6:
            drawn.append(svg.text(left + shades(tick), y + 25, name, "middle", "tick"))
            edge = shades(tick) + svg.text_width(name) / 2
    label = shades.axis.label
    start = max(0.0, min(x, end - svg.text_width(label)))
    return [*drawn, svg.text(start, y + 44, label, None, "label")]


def _range(rows: Sequence[str], columns: Sequence[str], values: Values, axis: Axis) -> str:
    known = [
        (value, rows[y], columns[x])
        for y, line in enumerate(values)
        for x, value in enumerate(line)
        if value is not None and axis.takes(value)
    ]
    if not known:
        return ""
    least, most = min(known, key=lambda k: k[0]), max(known, key=lambda k: k[0])
    return (
        f", from {axis.show(least[0])} ({least[1]}, {least[2]}) "
        f"to {axis.show(most[0])} ({most[1]}, {most[2]})"
    )


def _numbers(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Values, axis: Axis
) -> Markup:
    """The table of values, with the longer side down."""
    if len(columns) > len(rows):
        turned = [[line[place] for line in values] for place in range(len(columns))]
        rows, columns, values = columns, rows, turned
    headings = [Column(""), *(Column(name, numeric=True) for name in columns)]
    body = [
        [Cell(row, float(row)) if row.isdecimal() else row, *(Cell(axis.show(v), v) for v in line)]
        for row, line in zip(rows, values, strict=True)
    ]
    return table(title, headings, body, dense=True)
