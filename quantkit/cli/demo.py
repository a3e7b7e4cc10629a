"""`quantkit demo`."""

from pathlib import Path

import typer

from quantkit.cli.options import AsJson, Device, Out, Quiet, Verbose

NEXT = """
Everything is in {out}: checkpoints, scores/, report.json, report.md, report.html.

Next, with a model of yours (a folder or a hub id):
  quantkit recipes                                     what there is to choose from
  quantkit quantize MODEL -r fp8-dynamic -o out        a checkpoint that vLLM serves
  quantkit verify out/fp8-dynamic                      is it what it should be
  quantkit run MODEL -r fp8-dynamic -r rtn-w4a16 --tasks wikitext -o out
                                                       quantise, check, score, compare"""


def command(
    out: Out = Path("quantkit-demo"),
    device: Device = "auto",
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Try the whole line on a small model that ships with quantkit.

    It needs no network and no GPU.
    """
    from quantkit.cli import console, early, start

    start.stay_offline_if(True)
    early.output(out)
    start.load_lean(quiet)
    from quantkit import pipeline, resources
    from quantkit.model.source import ModelSource
    from quantkit.onepass.prepare import CalibrationChoice, Run
    from quantkit.recipe import load
    from quantkit.scoring.harness import Asked

    recipes = [r for r in map(load, resources.names("recipes")) if r.demo]
    source = ModelSource.open("demo")
    with console.progress(quiet, verbose) as progress:
        outcome = pipeline.run(
            source,
            recipes,
            Asked(("python_docs", "python_quiz")),
            out,
            device,
            CalibrationChoice("python-docs"),
            Run(progress, force=True),
        )
    start.show(outcome, json)
    if not (json or quiet):
        typer.echo(NEXT.format(out=out))
