"""What `quantkit demo` prints and scores, for the pages that show it.

    python benchmarks/demo_output.py --out benchmarks/results/demo.json && make docs

It takes as long as the demo. README.md shows `notes` and `printed`, the demo model's page `scores`.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from recording import ROOT, tell

from quantkit.export.manifest import versions

TASKS = ("python_docs/perplexity", "python_quiz/acc")
# Of what goes to standard error, the plan; the rest is progress.
NOTES = re.compile(r"^[a-z0-9_-]+: \d.* (linear layers|tensors quantised|samples of|streams of)\b")


def run(folder: str) -> tuple[str, str, float]:
    """Standard output, standard error and seconds of the demo in an empty folder."""
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    environment["XDG_CACHE_HOME"] = f"{folder}/cache"  # a newcomer has no answers in it
    started = time.monotonic()
    answer = subprocess.run(
        [sys.executable, "-m", "quantkit", "demo"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode:
        raise SystemExit(f"quantkit demo: exit code {answer.returncode}\n{answer.stderr}")
    return answer.stdout, answer.stderr, time.monotonic() - started


def scores(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Value and count of the two scores of every model, the source first."""
    models = {"source": report["baseline"]}
    models |= {candidate["recipe"]: candidate for candidate in report["candidates"]}
    return {
        name: {
            **{task: model["scores"][task]["value"] for task in TASKS},
            **{f"{task}/n": model["scores"][task]["n"] for task in TASKS},
        }
        for name, model in models.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        printed, told, seconds = run(folder)
        report = json.loads(Path(folder, "quantkit-demo", "report.json").read_text())
    result = {
        "what": "`quantkit demo`: what it prints, and its scores",
        "command": "quantkit demo",
        "notes": [line for line in told.splitlines() if NOTES.match(line)],
        "printed": printed.splitlines(),
        "scores": scores(report),
        "seconds": seconds,
        "load_average": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": versions(),
    }
    tell(result, args.out)


if __name__ == "__main__":
    main()
