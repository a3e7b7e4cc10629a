"""Perplexity of 4-bit recipes on a real small model: what each method is worth.

    python benchmarks/quality.py --model DIR --calibration FILE --text FILE [--out FILE]

Quantises in groups of 64 on the first 64 x 2,048 tokens of the calibration text, and measures
perplexity on all windows of 2,048 tokens of the other text, in bf16 on a GPU.
"""

import argparse
import math
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from quantkit import device as devices
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import versions
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.offline import without_hub
from quantkit.quantize.prepare import CalibrationChoice
from quantkit.quantize.run import quantize
from quantkit.recipe import Recipe
from quantkit.score import loading
from quantkit.storage import write_json

# Name, the shipped recipe that it varies, and whether without zero points.
VARIANTS = (
    ("rtn-sym", "rtn-w4a16", True),
    ("rtn-asym", "rtn-w4a16", False),
    ("gptq-sym", "gptq-w4a16", True),
    ("gptq-asym", "gptq-w4a16", False),
    ("awq-sym", "awq-w4a16", True),
    ("awq-asym", "awq-w4a16", False),
    ("awq-gptq-sym", "awq-gptq-w4a16", True),
    ("awq-gptq-asym", "awq-gptq-w4a16", False),
    ("int8-w8a8", "int8-w8a8", None),
    ("fp8-static", "fp8-static", None),
    ("fp8-dynamic", "fp8-dynamic", None),
)


def variant(name: str, base: str, symmetric: bool | None, group_size: int) -> Recipe:
    recipe = Recipe.load(base)
    weights = recipe.weights
    if symmetric is not None:
        weights = weights.model_copy(update={"symmetric": symmetric, "group_size": group_size})
    return recipe.model_copy(update={"name": name, "weights": weights})


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, text: Path, length: int) -> float:
    """Over all whole windows of the text, the first token of each not predicted."""
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    windows = ids[: len(ids) // length * length].view(-1, length)
    total = 0.0
    for window in windows.to(model.device).split(4):
        logits = model(window).logits[:, :-1].float()
        flat = logits.reshape(-1, logits.shape[-1])
        total += torch.nn.functional.cross_entropy(
            flat, window[:, 1:].reshape(-1), reduction="sum"
        ).item()
    return math.exp(total / (windows.shape[0] * (length - 1)))


def perplexity_of(target: ModelSource | Checkpoint, text: Path, length: int, device: str) -> float:
    """The same for a folder."""
    model = loading.load(target, torch.device(device))
    return perplexity(model, load_tokenizer(target.folder), text, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    without_hub()
    source = ModelSource.open(args.model)
    values = {"source": perplexity_of(source, args.text, args.length, args.device)}
    print("source", values["source"], flush=True)
    choice = CalibrationChoice(args.calibration, args.samples, args.length)
    recipes = [variant(*v, args.group_size) for v in VARIANTS if not args.only or v[0] in args.only]
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        made = quantize(source, recipes, Path(folder) / "out", args.device, calibration=choice)
        seconds = time.monotonic() - started
        for checkpoint in made:
            values[checkpoint.label] = perplexity_of(
                checkpoint, args.text, args.length, args.device
            )
            print(f"{checkpoint.label:16} {values[checkpoint.label]:.3f}", flush=True)
    if args.out:
        write_json(
            args.out,
            {
                "what": "perplexity by windows, 4 bits in groups unless the recipe says otherwise",
                "model": Path(args.model).name,
                "calibration": f"{Path(args.calibration).name}, {args.samples} x {args.length}",
                "text": args.text.name,
                "group_size": args.group_size,
                "perplexity": values,
                "seconds_for_all": seconds,
                "device": devices.describe(torch.device(args.device)),
                "machine": platform.machine(),
                "versions": versions(),
            },
        )


if __name__ == "__main__":
    main()
