"""Horizontal bars with their values, and optionally a mark to compare each with."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from quantkit.page import svg
from quantkit.page.figure import WIDE, Key, figure
from quantkit.page.scale import Axis, Scale, scale
from quantkit.page.table import Cell, Column, table

BAR = 14
FOOT = 44


@dataclass(frozen=True)
class Bar:
    """One value."""

    name: str
    value: float
    mark: float | None = None
    """Another value of the same thing, such as a target."""


def bars(
    title: str, items: Sequence[Bar], axis: Axis, *, mark: str = "", value: str = "", note: str = ""
) -> Markup:
    """A figure of some values; `value` and `mark` are what bars and marks are called."""
    value = value or axis.label
    shown = [item for item in items if axis.takes(item.value)]
    keys = []
    if mark:
        keys = [
            Key(value, svg.element("rect", x=2, y=2, width=24, height=10, class_="bar")),
            Key(mark, svg.line(14, 0, 14, 14, "bar-mark")),
        ]
    return figure(
        title,
        lambda width: _draw(width, title, shown, axis, mark),
        _numbers(title, items, axis, value, mark),
        keys=keys,
        note=note,
    )


def _draw(width: int, title: str, items: Sequence[Bar], axis: Axis, mark: str) -> Markup:
    beside = width >= WIDE  # names and numbers go beside their bars, or above them
    columns = _columns(items, axis, mark)
    names = max((svg.text_width(item.name) for item in items), default=0)
    left = min(names, 0.34 * width) + 14 if beside else 12.0
    right = width - sum(columns) if beside else width - 18
    both = [value for item in items for value in (item.value, item.mark)]
    across = scale(both, axis, left, right, 6 if beside else 4, with_zero=True)
    step, offset = (30, 8) if beside else (46, 26)
    bottom = step * len(items) + 6
    drawn = _grid(across, bottom)
    for place, item in enumerate(items):
        y = place * step + offset
        baseline = y + 11 if beside else y - 8
        room = left - 14 if beside else width - sum(columns)
        drawn.append(svg.text(0, baseline, svg.shorten(item.name, room), None, "name"))
        drawn.append(_bar(across, item, y, mark))
        drawn += _values(item, axis, width, baseline, columns)
    drawn.append(svg.text(across.end, bottom + 35, axis.label, "end", "label"))
    return svg.drawing(width, bottom + FOOT, title, _summary(items, axis), *drawn)


def _columns(items: Sequence[Bar], axis: Axis, mark: str) -> list[float]:
    """The width that the numbers need: those of the bars, and those of the marks."""
    values = [[item.value for item in items]]
    values += [[item.mark for item in items if item.mark is not None]] if mark else []
    return [max((svg.text_width(axis.show(v)) for v in some), default=0) + 14 for some in values]


def _values(
    item: Bar, axis: Axis, width: float, baseline: float, columns: list[float]
) -> list[Markup]:
    """The numbers in columns at the right edge; the bar's own is bold."""
    own = width - sum(columns[1:])
    drawn = [svg.text(own, baseline, axis.show(item.value), "end", "value")]
    if len(columns) > 1 and item.mark is not None:
        drawn.append(svg.text(width, baseline, axis.show(item.mark), "end", "mark-value"))
    return drawn


def _grid(across: Scale, bottom: float) -> list[Markup]:
    drawn = []
    for tick in across.ticks:
        x = across(tick)
        drawn.append(svg.line(x, 0, x, bottom, "axis" if tick == 0 else "grid"))
        drawn.append(svg.text(x, bottom + 17, across.tick_text(tick), "middle", "tick"))
    return drawn


def _bar(across: Scale, item: Bar, y: float, mark: str) -> Markup:
    axis, zero, end = across.axis, across(0), across(item.value)
    tooltip = f"{item.name}: {axis.show(item.value)}"
    long = max(abs(end - zero), 1)
    drawn = [
        svg.element("rect", x=min(zero, end), y=y, width=long, height=BAR, class_="bar"),
    ]
    if item.mark is not None and axis.takes(item.mark):
        tooltip += f"; {mark}: {axis.show(item.mark)}"
        x = across(item.mark)
        drawn.append(svg.line(x, y - 4, x, y + BAR + 4, "bar-mark"))
    return svg.with_tooltip(tooltip, *drawn)


def _summary(items: Sequence[Bar], axis: Axis) -> str:
    if not items:
        return "No values."
    least, most = min(items, key=lambda i: i.value), max(items, key=lambda i: i.value)
    return (
        f"{len(items)} bars, {axis.label}: from {axis.show(least.value)} ({least.name}) "
        f"to {axis.show(most.value)} ({most.name})."
    )


def _numbers(title: str, items: Sequence[Bar], axis: Axis, value: str, mark: str) -> Markup:
    columns = [Column("Name"), Column(value, numeric=True)]
    columns += [Column(mark, numeric=True)] if mark else []
    rows: list[list[Cell | str]] = [
        [
            item.name,
            Cell(axis.show(item.value), item.value),
            *([Cell(axis.show(item.mark), item.mark)] if mark else []),
        ]
        for item in items
    ]
    return table(title, columns, rows, dense=True)
