"""How long `quantkit verify --for vllm` takes for a large model, and how much memory.

    python benchmarks/wild_headers.py [--out FILE]

The files are sparse: true headers of every shard, and holes where the weights would be, so that a
70B takes no room on disk. Each model is judged in a process of its own, whose wall time includes
starting Python and whose peak memory is the operating system's figure.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from recording import write

RESULT = Path(__file__).parent / "results" / "wild_headers.json"
SHARD_BYTES = 5_000_000_000
BYTES = {"BF16": 2, "I32": 4, "F8_E4M3": 1, "I64": 8, "F32": 4}
LIMITS = {"seconds": 5.0, "peak_mb": 500.0}
Tensor = tuple[str, str, tuple[int, ...]]
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192,
    "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
    "moe_intermediate_size": 1536, "num_hidden_layers": 94, "num_attention_heads": 64,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "torch_dtype": "bfloat16",
    "num_experts": 128, "tie_word_embeddings": False,
}  # fmt: skip


def linears(config: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Names, rows and columns of all linear layers."""
    hidden, width = config["hidden_size"], config["head_dim"]
    heads, kv = (config[f"num_{kind}_heads"] * width for kind in ("attention", "key_value"))
    n_experts = config.get("num_experts", 0)
    inner = config["moe_intermediate_size"] if n_experts else config["intermediate_size"]
    for index in range(config["num_hidden_layers"]):
        block = f"model.layers.{index}"
        for name, rows, columns in (
            ("q_proj", heads, hidden), ("k_proj", kv, hidden), ("v_proj", kv, hidden),
            ("o_proj", hidden, heads),
        ):  # fmt: skip
            yield f"{block}.self_attn.{name}", rows, columns
        places = [f"experts.{n}." for n in range(n_experts)] or [""]
        for place in places:
            yield f"{block}.mlp.{place}gate_proj", inner, hidden
            yield f"{block}.mlp.{place}up_proj", inner, hidden
            yield f"{block}.mlp.{place}down_proj", hidden, inner


def tensors(config: dict[str, Any], scheme: str) -> Iterator[Tensor]:
    """Every tensor of a checkpoint in W4A16 (groups of 128) or FP8 (channels)."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden)
    for name, rows, columns in linears(config):
        if scheme == "w4a16":
            yield f"{name}.weight_packed", "I32", (rows, columns // 8)
            yield f"{name}.weight_scale", "BF16", (rows, columns // 128)
            yield f"{name}.weight_shape", "I64", (2,)
        else:
            yield f"{name}.weight", "F8_E4M3", (rows, columns)
            yield f"{name}.weight_scale", "BF16", (rows, 1)
    for index in range(config["num_hidden_layers"]):
        block = f"model.layers.{index}"
        if config.get("num_experts"):
            yield f"{block}.mlp.gate.weight", "BF16", (config["num_experts"], hidden)
        yield f"{block}.input_layernorm.weight", "BF16", (hidden,)
        yield f"{block}.post_attention_layernorm.weight", "BF16", (hidden,)
    yield "model.norm.weight", "BF16", (hidden,)
    yield "lm_head.weight", "BF16", (config["vocab_size"], hidden)


def declared(scheme: str, routers: list[str]) -> dict[str, Any]:
    """`quantization_config`, as llm-compressor writes it."""
    if scheme == "w4a16":
        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                   "group_size": 128}  # fmt: skip
        inputs, form = None, "pack-quantized"
    else:
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
        inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
        form = "float-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", *routers],
    }


def save(folder: Path, config: dict[str, Any], scheme: str) -> tuple[int, int, int]:
    """Write shards with holes; returns files, tensors and bytes."""
    folder.mkdir()
    shards: list[dict[str, Any]] = [{}]
    size, total, n = 0, 0, 0
    for name, dtype, shape in tensors(config, scheme):
        n_bytes = math.prod(shape) * BYTES[dtype]
        if size and size + n_bytes > SHARD_BYTES:
            shards.append({})
            size = 0
        offsets = [size, size + n_bytes]
        shards[-1][name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        size, total, n = size + n_bytes, total + n_bytes, n + 1
    places = {}
    for index, header in enumerate(shards, 1):
        file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        raw = json.dumps(header).encode()
        raw += b" " * (-len(raw) % 8)
        end = max(entry["data_offsets"][1] for entry in header.values())
        with (folder / file).open("wb") as stream:
            stream.write(len(raw).to_bytes(8, "little") + raw)
            stream.truncate(8 + len(raw) + end)
        places |= dict.fromkeys(header, file)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    n_blocks = config["num_hidden_layers"] if config.get("num_experts") else 0
    routers = [f"model.layers.{block}.mlp.gate" for block in range(n_blocks)]
    told = {**config, "quantization_config": declared(scheme, routers)}
    (folder / "config.json").write_text(json.dumps(told))
    return len(shards), n, total


PROBE = """
import json, resource, sys
from quantkit.cli.main import main
code = main(sys.argv[1:])
scale = 1 if sys.platform == "darwin" else 1024
print(json.dumps([code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale]),
      file=sys.stderr)
"""


def judged(folder: Path) -> dict[str, Any]:
    """Seconds, peak memory and verdict of one call of the command."""
    command = [sys.executable, "-c", PROBE, "verify", str(folder), "--for", "vllm"]
    command += ["--gpu", "H100", "--json"]
    started = time.monotonic()
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    code, peak = json.loads(answer.stderr.strip().splitlines()[-1])
    told = json.loads(answer.stdout)
    return {
        "seconds": round(seconds, 2),
        "peak_mb": round(peak / 1e6, 1),
        "exit_code": code,
        "verdict": told["verdict"],
        "kernels": sorted({one["kernel"] for one in told["kernels"]}),
        "findings": len(told["findings"]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(arguments)
    models = {}
    with tempfile.TemporaryDirectory(prefix="quantkit-headers-") as scratch:
        for name, config, scheme in (
            ("70B w4a16", LLAMA_70B, "w4a16"),
            ("70B fp8", LLAMA_70B, "fp8"),
            ("235B-A22B w4a16", QWEN3_235B, "w4a16"),
        ):
            folder = Path(scratch, name.replace(" ", "-"))
            files, n_tensors, size = save(folder, config, scheme)
            models[name] = {"files": files, "tensors": n_tensors, "bytes": size, **judged(folder)}
            print(name, models[name], flush=True)
    result = {
        "what": "verify --for vllm on the headers of large models: wall seconds with the start of "
        "Python, peak resident memory",
        "machine": f"{platform.machine()}, {platform.system()}, Python {platform.python_version()}",
        "limits_of_70b": LIMITS,
        "models": models,
    }
    write(args.out, result)


if __name__ == "__main__":
    main()
