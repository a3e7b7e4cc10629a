"""What a busy machine costs: a command alone, and beside another program that computes.

    python benchmarks/busy.py [--command quantize|demo] [--waits passive,active] [--out FILE]

The other program multiplies matrices in torch on as many threads as it likes, as a second job on a
laptop or a CI runner does. Two runnable programs on the same cores cost each other a factor of two;
threads that spin while they wait cost far more. `active` asks for spinning, which is what torch
does when nobody tells it otherwise, and shows what settling it is worth. Run it on a machine that
has nothing else to do.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from recording import tell

COMMANDS = {
    "quantize": ("quantize demo -r fp8-dynamic -r rtn-w4a16 -r rtn-w8a16 -r gptq-w4a16 "
                 "--calibration python-docs -q"),
    "demo": "demo -q",
}  # fmt: skip
OTHER = """
import torch
matrix = torch.randn(1024, 1024)
print("at work", flush=True)
while True:
    matrix = torch.nn.functional.normalize(matrix @ matrix)
"""


@contextmanager
def busy() -> Iterator[None]:
    """Another program that computes, until the end of the block."""
    with subprocess.Popen([sys.executable, "-c", OTHER], stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            yield
        finally:
            other.kill()


def seconds(words: str, environment: dict[str, str]) -> tuple[float, float]:
    """By the clock and of the processor, for one run of a command."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "quantkit", *words.split(), "-o", f"{out}/out"]
        # Answers that an earlier run cached would spare this one its scoring.
        fresh = {"XDG_CACHE_HOME": f"{out}/cache"}
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started = time.monotonic()
        kept = os.environ | environment | fresh
        subprocess.run(command, check=True, capture_output=True, env=kept)
        clock = time.monotonic() - started
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return clock, used


def measure(words: str, policy: str) -> dict[str, Any]:
    """Alone and beside the other; waiting asleep is what the command chooses itself."""
    environment = {"OMP_WAIT_POLICY": "ACTIVE"} if policy == "active" else {}
    found: dict[str, Any] = {"waiting": policy}
    for name, beside in (("alone", nullcontext), ("beside", busy)):
        with beside():
            clock, used = seconds(words, environment)
        # Of the other program's time nothing is in these: it ends after the command.
        found[name] = {"seconds": clock, "cpu_seconds": used}
        print(json.dumps({policy: {name: found[name]}}), flush=True)
    found["ratio"] = found["beside"]["seconds"] / found["alone"]["seconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--command", choices=COMMANDS, default="demo")
    parser.add_argument("--waits", default="passive,active")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    runs = [measure(COMMANDS[args.command], policy) for policy in args.waits.split(",")]
    result = {
        "command": COMMANDS[args.command],
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_before": load_before,
        "runs": runs,
    }
    tell(result, args.out)


if __name__ == "__main__":
    main()
