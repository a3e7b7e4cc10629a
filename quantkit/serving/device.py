"""What a server is planned for: a GPU by name, this machine's own, or its CPU."""

import os

from quantkit.errors import HardwareError
from quantkit.hardware import gpus
from quantkit.hardware.gpus import GPU


def find(name: str) -> GPU:
    """A device by name; `cpu` is this machine's, `auto` its GPU or else its CPU."""
    if name == "cpu":
        return own_cpu()
    if name == "auto" and not _has_gpu():
        return own_cpu()
    return gpus.find(name)


def own_cpu() -> GPU:
    """This machine's CPU with the memory that the machine has."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Nothing in a plan follows from its bandwidth.
    return GPU("this machine's CPU", "cpu", size / 1e9, 0.0, memory_bytes=size)


def _has_gpu() -> bool:
    try:
        gpus.detect()
    except HardwareError as error:
        # One that is there and not known is told of, and not left out.
        return "is not in the list" in str(error)
    return True
