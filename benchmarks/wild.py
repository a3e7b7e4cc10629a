# ruff: noqa: E402
"""What `quantkit verify --for vllm` foretells of a corpus of checkpoints, beside what vLLM does.

    python benchmarks/wild.py --python PYTHON_OF_VLLM --work DIR [--gpu H200] [--jobs 4]
        [--only NAME ...]
    python benchmarks/wild.py --judge RESULT --work DIR [--out FILE]

The corpus (tests/wild.py) is made on the demo model: sound checkpoints of every scheme, and broken
ones, one per known fault. Each is judged from config and headers, then loaded by a real vLLM in a
process of its own (eager, a small cache), which gives the log-probabilities of a few texts. They
are held against our reader's of the sound checkpoint that each was made from: `refuses` where vLLM
raises, `garbage` where it answers otherwise than the sound one by far, else `loads`. Results go to
one file as they come, so that a stopped run goes on (`--again` starts anew).

`--judge` asks no engine: the corpus is made again, judged by the rules of this tree, and held
against the outcomes that RESULT has, which stay as they are. Its file says which commit foretold.
"""

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from recording import without_folders, write

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import torch
import wild

import quantkit
from quantkit import opening
from quantkit.dispatch import scales
from quantkit.dispatch.prediction import Prediction
from quantkit.engine.vllm_job import Job, Vllm
from quantkit.errors import QuantkitError
from quantkit.hardware import gpus
from quantkit.model.source import ModelSource
from quantkit.scoring import loading
from quantkit.scoring.expected import log_probabilities

RESULT = Path(__file__).parent / "results" / "wild-h200.json"
TEXTS = 8
LENGTH = 96
GARBAGE = 0.25
"""Nats per token from the sound checkpoint's reference beyond which an answer is not the model's;
sound ones are off by a few hundredths."""


def prompts() -> list[list[int]]:
    """Token ids of Python's own documentation, which is what the demo model was trained on."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(wild.DEMO / "tokenizer.json"))
    text = "\n".join(topics[name] for name in sorted(topics)[:TEXTS])
    ids = tokenizer.encode(text).ids
    return [ids[n * LENGTH : (n + 1) * LENGTH] for n in range(TEXTS)]


def references(folder: Path, score: list[list[int]], device: str) -> list[list[list[float]]]:
    """Log-probabilities of each prompt's tokens after the first, by our reader.

    Where inputs are rounded, also without that: on GPUs that lack the kernel, engines leave it out.
    """
    found = opening.find(str(folder), None, False)
    assert isinstance(found, ModelSource)
    model = loading.load(found, torch.device(device), dtype=torch.float32)
    rows: list[list[list[float]]] = [log_probabilities(model, torch.tensor(score)).tolist()]
    hooked = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m._forward_pre_hooks]
    for linear in hooked:
        linear._forward_pre_hooks.clear()
    if hooked:
        rows.append(log_probabilities(model, torch.tensor(score)).tolist())
    return rows


def apart(one: list[list[float]], other: list[list[float]]) -> float:
    """Mean difference in nats per token; infinite where one of them is not a number."""
    pairs = [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    mean = statistics.fmean(pairs)
    return mean if math.isfinite(mean) else math.inf


def outcome(
    case: wild.Case,
    engine: Vllm,
    score: list[list[int]],
    expected: list[list[list[float]]],
    dtype: str = "auto",
) -> dict[str, Any]:
    """What vLLM does with one folder."""
    settings = {"dtype": dtype, "enforce_eager": True, "max_model_len": 128}
    settings["enable_prefix_caching"] = False
    job = Job(str(case.folder.resolve()), "logprobs", score[:1], 1, score, True, settings)
    started = time.monotonic()
    try:
        answer = engine.ask(job)
    except QuantkitError as error:
        return {
            # A signal is the machine's word (an instruction that it lacks), not vLLM's.
            "outcome": "crashes" if " ended with signal " in str(error) else "refuses",
            "reason": without_folders(str(error))[:600],
            "seconds": _since(started),
        }
    off = min(apart(answer.prompt_logprobs, rows) for rows in expected)
    return {
        "outcome": "garbage" if off > GARBAGE else "loads",
        "nats_apart": None if math.isinf(off) else round(off, 4),
        "version": answer.version,
        "device": answer.device,
        "quantization": answer.quantization,
        "seconds": _since(started),
    }


def _since(started: float) -> float:
    return round(time.monotonic() - started, 1)


def foretold(case: wild.Case, version: str, gpu: str | None) -> dict[str, Any]:
    """Our own word, and how long it took; without a GPU, what the version alone tells."""
    started = time.monotonic()
    found = quantkit.predict(case.folder, version=version, gpu=gpu)
    verdict = {"loads": "loads", "will not load": "refuses"}.get(found.verdict, "garbage")
    told = {
        "verdict": verdict,
        "rules": sorted({one.rule.id for one in found.faults}),
        "kernels": sorted({one.kernel for one in found.kernels if one.kernel}),
        "seconds": round(time.monotonic() - started, 3),
    }
    if case.verify is not None:  # in the numbers, not in the headers
        faults = quantkit.verify(case.folder).faults
        bears = [one for one in faults if one.startswith("scales: ")]
        if faults and not (bears and all(is_borne(one, found, case.folder, gpu) for one in bears)):
            told["verdict"] = "garbage"
        told["verify"] = faults[:2]
    return told


def is_borne(fault: str, found: Prediction, folder: Path, gpu: str | None) -> bool:
    """Whether a kernel makes another number of a scale that is NaN."""
    if gpu is None or not fault.endswith(scales.NAN_WORDS):
        return False
    layer = fault.removeprefix("scales: ").partition(": ")[0].rpartition(".")[0]
    kernel = next((one.kernel for one in found.kernels if one.layer == layer), None)
    config = json.loads((folder / "config.json").read_bytes())
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    capability = round(10 * (gpus.find(gpu).capability or 0))
    return scales.of_nan(layer, kernel, dtype, capability).consequence == "accuracy"


def judged(path: Path, work: Path) -> dict[str, Any]:
    """The outcomes of a result, beside what the rules of this tree foretell of the same corpus."""
    result = json.loads(path.read_text())
    rows: dict[str, Any] = result["checkpoints"]
    unknown = rows.keys() - {*wild.SOUND, *wild.BROKEN}
    if unknown:
        raise SystemExit(f"{path.name}: the corpus has no {', '.join(sorted(unknown))}")
    done: dict[str, Any] = {}
    for case in wild.make(work, wanted=lambda name: name in rows):
        told = foretold(case, result["version"], result["gpu"])
        row = rows[case.name]
        agrees = told["verdict"] == row["found"]["outcome"]
        done[case.name] = {
            "foretold": told, "found": row["found"], "agrees": agrees,
            "foretold_then": row["foretold"]["verdict"],
        }  # fmt: skip
        print(
            f"{'agrees ' if agrees else 'DIFFERS'} {case.name}: foretold {told['verdict']} (then "
            f"{row['foretold']['verdict']}), found {row['found']['outcome']}",
            flush=True,
        )
    return {
        "what": "outcomes of vLLM in another result, beside what today's rules foretell",
        "outcomes": {"of": path.name, **result["recorded"]},
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "gpu": result["gpu"],
        "version": result["version"],
        "agree": sum(told["agrees"] for told in done.values()),
        "of": len(done),
        "checkpoints": done,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--python", type=Path, help="of vLLM's environment")
    way.add_argument("--judge", type=Path, help="a result: its outcomes by today's rules")
    parser.add_argument("--work", type=Path, required=True, help="the corpus goes here")
    parser.add_argument("--gpu", default="H200", help="none: by vLLM's version alone")
    parser.add_argument("--dtype", default="auto", help="what vLLM computes in")
    parser.add_argument("--version", default="0.26")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=4, help="engines at a time")
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, help="default: results/wild-h200.json, -judged")
    args = parser.parse_args(arguments)
    if args.judge:
        out = args.out or args.judge.with_name(f"{args.judge.stem}-judged.json")
        write(out, judged(args.judge, args.work))
        return
    args.out = args.out or RESULT
    args.gpu = None if args.gpu == "none" else args.gpu
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")  # compiled while loading, which takes minutes
    done: dict[str, Any] = {}
    if args.out.is_file() and not args.again:
        done = json.loads(args.out.read_text())["checkpoints"]
    cases = wild.make(args.work, wanted=lambda name: not args.only or name in args.only)
    engine = Vllm(args.python, args.timeout)
    score = prompts()
    expected: dict[Path, list[list[list[float]]]] = {}
    asked: dict[Future[dict[str, Any]], tuple[wild.Case, dict[str, Any]]] = {}
    with ThreadPoolExecutor(args.jobs) as engines:
        for case in cases:
            if case.name in done and case.name not in args.only:
                continue
            base = case.folder if case.is_sound else args.work / "sound" / wild.BROKEN[case.name][0]
            if base not in expected:
                expected[base] = references(base, score, args.device)
            told = foretold(case, args.version, args.gpu)
            future = engines.submit(outcome, case, engine, score, expected[base], args.dtype)
            asked[future] = case, told
        for answered in as_completed(asked):
            case, told = asked[answered]
            found = answered.result()
            agrees = told["verdict"] == found["outcome"]
            done[case.name] = {
                "sound": case.is_sound, "foretold": told, "found": found, "agrees": agrees
            }  # fmt: skip
            print(
                f"{'agrees ' if agrees else 'DIFFERS'} {case.name}: foretold {told['verdict']}, "
                f"found {found['outcome']}",
                flush=True,
            )
            write(args.out, _result(done, args))
    write(args.out, _result(done, args))


def _result(done: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    return {
        "what": "verify --for vllm, foretold from config and headers, beside what vLLM did",
        "gpu": args.gpu,
        **({} if args.gpu else {"machine": platform.machine()}),
        "dtype": args.dtype,
        "version": args.version,
        "agree": sum(told["agrees"] for told in done.values()),
        "of": len(done),
        "garbage_beyond_nats": GARBAGE,
        "checkpoints": done,
    }


if __name__ == "__main__":
    main()
