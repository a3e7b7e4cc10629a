"""How many threads compute, and how they wait: settled before torch is loaded, which reads it once.

torch counts the machine's cores, whatever share of them a container may use, and its threads spin
while they wait for each other. Alone that is quick; beside another program, or within a quota, all
of them burn the time that one of them needs. Waiting asleep costs next to nothing, and a machine
that is half taken makes the work twice as long, not ten times.

Threads are never fewer because others are busy: sums would be made in other parts, and a checkpoint
must not depend on who else was at work.
"""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Of GNU's and Intel's libraries."""
COUNT = "OMP_NUM_THREADS"


def settle() -> None:
    """Tell the libraries, unless the user has; programs that we start are not told."""
    told = dict(WAITING)
    if (n := quota()) is not None and n < cores():
        told[COUNT] = str(n)
    for name, value in told.items():
        if name not in os.environ:
            os.putenv(name, value)  # seen by C alone: `os.environ` is what children get


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota(root: Path = CGROUP) -> int | None:
    """Whole cores that a container's quota is worth, rounded up; None where there is none."""
    try:
        if (root / "cpu.max").is_file():
            amount, period = (root / "cpu.max").read_text().split()
        else:  # the first version
            amount = (root / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        share = int(amount) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return max(1, math.ceil(share)) if share > 0 else None
