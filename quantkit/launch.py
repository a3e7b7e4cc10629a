"""This process's rank under torchrun, read from the environment alone.

torchrun starts the same command several times and gives each process its rank. This module imports
nothing heavy, so commands that cannot be distributed can refuse at once.
"""

import os
from dataclasses import dataclass

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """Rank of one process in a run."""

    rank: int
    size: int
    """Processes in the run."""
    local_rank: int
    local_size: int
    """Processes on this machine."""


def place() -> Place | None:
    """This process's rank; None if torchrun did not start it.

    All of torchrun's variables must be set: schedulers set some of them for any program.
    """
    values = [os.environ.get(name, "") for name in NAMES]
    if not all(value.isdecimal() for value in values):
        return None
    if not all(os.environ.get(name) for name in MEETING):
        return None
    found = Place(*(int(value) for value in values))
    return found if found.rank < found.size and found.local_rank < found.local_size else None


def is_first() -> bool:
    """Whether this process prints and writes for the run: rank 0, or the only process."""
    found = place()
    return found is None or found.rank == 0


def address() -> str:
    """Address at which rank 0 can be reached."""
    return os.environ["MASTER_ADDR"]
