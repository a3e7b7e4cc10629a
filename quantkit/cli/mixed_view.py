"""What a budget buys, as tables."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.mixed.budget import Choice
    from quantkit.mixed.table import Table


def show_curve(table: "Table") -> None:
    """What more or fewer bits buy."""
    from quantkit.cli import console
    from quantkit.mixed.page import curve

    cost = "predicted KL, nats per token" if table.is_weighted else "relative error"
    rows = [[f"{table.bits_of(one.choice):.2f}", f"{one.cost:.3g}"] for one in curve(table, 12)]
    console.print_table(["bits per quantised weight", cost], rows)


def show_choice(choice: "Choice") -> None:
    """The formats of a choice, by kind."""
    from quantkit.cli import console
    from quantkit.mixed.units import Unit
    from quantkit.recipe.patterns import ranges

    kinds: dict[str, dict[str, list[str]]] = {}
    for name, format in choice.of_unit().items():
        unit = Unit(name, ())
        kinds.setdefault(unit.kind, {}).setdefault(format, []).append(unit.block)
    rows = [
        [kind, format, ranges(int(block) for block in blocks if block)]
        for kind, formats in kinds.items()
        for format, blocks in formats.items()
    ]
    console.print_table(["layers", "format", "blocks"], rows, words=(0, 1, 2))


def as_json(choice: "Choice") -> dict[str, Any]:
    """A choice as plain data."""
    return {
        "name": choice.budget.label,
        "bits_per_weight": choice.bits,
        "predicted": choice.allocation.cost,
        "bound": choice.allocation.bound,
        "units": choice.of_unit(),
        "notes": choice.notes,
    }
