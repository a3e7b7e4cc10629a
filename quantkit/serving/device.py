"""The device that a server is planned for: a GPU by name, this machine's own, or its CPU."""

import os

from quantkit.errors import HardwareError
from quantkit.hardware import gpus
from quantkit.hardware.gpus import GPU

ASSUMED = "CPU 2 x DDR5-5600"
"""The device whose bandwidth is assumed for a CPU by default."""


def find(name: str) -> GPU:
    """A device by name; `cpu` is this machine's, `auto` its GPU or otherwise its CPU."""
    if name == "cpu":
        return own_cpu()
    if name == "auto" and not _has_gpu():
        return own_cpu()
    return gpus.find(name)


def own_cpu() -> GPU:
    """This machine's CPU with the memory that the machine has."""
    return cpu()


def cpu(
    memory_bytes: int | None = None,
    bandwidth_gb_s: float | None = None,
    tflops: float | None = None,
) -> GPU:
    """A CPU with that memory, or as much as this machine has; its bandwidth is assumed if not
    given, and a note with the answer says so.
    """
    size = memory_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    usual = gpus.find(ASSUMED)
    note = f"the bandwidth of {usual.name.removeprefix('CPU ')} is assumed (--bandwidth)"
    derived = {} if bandwidth_gb_s else {"bandwidth_gb_s": note}
    return GPU(
        "this machine's CPU" if memory_bytes is None else "a CPU", "cpu", size / 1e9,
        bandwidth_gb_s or usual.bandwidth_gb_s, memory_bytes=size, fp16_tflops=tflops,
        derived=derived,
    )  # fmt: skip


def _has_gpu() -> bool:
    try:
        gpus.detect()
    except HardwareError as error:
        # A GPU that exists but is unknown is reported, not ignored.
        return "is not in the list" in str(error)
    return True
