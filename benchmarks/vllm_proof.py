"""Checkpoints in real vLLM: config, greedy text, and log-probabilities against our reference.

    python benchmarks/vllm_proof.py --python PYTHON_OF_VLLM --jobs 4 --out FILE SOURCE DIR...

The source goes through the same comparison, which tells what the engine's own arithmetic is worth
where nothing is quantised. A checkpoint that has a fault, or that vLLM refuses, is recorded with
the reason. Several engines share one GPU: each takes a small cache of a given size.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recording import write

from quantkit.engine.vllm_job import Vllm
from quantkit.errors import QuantkitError
from quantkit.export.verified import Verified
from quantkit.model.source import ModelSource
from quantkit.progress import Silent
from quantkit.proof.run import Asked, Asking, ask, compare, prove


def figures(record: Verified) -> dict[str, Any]:
    """What is kept of a record; texts shortened to what shows that they are text."""
    kept = record.to_json()
    kept["texts"] = kept["texts"][:2]
    if record.read is not None:
        kept["over_noise"] = round(record.read.mean / max(record.read.noise_mean, 1e-9), 3)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    # Kernels that are compiled while loading need a compiler, and minutes.
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
    started = time.monotonic()
    engine = Vllm(args.python, args.timeout)
    # The source has an engine of its own beside the others, so there are always several.
    asked = Asked("logprobs", args.prompts, args.device, jobs=max(2, args.jobs))
    source = ModelSource.open(args.source)
    models: dict[str, Any] = {}
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(ask, source, engine, asked)
        for proof in prove(args.folders, engine, asked, source):
            told: dict[str, Any] = {"ok": proof.ok, "problem": proof.problem}
            told["faults"] = proof.checks.faults
            told |= figures(proof.verified) if proof.verified else {}
            models[str(proof.folder.name)] = told
            show(str(proof.folder.name), told, started)
        try:
            asking: Asking = first.result()
            told = figures(compare(asking, asked, Silent()))
        except QuantkitError as error:
            told = {"ok": False, "problem": str(error)}
        models = {"source": told, **models}
        show("source", told, started)
    result = {
        "what": "vLLM against our dequantised reference, nats a token; source first",
        "model": source.label,
        "jobs": args.jobs,
        "seconds": round(time.monotonic() - started, 1),
        "agree": sum(bool(told["ok"]) for told in models.values()),
        "of": len(models),
        "models": models,
    }
    print(f"{result['agree']} of {result['of']} agree, {result['seconds']} s in all")
    if args.out:
        write(args.out, result)


def show(name: str, told: dict[str, Any], started: float) -> None:
    spent = time.monotonic() - started
    read = told.get("read")
    words = told.get("problem") or "; ".join(told.get("faults") or []) or "no figures"
    if read:
        words = f"off by {read['mean']:.4f}, noise {read['noise_mean']:.4f}"
    print(f"{spent:6.1f} s  {'ok ' if told['ok'] else 'NOT'}  {name}: {words}", flush=True)


if __name__ == "__main__":
    main()
