"""How fast scoring is, against lm-eval's own model and against plain forward passes.

    python benchmarks/scoring.py --model DIR --data HUB_FOLDER [--limit N] [--out FILE]

mmlu       five-shot MMLU: seconds of lm-eval's `hf` model with batch size auto, and ours, on the
           same tasks; and how far apart the log-probabilities of all answers are
wikitext   seconds for perplexity on WikiText-2, against bare forward passes over the same windows
memory     peak device memory beyond the model, vocabulary 150,000, windows of 4,096 tokens
"""

import argparse
import json
import platform
import tempfile
import time
from contextlib import chdir
from pathlib import Path
from typing import Any

import torch

from quantkit import device as devices
from quantkit.export.manifest import versions
from quantkit.model.source import ModelSource
from quantkit.offline import without_hub
from quantkit.progress import Silent
from quantkit.storage import write_json


def loaded_tasks(names: list[str], data: Path, shots: int | None) -> Any:
    from lm_eval.tasks import TaskManager

    with chdir(data):
        found = TaskManager().load(names)
    for task in found["tasks"].values():
        if shots is not None:
            task.set_config(key="num_fewshot", value=shots)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=0)
    return found


def ours(model: str, device: torch.device, cache: Path, max_length: int | None) -> Any:
    from quantkit.score.model import EvaluatedModel

    source = ModelSource.open(model)
    return EvaluatedModel(source, device, max_length, None, cache, Silent(), False)


def timed(lm: Any, tasks: Any, limit: int | None) -> tuple[float, dict[str, Any]]:
    import lm_eval

    _wait()
    started = time.monotonic()
    results = lm_eval.evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=0)
    _wait()
    return time.monotonic() - started, results


def mmlu(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    from lm_eval.models.huggingface import HFLM

    dtype = "bfloat16" if device.type == "cuda" else "float32"
    peer = HFLM(pretrained=args.model, dtype=dtype, device=str(device), batch_size="auto")
    their_seconds, theirs = timed(peer, loaded_tasks([args.task], args.data, 5), args.limit)
    del peer
    with tempfile.TemporaryDirectory() as cache:
        lm = ours(args.model, device, Path(cache), None)
        our_seconds, found = timed(lm, loaded_tasks([args.task], args.data, 5), args.limit)
        lm.close()
    gaps, same, n = [], 0, 0
    for task, samples in theirs["samples"].items():
        for one, other in zip(samples, found["samples"][task], strict=True):
            first = [float(r[0][0]) for r in one["resps"]]
            second = [float(r[0][0]) for r in other["resps"]]
            gaps += [abs(a - b) for a, b in zip(first, second, strict=True)]
            same += first.index(max(first)) == second.index(max(second))
            n += 1
    gaps.sort()
    return {
        "task": args.task,
        "questions": n,
        "lm_eval_seconds": their_seconds,
        "our_seconds": our_seconds,
        "times_faster": their_seconds / our_seconds,
        "same_answers": same,
        "log_probability_gap": {"median": gaps[len(gaps) // 2], "largest": gaps[-1]},
        "accuracy": {
            "lm_eval": theirs["results"][args.task]["acc,none"],
            "ours": found["results"][args.task]["acc,none"],
        },
    }


def wikitext(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        lm = ours(args.model, device, Path(cache), 2048)
        tasks = loaded_tasks(["wikitext"], args.data, None)
        (task,) = tasks["tasks"].values()
        texts = [task.doc_to_target(doc) for doc in task.eval_docs][: args.limit]
        windows = [w for text in texts for w in lm._windows(lm.tok_encode(text))]
        windows.sort(key=lambda window: len(window.continuation))
        seconds, _ = timed(lm, tasks, args.limit)
        lm.close()
        _wait()
        started = time.monotonic()
        with torch.no_grad():
            for start in range(0, len(windows), args.plain_batch):
                rows = [
                    w.context + w.continuation[:-1] for w in windows[start:][: args.plain_batch]
                ]
                width = max(map(len, rows))
                ids = torch.tensor([row + (0,) * (width - len(row)) for row in rows], device=device)
                lm.model(ids)
        _wait()
        plain = time.monotonic() - started
    return {
        "windows": len(windows),
        "our_seconds": seconds,
        "plain_seconds": plain,
        "ratio": seconds / plain,
    }


def memory(device: torch.device) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from quantkit.score.answering import Answerer, Request

    config = LlamaConfig(
        vocab_size=150_000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    ids = torch.randint(0, 150_000, (32, 4096)).tolist()
    for _ in Answerer(model, 4096).answers([Request((0,), tuple(row)) for row in ids]):
        pass
    return {
        "model_bytes": before,
        "peak_beyond_model_bytes": torch.cuda.max_memory_allocated(device) - before,
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--task", default="mmlu")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--plain-batch", type=int, default=16)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    without_hub()
    args.model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    device = devices.choose()
    result = {
        "what": "scoring against lm-eval's own model, plain forward passes and memory",
        "device": devices.describe(device),
        "machine": platform.machine(),
        "versions": versions(),
    }
    for name, part in (("mmlu", mmlu), ("wikitext", wikitext)):
        result[name] = part(args, device)
        print(name, json.dumps(result[name]), flush=True)
    if device.type == "cuda":
        result["memory"] = memory(device)
        print("memory", json.dumps(result["memory"]), flush=True)
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
