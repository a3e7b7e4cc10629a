"""Choosing where to compute, and what a machine has."""

from typing import TYPE_CHECKING

from quantkit.errors import HardwareError, UnknownName

if TYPE_CHECKING:
    import torch


def choose(name: str = "auto") -> "torch.device":
    """`auto` is the first GPU, else the CPU; a named device must exist."""
    import torch

    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not (number.isascii() and number.isdigit())):
        raise UnknownName("device", name, ["auto", "cpu", "cuda", "cuda:0"])
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if int(number or 0) >= count:
        has = f"there are {count} CUDA devices" if count else "no CUDA device can be used"
        raise HardwareError(f"device {name}: {has} on this machine; use --device cpu")
    return torch.device("cuda", int(number or 0))


def describe(device: "torch.device") -> str:
    """The device's own name."""
    import platform

    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"


def peak_host_bytes() -> int:
    """The most memory that this process has held so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_device_bytes(device: "torch.device") -> int | None:
    """The most memory that tensors have taken on a GPU; None on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def available_host_bytes() -> int | None:
    """Memory that programs can still take without swapping; None where Linux does not tell."""
    from pathlib import Path

    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None
