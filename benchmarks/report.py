"""A report of many candidates with every answer to all of MMLU: seconds from files to files.

    python benchmarks/report.py [--candidates 200] [--out FILE]

Score files and answers are made up (each candidate changes some of the source's answers and loses a
little perplexity); reading, pairing, statistics and the three report files are real.
"""

import argparse
import platform
import random
import tempfile
import time
from pathlib import Path

from recording import tell

from quantkit.report import files
from quantkit.report.comparison import Report
from quantkit.scoring.answers import LOSS, Outcome
from quantkit.scoring.evaluation import Evaluation, read_all
from quantkit.scoring.scorecard import LayerError, Provenance, Score, Scorecard, Settings

N_QUESTIONS = 14_042
N_SUBJECTS = 57
N_DOCUMENTS = 62
BLOCKS = 32
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def evaluation(number: int, rng: random.Random, right: list[int]) -> Evaluation:
    """The source (0), or a candidate that answers some questions otherwise."""
    source = number == 0
    rate = 0.0 if source else rng.uniform(0.01, 0.15)
    given = [1 - r if rng.random() < rate else r for r in right]
    subjects = [f"mmlu_subject_{i % N_SUBJECTS}" for i in range(N_QUESTIONS)]
    outcomes = [
        Outcome(task, i, f"{i:064x}", "acc", float(answer), 1.0, 0.25)
        for i, (task, answer) in enumerate(zip(subjects, given, strict=True))
    ]
    loss = 2.8 * (1 + rate / 10)
    outcomes += [
        Outcome("wikitext", i, f"{i:064x}", LOSS, 4000 * loss * rng.uniform(0.99, 1.01), 4000.0)
        for i in range(N_DOCUMENTS)
    ]
    members = [f"mmlu_subject_{i}" for i in range(N_SUBJECTS)]
    quarter = N_SUBJECTS // 4 + 1
    groups = {f"mmlu_{k}": members[k * quarter : (k + 1) * quarter] for k in range(4)}
    scores = {
        "wikitext/perplexity": Score(value=2.718**loss, stderr=0.1, n=248_000),
        "wikitext/kl_mean": Score(value=rate / 10, stderr=0.001, n=248_000),
        "mmlu/acc": Score(
            value=sum(given) / len(given), stderr=0.004, n=len(given), higher_is_better=True
        ),
    }
    layers = {
        f"model.layers.{b}.{kind}": LayerError(weight=rng.random(), output=rng.random())
        for b in range(BLOCKS)
        for kind in KINDS
    }
    card = Scorecard(
        name="model" if source else f"candidate-{number}",
        recipe=None if source else f"candidate-{number}",
        format="safetensors" if source else "compressed-tensors",
        size_bytes=16_000_000_000 if source else rng.randrange(4_000_000_000, 9_000_000_000),
        bits_per_weight=16 if source else 4.5,
        digest="source" if source else f"digest {number}",
        source_fingerprint="source",
        scores=scores,
        settings=Settings(
            tasks={"wikitext": "2.0", "mmlu": "2"},
            limit=None,
            num_fewshot=5,
            max_length=4096,
            seed=0,
        ),
        made=None
        if source
        else Provenance(
            method="gptq",
            recipe_digest="r",
            engine="native",
            disk_bytes=5_000_000_000,
            seconds=70,
            peak_host_bytes=1 << 30,
            peak_device_bytes=8 << 30,
            device="made up",
            layers=layers,
        ),
        groups=groups | {"mmlu": members},
        versions={"lm_eval": "0.4.13"},
        device="made up",
        seconds=1,
        created="2026-01-01T00:00:00+00:00",
    )
    return Evaluation(card, outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--candidates", type=int, default=200)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rng = random.Random(0)
    right = [int(rng.random() < 0.65) for _ in range(N_QUESTIONS)]
    with tempfile.TemporaryDirectory() as folder:
        scores = Path(folder, "scores")
        for number in range(args.candidates + 1):
            evaluation(number, rng, right).write(scores)
        seconds = {}
        started = time.monotonic()
        evaluations = read_all([scores])
        seconds["read"] = time.monotonic() - started
        report = Report.of(evaluations)
        seconds["compare"] = time.monotonic() - started - seconds["read"]
        files.write(report, Path(folder, "report"))
        seconds["all"] = time.monotonic() - started
        sizes = {path.name: path.stat().st_size for path in Path(folder, "report").iterdir()}
    result = {
        "candidates": args.candidates,
        "questions": N_QUESTIONS,
        "seconds": seconds,
        "bytes": sizes,
        "machine": platform.machine(),
    }
    tell(result, args.out)


if __name__ == "__main__":
    main()
