"""What vLLM for CPUs needs to start beside other programs.

By default it claims 92% of the machine's memory and dies if less is free. One setting gives its KV
cache a fixed size in whole GiB, and stops it from claiming more. It overrides
--kv-cache-memory-bytes, so it is left out if the user has set anything about memory.
"""

import os
from collections.abc import Mapping, Sequence

from quantkit.device import available_host_bytes

SPACE = "VLLM_CPU_KVCACHE_SPACE"
SHARE = 4
"""A quarter of the free memory: weights need the same memory."""
GIB = 1 << 30
FLAGS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes")


def environment(arguments: Sequence[str]) -> dict[str, str]:
    """Environment for an engine with these flags."""
    given = {word.partition("=")[0].replace("_", "-") for word in arguments}
    if SPACE in os.environ or given & set(FLAGS):
        return {}
    free = available_host_bytes() or 0  # the minimum if free memory is unknown
    return {SPACE: str(max(1, free // SHARE // GIB))}


def sentence(settings: Mapping[str, str]) -> str:
    """What was set, and why."""
    return (
        f"vLLM computes on the CPU: its KV cache gets {settings[SPACE]} GiB, a quarter of the free "
        f"memory; {SPACE} sets another size"
    )
