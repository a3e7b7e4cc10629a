"""Tokens that vLLM's KV cache really holds, against what `recommend` computes.

    python benchmarks/kv_capacity.py --model DIR --gpu H200 [--vllm-site DIR] [--out FILE]

For a small model and one of an 8B Llama's shape: as it is, in FP8 and in 4 bits, with a 16-bit and
an 8-bit cache. Weights are dummies, as their number alone counts, so only configs are needed. vLLM
starts with a server's own settings and says "GPU KV cache size: N tokens"; ours is computed
without it. `--vllm-site` is put on the path of the Python that runs vLLM, if it needs that.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
}
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
}


def work(jobs: Path) -> None:
    """In vLLM's environment: start each model in a child of its own, so that imports are shared."""
    import vllm

    for job in json.loads(jobs.read_text()):
        log = Path(job["log"])
        child = os.fork()
        if child == 0:
            with log.open("w") as stream:
                os.dup2(stream.fileno(), 1)
                os.dup2(stream.fileno(), 2)
                try:
                    vllm.LLM(
                        job["folder"],
                        load_format="dummy",
                        dtype="bfloat16",
                        kv_cache_dtype=job["kv"],
                        max_model_len=job["context"],
                        max_num_batched_tokens=8192,
                        max_num_seqs=1024,
                        enforce_eager=job["eager"],
                    )
                except BaseException as error:  # its words are in the log
                    print(f"{type(error).__name__}: {error}", flush=True)
                os._exit(0)
        os.waitpid(child, 0)
        print(job["name"], flush=True)


def config_folder(folder: Path, config: dict[str, Any], recipe: str | None, label: str) -> Path:
    """A folder of a quantised model without its weights."""
    import shutil

    from quantkit import recipe as recipes
    from quantkit.export import compressed_tensors
    from quantkit.recipe import Recipe
    from quantkit.resources import DEMO_MODEL

    folder.mkdir()
    config = {**config}
    config.pop("quantization_config", None)
    if recipe:
        found = recipes.load(recipe)
        assert isinstance(found, Recipe)
        config["quantization_config"] = compressed_tensors.quantization_config(found, ["lm_head"])
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
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker)
        return
    from quantkit import recipe as recipes
    from quantkit.advise import gpus, memory, shape
    from quantkit.resources import DEMO_MODEL
    from quantkit.storage import write_json

    small = json.loads((Path(args.model) / "config.json").read_text())
    large = json.loads((DEMO_MODEL / "config.json").read_text()) | EIGHT_B
    gpu = gpus.find(args.gpu)
    rows, jobs = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for label, config in ((Path(args.model).name, small), ("8B-shaped", large)):
            context = min(8192, config["max_position_embeddings"])
            for recipe in RECIPES:
                folder = config_folder(Path(scratch) / f"{label}-{recipe}", config, recipe, label)
                made = recipes.load(recipe) if recipe else None
                for bits, kind in ((16, "auto"), (8, "fp8")):
                    ours = memory.fits(
                        shape.from_config(config, label), made, gpu, 1, context, kv_bits=bits
                    )
                    name = f"{label} {recipe or 'bf16'} kv{bits}"
                    log = Path(scratch) / f"{len(jobs)}.log"
                    jobs.append(
                        {"name": name, "folder": str(folder), "kv": kind, "context": context,
                         "log": str(log), "eager": not args.compiled}
                    )  # fmt: skip
                    rows.append(
                        {"model": label, "recipe": recipe or "bf16", "kv_bits": bits,
                         "ours": ours.kv_tokens, "our_kv_gib": ours.kv_bytes / 2**30,
                         "our_weights_gib": ours.weight_bytes / 2**30}
                    )  # fmt: skip
        table = Path(scratch) / "jobs.json"
        table.write_text(json.dumps(jobs))
        environment = {**os.environ, **SETTINGS}
        if args.vllm_site:
            environment["PYTHONPATH"] = str(args.vllm_site)
        command = [sys.executable, __file__, "--worker", str(table)]
        subprocess.run(command, env=environment, check=True)
        for row, job in zip(rows, jobs, strict=True):
            said = Path(job["log"]).read_text()
            for key, pattern in SAID.items():
                found = re.findall(pattern, said)
                row[key] = float(found[-1].replace(",", "")) if found else None
            if row["tokens"] is None:
                row["failed"] = said.strip().splitlines()[-12:]
            else:
                row["gap_percent"] = 100 * (row["ours"] / row["tokens"] - 1)
            print(json.dumps(row), flush=True)
    if args.out:
        write_json(
            args.out,
            {
                "what": "tokens of vLLM's KV cache, ours against what it says",
                "gpu": gpu.name,
                "eager": not args.compiled,
                "machine": platform.machine(),
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
