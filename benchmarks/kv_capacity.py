"""Tokens that vLLM's KV cache really holds, against what `recommend` computes.

    python benchmarks/kv_capacity.py --model DIR --gpu H200 [--vllm-site DIR] [--out FILE]

For a small model and one of an 8B Llama's shape: as it is, in FP8 and in 4 bits, with a 16-bit and
an 8-bit cache. Weights are dummies, as their number alone counts, so only configs are needed. vLLM
starts with a server's own settings and says "GPU KV cache size: N tokens"; ours is computed
without it. `--vllm-site` is put on the path of the Python that runs vLLM, if it needs that.
"""

import argparse
import fcntl
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from quantkit.engine.process import run
from quantkit.errors import EngineError

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
}
UTILISATION = 0.92
"""vLLM's own default; said to both sides."""
RECIPES = (None, "fp8-dynamic", "awq-gptq-w4a16")
EIGHT_B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SAID = {
    "tokens": r"GPU KV cache size: ([\d,]+) tokens",
    "available_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "weights_gib": r"Model loading took ([\d.]+) GiB",
    "total_gib": r"Free memory on device \([\d.]+/([\d.]+) GiB\)",
    "activation_gib": r"([\d.]+) GiB for peak activation",
    "non_torch_gib": r"([\d.]+) GiB for non-torch memory",
    "graphs_gib": r"([\d.]+) GiB for CUDAGraph memory",
}


def work(job: dict[str, Any]) -> None:
    """In vLLM's environment: start one model, and let it say what it found."""
    import vllm

    start = vllm.LLM  # importing takes as long as the rest, and needs no GPU
    lock = Path(job["lock"]).open("w")  # noqa: SIM115 held until the process ends
    fcntl.flock(lock, fcntl.LOCK_EX)  # an engine takes the memory that it finds free
    wait_for_memory()
    start(
        job["folder"],
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_dtype=job["kv"],
        max_model_len=job["context"],
        max_num_batched_tokens=8192,
        max_num_seqs=1024,
        gpu_memory_utilization=UTILISATION,
        enforce_eager=job["eager"],
    )
    sys.stdout.flush()
    os._exit(0)  # an engine that falls over its own end has said what it found


def wait_for_memory() -> None:
    """Until what the engine before held is free again; asked outside, as asking takes memory."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        if not said.strip() or int(said.split()[0]) < 1000:
            return
        time.sleep(0.2)


def ask(job: dict[str, Any], environment: dict[str, str], timeout: float) -> dict[str, Any]:
    """What vLLM says of one model, or its last lines."""
    command = [sys.executable, __file__, "--worker", json.dumps(job)]
    try:
        said = run(command, timeout=timeout, environment=environment, name="vLLM")
    except EngineError as error:
        return {"failed": str(error).splitlines()[-12:]}
    found: dict[str, Any] = {}
    for key, pattern in SAID.items():
        values = re.findall(pattern, said)
        found[key] = float(values[-1].replace(",", "")) if values else None
    return found


def config_folder(folder: Path, config: dict[str, Any], recipe: str | None) -> Path:
    """A folder of a quantised model without its weights."""
    import shutil

    from quantkit import formats
    from quantkit import recipe as recipes
    from quantkit.recipe import Recipe
    from quantkit.resources import DEMO_MODEL

    folder.mkdir()
    config = {**config}
    config.pop("quantization_config", None)
    if recipe:
        found = recipes.load(recipe)
        assert isinstance(found, Recipe)
        found, _ = found.resolved({k: config[k] for k in ("hidden_size", "intermediate_size")})
        config["quantization_config"] = formats.config(found, ["lm_head"])
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder with a config.json")
    parser.add_argument("--gpu", default="H200")
    parser.add_argument("--vllm-site", type=Path)
    parser.add_argument("--compiled", action="store_true", help="as served, not eager: slower")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--ahead", type=int, default=3, help="engines that import meanwhile")
    parser.add_argument("--only", help="names of models and formats must hold this")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker))
        return
    from recording import write

    from quantkit import recipe as recipes
    from quantkit.advise import memory, shape
    from quantkit.hardware import gpus
    from quantkit.resources import DEMO_MODEL

    small = json.loads((Path(args.model) / "config.json").read_text())
    large = json.loads((DEMO_MODEL / "config.json").read_text()) | EIGHT_B
    gpu = gpus.find(args.gpu)
    environment = {**SETTINGS}
    if args.vllm_site:
        environment["PYTHONPATH"] = str(args.vllm_site)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.ahead) as pool:
        begun: list[tuple[dict[str, Any], Future[dict[str, Any]]]] = []
        for (label, config), recipe in itertools.product(
            ((Path(args.model).name, small), ("8B-shaped", large)), RECIPES
        ):
            context = min(8192, config["max_position_embeddings"])
            folder = config_folder(Path(scratch) / f"{label}-{recipe}", config, recipe)
            made = recipes.load(recipe) if recipe else None
            for bits, kind in ((16, "auto"), (8, "fp8")):
                row: dict[str, Any] = {"model": label, "recipe": recipe or "bf16", "kv_bits": bits}
                if args.only and args.only not in " ".join(map(str, row.values())):
                    continue
                ours = memory.fits(
                    shape.from_config(config, label),
                    made,
                    gpu,
                    1,
                    context,
                    serving=memory.Serving(UTILISATION, bits),
                )
                row |= {
                    "ours": ours.kv_tokens,
                    "our_kv_gib": ours.kv_bytes / 2**30,
                    "our_weights_gib": ours.weight_bytes / 2**30,
                }
                job = {"folder": str(folder), "kv": kind, "context": context}
                job |= {"eager": not args.compiled, "lock": str(Path(scratch) / "lock")}
                begun.append((row, pool.submit(ask, job, environment, args.timeout)))
        for row, answer in begun:
            row |= answer.result()
            if row.get("tokens"):
                row["gap_percent"] = 100 * (row["ours"] / row["tokens"] - 1)
            print(json.dumps(row), flush=True)
            rows.append(row)
            if args.out:
                what = "tokens of vLLM's KV cache, ours against what it says"
                told = {"what": what, "gpu": gpu.name, "eager": not args.compiled}
                told["utilisation"] = UTILISATION
                write(args.out, {**told, "machine": platform.machine(), "rows": rows})


if __name__ == "__main__":
    main()
