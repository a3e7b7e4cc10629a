"""Seconds per block of GPTQ on an MoE model, blocks of Qwen3-30B-A3B's shape.

    python benchmarks/moe_speed.py [--blocks 8 16] [--kill 8] [--out FILE] [--again]

128 experts of 768 inner columns, 8 a token, hidden size 2,048. Weights and tokens are random: the
work depends on them only through how evenly the router spreads tokens. Every run is a process of
its own, so that its peaks are its own. One size runs a second time, is killed half way and resumed,
and must end in the same bytes. What FILE holds already is kept, so that sizes may be measured in
several calls (`--blocks 8 --kill 8`, then `--blocks 16 --kill 0`).
"""

import argparse
import itertools
import json
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from recording import write
from transformers import Qwen3MoeConfig

from quantkit import device as devices
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.export.folder import MAX_SHARD_BYTES, open_folder
from quantkit.export.manifest import versions
from quantkit.model.architecture import Architecture
from quantkit.model.shards import ShardWriter, TensorSpec, assign_to_shards, index_of
from quantkit.model.source import INDEX, ModelSource
from quantkit.onepass.journal import Journal
from quantkit.onepass.onepass import Pass, quantize_blocks
from quantkit.plan import checkpoint as planning
from quantkit.progress import Silent
from quantkit.recipe import Recipe
from quantkit.storage import sha256_of, write_json

SHAPE: dict[str, Any] = {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32768,
    "max_position_embeddings": 8192,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
SMALL = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
}
BLOCK = "block done"
KILLED = "killed_and_resumed"


def make_model(folder: Path, n_blocks: int, shape: dict[str, Any]) -> int:
    """A checkpoint of random weights; returns the bytes of its tensors."""
    folder.mkdir(parents=True)
    config = Qwen3MoeConfig(**shape, num_hidden_layers=n_blocks, dtype="bfloat16")
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(folder)
    shapes = Architecture.of(folder).shapes  # by the names that transformers saves
    specs = [TensorSpec(name, "BF16", found) for name, found in shapes.items()]
    device = devices.choose()
    generator = torch.Generator(device).manual_seed(0)
    shards = assign_to_shards(specs, MAX_SHARD_BYTES)
    for file, part in shards.items():
        writer = ShardWriter(folder / file, part)
        for spec in part:
            values = torch.ones(spec.shape, device=device)
            if len(spec.shape) > 1:
                values = torch.randn(spec.shape, device=device, generator=generator)
                values *= spec.shape[-1] ** -0.5
            writer.write(spec.name, values.to(torch.bfloat16).cpu())
        writer.close()
    if len(shards) > 1:
        write_json(folder / INDEX, index_of(shards))
    return sum(spec.size_bytes for spec in specs)


class Watch(Silent):
    """Notes when each block ends, and tells whoever waits."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def start(self, label: str, total: int, unit: str = "bytes") -> None:
        self.times = [time.monotonic()]

    def advance(self, amount: int) -> None:
        if amount == 1:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.monotonic())
            print(BLOCK, flush=True)


def quantize(model: Path, out: Path, recipe: str, n_samples: int, length: int) -> None:
    """One run in this process, which goes on where an earlier one was killed."""
    source = ModelSource.open(str(model))
    architecture = Architecture.of(source.folder, tensors=source.tensors)
    plan = planning.make(architecture, architecture.stored(source), Recipe.load(recipe))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, source.config["vocab_size"], (n_samples, length), generator=generator)
    out.mkdir(parents=True, exist_ok=True)
    journal = Journal.open(out, {})
    n_kept = len(journal.tensors)  # of a run that was killed
    device, watch = devices.choose(), Watch()
    started = time.monotonic()
    with open_folder(out, plan.specs, journal.tensors) as writer:
        samples = CalibrationTokens("random", tokens)
        quantize_blocks(Pass(source, [plan], samples, device, [writer], [journal], progress=watch))
    blocks = [b - a for a, b in itertools.pairwise(watch.times)]
    result = {
        "n_blocks": len(blocks),
        "seconds_in_all": time.monotonic() - started,
        "tensors_taken_up": n_kept,
        "seconds_by_block": blocks,
        "seconds_a_block": statistics.median(blocks[1:] or blocks),
        "peak_device_bytes": devices.peak_device_bytes(device),
        "peak_host_bytes": devices.peak_host_bytes(),
    }
    print(json.dumps(result), flush=True)


def run(arguments: list[str], kill_after: int | None = None) -> dict[str, Any] | None:
    """A run in a process of its own; killed once so many blocks are done, if that is asked for."""
    command = [sys.executable, __file__, "--child", *arguments]
    lines, n_done = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            n_done += line.strip() == BLOCK
            if kill_after is not None and n_done >= kill_after:
                process.send_signal(signal.SIGKILL)
                return None
    if process.returncode:
        raise SystemExit(f"the run failed with exit code {process.returncode}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: sha256_of(path) for path in sorted(folder.glob("*.safetensors"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--kill", type=int, help="the size to be killed; default: the smallest")
    parser.add_argument("--again", action="store_true", help="forget what was measured before")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--recipe", default="gptq-w4a16")
    parser.add_argument("--small", action="store_true", help="a shape that a CPU can take")
    parser.add_argument("--folder", type=Path, help="where there is room; default: a temporary one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        model, out, recipe, n_samples, length = args.child
        quantize(Path(model), Path(out), recipe, int(n_samples), int(length))
        return
    result: dict[str, Any] = {
        "what": "GPTQ of a mixture of experts, blocks of Qwen3-30B-A3B's shape",
        "recipe": args.recipe,
        "samples": args.samples,
        "length": args.length,
        "device": devices.describe(devices.choose()),
        "machine": platform.machine(),
        "versions": versions(),
        "by_size": [],
    }
    if args.out and args.out.is_file() and not args.again:
        stored = json.loads(args.out.read_text(encoding="utf-8"))
        for key in ("recipe", "samples", "length", "device", "versions"):
            if stored[key] != result[key]:
                raise SystemExit(f"{args.out} has another {key}; measure anew with --again")
        result |= {key: stored[key] for key in ("by_size", KILLED) if key in stored}
    to_kill = min(args.blocks) if args.kill is None else args.kill
    shape = SHAPE | (SMALL if args.small else {})
    with tempfile.TemporaryDirectory(prefix="quantkit-moe-", dir=args.folder) as scratch:
        for n_blocks in args.blocks:
            model, out = Path(scratch) / f"model-{n_blocks}", Path(scratch) / f"out-{n_blocks}"
            size = make_model(model, n_blocks, shape)
            sizes = [str(args.samples), str(args.length)]
            found = run([str(model), str(out), args.recipe, *sizes])
            assert found is not None
            print(json.dumps(found), flush=True)
            others = [one for one in result["by_size"] if one["n_blocks"] != n_blocks]
            by_size = sorted([*others, {"model_bytes": size, **found}], key=_n_blocks)
            result |= {"by_size": by_size, **growth(by_size)}
            if args.out:
                write(args.out, result)
            if n_blocks == to_kill:
                again = Path(scratch) / "again"
                run([str(model), str(again), args.recipe, *sizes], max(1, n_blocks // 2))
                rest = run([str(model), str(again), args.recipe, *sizes])
                assert rest is not None
                same = hashes(out) == hashes(again) and bool(hashes(out))
                result[KILLED] = {
                    "n_blocks": n_blocks,
                    "tensors_taken_up": rest["tensors_taken_up"],
                    "seconds_by_block": rest["seconds_by_block"],
                    "same_bytes": same,
                }
                print(json.dumps({KILLED: result[KILLED]}), flush=True)
                if args.out:
                    write(args.out, result)
            for folder in (model, out):
                shutil.rmtree(folder)


def _n_blocks(found: dict[str, Any]) -> int:
    return int(found["n_blocks"])


def growth(by_size: list[dict[str, Any]]) -> dict[str, float]:
    """How time and memory grow from the smallest size to the largest: linear time is as many times
    as long as there are blocks, bounded memory is the same."""
    first, last = by_size[0], by_size[-1]
    pairs = {
        "times_the_blocks": "n_blocks",
        "times_as_long": "seconds_in_all",
        "times_the_host_memory": "peak_host_bytes",
        "times_the_device_memory": "peak_device_bytes",
    }
    return {name: round(last[key] / first[key], 3) for name, key in pairs.items() if first.get(key)}


if __name__ == "__main__":
    main()
