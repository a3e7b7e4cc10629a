"""Checkpoints in real vLLM: config, greedy text, and log-probabilities against our reference.

    python benchmarks/vllm_proof.py --python PYTHON_OF_VLLM --jobs 4 --out FILE SOURCE [DIR...]
    python benchmarks/vllm_proof.py --python PYTHON_OF_VLLM --make WORK --out FILE SOURCE

The second form makes the checkpoints first, in WORK, and is the whole measurement in one call. The
source goes through the same comparison, which shows what the engine's own arithmetic is worth where
nothing is quantised; it is not counted among the checkpoints. Its answers are then put forward once
more as those of every checkpoint (`source_instead`), as an engine would that ignores the
quantisation: each must be caught. A checkpoint that has a fault, or that vLLM refuses, is recorded
with the reason. Several engines share one GPU: each takes a small cache of a given size.

4-bit activations have no kernels before Blackwell: `--engine '{"linear_backend": "emulation"}'` has
vLLM compute them by its own emulation.

`results/vllm-proof-h200.json` was recorded before there was a test against the source. It counts
the source among its 13, and keeps means and quantiles of the differences but not the answers, so
whether they are nearer to the checkpoint or to the source cannot be computed from it.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recording import write

from quantkit.engine.vllm_job import Vllm
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.verified import Verified
from quantkit.model.source import ModelSource
from quantkit.progress import Silent
from quantkit.proof.run import EngineAnswer, ProofOptions, Sources, ask, compare, prove

MADE = {
    "rtn-w8a16": (),
    "awq-gptq-w4a16": ("gptq",),
    "awq-w4a16": ("awq",),
    "fp8-dynamic": (),
    "fp8-static": ("fp8",),
    "fp8-tensor": ("fp8",),
    "gptq-w4a16": ("gptq",),
    "int8-w8a8": (),
}
"""Recipes, and the native formats that each is written in besides compressed-tensors."""


def make(source: ModelSource, out: Path, calibration: str) -> list[Path]:
    """All checkpoints in one pass; those that are there already are not made again."""
    from quantkit.onepass.prepare import CalibrationChoice
    from quantkit.onepass.run import quantize
    from quantkit.recipe import Recipe

    recipes = []
    for name, formats in MADE.items():
        plain = Recipe.load(name)
        recipes += [plain, *(plain.in_format(form) for form in formats)]
    if missing := [recipe for recipe in recipes if not (out / recipe.name).exists()]:
        quantize(source, missing, out, calibration=CalibrationChoice(calibration))
    return [out / recipe.name for recipe in recipes]


def figures(record: Verified) -> dict[str, Any]:
    """What is kept of a record; texts shortened to what shows that they are text."""
    kept = record.to_json()
    kept["texts"] = kept["texts"][:2]
    if record.read is not None:
        kept["over_noise"] = round(record.read.mean / max(record.read.noise_mean, 1e-9), 3)
    return kept


def source_instead(
    folder: Path,
    asking: EngineAnswer,
    prompts_digest: str | None,
    asked: ProofOptions,
    sources: Sources,
) -> dict[str, Any]:
    """What comes of the source's answers when they pass for a checkpoint's."""
    if asking.prompts.digest != prompts_digest:
        return {"caught": None, "problem": "the source was asked about other prompts"}
    pretended = EngineAnswer(Checkpoint.open(folder), asking.prompts, asking.answer)
    found = compare(pretended, asked, Silent(), sources)
    whose = None if found.attribution is None else found.attribution.model_dump(mode="json")
    return {"caught": not found.ok, "faults": found.faults, "attribution": whose}


def summary(models: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts of checkpoints; the source stands beside them."""
    checkpoints = {name: told for name, told in models.items() if name != "source"}
    pretended = [t["source_instead"] for t in checkpoints.values() if "source_instead" in t]
    return {
        "agree": sum(bool(told["ok"]) for told in checkpoints.values()),
        "of": len(checkpoints),
        "source_agrees": bool(models["source"]["ok"]) if "source" in models else None,
        "sources_caught": sum(bool(told["caught"]) for told in pretended),
        "sources_pretended": len(pretended),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--make", type=Path, metavar="WORK", help="make the checkpoints here first")
    parser.add_argument("--calibration", default="python-docs", help="of what is made")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", help="what vLLM computes in")
    parser.add_argument("--engine", type=json.loads, default={}, help="further arguments, as JSON")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    # Kernels that are compiled while loading need a compiler, and minutes.
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
    started = time.monotonic()
    engine = Vllm(args.python, args.timeout, args.engine)
    # The source has an engine of its own beside the others, so there are always several.
    jobs = max(2, args.jobs)
    asked = ProofOptions("logprobs", args.prompts, args.device, args.dtype, jobs=jobs)
    source = ModelSource.open(args.source)
    folders = list(args.folders)
    if args.make is not None:
        folders += make(source, args.make, args.calibration)
    models: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(1) as beside:
        first = beside.submit(ask, source, engine, asked)
        for proof in prove(folders, engine, asked, source):
            told: dict[str, Any] = {"ok": proof.ok, "problem": proof.problem}
            told["faults"] = proof.checks.faults
            told |= figures(proof.verified) if proof.verified else {}
            models[proof.folder.name] = told
            show(proof.folder.name, told, started)
            keep(args, source, models, started)
        try:
            asking: EngineAnswer = first.result()
            told = figures(compare(asking, asked, Silent()))
        except QuantkitError as error:
            told = {"ok": False, "problem": str(error)}
        else:
            sources = Sources(source)
            for folder in folders:
                record = models[folder.name]
                if record.get("prompts_digest"):
                    record["source_instead"] = source_instead(
                        folder, asking, record["prompts_digest"], asked, sources
                    )
                    caught = record["source_instead"]["caught"]
                    print(f"{'caught' if caught else 'MISSED'}  the source as {folder.name}")
        models = {"source": told, **models}
        show("source", told, started)
    counts = keep(args, source, models, started)
    print(
        f"{counts['agree']} of {counts['of']} checkpoints agree, and the source "
        f"{'does' if counts['source_agrees'] else 'does not'}; the source is caught as "
        f"{counts['sources_caught']} of {counts['sources_pretended']}; "
        f"{time.monotonic() - started:.0f} s in all"
    )


def keep(
    args: argparse.Namespace, source: ModelSource, models: dict[str, dict[str, Any]], started: float
) -> dict[str, Any]:
    """Write down what there is so far; returns its counts."""
    counts = summary(models)
    result = {
        "what": "vLLM against our dequantised reference, nats per token; source first",
        "model": source.label,
        "jobs": args.jobs,
        "engine_settings": args.engine,
        "seconds": round(time.monotonic() - started, 1),
        **counts,
        "models": models,
    }
    if args.out:
        write(args.out, result)
    return counts


def show(name: str, told: dict[str, Any], started: float) -> None:
    spent = time.monotonic() - started
    read, whose = told.get("read"), told.get("attribution")
    words = told.get("problem") or "; ".join(told.get("faults") or []) or "no figures"
    if read:
        words = f"off by {read['mean']:.4f}, noise {read['noise_mean']:.4f}"
    if whose:
        words += f", source {whose['apart']:.4f} away, power {whose['power']:.3f}"
    print(f"{spent:6.1f} s  {'ok ' if told['ok'] else 'NOT'}  {name}: {words}", flush=True)


if __name__ == "__main__":
    main()
