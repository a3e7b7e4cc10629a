"""`quantkit calibrate`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import (
    AsJson,
    Datasets,
    Force,
    Length,
    Quiet,
    Revision,
    Samples,
    Verbose,
    one_of,
    split,
)

app = typer.Typer(help="Build calibration sets that look like your traffic.", no_args_is_help=True)


@app.command("list")
def list_sets(json: AsJson = False) -> None:
    """List the sets that ship with quantkit."""
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
        str,
        typer.Option(
            "--model", metavar="MODEL", help="The model whose tokenizer and chat template to use."
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Output folder.")],
    name: Annotated[
        str | None, typer.Argument(metavar="[SET]", help="A set's name or YAML file.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="PATH", help="Your own data; `-` reads stdin. Repeatable."),
    ] = None,
    samples: Samples = None,
    length: Length = None,
    short: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="What to do with rows shorter than a sample: pack or pad.",
            callback=one_of("pack", "pad"),
        ),
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="How to choose samples: cover (represent all rows) or random.",
            callback=one_of("cover", "random"),
        ),
    ] = None,
    redact: Annotated[
        bool,
        typer.Option(
            "--redact", help="Replace personal data and secrets: addresses, numbers, keys."
        ),
    ] = False,
    avoid: Annotated[
        str,
        typer.Option(
            metavar="A,B",
            help="Leave out rows that overlap these tasks or files (what you will score on).",
        ),
    ] = "",
    tree: Datasets = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip and count unusable rows instead of stopping.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(metavar="N", help="Random seed for choosing samples.")
    ] = None,
    revision: Revision = None,
    force: Force = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Build a calibration set for a model."""
    from quantkit.calls.calibrate import Build
    from quantkit.cli import start

    changes = {
        "n_samples": samples,
        "max_length": length,
        "short": short,
        "select": select,
        "redact": redact or None,
        "avoid": split(avoid) if avoid else None,
        "seed": seed,
    }
    start.run(
        Build(model, name, data or (), changes, out, tree, skip_bad, revision, force),
        quiet,
        verbose,
    )
    show(out, json, n_samples=0)


@app.command("inspect")
def inspect(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A calibration set made by `calibrate build`.")
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write an HTML page with plots.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show how well a set represents its data."""
    show(folder, json, n_samples=10)
    if html is not None:
        from quantkit.calibration import calibration_set, page
        from quantkit.storage import write_text

        write_text(html, page.render(calibration_set.read(folder)))
        typer.echo(f"written: {html}", err=True)


def show(folder: Path, as_json: bool, n_samples: int) -> None:
    """A set's figures, charts, some samples and its weaknesses."""
    from quantkit.calibration.lookup import require_set
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
