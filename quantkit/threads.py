"""Thread count and wait policy, set before torch is loaded, which reads them once.

torch counts the machine's cores, whatever share of them a container may use, and its threads spin
while they wait for each other. On an idle machine that is fast; beside another program, or within a
quota, all of them burn the time that one of them needs. Sleeping waits cost next to nothing, and on
a half-loaded machine the work takes twice as long, not ten times.

The thread count never drops because others are busy: sums would be split differently, and a
checkpoint must not depend on what else was running.
"""

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

CGROUP = Path("/sys/fs/cgroup")
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
"""Variables of the GNU and Intel OpenMP libraries."""
COUNT = "OMP_NUM_THREADS"


def settle() -> None:
    """Set the libraries' variables unless the user has; child processes do not inherit them."""
    settings = dict(WAITING)
    if (n := quota()) is not None and n < cores():
        settings[COUNT] = str(n)
    for name, value in settings.items():
        if name not in os.environ:
            os.putenv(name, value)  # visible to C only: children get `os.environ`


def cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def quota(root: Path = CGROUP) -> int | None:
    """A container's CPU quota in whole cores, rounded up; None if there is none."""
    try:
        if (root / "cpu.max").is_file():
            amount, period = (root / "cpu.max").read_text().split()
        else:  # cgroup v1
            amount = (root / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        share = int(amount) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return max(1, math.ceil(share)) if share > 0 else None


def workers(n_workers: int) -> "ThreadPoolExecutor":
    """A pool whose threads are the parallelism: torch computes on one core in each."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    # In a forked process torch replaces its thread pool at the first call of this, and a second
    # thread that calls it meanwhile finds none.
    torch.set_num_threads(torch.get_num_threads())
    return ThreadPoolExecutor(n_workers, initializer=torch.set_num_threads, initargs=(1,))
