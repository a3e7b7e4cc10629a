"""How long the suite takes, where, and which twenty tests take longest.

    python benchmarks/suite.py [--junit FILE] [--out benchmarks/results/suite.json]

Runs what `make test` runs and reads the times that pytest keeps, setup counted to the test that it
was for; or reads a file of them that a run elsewhere left (pytest --junitxml).
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from recording import ROOT, write

SUITE = ("-q", "-n", "2", "--dist", "loadscope", "--no-loadscope-reorder")
SLOWEST = 20


def run(junit: Path) -> float:
    """Run the suite, and give its seconds by the clock."""
    command = [sys.executable, "-m", "pytest", *SUITE, f"--junitxml={junit}"]
    started = time.monotonic()
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    return time.monotonic() - started


def read(junit: Path) -> list[tuple[str, str, float]]:
    """File, test and seconds of every case."""
    found = []
    for case in ET.parse(junit).getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        found.append((file, case.get("name", ""), float(case.get("time", 0))))
    return found


def summary(cases: list[tuple[str, str, float]], seconds: float | None) -> dict[str, Any]:
    files: Counter[str] = Counter()
    for file, _, took in cases:
        files[file] += took
    slowest = sorted(cases, key=lambda case: case[2], reverse=True)[:SLOWEST]
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "seconds": seconds,
        "n_tests": len(cases),
        "seconds_of_tests": sum(took for _, _, took in cases),
        "slowest": [
            {"test": f"{file}::{name}", "seconds": round(took, 2)} for file, name, took in slowest
        ],
        "files": {file: round(took, 1) for file, took in files.most_common()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--junit", type=Path, help="read this instead of running the suite")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        junit = args.junit or Path(scratch) / "junit.xml"
        seconds = None if args.junit else run(junit)
        result = summary(read(junit), seconds)
    print(json.dumps({k: v for k, v in result.items() if k != "files"}, indent=1))
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
