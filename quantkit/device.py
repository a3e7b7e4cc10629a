"""Choice of device, and what the machine has."""

import re
from typing import TYPE_CHECKING

from quantkit.errors import HardwareError, UnknownName

if TYPE_CHECKING:
    import torch

NO_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "defaultcpuallocator: not enough memory",
    "bad_alloc",
    "failed to map segment",
    "can't start new thread",
)
"""Wordings of out-of-memory errors in various libraries, in lower case."""
FEW_BYTES = 32 << 20
"""Below this much free memory any failure is taken for lack of memory, whatever its message: Python
itself loses errors there, and imports fail halfway.
"""


def choose(name: str = "auto") -> "torch.device":
    """`auto` is the first GPU, or the CPU if there is none; a named device must exist."""
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
    """Display name of the device."""
    import platform

    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    n = torch.get_num_threads()
    return f"cpu ({platform.machine()}, {n} thread{'s' * (n != 1)})"


def peak_host_bytes() -> int:
    """Peak resident memory of this process so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak_device_bytes(device: "torch.device") -> int | None:
    """Peak memory of tensors on a GPU; None on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def available_host_bytes() -> int | None:
    """Memory this process can still allocate without swapping; None if Linux does not report it."""
    import resource
    from pathlib import Path

    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        found.append(max(0, limit - mapped))
    return min(found) if found else None


def free_bytes(device: "torch.device") -> int | None:
    """Memory that tensors on a device can still take; None if the system does not report it."""
    import torch

    if device.type != "cuda":
        return available_host_bytes()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0] + held)


def out_of_memory(error: BaseException) -> str | None:
    """One sentence if an error, or its cause, is a lack of memory; otherwise None."""
    found: BaseException | None = error
    while found is not None:
        text = next(iter(str(found).splitlines()), "")
        if type(found).__name__ == "OutOfMemoryError":
            return f"out of GPU memory: {text}; use --device cpu or smaller batches"
        if isinstance(found, MemoryError) or any(words in text.lower() for words in NO_MEMORY):
            return _lacking(text)
        found = found.__cause__ or found.__context__
    free = available_host_bytes()
    return _lacking("") if free is not None and free < FEW_BYTES else None


def _lacking(text: str) -> str:
    from quantkit.storage import gib

    asked = re.search(r"tried to allocate (\d+) bytes", text)
    stated = re.search(r"Unable to allocate ([\d.]+ \w+)", text)
    size = gib(int(asked[1])) if asked else stated[1] if stated else ""
    free = available_host_bytes()
    parts = [f"{size} more were needed" if size else "", f"{gib(free)} are free" if free else ""]
    known = " and ".join(part for part in parts if part)
    return (
        f"out of memory{f': {known}' if known else ''}; close other programs, use smaller batches "
        "or fewer samples, or take a machine with more memory"
    )
