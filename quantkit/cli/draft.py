"""`quantkit draft`."""

from typing import Annotated

import typer

from quantkit.cli.options import AsJson, Device, Quiet, Revision, Seed, TrustRemoteCode, Verbose


def command(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The model to serve: a folder or a hub id.")
    ],
    draft: Annotated[
        str, typer.Argument(metavar="DRAFT", help="The draft model, such as a 4-bit checkpoint.")
    ],
    calibration: Annotated[
        str,
        typer.Option(
            metavar="SET",
            help="Source of prompts: a calibration set's name or file, or a text file.",
        ),
    ],
    samples: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of prompts to continue.")
    ] = 32,
    prompt: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens per prompt.")] = 64,
    tokens: Annotated[
        int, typer.Option(min=9, metavar="N", help="Tokens that the target generates per prompt.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.01, metavar="T", help="Sampling temperature of the target.")
    ] = 1.0,
    on_text: Annotated[
        bool,
        typer.Option(
            "--on-text",
            help="Use the set's own continuations: faster, but underestimates acceptance.",
        ),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Estimate the speed-up on this GPU, with the roofline of `recommend`.",
        ),
    ] = None,
    users: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Concurrent users on that GPU; default: 1."),
    ] = None,
    seed: Seed = 0,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Measure what a draft model gains, without a server.

    The target continues real prompts; how much of that the draft would have proposed gives the
    acceptance rate, the tokens per step for 1 to 8 drafted tokens, and the speed-up at small batch
    sizes.
    """
    from quantkit.calls.draft import Continuations, Drafting
    from quantkit.cli import draft_view, start

    if users is not None and gpu is None:
        raise typer.BadParameter("needs --gpu", param_hint="--users")
    text = Continuations(calibration, samples, prompt, tokens, temperature, on_text, seed)
    call = Drafting(target, draft, text, gpu, users or 1, device, revision, trust_remote_code)
    draft_view.show(start.run(call, quiet, verbose), json)
