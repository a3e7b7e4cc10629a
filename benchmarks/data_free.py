"""How long data-free quantisation takes, against a plain copy of the same bytes.

    python benchmarks/data_free.py [--blocks 32 --hidden 4096 --intermediate 14336] [--work DIR]

Makes a Llama-shaped checkpoint of random weights, copies its weights with the system's own copy,
then runs `quantkit quantize` in a process of its own and reports the ratio of the times, from the
start to the end of that process, and the peak memory. Both sides flush to disk and both read files
that the page cache holds. Each is run `--repeat` times, alternating; the fastest of each counts.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from recording import tell

from quantkit import device as devices
from quantkit.export.folder import MAX_SHARD_BYTES
from quantkit.export.manifest import versions
from quantkit.model.shards import ShardWriter, TensorSpec, assign_to_shards, index_of
from quantkit.resources import DEMO_MODEL
from quantkit.storage import write_json


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Options for the shape of a made-up model, an 8B Llama's unless told."""
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--vocabulary", type=int, default=128256)


def make_model(folder: Path, blocks: int, hidden: int, intermediate: int, vocabulary: int) -> int:
    """A checkpoint of random weights; returns the bytes of its tensors."""
    folder.mkdir(parents=True)
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": blocks,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": max(1, hidden // 512),
        "head_dim": 128,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }
    write_json(folder / "config.json", config)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    narrow = config["num_key_value_heads"] * 128
    specs = [TensorSpec("model.embed_tokens.weight", "BF16", (vocabulary, hidden))]
    for index in range(blocks):
        prefix = f"model.layers.{index}"
        for name, shape in {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (narrow, hidden),
            "self_attn.v_proj": (narrow, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            specs.append(TensorSpec(f"{prefix}.{name}.weight", "BF16", shape))
    specs += [
        TensorSpec("model.norm.weight", "BF16", (hidden,)),
        TensorSpec("lm_head.weight", "BF16", (vocabulary, hidden)),
    ]
    device = devices.choose()
    shards = assign_to_shards(specs, MAX_SHARD_BYTES)
    for file, part in shards.items():
        writer = ShardWriter(folder / file, part)
        for spec in part:
            writer.write(spec.name, torch.randn(spec.shape, device=device).mul_(0.02).bfloat16())
        writer.close()
    if len(shards) > 1:
        write_json(folder / "model.safetensors.index.json", index_of(shards))
    return sum(spec.size_bytes for spec in specs)


def time_copy(model: Path, target: Path) -> float:
    """Seconds to copy all weight files and flush them."""
    target.mkdir()
    started = time.monotonic()
    for path in sorted(model.glob("*.safetensors")):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb+") as stream:
            os.fsync(stream.fileno())
    seconds = time.monotonic() - started
    shutil.rmtree(target)
    return seconds


def time_quantize(model: Path, recipes: list[str], out: Path, device: str) -> dict[str, float]:
    """Seconds of the command as a user sees it, and of its work alone, with peak memory."""
    arguments = [x for recipe in recipes for x in ("-r", recipe)]
    command = [sys.executable, "-m", "quantkit", "quantize", str(model), *arguments]
    command += ["-o", str(out), "--device", device, "--json", "-q"]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.monotonic() - started
    manifests = [made["manifest"] for made in json.loads(done.stdout)]
    manifest = manifests[-1]
    shutil.rmtree(out)
    return {
        "command_seconds": seconds,
        "seconds": sum(made["seconds"] for made in manifests),
        **{f"{stage}_seconds": s for stage, s in manifest["stage_seconds"].items()},
        "peak_host_bytes": manifest["peak_host_bytes"],
        "peak_device_bytes": manifest["peak_device_bytes"] or 0,
    }


def fastest(runs: list[dict[str, float]]) -> dict[str, float]:
    return min(runs, key=lambda run: run["command_seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_shape(parser)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--also", nargs="*", default=[], help="further recipes, each alone")
    parser.add_argument("--work", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--out", type=Path, help="where the result file goes")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as scratch:
        work = Path(scratch)
        size = make_model(
            work / "model", args.blocks, args.hidden, args.intermediate, args.vocabulary
        )
        copies, single, triple = [], [], []
        for _ in range(args.repeat):
            copies.append(time_copy(work / "model", work / "copy"))
            single.append(time_quantize(work / "model", ["fp8-dynamic"], work / "out", args.device))
        everything = ["fp8-dynamic", "rtn-w8a16", "rtn-w4a16"]
        triple.append(time_quantize(work / "model", everything, work / "out", args.device))
        also = {
            name: fastest(
                [
                    time_quantize(work / "model", [name], work / "out", args.device)
                    for _ in range(args.repeat)
                ]
            )
            for name in args.also
        }
    copy = min(copies)
    result = {
        "what": "data-free quantisation against a plain copy of the source's weights",
        "source_bytes": size,
        "shape": {k: vars(args)[k] for k in ("blocks", "hidden", "intermediate", "vocabulary")},
        "device": devices.describe(devices.choose(args.device)),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
        "copy_seconds": copies,
        "fp8_dynamic": fastest(single),
        "fp8_dynamic_over_copy": fastest(single)["command_seconds"] / copy,
        "three_recipes": triple[0],
        "three_recipes_over_copy": triple[0]["command_seconds"] / copy,
        "also": {
            name: {**found, "over_copy": found["command_seconds"] / copy}
            for name, found in also.items()
        },
    }
    tell(result, args.out)


if __name__ == "__main__":
    main()
