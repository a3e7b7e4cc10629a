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
    """Run the whole pipeline on the bundled demo model.

    Needs no network and no GPU.
    """
    from quantkit.calls.run import demo
    from quantkit.cli import start

    outcome = start.run(demo(out, device), quiet, verbose)
    start.show(outcome, json)
    if not (json or quiet):
        typer.echo(NEXT.format(out=out))
