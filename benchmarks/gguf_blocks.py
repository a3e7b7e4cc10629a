"""GGUF blocks against ggml's own: the same bytes, the same error, and how fast.

    python benchmarks/gguf_blocks.py [--model DIR] [--rows 1024] [--speed] [--out FILE]

identity  share of blocks that are byte for byte ggml's, by type, kind of weights and importance;
          of the others the worst relative gap of the weighted error; the ratio of total errors
speed     the search alone for one block of an 8B Llama as Q4_K_M, tensors in the memory of the
          side that works on them: ours on the device, ggml's on all cores, in one run
"""

import argparse
import json
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from gguf import GGMLQuantizationType as Kind

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import ggml_judge
from recording import write

from quantkit import device as devices
from quantkit.export.manifest import versions
from quantkit.gguf import blocks
from quantkit.model.source import ModelSource

EIGHT_B = {  # rows, columns, how many of 32 blocks have it as Q6_K in Q4_K_M
    "attn_q": (4096, 4096, 0),
    "attn_k": (1024, 4096, 0),
    "attn_v": (1024, 4096, 16),
    "attn_output": (4096, 4096, 0),
    "ffn_gate": (14336, 4096, 0),
    "ffn_up": (14336, 4096, 0),
    "ffn_down": (4096, 14336, 16),
}


def kinds_of_weights(rows: int, model: str | None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(rows, 1024, generator=generator) * 0.02
    heavy = torch.distributions.StudentT(3.0).sample((rows, 1024)) * 0.02
    found = {"normal": normal, "heavy-tailed": heavy}
    if model:
        source = ModelSource.open(model)
        wide = [t for t in source.tensors.values() if len(t.shape) == 2 and t.shape[1] % 256 == 0]
        found["real"] = torch.cat(
            [t.read().float().reshape(-1, 256)[: rows * 4] for t in wide[:: max(1, len(wide) // 8)]]
        )
    return found


def identity(rows: int, model: str | None) -> list[dict]:
    found = []
    for label, weight in kinds_of_weights(rows, model).items():
        generator = torch.Generator().manual_seed(1)
        importance = torch.randn(weight.shape[1], generator=generator).square() + 0.01
        for kind in blocks.KINDS:
            for weights in (None, importance):
                ours = blocks.quantize(weight, kind, weights)
                theirs = ggml_judge.quantize(weight, kind, weights)
                result = ggml_judge.compare(weight, ours, theirs, kind, weights)
                found.append(
                    {
                        "type": kind.name,
                        "weights": label,
                        "importance": weights is not None,
                        "identical": result.identical,
                        "worst_gap": result.worst_gap,
                        "total_ratio": result.total_ratio,
                    }
                )
                print(json.dumps(found[-1]), flush=True)
    return found


def by_ggml(weight: torch.Tensor, kind: Kind, importance: torch.Tensor | None) -> None:
    """On all cores: ggml works on rows, and lets go of Python meanwhile."""
    cores = os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as pool:
        parts = torch.split(weight, -(-len(weight) // cores))
        list(pool.map(lambda part: ggml_judge.quantize(part, kind, importance), parts))


def seconds(run, weight, kind, importance, device) -> float:
    run(weight[: max(1, len(weight) // 16)], kind, importance)  # warm up
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.monotonic()
    run(weight, kind, importance)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - started


def speed(device: torch.device) -> dict:
    result: dict = {"cores": os.cpu_count(), "layers": {}}
    totals = {"ours": [0.0, 0.0], "ggml": [0.0, 0.0]}
    n_weights = 0
    for name, (rows, columns, n_better) in EIGHT_B.items():
        weight = torch.randn(rows, columns) * 0.02
        importance = torch.rand(columns) + 0.1
        there = weight.to(device)
        for kind, share in ((Kind.Q4_K, 1 - n_better / 32), (Kind.Q6_K, n_better / 32)):
            if not share:
                continue
            row = {}
            for place, weights in enumerate((None, importance)):
                on_device = None if weights is None else weights.to(device)
                ours = seconds(blocks.quantize, there, kind, on_device, device)
                theirs = seconds(by_ggml, weight, kind, weights, torch.device("cpu"))
                totals["ours"][place] += share * ours
                totals["ggml"][place] += share * theirs
                row["with importance" if place else "without"] = {"ours": ours, "ggml": theirs}
            result["layers"][f"{name} {kind.name}"] = row
            print(name, kind.name, json.dumps(row), flush=True)
        n_weights += rows * columns
    result["weights_a_block"] = n_weights
    for side, (plain, weighted) in totals.items():
        result[side] = {
            "seconds_a_block": plain,
            "seconds_a_block_with_importance": weighted,
            "million_weights_a_second": n_weights / plain / 1e6,
            "million_weights_a_second_with_importance": n_weights / weighted / 1e6,
        }
    result["times_faster"] = totals["ggml"][0] / totals["ours"][0]
    result["times_faster_with_importance"] = totals["ggml"][1] / totals["ours"][1]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder whose weights are the real ones; or `demo`")
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = devices.choose()
    result = {
        "what": "GGUF blocks against ggml's",
        "device": devices.describe(device),
        "machine": platform.machine(),
        "versions": versions(),
        "identity": identity(args.rows, args.model),
    }
    if args.speed:
        result["speed"] = speed(device)
        print(json.dumps({k: v for k, v in result["speed"].items() if k != "layers"}), flush=True)
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
