"""What `quantkit demo` prints, and the demo model's own page (benchmarks/demo_output.py)."""

import json
from typing import Any

from figures.regions import ROOT, number, paragraph, region, result, table
from quantkit.hardware.gpus import label

MODEL = ROOT / "quantkit" / "_data" / "demo-model"
PLANNED = ("awq-gptq-w4a16", "fp8-dynamic", "gguf-q4_k_m")
JUDGED = ("rtn-w8a16", "rtn-w4a16")
PERPLEXITY = "python_docs/perplexity"


def training() -> Any:
    return json.loads((MODEL / "training.json").read_text(encoding="utf-8"))


def shortened(lines: list[str], models: list[str], kept: tuple[str, ...]) -> list[str]:
    """Of the lines on models only some; what is left out is one line with an ellipsis."""
    shown: list[str] = []
    for line in lines:
        first = line.split(" ")[0].removesuffix(":")
        if first in models and first not in kept:
            if shown[-1] != "…":
                shown.append("…")
        else:
            shown.append(line)
    return shown


@region
def demo_output() -> str:
    """Notes and results; the hints on what to do next are left out."""
    run = result("demo")
    printed = [line.rstrip() for line in run["printed"]]
    end = next(i for i, line in enumerate(printed) if line.startswith("Everything is in"))
    models = [name for name in run["scores"] if name != "source"]
    notes = shortened(run["notes"], models, PLANNED)
    lines = [f"$ {run['command']}", *notes, *shortened(printed[: end + 1], models, JUDGED)]
    return "\n".join(["```", *lines, "```"])


@region
def demo_model_facts() -> str:
    run = training()
    text, settings = run["text"], run["settings"]
    size = (MODEL / "model.safetensors").stat().st_size
    tokens = settings["batch"] * settings["context"]
    rows = [
        ["parameters", f"{run['parameters']:,}, embeddings tied; {number(size / 1e6)} MB in bf16"],
        [
            "text",
            f"what comes with Python {text['python']}: language topics, docstrings and sources of "
            f"its library; {number(text['documents_tokens'] / 1e6, 2)} million tokens of "
            f"documentation, {number(text['code_tokens'] / 1e6, 2)} million of source code",
        ],
        [
            "training",
            f"{settings['steps']:,} steps of {tokens:,} tokens, AdamW, {run['seconds']} seconds on "
            f"one {label(run['device'])}; every figure is in `training.json`",
        ],
    ]
    return table(["", ""], rows)


@region
def demo_model_losses() -> str:
    curve = training()["curve"]
    told = ", ".join(f"{point['heldout_loss']:.3f} ({point['step']:,})" for point in curve)
    return paragraph(f"Held-out loss per token by step: {told}: flat at the end.")


@region
def demo_model_scores() -> str:
    run = result("demo")
    scores = run["scores"]
    source = scores["source"][PERPLEXITY]
    rows = [["source", f"{source:.3f}", ""]]
    made = sorted((found[PERPLEXITY], name) for name, found in scores.items() if name != "source")
    rows += [[f"`{name}`", f"{value:.3f}", f"{value / source - 1:+.2%}"] for value, name in made]
    text = paragraph(
        "What quantising it costs, perplexity per token on the held-out text (lm-eval task "
        f"`python_docs`, {scores['source'][f'{PERPLEXITY}/n']:,} tokens, Python "
        f"{run['versions']['python']}), as `quantkit demo` makes it:"
    )
    return f"{text}\n\n{table(['', 'perplexity:', 'change:'], rows)}"
