"""The kinds of traffic a server can be set up for.

A profile sets two numbers: tokens per batch, and concurrent sequences. Prompts are processed in
chunks of the first: small chunks keep other users' next tokens from waiting, large ones make the
best of the GPU.
"""

from dataclasses import dataclass

from quantkit.advise.memory import LARGE_BYTES
from quantkit.errors import UnknownName
from quantkit.hardware.gpus import GPU


@dataclass(frozen=True)
class Profile:
    """A kind of traffic.

    Pairs are for GPUs below 70 GiB and from there on, as in vLLM, whose own defaults are (2048,
    8192) tokens for a server and (8192, 16384) for offline work.
    """

    name: str
    batch_tokens: tuple[int, int]
    why_tokens: str
    filled: float
    """Share of its context that a running request is assumed to occupy."""
    why_sequences: str
    slots: int
    """Default number of sequences in llama.cpp, which reserves memory for each."""


MAX_SEQUENCES = (256, 1024)
"""vLLM's own limits, by GPU size."""

PROFILES = {
    "chat": Profile(
        "chat",
        batch_tokens=(2048, 2048),
        why_tokens="small prefill chunks, so that running answers do not stall",
        filled=1.0,
        why_sequences="each can fill its context without another being preempted",
        slots=4,
    ),
    "mixed": Profile(
        "mixed",
        batch_tokens=(2048, 8192),
        why_tokens="vLLM's default for a server on such a GPU",
        filled=0.5,
        why_sequences="assumes contexts half full",
        slots=8,
    ),
    "batch": Profile(
        "batch",
        batch_tokens=(8192, 16384),
        why_tokens="large prefill chunks use the GPU best; time to first token does not matter",
        filled=0.25,
        why_sequences="assumes contexts a quarter full; more concurrency is more throughput",
        slots=16,
    ),
}


def find(name: str) -> Profile:
    """A profile by name."""
    if name not in PROFILES:
        raise UnknownName("profile", name, PROFILES)
    return PROFILES[name]


def is_large(gpu: GPU) -> bool:
    """Whether vLLM uses its larger defaults for this GPU."""
    return gpu.vendor != "cpu" and gpu.usable_bytes >= LARGE_BYTES
