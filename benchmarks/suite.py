"""How long the suite takes, where, and which twenty tests take longest.

    python benchmarks/suite.py [--junit FILE] [--out benchmarks/results/suite.json]

Runs the tests that `make test` runs and reads the times that pytest keeps, setup counted to the
test that it was for; or reads a file of them that a run elsewhere left (pytest --junitxml). What a
result file held stays in the new one as what was before.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from recording import ROOT, write

SUITE = ("-q", "-n", "3", "--dist", "loadscope", "--no-loadscope-reorder")
SLOWEST = 20


def run(junit: Path) -> None:
    """Run the suite."""
    command = [sys.executable, "-m", "pytest", *SUITE, f"--junitxml={junit}"]
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as make does
    subprocess.run(command, cwd=ROOT, env=kept | {"OMP_NUM_THREADS": "1"}, check=True)


def read(junit: Path) -> tuple[list[tuple[str, str, float]], float]:
    """File, test and seconds of every case; the seconds of all by the clock."""
    root = ET.parse(junit).getroot()
    found = []
    for case in root.iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        found.append((file, case.get("name", ""), float(case.get("time", 0))))
    return found, sum(float(suite.get("time", 0)) for suite in root.iter("testsuite"))


def summary(cases: list[tuple[str, str, float]], seconds: float) -> dict[str, Any]:
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
        if not args.junit:
            run(junit)
        result = summary(*read(junit))
    print(json.dumps({k: v for k, v in result.items() if k != "files"}, indent=1))
    if args.out:
        if args.out.exists():
            there = json.loads(args.out.read_text())
            result["before"] = there.get("before", there)
        write(args.out, result)


if __name__ == "__main__":
    main()
