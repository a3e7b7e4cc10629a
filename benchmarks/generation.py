"""How fast answers are written and followed: against lm-eval, vLLM and plain forward passes.

    python benchmarks/generation.py --model DIR --data HUB_FOLDER --out FILE
        [--vllm-path DIR] [--vllm-python FILE]

batch_sizes  lm-eval's `hf` on some questions with each batch size, `auto` on fewer: which is best
lm_eval      all questions with the best one
ours         all questions; with a second run of some that tells prompts from answers
same         both compared: answers that differ, and by how little the two tokens were apart where
             they part; in 16 bits a batch of another shape rounds otherwise
exactness    some questions of both in float32, where rounding has no say
vllm         vLLM by itself on the same prompts, then our score of the same model on its server
following    a new candidate held against 200 answers of 256 tokens, in plain forward passes

Every part is written to `--out` when it is done, and parts that are there are not run again.
Answers lie in `--work`, beside it by default. vLLM runs in `--vllm-python`, this Python by default,
with `--vllm-path` as its PYTHONPATH; without either, the part vllm is left out.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import recording

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}
MEMORY = 0.8
"""Share of the GPU's memory that vLLM takes."""
TURNS = 3


def work(job: dict[str, Any]) -> None:
    """In vLLM's environment: one model, all prompts at once."""
    import vllm

    engine = vllm.LLM(job["model"], dtype=job["dtype"], enable_prefix_caching=False, **job["more"])
    how = vllm.SamplingParams(temperature=0, max_tokens=job["max_new"], stop=job["stops"])
    asked = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    engine.generate(asked[:16], how, use_tqdm=False)
    started = time.monotonic()
    answers = engine.generate(asked, how, use_tqdm=False)
    seconds = time.monotonic() - started
    n_tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    texts = [answer.outputs[0].text for answer in answers]
    told = {"vllm": vllm.__version__, "seconds": seconds, "tokens": n_tokens, "texts": texts}
    Path(job["out"]).write_text(json.dumps(told))
    sys.stdout.flush()
    os._exit(0)  # an engine that falls over its own end has said what it found


class Bench:
    """What all parts share."""

    def __init__(self, args: argparse.Namespace) -> None:
        from quantkit import device as devices
        from quantkit.scoring import lmeval

        self.args = args
        self.device = devices.choose()
        self.dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        self.folder: Path = args.work
        self.folder.mkdir(parents=True, exist_ok=True)
        self.result: dict[str, Any] = {}
        with lmeval.quiet():
            self.tasks = lmeval.load([args.task], args.data)
        ((self.name, task),) = self.tasks["tasks"].items()
        self.n = min(len(task.eval_docs), args.limit or len(task.eval_docs))

    def loaded(self) -> dict[str, Any]:
        """The task with examples drawn anew, so that all are asked the same."""
        for task in self.tasks["tasks"].values():
            task.set_fewshot_seed(seed=0)
        return self.tasks

    def keep(self, name: str, samples: Any) -> None:
        found = sorted(samples[self.name], key=lambda sample: sample["doc_id"])
        rows = [[s["arguments"][0][0], s["resps"][0][0]] for s in found]
        (self.folder / f"{name}.json").write_text(json.dumps(rows))

    def kept(self, name: str) -> list[list[str]]:
        rows: list[list[str]] = json.loads((self.folder / f"{name}.json").read_text())
        return rows

    def theirs(self, batch_size: str, n: int, dtype: str | None = None) -> tuple[float, Any]:
        from scoring import by_lm_eval, theirs, timed

        lm = theirs(self.args.model, self.device, dtype or self.dtype, batch_size)
        seconds, found = timed(partial(by_lm_eval, lm, self.loaded(), n))
        del lm
        released()
        return seconds, found

    def ours(self, n: int, in_float32: bool = False) -> tuple[float, Any, Any]:
        """Seconds, results, and what wrote the answers."""
        from scoring import ours, timed

        from quantkit.scoring import lmeval

        with tempfile.TemporaryDirectory() as cache:
            lm = ours(self.args.model, self.device, Path(cache), None)
            if in_float32:
                lm.model.float()
            seconds, found = timed(partial(lmeval.run, lm, self.loaded(), n, None))
            decoder = lm.writer._generator.decoder
            lm.close()
        del lm
        released()
        return seconds, found, decoder

    def scores(self, found: Any) -> dict[str, float]:
        figures = found["results"][self.name]
        return {k: v for k, v in figures.items() if isinstance(v, float) and "stderr" not in k}


def batch_sizes(bench: Bench) -> dict[str, Any]:
    """Questions per second with each; one that does not fit is told, not left out."""
    import torch

    rows = []
    wanted = [(size, min(bench.n, bench.args.subset)) for size in bench.args.batch_sizes]
    if bench.args.auto_subset:
        wanted.append(("auto", min(bench.n, bench.args.auto_subset)))
    for size, n in wanted:
        try:
            seconds, _ = bench.theirs(size, n)
            row = {"batch_size": size, "questions": n, "seconds": seconds, "a_second": n / seconds}
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            row = {"batch_size": size, "questions": n, "failed": "out of memory"}
        print(json.dumps(row), file=sys.__stdout__, flush=True)
        rows.append(row)
    best = max(rows, key=lambda row: row.get("a_second", 0))
    return {"rows": rows, "best": best["batch_size"]}


def lm_eval(bench: Bench) -> dict[str, Any]:
    size = bench.result["batch_sizes"]["best"]
    seconds, found = bench.theirs(size, bench.n)
    bench.keep("lm_eval", found["samples"])
    return {
        "batch_size": size,
        "questions": bench.n,
        "seconds": seconds,
        "scores": bench.scores(found),
    }


def ours(bench: Bench) -> dict[str, Any]:
    seconds, found, decoder = bench.ours(bench.n)
    bench.keep("ours", found["samples"])
    told = {
        "questions": bench.n,
        "seconds": seconds,
        "scores": bench.scores(found),
        "static_cache": decoder is not None,
        "cuda_graphs": bool(decoder is not None and decoder._graphs),
    }
    with split() as parts:
        whole, _, _ = bench.ours(min(bench.n, bench.args.subset))
    told["of_some"] = {"questions": min(bench.n, bench.args.subset), "seconds": whole, **parts}
    if theirs := bench.result.get("lm_eval"):
        told["times_faster"] = theirs["seconds"] / seconds
    return told


@contextmanager
def split():  # type: ignore[no-untyped-def]
    """Seconds of prompts and of answers; waiting for the device in between costs a little."""
    from scoring import timed

    from quantkit.scoring import decoding

    batch = decoding._Batch
    join, write = batch.join, batch.write
    parts = {"prompts": 0.0, "answers": 0.0, "rounds": 0, "rows": 0}

    def joined(self: Any, *more: Any) -> None:
        parts["prompts"] += timed(partial(join, self, *more))[0]

    def wrote(self: Any, *more: Any) -> None:
        parts["rounds"] += 1
        parts["rows"] += len(self.places)
        parts["answers"] += timed(partial(write, self, *more))[0]

    batch.join, batch.write = joined, wrote  # type: ignore[method-assign]
    try:
        yield parts
    finally:
        batch.join, batch.write = join, write  # type: ignore[method-assign]


def same(bench: Bench) -> dict[str, Any]:
    return compared(bench, bench.kept("ours"), bench.kept("lm_eval"))


def compared(bench: Bench, one: list[list[str]], other: list[list[str]]) -> dict[str, Any]:
    """Answers that differ, and how nearly tied the tokens were where they part."""
    import torch

    from quantkit.model.source import ModelSource
    from quantkit.model.tokenizer import load as load_tokenizer
    from quantkit.scoring import loading

    assert [row[0] for row in one] == [row[0] for row in other], "they were asked other prompts"
    pairs = [(a[0], a[1], b[1]) for a, b in zip(one, other, strict=True) if a[1] != b[1]]
    told: dict[str, Any] = {"answers": len(one), "other_answers": len(pairs)}
    if not pairs:
        return told
    source = ModelSource.open(bench.args.model)
    tokenizer = load_tokenizer(source.folder)
    model = loading.load(source, bench.device, dtype=torch.float32)
    margins, top2 = [], 0
    for prompt, a, b in pairs[: bench.args.ties]:
        start = tokenizer(prompt)["input_ids"]
        first, second = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (a, b))
        n = next(
            (i for i, (x, y) in enumerate(zip(first, second, strict=False)) if x != y),
            min(len(first), len(second)),
        )
        ids = torch.tensor([start + first[:n]], device=bench.device)
        with torch.no_grad():
            logits = model(ids, logits_to_keep=1).logits[0, -1]
        best = logits.topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        # An answer that ends where the other goes on has no token there.
        tokens = {part[n] for part in (first, second) if len(part) > n}
        top2 += tokens <= set(best.indices.tolist())
    margins.sort()
    return told | {
        "looked_into": len(margins),
        "between_the_two_likeliest": top2,
        "margin_of_logits_in_float32": {
            "median": statistics.median(margins),
            "p90": margins[int(0.9 * (len(margins) - 1))],
            "largest": margins[-1],
        },
    }


def exactness(bench: Bench) -> dict[str, Any]:
    n = min(bench.n, bench.args.exact)
    _, theirs = bench.theirs("32", n, "float32")
    bench.keep("exact_lm_eval", theirs["samples"])
    _, found, _ = bench.ours(n, in_float32=True)
    bench.keep("exact_ours", found["samples"])
    return compared(bench, bench.kept("exact_ours"), bench.kept("exact_lm_eval"))


def vllm(bench: Bench) -> dict[str, Any]:
    from quantkit.engine import process
    from quantkit.model.source import ModelSource
    from quantkit.scoring.harness import evaluate
    from quantkit.scoring.options import ScoreOptions

    prompts, rules = asked_prompts(bench)
    python = str(bench.args.vllm_python or sys.executable)
    environment = dict(SETTINGS)
    if bench.args.vllm_path is not None:
        environment["PYTHONPATH"] = str(bench.args.vllm_path)
    more = {"max_model_len": bench.args.context, "gpu_memory_utilization": MEMORY}
    alone = bench.folder / "vllm.json"
    if not alone.is_file():
        job = {
            "model": bench.args.model,
            "dtype": bench.dtype,
            "more": more,
            "prompts": prompts,
            "max_new": rules.max_new,
            "stops": list(rules.stops),
            "out": str(alone),
        }
        file = bench.folder / "vllm-job.json"
        file.write_text(json.dumps(job))
        wait_for_memory(bench)
        # With its whole group: the engine's own process outlives the one that was started.
        process.run(
            [python, __file__, "--worker", str(file)],
            timeout=bench.args.timeout + 600,
            environment=environment,
            log=bench.folder / "vllm.log",
            name="vLLM by itself",
        )
    told = json.loads(alone.read_text())
    texts = told.pop("texts")
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", bench.args.model, "--dtype", bench.dtype, "--port", str(bench.args.port)]
    command += ["--no-enable-prefix-caching", "--max-model-len", str(bench.args.context)]
    command += ["--gpu-memory-utilization", str(MEMORY), "--max-logprobs", "20"]
    url = f"http://127.0.0.1:{bench.args.port}"
    wait_for_memory(bench)
    log = bench.folder / "server.log"
    with process.Child(command, environment=environment, log=log, name="the server") as server:
        wait_for(f"{url}/health", server, bench.args.timeout)
        with tempfile.TemporaryDirectory() as cache, watched() as seen:
            asked = ScoreOptions(
                (bench.args.task,),
                limit=bench.n,
                data=bench.args.data,
                cache=Path(cache),
                server=url,
            )
            card = evaluate(ModelSource.open(bench.args.model), asked).card
    cut = [cut_at(text, rules.stops) for text in texts]
    return {
        "version": told["vllm"],
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "written_tokens": told["tokens"],
        "vllm_alone_seconds": told["seconds"],
        "our_score_seconds": seen["writing"],
        "whole_command_seconds": card.seconds,
        "times_vllm_alone": seen["writing"] / told["seconds"],
        "other_answers": sum(a != b for a, b in zip(cut, seen["rows"], strict=True)),
        "scores": {name: score.value for name, score in card.scores.items()},
    }


@contextmanager
def watched():  # type: ignore[no-untyped-def]
    """Seconds from the first question to the last answer of a served model, and its answers."""
    from quantkit.scoring.server import ServedModel

    usual, seen = ServedModel.generate_until, {}

    def generate_until(self: Any, requests: Any, *more: Any) -> list[str]:
        started = time.monotonic()
        found = usual(self, requests, *more)
        seen["writing"] = time.monotonic() - started
        order = sorted(range(len(requests)), key=lambda i: requests[i].doc_id)
        seen["rows"] = [found[i] for i in order]
        return found

    ServedModel.generate_until = generate_until  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        ServedModel.generate_until = usual  # type: ignore[method-assign]


def asked_prompts(bench: Bench) -> tuple[list[list[int]], Any]:
    """The prompts as they are sent, in the order of the questions, and how they are answered."""
    from scoring import ours as loaded_by_us

    (task,) = bench.loaded()["tasks"].values()
    task.build_all_requests(limit=bench.n, rank=0, world_size=1)
    instances = sorted(task.instances, key=lambda instance: instance.doc_id)
    with tempfile.TemporaryDirectory() as cache:
        lm = loaded_by_us(bench.args.model, bench.device, Path(cache), None)
        rules = lm.writer.rules(bench.name, instances[0].args[1], 0)
        encoded = lm._encoder.texts([instance.args[0] for instance in instances])
        prompts = [list(lm.writer.fitting(bench.name, ids, rules)) for ids in encoded]
        lm.close()
    del lm
    released()
    return prompts, rules


def cut_at(text: str, stops: tuple[str, ...]) -> str:
    for stop in stops:
        text = text.split(stop)[0]
    return text


def wait_for(url: str, server: Any, timeout_s: float) -> None:
    """Until the server answers; with its last lines where it does not."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        server.check()
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.5)
    raise server.failure(f"the server was not ready after {timeout_s:.0f} s")


def wait_for_memory(bench: Bench) -> None:
    """Until what was stopped has given back the GPU's memory that vLLM is to have."""
    import torch

    if bench.device.type != "cuda":
        return
    released()
    deadline = time.monotonic() + bench.args.timeout
    while True:
        free, total = torch.cuda.mem_get_info()
        if free > MEMORY * total:
            return
        if time.monotonic() > deadline:
            raise SystemExit(
                f"{(total - free) / 2**30:.0f} of {total / 2**30:.0f} GiB of the GPU are in use "
                f"({torch.cuda.memory_reserved() / 2**30:.0f} by this process); vLLM is to have "
                f"{MEMORY:.0%}"
            )
        time.sleep(1)


def released() -> None:
    """Give back the memory of models that nothing refers to."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def following(bench: Bench) -> dict[str, Any]:
    import torch
    from scoring import ours as loaded_by_us
    from scoring import timed

    from quantkit.scoring.answering import Request
    from quantkit.scoring.following import Prompts

    (task,) = bench.tasks["tasks"].values()
    questions = [task.doc_to_text(doc) for doc in list(task.eval_docs)[: bench.args.answers]]
    asked = Prompts("questions", tuple(questions), bench.args.answer_tokens)
    with tempfile.TemporaryDirectory() as cache:
        lm = loaded_by_us(bench.args.model, bench.device, Path(cache), None)
        lm.writer._ends = ()  # answers of full length
        first = timed(partial(lm.follow, asked))[0]
        (kept,) = Path(cache).glob("*.answers")
        written = [tuple(tokens) for tokens in json.loads(kept.read_text())]
        prompts = [tuple(ids) for ids in asked.encoded(lm.tokenizer)]
        windows = [Request(p, tokens) for p, tokens in zip(prompts, written, strict=True)]
        ordered = sorted(windows, key=lambda w: len(w.context))

        def plain() -> None:
            with torch.no_grad():
                for start in range(0, len(ordered), bench.args.plain_batch):
                    part = ordered[start : start + bench.args.plain_batch]
                    rows = [w.context + w.continuation[:-1] for w in part]
                    width = max(map(len, rows))
                    padded = [row + (0,) * (width - len(row)) for row in rows]
                    lm.model(torch.tensor(padded, device=bench.device))

        lm._kept = replace(lm._kept, is_source=False)

        def candidate() -> None:
            for path in Path(cache).glob("*.text"):
                path.unlink()
            lm.follow(asked)

        def unwatched() -> None:
            for _ in lm._answerer.answers(windows):
                pass

        runs = (plain, unwatched, candidate)
        for run in runs:
            run()
        turns = [[timed(run)[0] for run in runs] for _ in range(TURNS)]
        _, answered = lm.follow(asked)
        lm.close()
    bare, losses, ours = (statistics.median(values) for values in zip(*turns, strict=True))
    differences = answered.first_differences()
    assert differences is not None
    return {
        "answers": len(written),
        "answer_tokens": sum(map(len, written)),
        "prompt_tokens": sum(map(len, prompts)),
        "source_writes_and_records_seconds": first,
        "plain_forward_passes_seconds": bare,
        "losses_alone_seconds": losses,
        "candidate_seconds": ours,
        "in_forward_passes": ours / bare,
        "source_against_itself_same_tokens": sum(differences) / sum(answered.lengths),
    }


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "batch_sizes": batch_sizes,
    "lm_eval": lm_eval,
    "ours": ours,
    "same": same,
    "exactness": exactness,
    "following": following,
    "vllm": vllm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--data", type=Path, help="as for `quantkit score --data`")
    parser.add_argument("--task", default="gsm8k")
    parser.add_argument("--limit", type=int, help="questions; default: all")
    parser.add_argument("--batch-sizes", nargs="*", default=["128", "256", "512"])
    parser.add_argument("--subset", type=int, default=512, help="questions for each batch size")
    parser.add_argument("--auto-subset", type=int, default=16, help="the same for `auto`; 0: none")
    parser.add_argument("--exact", type=int, default=64, help="questions in float32")
    parser.add_argument("--ties", type=int, default=100, help="differing answers to look into")
    parser.add_argument("--answers", type=int, default=200)
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--plain-batch", type=int, default=16)
    parser.add_argument("--vllm-path", type=Path, help="PYTHONPATH of vLLM")
    parser.add_argument("--vllm-python", type=Path, help="Python of vLLM's environment")
    parser.add_argument("--context", type=int, default=4096, help="of vLLM")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a server to start")
    parser.add_argument("--parts", nargs="*", choices=PARTS, help="default: all")
    parser.add_argument("--work", type=Path, help="default: OUT.work")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(json.loads(args.worker.read_text()))
        return
    if not (args.model and args.out):
        parser.error("--model and --out are needed")
    from quantkit import device as devices
    from quantkit.export.manifest import versions
    from quantkit.offline import without_hub
    from quantkit.scoring import lmeval

    without_hub()
    args.model = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    args.data = args.data.resolve() if args.data else None
    args.work = args.work or args.out.with_suffix(".work")
    bench = Bench(args)
    bench.result = json.loads(args.out.read_text()) if args.out.is_file() else {}
    bench.result.pop("recorded", None)
    bench.result |= {
        "what": "answers written and followed, against lm-eval, vLLM and plain forward passes",
        "model": Path(args.model).name,
        "task": bench.name,
        "device": devices.describe(bench.device),
        "machine": platform.machine(),
        "versions": versions(),
    }
    for name in args.parts or PARTS:
        if name in bench.result or (name == "vllm" and not (args.vllm_path or args.vllm_python)):
            continue
        with lmeval.quiet():
            bench.result[name] = PARTS[name](bench)
        print(name, json.dumps(bench.result[name]), flush=True)
        recording.write(args.out, bench.result)


if __name__ == "__main__":
    main()
