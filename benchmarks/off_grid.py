"""Moves a model off the 4-bit grid that its weights come from, by a little training on open text.

    python benchmarks/off_grid.py --model DIR --text FILE [FILE ...] --held-out FILE --out DIR
        [--steps 400 --batch 16 --length 1024 --rate 2e-4]

The models that these benchmarks can reach without a hub were dequantised from 4-bit files: their
weights lie on a grid, and 4-bit formats of the same grouping look better than they are. Some
hundred steps of AdamW (bfloat16 products, float32 weights) move every weight by about a step of
that grid; the result is saved in bfloat16. The check, in DIR/off_grid.json: the error of rounding
each group of 32 weights onto the best evenly spaced grid of 16 numbers, before and after, beside
the error of the same weights with their columns shuffled, which lie on no grid. `is_off_grid` says
that at least `ENOUGH` of the latter is reached. Perplexity of --held-out before and after says what
it cost.

Text is read from .txt, .raw and .jsonl (every string of a row). With DIR/off_grid.json there,
nothing is done. `moved` is for other programs.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from quality import load, perplexity
from recording import write

from quantkit import device as devices
from quantkit.model.tokenizer import load as load_tokenizer

SIZE = 32
"""Weights of a group in the GGUF types Q4_1 and Q4_K."""
INTERVALS = range(8, 16)
"""Steps of a grid that a group's range may take up: a group need not use all 16 numbers."""
ENOUGH = 0.95
RECORD = "off_grid.json"


def strings(value: Any) -> Iterator[str]:
    """All text within a row of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings(part)


def read(path: Path) -> str:
    """The text of a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".jsonl":
        return text
    return "\n\n".join("\n".join(strings(json.loads(line))) for line in text.splitlines() if line)


def grid_error(weight: torch.Tensor) -> float:
    """What rounding onto each group's best grid of 16 numbers moves, over the weight's norm."""
    groups = weight.float().reshape(-1, SIZE)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    best = torch.full((len(groups),), math.inf, device=weight.device)
    for intervals in INTERVALS:
        step = ((high - low) / intervals).clamp(min=1e-30)
        rounded = ((groups - low) / step).round_() * step + low
        best = torch.minimum(best, (rounded - groups).square().sum(1))
    return (best.sum() / groups.square().sum()).sqrt().item()


def grid_errors(model: torch.nn.Module) -> dict[str, float]:
    """The same over all linear layers within blocks, as they are and with columns shuffled."""
    order = torch.Generator().manual_seed(0)
    own, shuffled = [], []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in f".{name}":
            weight = module.weight.detach().bfloat16()
            if weight.shape[1] % SIZE == 0:
                own.append(grid_error(weight))
                columns = torch.randperm(weight.shape[1], generator=order).to(weight.device)
                shuffled.append(grid_error(weight[:, columns]))
    return {
        "own": sum(own) / len(own),
        "shuffled": sum(shuffled) / len(shuffled),
        "share": sum(own) / sum(shuffled),
    }


def windows_of(tokenizer: Any, paths: list[Path], length: int) -> torch.Tensor:
    """All whole windows of some texts, in a fixed random order."""
    ids = [torch.tensor(tokenizer(read(path), verbose=False)["input_ids"]) for path in paths]
    joined = torch.cat(ids)
    windows = joined[: len(joined) // length * length].view(-1, length)
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]


def train(model: Any, windows: torch.Tensor, steps: int, batch: int, rate: float) -> list[float]:
    """AdamW with warm-up and a linear end; returns the loss of every step."""
    device = model.device
    model.float().train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    warm = max(1, steps // 20)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / warm, (steps - step) / max(1, steps - warm))
        rows = windows[torch.arange(step * batch, (step + 1) * batch) % len(windows)]
        total = 0.0
        for part in rows.to(device).split(4):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(part).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum"
            ) / (len(rows) * (part.shape[1] - 1))
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
        if step % 20 == 0:
            print(f"step {step}: loss {total:.3f}", flush=True)
    return losses


def moved(args: argparse.Namespace) -> dict[str, Any]:
    """The record of a model that was moved, now or before."""
    if (args.out / RECORD).is_file():
        return json.loads((args.out / RECORD).read_text())
    device = devices.choose(args.device)
    tokenizer = load_tokenizer(args.model)
    model = load(args.model, args.model, device)
    before = {
        "grid": grid_errors(model),
        "perplexity": perplexity(model, tokenizer, args.held_out, args.length),
    }
    print(json.dumps(before), flush=True)
    started = time.monotonic()
    windows = windows_of(tokenizer, args.text, args.length)
    losses = train(model, windows, args.steps, args.batch, args.rate)
    model.to(torch.bfloat16).eval()
    after = {
        "grid": grid_errors(model),
        "perplexity": perplexity(model, tokenizer, args.held_out, args.length),
    }
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    write(
        args.out / RECORD,
        {
            "what": "a model moved off the 4-bit grid that its weights come from, by training",
            "source": args.model.name,
            "text": [path.name for path in args.text],
            "windows": len(windows),
            "length": args.length,
            "steps": args.steps,
            "batch": args.batch,
            "rate": args.rate,
            "loss": {"first": losses[0], "last": losses[-1]},
            "held_out": args.held_out.name,
            "before": before,
            "after": after,
            "is_off_grid": after["grid"]["share"] >= ENOUGH,
            "seconds": time.monotonic() - started,
            "device": devices.describe(device),
        },
    )
    return json.loads((args.out / RECORD).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--device", default="auto")
    record = moved(parser.parse_args())
    print(json.dumps({key: record[key] for key in ("before", "after", "is_off_grid", "seconds")}))


if __name__ == "__main__":
    main()
