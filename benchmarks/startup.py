"""How long `quantkit --help` and an answer of `recommend` take, against starting Python with Typer.

python benchmarks/startup.py [--repeat 15] [--out FILE]

Seconds are medians; those that end in `_cpu` are the processor's, which others on the machine
change less than those by the clock.
"""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from recording import write

RECOMMEND = (
    "recommend",
    "8B",
    "--gpu",
    "L40S",
    "--count",
    "2",
    "--context",
    "16384",
    "--users",
    "40",
)

ALL = ("recommend", "8B", "--gpu", "all")


def median_seconds(command: list[str], repeat: int) -> float:
    """The median of several runs, after one to warm up."""
    times = []
    for _ in range(repeat + 1):
        started = time.monotonic()
        subprocess.run(command, capture_output=True, check=True)
        times.append(time.monotonic() - started)
    return statistics.median(times[1:])


def median_cpu_seconds(command: list[str], repeat: int) -> float:
    """The same in seconds of the processor, the system's own counted."""
    times = []
    for _ in range(repeat + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    run = [sys.executable, "-m", "quantkit"]
    result = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "python_alone": median_seconds([sys.executable, "-c", "pass"], args.repeat),
        "import_typer": median_seconds([sys.executable, "-c", "import typer"], args.repeat),
        "quantkit_help": median_seconds([*run, "--help"], args.repeat),
        "quantkit_quantize_help": median_seconds([*run, "quantize", "--help"], args.repeat),
        "quantkit_gpus": median_seconds([*run, "gpus"], args.repeat),
        "quantkit_recommend": median_seconds([*run, *RECOMMEND], args.repeat),
        "quantkit_recommend_cpu": median_cpu_seconds([*run, *RECOMMEND], args.repeat),
        "quantkit_recommend_all_cpu": median_cpu_seconds([*run, *ALL], args.repeat),
    }
    result["help_over_typer"] = result["quantkit_help"] / result["import_typer"]
    print(json.dumps(result, indent=2))
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
