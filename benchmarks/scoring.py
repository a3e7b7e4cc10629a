"""How fast scoring is, against lm-eval's own model and against plain forward passes.

    python benchmarks/scoring.py --model DIR --data HUB_FOLDER [--limit N] [--out FILE]

memory     peak device memory beyond the model, vocabulary 150,000, windows of 4,096 tokens
wikitext   seconds for perplexity on WikiText-2, against bare forward passes over the same windows
divergence exact KL against brute force in float64: on synthetic logits of 128,256 tokens, and on
           the model with its weights rounded to 8 bits
exactness  some questions of every subject, ours and lm-eval's, in float32 and in bfloat16
mmlu       five-shot MMLU: seconds of lm-eval's `hf` model with batch size auto, and ours, on the
           same tasks; and how far apart the log-probabilities of all answers are
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lm_eval
import torch
from recording import write

from quantkit import device as devices
from quantkit.export.manifest import versions
from quantkit.model.source import ModelSource
from quantkit.offline import without_hub
from quantkit.progress import Silent
from quantkit.scoring import lmeval

TURNS = 5


def ours(model: str, device: torch.device, cache: Path, max_length: int | None) -> Any:
    from quantkit.scoring.model import EvaluatedModel, How

    source = ModelSource.open(model)
    return EvaluatedModel(source, device, How(max_length), cache, Silent(), False)


def theirs(model: str, device: torch.device, dtype: str, batch_size: str) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, dtype=dtype, device=str(device), batch_size=batch_size)


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    _wait()
    started = time.monotonic()
    result = run()
    _wait()
    return time.monotonic() - started, result


def by_lm_eval(lm: Any, tasks: dict[str, Any], limit: int | None) -> Any:
    """As `lm_eval` runs it, and nothing of ours around it."""
    return lm_eval.evaluate(lm=lm, task_dict=tasks, limit=limit, bootstrap_iters=0)


def values_of(results: Any) -> list[list[float]]:
    """Log-probabilities by question and answer."""
    return [
        [float(response[0][0]) for response in sample["resps"]]
        for task in sorted(results["samples"])
        for sample in sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    ]


def compared(one: list[list[float]], other: list[list[float]]) -> dict[str, Any]:
    """How far apart, and which answers differ, with how nearly tied they were."""
    gaps = sorted(
        abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )
    margins = []
    for x, y in zip(one, other, strict=True):
        if x.index(max(x)) != y.index(max(y)):
            first, second = sorted(x)[-1:-3:-1]
            margins.append(first - second)
    return {
        "answers": len(one),
        "other_answers": len(margins),
        "largest_margin_of_another_answer": max(margins, default=0.0),
        "gap_median": gaps[len(gaps) // 2],
        "gap_p99": gaps[int(0.99 * len(gaps))],
        "gap_largest": gaps[-1],
    }


def mmlu(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    tasks = lmeval.load([args.task], args.data, 5)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    peer = theirs(args.model, device, dtype, "auto")
    their_seconds, peers = timed(partial(by_lm_eval, peer, tasks, args.limit))
    del peer
    print("lm_eval", their_seconds, flush=True)
    with tempfile.TemporaryDirectory() as cache:
        lm = ours(args.model, device, Path(cache), None)
        our_seconds, found = timed(partial(lmeval.run, lm, tasks, args.limit, None))
        lm.close()
    return {
        "task": args.task,
        "dtype": dtype,
        "lm_eval_seconds": their_seconds,
        "our_seconds": our_seconds,
        "times_faster": their_seconds / our_seconds,
        "same": compared(values_of(peers), values_of(found)),
        "accuracy": {
            "lm_eval": peers["results"][args.task]["acc,none"],
            "ours": found["results"][args.task]["acc,none"],
        },
    }


def exactness(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Some questions of every subject in float32, where rounding hides nothing."""
    tasks = lmeval.load([args.task], args.data, 5)
    limit = min(args.exact, args.limit or args.exact)
    exact = values_of(by_lm_eval(theirs(args.model, device, "float32", "8"), tasks, limit))
    with tempfile.TemporaryDirectory() as cache:
        lm = ours(args.model, device, Path(cache), None)
        half = values_of(lmeval.run(lm, tasks, limit, None))
        lm.close()
    with tempfile.TemporaryDirectory() as cache:
        lm = ours(args.model, device, Path(cache), None)
        lm.model.float()
        found = values_of(lmeval.run(lm, tasks, limit, None))
        lm.close()
    peer = values_of(by_lm_eval(theirs(args.model, device, "bfloat16", "8"), tasks, limit))
    return {
        "float32, ours against lm_eval's": compared(exact, found),
        "bfloat16, ours against float32": compared(exact, half),
        "bfloat16, lm_eval's against float32": compared(exact, peer),
    }


def wikitext(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    tasks = lmeval.load(["wikitext"], args.data)
    (task,) = tasks["tasks"].values()
    texts = [task.doc_to_target(doc) for doc in task.eval_docs][: args.limit]
    with tempfile.TemporaryDirectory() as cache:
        lm = ours(args.model, device, Path(cache), 2048)
        ids = lm._encoder.texts(texts)
        windows = sorted(
            (w for text in ids for w in lm._windows(text)), key=lambda w: len(w.continuation)
        )

        def plain() -> None:
            with torch.no_grad():
                for start in range(0, len(windows), args.plain_batch):
                    batch = windows[start : start + args.plain_batch]
                    rows = [w.context + w.continuation[:-1] for w in batch]
                    width = max(map(len, rows))
                    padded = [row + (0,) * (width - len(row)) for row in rows]
                    lm.model(torch.tensor(padded, device=device))

        def answered() -> None:
            for _ in lm._answerer.answers(windows):
                pass

        task_run = partial(lmeval.run, lm, tasks, args.limit, None)
        plain()  # once to warm up, as for ours
        answered()
        # In turns, and the median of each: single times vary by a tenth.
        turns = [(timed(plain)[0], timed(answered)[0]) for _ in range(TURNS)]
        seconds = {
            "plain forward passes": statistics.median(bare for bare, _ in turns),
            "losses alone": statistics.median(ours for _, ours in turns),
            "task, predictions recorded": timed(task_run)[0],
        }
        lm.close()
        for path in Path(cache).glob("*.text"):
            path.unlink()
        lm._kept = replace(lm._kept, is_source=False)
        seconds["task, compared with the record"] = timed(task_run)[0]
        lm.close()
        disk = {path.suffix[1:]: path.stat().st_size for path in Path(cache).iterdir()}
        (text,) = lm.texts.values()
        assert text.kl is not None
    base = seconds["plain forward passes"]
    return {
        "windows": len(windows),
        "tokens": sum(map(len, ids)),
        "compared_positions": sum(map(len, text.kl)),
        "largest_kl_against_itself": max(float(part.max()) for part in text.kl if len(part)),
        "disk_bytes": {name: disk[name] for name in ("reference", "head", "text")},
        "seconds": seconds,
        "ratios": {name: value / base for name, value in seconds.items()},
    }


def divergence(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    from quantkit.scoring.divergence import kl

    generator = torch.Generator(device).manual_seed(0)
    result: dict[str, Any] = {}
    vocabulary, n_rows = 128_256, 256 if device.type == "cuda" else 32
    for noise in (0.01, 0.1, 1.0):
        source = 3 * torch.randn(n_rows, vocabulary, generator=generator, device=device)
        moved = torch.randn(source.shape, generator=generator, device=device)
        pair = source, source + noise * moved
        kl(*pair)  # once to warm up
        seconds, found = timed(partial(kl, *pair))
        result[f"synthetic, 128,256 tokens, noise {noise:g}"] = {
            "positions": n_rows,
            "seconds_per_1000_positions": 1000 * seconds / n_rows,
            "of_reading_both_once": seconds / timed(partial(_read, *pair))[0],
            "largest_against_itself": float(kl(source, source).max()),
            **_against_brute_force(found, brute_force(*pair)),
        }
    result["the model, weights rounded to 8 bits"] = _rounded(args, device)
    return result


def _rounded(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Some windows through the code that scores, and the obvious way."""
    from quantkit.scoring.divergence import Divergence, Recorder, head_of

    tasks = lmeval.load(["wikitext"], args.data)
    (task,) = tasks["tasks"].values()
    texts = [task.doc_to_target(doc) for doc in task.eval_docs][:2]
    with tempfile.TemporaryDirectory() as cache, torch.no_grad():
        lm = ours(args.model, device, Path(cache), 2048)
        windows = [w for ids in lm._encoder.texts(texts) for w in lm._windows(ids)][: args.windows]
        n_tokens = sum(len(w.continuation) for w in windows)
        recorder = Recorder(torch.ones(n_tokens, dtype=torch.bool))

        def logits() -> list[torch.Tensor]:
            rows = [torch.tensor([w.context + w.continuation[:-1]], device=device) for w in windows]
            return [
                lm.model(row).logits[0, -len(w.continuation) :].cpu()
                for row, w in zip(rows, windows, strict=True)
            ]

        list(lm._answerer.answers(windows, recorder.see))
        head = torch.nn.Linear(1, 1, device=device)
        head.weight = torch.nn.Parameter(head_of(lm.model)["weight"].clone())
        head.bias = None
        source = logits()
        for weight in lm.model.parameters():
            if weight.dim() == 2:
                step = weight.abs().amax(-1, keepdim=True) / 127
                weight.copy_((weight / step).round() * step)
        compared = Divergence(recorder.reference, n_tokens, lm._answerer, head)
        list(lm._answerer.answers(windows, compared.see))
        expected = torch.cat([brute_force(a, b) for a, b in zip(source, logits(), strict=True)])
        lm.close()
    found = compared.kl[torch.argsort(compared.places)]
    return {"positions": n_tokens, **_against_brute_force(found, expected)}


def _read(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        tensor.sum()


def brute_force(source: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """The definition, in float64, some rows at a time."""
    parts = []
    for a, b in zip(source.split(64), candidate.split(64), strict=True):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        parts.append((p.exp() * (p - q)).sum(-1).cpu())
    return torch.cat(parts)


def _against_brute_force(found: torch.Tensor, expected: torch.Tensor) -> dict[str, Any]:
    told = {}
    for name, one in (("found", found.double().cpu()), ("expected", expected)):
        told[name] = {
            "mean": float(one.mean()),
            "median": float(one.quantile(0.5)),
            "p99": float(one.quantile(0.99)),
        }
    gaps = [abs(told["found"][name] / told["expected"][name] - 1) for name in told["expected"]]
    return {**told, "largest_relative_gap": max(gaps)}


def memory(device: torch.device) -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from quantkit.scoring.answering import Answerer, Request

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
    parser.add_argument("--exact", type=int, default=10, help="questions a subject in float32")
    parser.add_argument("--plain-batch", type=int, default=16)
    parser.add_argument("--windows", type=int, default=8, help="of text, for brute force")
    parser.add_argument("--parts", nargs="*", help="default: all")
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
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "memory": lambda: memory(device),
        "wikitext": lambda: wikitext(args, device),
        "divergence": lambda: divergence(args, device),
        "exactness": lambda: exactness(args, device),
        "mmlu": lambda: mmlu(args, device),
    }
    if device.type != "cuda":
        del parts["memory"]
    for name in args.parts or parts:
        with lmeval.quiet():
            result[name] = parts[name]()
        print(name, json.dumps(result[name]), flush=True)
        if args.out:
            write(args.out, result)


if __name__ == "__main__":
    main()
