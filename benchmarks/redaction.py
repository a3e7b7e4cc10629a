"""What redaction finds, what it takes by mistake, and how fast it reads.

    python benchmarks/redaction.py [--n 2000] [--seed 0] [--show] [--out FILE]

corpus    recall and precision by kind, on secrets and look-alikes of tests/redaction_corpus.py
          (recall_exact: nothing of the secret is left, and all around it stays);
          the patterns were improved on that corpus, so forms that it lacks may fare worse
sources   replacements a MB in the sources of Python's standard library, which hold no secrets but
          authors' addresses and sample IPs; --show prints them, the file does not repeat them
speed     megabytes per second of one core, all kinds together, on the library's help pages (prose)
          and on its sources (code); processor time, so that a busy machine does not matter
"""

import argparse
import platform
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import redaction_corpus
from recording import tell

from quantkit.calibration.reading import python_text
from quantkit.calibration.redaction.redact import _FINDERS, KINDS, redact


def corpus(seed: int, n_each: int) -> dict:
    tallies, _ = redaction_corpus.measure(seed, n_each)
    return {
        kind: {
            "n": tally.n,
            "recall": tally.recall,
            "recall_exact": tally.exact / tally.n,
            "n_look_alikes": tally.n_look_alikes,
            "n_replacements": tally.replaced,
            "precision": tally.precision,
        }
        for kind, tally in tallies.items()
    }


def sources() -> list[str]:
    library = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        path
        for path in library.rglob("*.py")
        if not {"site-packages", "test", "tests", "idle_test"} & set(path.parts)
    )
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]


def replaced(texts: list[str], show: bool) -> dict:
    size_mb = sum(map(len, texts)) / 1e6
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(redact(text).counts)
        for kind, find in _FINDERS.items():
            for start, end in find(text) if show else ():
                print(kind, repr(text[max(0, start - 30) : start]), text[start:end])
    return {
        "size_mb": size_mb,
        "by_kind": {kind: {"n": counts[kind], "per_mb": counts[kind] / size_mb} for kind in KINDS},
    }


def megabytes_a_second(texts: list[str], repeat: int = 3) -> float:
    best = float("inf")
    for _ in range(repeat):
        started = time.process_time()
        for text in texts:
            redact(text)
        best = min(best, time.process_time() - started)
    return sum(map(len, texts)) / best / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=2000, help="secrets and look-alikes of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print what is replaced in sources")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    code = sources()
    prose = [document.text for document in python_text.topics("train")]
    result = {
        "what": "redaction: recall, precision, speed",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "seed": args.seed,
        "corpus": corpus(args.seed, args.n),
        "sources": replaced(code, args.show),
        "speed_mb_per_s": {
            "prose": megabytes_a_second(prose),
            "code": megabytes_a_second(code, 1),
        },
    }
    tell(result, args.out)


if __name__ == "__main__":
    main()
