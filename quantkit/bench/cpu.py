"""What vLLM for CPUs needs to start beside other programs.

Left alone it wants 92% of the machine's memory and dies where less is free. One setting gives its
KV cache a size of its own, in whole GiB, and stops it from asking for more. It counts above
--kv-cache-memory-bytes, so it is left out wherever the user has said something of memory.
"""

import os
from collections.abc import Mapping, Sequence

from quantkit.device import available_host_bytes

SPACE = "VLLM_CPU_KVCACHE_SPACE"
SHARE = 4
"""A quarter of what is free: weights lie in the same memory."""
GIB = 1 << 30
FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")


def environment(arguments: Sequence[str]) -> dict[str, str]:
    """Settings of an engine with these flags."""
    given = {word.partition("=")[0].replace("_", "-") for word in arguments}
    if SPACE in os.environ or given & set(FLAGS):
        return {}
    free = available_host_bytes() or 0  # where nothing tells, the least
    return {SPACE: str(max(1, free // SHARE // GIB))}


def sentence(settings: Mapping[str, str]) -> str:
    """What was set, and why."""
    return (
        f"vLLM computes on the CPU: its KV cache gets {settings[SPACE]} GiB, a quarter of the free "
        f"memory; {SPACE} sets another size"
    )
