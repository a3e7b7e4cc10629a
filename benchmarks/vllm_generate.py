"""Greedy text of checkpoints in real vLLM, side by side with their source's.

    PYTHON_OF_VLLM benchmarks/vllm_generate.py --out FILE [--jobs 4] SOURCE CHECKPOINT...

Runs in vLLM's own environment and imports nothing of quantkit. Every model is loaded in a process
of its own; one that vLLM refuses is recorded with its last words, not left out.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recording import write

PROMPTS = [
    'The "assert" statement',
    'class Stack:\n    """',
    "Return a list of",
    "Raised when an",
]
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}


def generate(folder: str, dtype: str, shared: bool) -> None:
    """Load one model and print what it writes, as the last line."""
    from vllm import LLM, SamplingParams

    # Beside others on one GPU: no profiling of memory that they change meanwhile.
    room = {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.05} if shared else {}
    model = LLM(folder, dtype=dtype, max_model_len=256, enforce_eager=True, **room)
    answers = model.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    print("\nRESULT " + json.dumps([answer.outputs[0].text for answer in answers]))


def ask(folder: str, dtype: str, shared: bool) -> dict[str, object]:
    """What one model writes, or why it does not."""
    command = [sys.executable, __file__, "--one", "--dtype", dtype, folder]
    command += ["--jobs", "2"] if shared else []
    environment = {**os.environ, **SETTINGS}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=600, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode == 0 and lines:
        return {"texts": json.loads(lines[-1].removeprefix("RESULT "))}
    words = [line for line in done.stderr.splitlines() if "Error" in line]
    return {"refused": words[-1].strip() if words else f"exit code {done.returncode}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", help="the source first")
    parser.add_argument("--dtype", default="float16", help="bfloat16 on a GPU")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, on a GPU")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        generate(args.folders[0], args.dtype, args.jobs > 1)
        return
    from importlib.metadata import version

    result = {
        "what": "greedy text in vLLM, source first",
        "vllm": next(
            (f"{p} {version(p)}" for p in ("vllm", "vllm-cpu") if _installed(p)), "unknown"
        ),
        "machine": platform.machine(),
        "dtype": args.dtype,
        "prompts": PROMPTS,
        "models": {},
    }
    with ThreadPoolExecutor(args.jobs) as pool:
        answers = pool.map(lambda folder: ask(folder, args.dtype, args.jobs > 1), args.folders)
        for folder, answer in zip(args.folders, answers, strict=True):
            name = "source" if folder == args.folders[0] else Path(folder).name
            result["models"][name] = answer
            print(name, json.dumps(answer), flush=True)
    if args.out:
        write(args.out, result)


def _installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version

    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
