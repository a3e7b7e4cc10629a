"""The table of candidates as one page: a heat map, and what more or fewer bits buy."""

from collections.abc import Sequence

from markupsafe import Markup

from quantkit import __version__
from quantkit.mixed.allocation import Allocation, solve_each
from quantkit.mixed.table import Table
from quantkit.page.document import Section, document
from quantkit.page.heatmap import heatmap
from quantkit.page.parts import Fact, facts, notices
from quantkit.page.scale import Axis
from quantkit.page.scatter import Point, scatter
from quantkit.page.table import Cell, Column, table
from quantkit.storage import duration, gib

N_POINTS = 24
"""Points on the curve."""


def curve(found: Table, n_points: int = N_POINTS) -> list[Allocation]:
    """The best choices for budgets from the smallest to 16 bits."""
    costs, sizes = found.costs(), found.sizes()
    known = [[size for size in row if size is not None] for row in sizes]
    least, most = sum(map(min, known)), sum(map(max, known))
    # More points where formats differ most: half of them below a quarter of the way.
    shares = [(place / (n_points - 1)) ** 2 for place in range(n_points)]
    made: list[Allocation] = []
    for one in solve_each(costs, sizes, [int(least + s * (most - least)) for s in shares]):
        if not made or one.choice != made[-1].choice:
            made.append(one)
    return made


def render(found: Table, chosen: Allocation | None = None) -> str:
    """The whole page; the chosen point is marked."""
    cost = "Predicted KL" if found.is_weighted else "Relative error"
    sections = [
        Section("What each bit gains", [_curve(found, chosen, cost)]),
        Section("Units by formats", [_map(found, cost)]),
        Section("Numbers", [_numbers(found, chosen)]),
    ]
    return document(
        f"Sensitivity of {found.model}",
        sections,
        kind="Sensitivity",
        lead=(
            f"What each of {len(found.units)} units costs in each of {len(found.formats)} formats, "
            f"from {found.n_tokens:,} tokens of {found.calibration}. A unit is a linear layer, or "
            "several that must have the same format."
        ),
        top=[notices("Read this first", _warnings(found)), facts(_facts(found))],
        footer=f"Written by quantkit {__version__}. This page loads nothing from the network.",
    )


def _warnings(found: Table) -> list[str]:
    if found.is_weighted:
        return []
    return ["Units could not be changed one at a time: costs are errors relative to their outputs."]


def _facts(found: Table) -> list[Fact]:
    return [
        Fact(str(len(found.units)), "units"),
        Fact(str(len(found.formats)), "formats"),
        Fact(f"{found.n_weights:,}", "weights in units"),
        Fact(gib(found.other_bytes), "always in 16 bits"),
        Fact(duration(found.seconds), "to measure"),
    ]


def _curve(found: Table, chosen: Allocation | None, cost: str) -> Markup:
    points = [Point("", found.bits_of(one.choice), one.cost, front=True) for one in curve(found)]
    points = [
        # The axis shows the bits; names are for the formats.
        Point(f"{p.x:.2f} bits", p.x, p.y, group="best choice", front=True, is_named=False)
        for p in points
        if p.y > 0
    ]
    points += _uniform(found)
    if chosen is not None and chosen.cost > 0:
        bits = found.bits_of(chosen.choice)
        points.append(Point("chosen", bits, chosen.cost, group="chosen"))
    return scatter(
        f"{cost} against bits per quantised weight",
        points,
        Axis("Bits per quantised weight", digits=2),
        Axis(_with_unit(found, cost), log=True),
        front="best choice of formats",
        note="Bits as files have them, scales included. 16 bits cost nothing, and are not shown.",
    )


def _with_unit(found: Table, cost: str) -> str:
    return f"{cost}, nats per token" if found.is_weighted else cost


def _uniform(found: Table) -> list[Point]:
    """One format for all units."""
    made = []
    for place, name in enumerate(found.formats):
        choice = [place] * len(found.units)
        if any(unit.sizes[place] is None for unit in found.units):
            continue
        if (cost := found.cost_of(choice)) > 0:
            made.append(Point(name, found.bits_of(choice), cost, group="one format for all"))
    return made


def _map(found: Table, cost: str) -> Markup:
    names = [name for place, name in enumerate(found.formats) if _any_cost(found, place)]
    places = [found.formats.index(name) for name in names]
    costs = found.costs()
    return heatmap(
        f"{cost} of each unit alone",
        short_names([unit.name for unit in found.units]),
        names,
        [[row[place] for place in places] for row in costs],
        Axis(_with_unit(found, cost), log=True),
    )


def short_names(names: Sequence[str]) -> list[str]:
    """Names without what all of them begin with, by block and layer where these tell them apart."""
    parts = [name.split(".") for name in names]
    depth = 0
    while all(len(one) > depth + 1 and one[depth] == parts[0][depth] for one in parts):
        depth += 1
    found = [" ".join(dict.fromkeys((one[depth], one[-1]))) for one in parts]
    return found if len(set(found)) == len(names) else [".".join(one[depth:]) for one in parts]


def _any_cost(found: Table, place: int) -> bool:
    return any((unit.errors[place] or 0) > 0 for unit in found.units)


def _numbers(found: Table, chosen: Allocation | None) -> Markup:
    columns = [
        Column("Unit"),
        *([Column("Chosen")] if chosen is not None else []),
        Column("Weights", numeric=True),
        Column("KL of the probe", numeric=True, note="nats per token"),
        *(Column(name, numeric=True, note="relative error") for name in found.formats),
    ]
    rows: list[list[Cell | str | Markup]] = []
    for number, unit in enumerate(found.units):
        kl = unit.probe_kl
        row: list[Cell | str | Markup] = [unit.name]
        if chosen is not None:
            row.append(found.formats[chosen.choice[number]])
        row.append(Cell(f"{unit.n_weights:,}", unit.n_weights))
        row.append(Cell("" if kl is None else f"{kl:.2e}", kl))
        for error in unit.errors:
            share = None if error is None else error / max(unit.energy, 1e-30)
            row.append(Cell("" if share is None else f"{share:.2e}", share))
        rows.append(row)
    return table(
        "Every unit in every format", columns, rows, searchable=True, dense=True, wide=True
    )
