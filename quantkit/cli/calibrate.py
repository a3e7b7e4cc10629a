"""`quantkit calibrate`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.options import AsJson, Force, Quiet, Revision, Verbose, one_of, split
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.calibration.spec import SetSpec

app = typer.Typer(help="Build calibration sets that look like your traffic.", no_args_is_help=True)


@app.command("list")
def list_sets(json: AsJson = False) -> None:
    """Show the sets that ship with quantkit."""
    from quantkit import resources
    from quantkit.calibration import spec
    from quantkit.cli import console

    named = [
        (name, spec.read(resources.find("calibration", name)))
        for name in resources.names("calibration")
    ]
    if json:
        console.print_json({name: found.model_dump(mode="json") for name, found in named})
        return
    console.print_table(
        ["set", "samples", "what it is"],
        [
            [name, str(s.n_samples), f"{s.summary}: {', '.join(map(spec.source_name, s.sources))}"]
            for name, s in named
        ],
        words=(0, 2),
    )


@app.command("build")
def build(
    model: Annotated[
        str, typer.Option("--model", metavar="MODEL", help="Whose tokenizer and template are used.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="The folder to write.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[SET]", help="A set's name or its YAML file.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="PATH", help="Data of your own; `-` reads stdin; repeats."),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples.")] = None,
    length: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Tokens of a sample.")
    ] = None,
    short: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Rows shorter than a sample: pack or pad.",
            callback=one_of("pack", "pad"),
        ),
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="cover (stand for all rows) or random.",
            callback=one_of("cover", "random"),
        ),
    ] = None,
    redact: Annotated[
        bool, typer.Option("--redact", help="Replace addresses, numbers and keys of people.")
    ] = False,
    avoid: Annotated[
        str, typer.Option(metavar="A,B", help="Tasks or files that models will be scored on.")
    ] = "",
    tree: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="DIR", help="Datasets without a hub: a folder tree like a hub's."
        ),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count rows that cannot be used, and go on.")
    ] = False,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Another choice.")] = None,
    revision: Revision = None,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Make a calibration set for a model."""
    from quantkit.calibration import named
    from quantkit.calibration.reading.files import is_data
    from quantkit.cli import console, early, start

    typed = {
        "n_samples": samples,
        "max_length": length,
        "short": short,
        "select": select,
        "redact": redact or None,
        "avoid": split(avoid) if avoid else None,
        "seed": seed,
    }
    wanted, base = _wanted(name, data or [], {k: v for k, v in typed.items() if v is not None})
    start.stay_offline_if(start.is_local(model) and not _needs_hub(wanted, tree))
    early.new_folder(out, force, named.FILE)
    early.models([model], revision)
    for path in data or []:
        early.calibration(path)
    early.tasks([task for task in wanted.avoid if not is_data(task)], tree)
    from quantkit.calibration import loading
    from quantkit.calibration.build import Vocabulary
    from quantkit.calibration.pool import Reading
    from quantkit.scoring import evaluation_text
    from quantkit.storage import claimed

    with claimed(out, force, named.FILE), console.progress(quiet, verbose) as progress:
        made = loading.make(
            name or ", ".join(data or []),
            wanted,
            Reading(base, skip_bad, tree),
            Vocabulary.of(model, revision),
            progress,
            partial(evaluation_text.known, data=tree),
        )
        made.write(out, force)
    show(out, json, n_samples=0)


@app.command("inspect")
def inspect(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A set that was built.")],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with plots as well.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show whether a set is any good, before hours are spent with it."""
    show(folder, json, n_samples=10)
    if html is not None:
        from quantkit.calibration import calibration_set, page
        from quantkit.storage import write_text

        write_text(html, page.render(calibration_set.read(folder)))
        typer.echo(f"written: {html}", err=True)


def show(folder: Path, as_json: bool, n_samples: int) -> None:
    """A set's figures, pictures, some samples and what is thin about it."""
    from quantkit.calibration.named import require_set
    from quantkit.cli import console

    require_set(folder)
    from quantkit.calibration import calibration_set, inspection

    found = calibration_set.read(folder)
    if as_json:
        findings = inspection.warnings(found)
        console.print_json({**found.manifest.model_dump(mode="json"), "warnings": findings})
        return
    from quantkit.cli import calibration_view

    calibration_view.show(found, folder, n_samples)


def _wanted(name: str | None, data: list[str], typed: dict[str, Any]) -> "tuple[SetSpec, Path]":
    """The set that was asked for, with what was typed in the place of what its file says."""
    from quantkit.calibration import named, spec
    from quantkit.calibration.reading.files import is_data

    if "" in data:
        raise UsageError("--from is empty: name a file, a folder or a pattern, or - for stdin")
    if name is None and not data:
        raise UsageError("give a set's name, its YAML file, or --from with data of your own")
    if name is not None and data:
        raise UsageError(f"give the set {name} or --from with data of your own, not both")
    wanted, base = named.find(name) if name else (spec.of_files(data), Path())
    if base != Path() and "avoid" in typed:
        # What is typed starts here; what a set's file says starts there.
        typed["avoid"] = [str(Path(a).absolute()) if is_data(a) else a for a in typed["avoid"]]
    return spec.changed(wanted, typed, name or data[0]), base


def _needs_hub(wanted: "SetSpec", tree: Path | None) -> bool:
    from quantkit.calibration.reading.files import is_data
    from quantkit.cli import start

    away = [task for task in wanted.avoid if not is_data(task) and not start.is_own(task)]
    return any(s.kind == "hub" for s in wanted.sources) or bool(away and tree is None)
