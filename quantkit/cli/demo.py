"""`quantkit demo`."""

from pathlib import Path

import typer

from quantkit.cli.options import AsJson, Device, Out, Quiet, Verbose

MADE = "\nEverything is in {out}: checkpoints, scores/, report.json, report.md, report.html."
NEXT = """
Next, with your own model (a folder or a hub id):
  quantkit recipes                               # list recipes
  quantkit quantize MODEL -r fp8-dynamic -o out  # make a checkpoint for vLLM
  quantkit verify out/fp8-dynamic                # check it against its source
  quantkit run MODEL -r fp8-dynamic -r awq-gptq-w4a16 --calibration general \\
      --tasks wikitext -o runs                   # all of it, scored and compared"""


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
    from quantkit.cli import console, start

    outcome = start.run(demo(out, device), quiet, verbose)
    start.show(outcome, json)
    if not (json or quiet):
        console.say(MADE.format(out=out))
        typer.echo(NEXT)
