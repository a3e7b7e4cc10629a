"""Where torchrun has put this process, told by the environment alone.

torchrun starts the same command several times and tells each process its place. Nothing is
imported for it here, so that commands which do not share their work can say so at once.
"""

import os
from dataclasses import dataclass

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """One process of a run."""

    rank: int
    size: int
    """Processes of the run ..."""
    local_rank: int
    local_size: int
    """... and those of them on this machine."""


def place() -> Place | None:
    """This process's place; None where no torchrun started it.

    All of its variables must be there: schedulers set some of them for programs of any kind.
    """
    values = [os.environ.get(name, "") for name in NAMES]
    if not all(value.isdecimal() for value in values):
        return None
    if not all(os.environ.get(name) for name in MEETING):
        return None
    found = Place(*(int(value) for value in values))
    return found if found.rank < found.size and found.local_rank < found.local_size else None


def is_first() -> bool:
    """Whether this process speaks and writes for the run: the first does, and one that is alone."""
    found = place()
    return found is None or found.rank == 0


def address() -> str:
    """Where the first rank can be reached."""
    return os.environ["MASTER_ADDR"]
