"""`quantkit draft`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import AsJson, Device, Quiet, Revision, TrustRemoteCode, Verbose
from quantkit.errors import AdviceError

if TYPE_CHECKING:
    from quantkit.draft.measure import Draft
    from quantkit.draft.speedup import Costs

NAMES = {
    "greedy": "greedy drafts (vLLM's default)",
    "temperature-0": "temperature 0",
    "sampled": "sampled drafts",
}
TITLES = {"greedy": "greedy", "temperature-0": "temp. 0", "sampled": "sampled"}


def command(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="The model to be served: a folder, a hub id.")
    ],
    draft: Annotated[
        str, typer.Argument(metavar="DRAFT", help="The one that drafts, such as a 4-bit folder.")
    ],
    calibration: Annotated[
        str, typer.Option(metavar="SET", help="Prompts: a calibration set, its file, or a text.")
    ],
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts to continue.")] = 32,
    prompt: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of a prompt.")] = 64,
    tokens: Annotated[
        int, typer.Option(min=9, metavar="N", help="Tokens that the target adds to each.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(min=0.01, metavar="T", help="Of the target when it samples.")
    ] = 1.0,
    on_text: Annotated[
        bool,
        typer.Option("--on-text", help="Use the set's own continuations: faster, and leans low."),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Speed-ups on it, by the roofline of `recommend`."),
    ] = None,
    users: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="At a time, on that GPU; default: 1.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of what the target samples.")] = 0,
    device: Device = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Tell what a draft model is worth to a target, before anybody starts a server.

    The target continues real prompts; how much of that the draft would have proposed gives the
    acceptance rate, tokens a step for 1 to 8 drafted tokens, and the speed-up at small batches.
    """
    from quantkit.cli import console, early, start

    if users is not None and gpu is None:
        raise typer.BadParameter("goes with --gpu", param_hint="--users")
    offline = start.is_local(target) and start.is_local(draft)
    start.stay_offline_if(offline and not start.set_needs_hub(calibration))
    early.models([target], revision)
    early.models([draft])
    early.calibration(calibration)
    if gpu is not None:
        from quantkit.hardware import gpus

        gpus.find(gpu)
    start.load_lean(quiet)
    from quantkit import opening
    from quantkit.draft.measure import Asked, measure

    choice = start.calibration_choice(calibration, samples, prompt + tokens)
    assert choice is not None
    asked = Asked(
        calibration, samples, prompt, tokens, temperature, on_text, seed, choice.evaluation
    )
    big = opening.find(target, revision, trust_remote_code)
    small = opening.find(draft, None, trust_remote_code)
    costs, name = None, None
    if gpu is not None:
        costs, name = _costs(big.folder, small.folder, gpu, users or 1, prompt + tokens)
    with console.progress(quiet, verbose) as progress:
        found = measure(big, small, asked, device, progress, trust_remote_code, costs)
    found = replace(found, gpu=name, users=users or 1)
    if json:
        console.print_json(found.to_json())
    else:
        _show(found)


def _costs(target: Path, draft: Path, gpu: str, users: int, depth: int) -> "tuple[Costs, str]":
    """What passes of both take on a GPU, and its whole name."""
    from quantkit.advise import formats, work
    from quantkit.advise.speed import Case
    from quantkit.draft.speedup import Costs, on_gpu, shortest
    from quantkit.hardware import gpus
    from quantkit.hardware.support import runs
    from quantkit.serving.target import open_target

    place, found = gpus.find(gpu), []
    for folder in (target, draft):
        model = open_target(folder)
        if model.shape is None or (model.is_stored and model.recipe is not None):
            raise AdviceError(f"{folder} is of a family whose speed cannot be told; omit --gpu")
        form = formats.of(model.recipe)
        support = runs(place, form.key, form.engine)
        if support.how == "no":
            raise AdviceError(f"{place.name} does not run {folder.name}: {support.reason}")
        found.append(Case(model.shape, work.of(model.shape, form), form, place))
    big, small = (on_gpu(case, users, depth) for case in found)
    return Costs(big, small, shortest(found[0], users)), place.name


def _spread(stderr: float | None) -> str:
    """In points, at 95%."""
    return "" if stderr is None else f" +-{196 * stderr:.1f}"


def _show(found: "Draft") -> None:
    from quantkit.cli import console
    from quantkit.storage import gib

    wrote = "of the set" if found.on_text else "that the target wrote"
    console.say(
        f"{found.draft} ({gib(found.draft_bytes)} read a token) drafts for {found.target} "
        f"({gib(found.target_bytes)}):\n{found.n_rows} prompts of {found.calibration}, "
        f"{found.n_tokens:,} tokens {wrote}"
    )
    console.print_table(
        ["the engine drafts", "accepted", "best k", "tokens/step", "speed-up"],
        [
            [
                NAMES[name],
                f"{way.acceptance:.1%}" + _spread(way.stderr),
                str(way.best_k) if way.best_k else "none",
                f"{way.steps[way.best_k - 1].tokens:.2f}" if way.best_k else "1.00",
                f"{way.best_speedup:.2f}x",
            ]
            for name, way in found.ways.items()
        ],
    )
    console.print_table(
        ["drafted tokens k", *(str(k + 1) for k in range(len(found.ways["greedy"].steps)))],
        [
            [f"{title}, {what}", *(f"{value:.2f}" for value in values)]
            for name, title in TITLES.items()
            for what, values in (
                ("tokens/step", [step.tokens for step in found.ways[name].steps]),
                ("speed-up", found.ways[name].speedups),
            )
        ],
    )
    if found.gpu is not None:
        at = "1 user" if found.users == 1 else f"{found.users} users"
        console.say(
            f"Speed-ups are by the roofline of {found.gpu} with {at}; "
            "`quantkit bench --sweep speculative=none,DIR:K` measures them."
        )
        return
    console.say(
        "Speed-ups count the bytes that both models read at a batch of one; at large batches, and "
        "where launching kernels takes longer than reading a small draft, they are smaller."
    )
