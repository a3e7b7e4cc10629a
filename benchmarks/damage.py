"""Every recipe on one model, over tasks that show damage: which metric moves first.

    python benchmarks/damage.py --model DIR --out reports/NAME-damage --work DIR
        [--calibration FILE] [--data HUB_FOLDER] [--tasks ...] [--recipes ...] [--limit N]

Makes a checkpoint of every recipe, scores all of them beside the source, and writes a report with a
table of all: `damage.md` beside `report.md`, which has the best only. What is there is not done
again, so a run that was stopped goes on. A recipe that cannot be made is named in the table.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit import metrics
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.foreign import is_source
from quantkit.model.source import ModelSource
from quantkit.offline import without_hub
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import load
from quantkit.report import damage
from quantkit.report.comparison import Report
from quantkit.report.document import Document, Entry
from quantkit.resources import names as names_of
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.harness import evaluate
from quantkit.scoring.options import ScoreOptions
from quantkit.scoring.scorecard import SOURCE_NAME

TASKS = ("wikitext", "python_quiz", "needle_1k", "python_answers")
NO_MORE_THAN_THE_SOURCE = ("gguf-f32", "gguf-bf16", "gguf-f16")


def made(
    source: ModelSource, names: Sequence[str], args: argparse.Namespace, refused: dict[str, str]
) -> None:
    """Checkpoints of all recipes in as few passes as can be; those that cannot be made are told."""
    open_names = [name for name in names if not (args.work / name).is_dir()]
    if not open_names:
        return
    choice = None
    if args.calibration is not None:
        choice = CalibrationChoice(str(args.calibration), args.samples, args.length)
    try:
        quantize(source, [load(name) for name in open_names], args.work, calibration=choice)
    except QuantkitError as error:
        if len(open_names) == 1:
            refused[open_names[0]] = str(error).splitlines()[0]
            return
        half = len(open_names) // 2
        made(source, open_names[:half], args, refused)
        made(source, open_names[half:], args, refused)


def kept(args: argparse.Namespace, name: str) -> Evaluation | None:
    """Scores that an earlier run wrote; their checkpoint is not needed again."""
    path = args.out / "scores" / f"{name}.json"
    return Evaluation.read(path) if path.is_file() else None


def scored(target: ModelSource | Checkpoint, args: argparse.Namespace) -> Evaluation:
    """A model's scores, from their file where it is there."""
    asked = ScoreOptions(tuple(args.tasks), args.limit, data=args.data, cache=args.work / "cache")
    name = SOURCE_NAME if is_source(target) else target.label
    if (known := kept(args, name)) is not None:
        return known
    started = time.monotonic()
    found = evaluate(target, asked)
    found.write(args.out / "scores")
    print(f"{target.label}: {time.monotonic() - started:.1f} s", flush=True)
    return found


def table(document: Document, refused: dict[str, str], missing: Sequence[str]) -> str:
    """Every candidate and every metric, with intervals, smallest first."""
    scores = columns(document)
    heads = ["recipe", "bits", *scores, "moves first"]
    lines = [
        f"# {document.baseline.name}: recipes, and what each breaks",
        "",
        "Changes against the source with 95% intervals: of perplexity in percent, of right answers "
        "in points. Distances from the source with twice their standard error. What moves first is "
        "the score that loses most for certain, as a share of what the source has.",
        "",
        f"| {' | '.join(heads)} |",
        f"|{'---|' * len(heads)}",
    ]
    source = [value_of(document.baseline, name) for name in scores]
    bits = f"{document.baseline.bits_per_weight:.2f}"
    lines.append(f"| {' | '.join([document.baseline.name, bits, *source, ''])} |")
    for entry in sorted(document.candidates, key=lambda e: (e.size_bytes, e.name)):
        lost = damage.losses(document, entry)
        first = lost[0].score if lost else "nothing is shown"
        cells = [told(document, entry, name) for name in scores]
        row = [entry.name, f"{entry.bits_per_weight:.2f}", *cells, first]
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", *(f"- {name} cannot be made: {why}" for name, why in sorted(refused.items()))]
    if missing:
        lines += ["", f"Not scored: {', '.join(missing)}."]
    return "\n".join(lines).rstrip() + "\n"


def columns(document: Document) -> list[str]:
    """Paired scores, then distances; those that only repeat others are left out."""
    found: dict[str, None] = {}
    for entry in document.candidates:
        for name in entry.scores:
            metric = metrics.of(name)
            if (metric.paired and not metric.rereads) or name.rpartition("/")[2] in (
                metrics.KL_MEAN,
                metrics.TOP1_AGREEMENT,
                metrics.SAME_ANSWERS,
                metrics.FIRST_DIFFERENCE,
            ):
                found[name] = None
    return list(found)


def value_of(entry: Entry, name: str) -> str:
    score = entry.scores.get(name)
    if score is None:
        return ""
    return f"{score.value:.1%}" if metrics.of(name).is_share else f"{score.value:.3f}"


def told(document: Document, entry: Entry, name: str) -> str:
    """One cell."""
    compared, score = entry.comparison(name), entry.scores.get(name)
    if compared is not None and compared.low is not None and compared.high is not None:
        if compared.ratio is not None:
            ends = f"{100 * (compared.low - 1):+.1f} to {100 * (compared.high - 1):+.1f}"
            return f"{compared.ratio - 1:+.1%} ({ends})"
        ends = f"{100 * compared.low:+.1f} to {100 * compared.high:+.1f}"
        return f"{100 * (compared.difference or 0.0):+.1f} ({ends})"
    if score is None:
        return ""
    times = 100 if metrics.of(name).is_share else 1
    digits = 4 if metrics.of(name).name == metrics.KL_MEAN else 1
    error = "" if score.stderr is None else f" +- {damage.SIGMAS * times * score.stderr:.{digits}f}"
    return f"{times * score.value:.{digits}f}{error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="for checkpoints and answers")
    parser.add_argument(
        "--calibration",
        type=Path,
        help="a file, or a set such as python-docs; without it recipes that learn are left out",
    )
    parser.add_argument("--samples", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--recipes", nargs="+", help="default: all that ship")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    without_hub()
    args.data = args.data.resolve() if args.data else None
    shipped = [name for name in names_of("recipes") if name not in NO_MORE_THAN_THE_SOURCE]
    names = args.recipes or shipped
    source = ModelSource.open(args.model)
    args.work.mkdir(parents=True, exist_ok=True)
    refused: dict[str, str] = {}
    made(source, [name for name in names if kept(args, name) is None], args, refused)
    evaluations = [scored(source, args)]
    for name in names:
        if (found := kept(args, name)) is not None:
            evaluations.append(found)
        elif (args.work / name).is_dir():
            evaluations.append(scored(Checkpoint.open(args.work / name), args))
    report = Report.of(evaluations)
    report.save(args.out)
    done = {entry.name for entry in report.document.candidates} | refused.keys()
    missing = [name for name in shipped if name not in done]
    text = table(report.document, refused, missing)
    (args.out / "damage.md").write_text(text, encoding="utf-8")
    print(json.dumps(summary(report.document)), flush=True)


def summary(document: Document) -> dict[str, Any]:
    """How often each score is the first to move."""
    first: dict[str, int] = {}
    for entry in document.candidates:
        lost = damage.losses(document, entry)
        name = lost[0].score if lost else "nothing"
        first[name] = first.get(name, 0) + 1
    return dict(sorted(first.items(), key=lambda item: -item[1]))


if __name__ == "__main__":
    main()
