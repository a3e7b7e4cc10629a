"""Terminal output of `quantkit quantize`: checkpoints, a plan, or what a budget buys."""

from typing import TYPE_CHECKING

from quantkit.cli import console, mixed_view
from quantkit.storage import gib

if TYPE_CHECKING:
    from quantkit.calls.quantize import Quantized
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.mixed.budget import Choice
    from quantkit.onepass.prepare import Job

DAMPING = "damping: what GPTQ added to the diagonal of the inputs' Gram matrix, over its mean"


def show(made: "Quantized", as_json: bool) -> None:
    """Tables on the terminal, or everything as JSON."""
    if made.plan is not None:
        _show_plan(made.plan, as_json)
    elif made.choice is not None:
        _show_choice(made.choice, made.checkpoints, as_json)
    elif as_json:
        console.print_json(_as_json(made.checkpoints))
    else:
        _show_made(made.checkpoints)


def _as_json(checkpoints: "list[Checkpoint]") -> list[dict[str, object]]:
    return [{"path": str(c.folder), "manifest": c.manifest.to_json()} for c in checkpoints]


def _show_choice(choice: "Choice", checkpoints: "list[Checkpoint]", as_json: bool) -> None:
    from quantkit.mixed.budget import one_percent_more

    if as_json:
        data = {**mixed_view.as_json(choice), "checkpoints": _as_json(checkpoints)}
        console.print_json(data)
        return
    if choice.recipe is None:
        for note in choice.notes:
            console.say(note)
        return
    mixed_view.show_choice(choice)
    console.say(
        f"{choice.bits:.2f} bits per quantised weight, predicted KL {choice.allocation.cost:.3g}, "
        f"at most {choice.allocation.gap:.1%} from the optimum."
    )
    if more := one_percent_more(choice):
        console.say(more)
    if checkpoints:
        _show_made(checkpoints)
        console.say("bits/weight counts every weight; those that cannot be quantised have 16 bits.")


def _show_made(checkpoints: "list[Checkpoint]") -> None:
    console.print_table(
        ["checkpoint", "size", "bits/weight", "worst weight error", "seconds"],
        [
            [
                str(c.folder),
                gib(c.manifest.size_bytes),
                f"{c.manifest.bits_per_weight:.2f}",
                _worst(c),
                f"{c.manifest.seconds:.1f}",
            ]
            for c in checkpoints
        ],
    )
    _show_worst(checkpoints)


def _worst(checkpoint: "Checkpoint") -> str:
    errors = [layer.relative_error for layer in checkpoint.manifest.layers.values()]
    return f"{max(errors):.1%}" if errors else ""  # some GGUF files are not quantised at all


def _show_worst(checkpoints: "list[Checkpoint]") -> None:
    """The ten layers with the largest output error, over all calibrated recipes."""
    layers = [
        (layer.output_error, c.label, name, layer)
        for c in checkpoints
        for name, layer in c.manifest.layers.items()
        if layer.output_error is not None
    ]
    if not layers:
        return
    layers.sort(key=lambda item: item[:3], reverse=True)
    console.print_table(
        ["worst layers", "recipe", "output error", "damping", ""],
        [
            [
                name,
                recipe,
                f"{error:.2e}",
                "" if layer.damping is None else f"{layer.damping:g}",
                "rounded to nearest" if layer.fallback else "",
            ]
            for error, recipe, name, layer in layers[:10]
        ],
        words=(0, 1, 4),
    )
    console.say(
        "output error: squared error on calibration data, over the output's square"
        + (f"; {DAMPING}" if any(item[3].damping is not None for item in layers[:10]) else "")
    )


def _show_plan(job: "Job", as_json: bool) -> None:
    if as_json:
        console.print_json(job.to_json())
        return
    console.print_table(
        ["would write", "layers", "size", "of source", "bits/weight", "calibrated"],
        [
            [
                str(target),
                str(len(plan.quantized)),
                gib(plan.size_bytes),
                f"{plan.size_bytes / job.source_record.size_bytes:.1%}",
                f"{plan.bits_per_weight:.2f}",
                "yes" if job.learns(plan) else "no",
            ]
            for target, plan in job.everything
        ],
    )
