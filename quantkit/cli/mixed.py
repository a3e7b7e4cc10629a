"""`quantkit quantize --bits`, `--size` and `--fit GPU --mixed`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import UsageError
from quantkit.registry import NATIVE

if TYPE_CHECKING:
    from quantkit.mixed.budget import Budget
    from quantkit.mixed.run import Made
    from quantkit.model.source import ModelSource
    from quantkit.onepass.prepare import CalibrationChoice, Run


@dataclass(frozen=True)
class Place:
    """Where the model is to be served."""

    gpu: str | None
    count: int
    context: int | None
    users: int


@dataclass(frozen=True)
class Asked:
    """A budget as it was typed."""

    model: str
    amount: dict[str, Any]
    place: Place
    target: str
    formats: tuple[str, ...]
    table: Path | None


def checked(
    recipes: list[str],
    bits: float | None,
    size: str | None,
    gpu: str | None,
    engine: str,
    format: str | None,
) -> dict[str, Any]:
    """The budget, if there is one and only one, and nothing that does not go with it."""
    given = {"bits": bits, "size": size, "mixed": gpu}
    found = {key: value for key, value in given.items() if value is not None}
    if len(found) != 1:
        raise UsageError("give one of --bits, --size, and --mixed together with --fit GPU")
    if recipes:
        raise UsageError("--bits, --size and --mixed choose the formats; leave out --recipe")
    if engine != NATIVE or format is not None:
        option = "--engine" if engine != NATIVE else "--format"
        raise UsageError(f"{option} does not go with --bits, --size or --mixed; leave it out")
    return found


def calibration(model: str, named: str | None, quiet: bool) -> str:
    """The set to learn from: the one that was named, else ours."""
    from quantkit.cli import console

    if named is not None:
        return named
    chosen = "python-docs" if model == "demo" else "general"
    if not quiet:
        console.say(f"It learns from the set {chosen}; --calibration names another.", err=True)
    return chosen


def make(
    asked: Asked,
    source: "ModelSource",
    out: Path,
    device: str,
    chosen: "CalibrationChoice | None",
    run: "Run",
    dry_run: bool,
) -> "Made":
    """Choose, and write unless it is a dry run."""
    from quantkit.mixed.run import Made, Wanted, choose, quantize
    from quantkit.mixed.table import Table

    wanted = Wanted(_budget(asked), asked.formats, asked.table, asked.target)
    if dry_run:
        if asked.table is None:
            raise UsageError(
                "--dry-run of a budget needs a table: make one with `quantkit sensitivity`, and "
                "name it with --sensitivity"
            )
        return Made(choose(source, wanted, Table.read(asked.table)))
    return quantize(source, wanted, out, device, chosen, run)


def _budget(asked: Asked) -> "Budget":
    from quantkit.mixed.budget import Budget, size_bytes

    if "bits" in asked.amount:
        return Budget(bits=asked.amount["bits"])
    if "size" in asked.amount:
        return Budget(size_bytes=size_bytes(asked.amount["size"]))
    from quantkit.advise.mixed import budget

    place = asked.place
    assert place.gpu is not None
    return budget(asked.model, place.gpu, place.count, place.context, place.users, asked.target)


def show(made: "Made", as_json: bool) -> None:
    """The choice; the checkpoint has a table of its own."""
    from quantkit.cli import console, mixed_view
    from quantkit.mixed.budget import one_percent_more

    choice = made.choice
    if as_json:
        console.print_json(
            {
                **mixed_view.as_json(choice),
                "checkpoints": [
                    {"path": str(c.folder), "manifest": c.manifest.to_json()}
                    for c in made.checkpoints
                ],
            }
        )
        return
    if choice.recipe is None:
        for note in choice.notes:
            console.say(note)
        return
    mixed_view.show_choice(choice)
    console.say(
        f"{choice.bits:.3f} bits per weight, predicted KL {choice.allocation.cost:.3g}, at most "
        f"{choice.allocation.gap:.1%} from the best there is."
    )
    if more := one_percent_more(choice):
        console.say(more)
