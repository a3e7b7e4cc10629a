"""What kind of traffic a server is set up for.

Two numbers follow from it: how many tokens are computed together at most, and how many sequences
run together. Prompts are read in pieces of the first: small pieces keep the next tokens of others
from waiting, large ones make the best of the GPU.
"""

from dataclasses import dataclass

from quantkit.advise.memory import LARGE_BYTES
from quantkit.errors import UnknownName
from quantkit.hardware.gpus import GPU


@dataclass(frozen=True)
class Profile:
    """A kind of traffic. Pairs are for GPUs below 70 GiB and from there on, as vLLM divides them;
    its own defaults are (2048, 8192) tokens for a server and (8192, 16384) for offline work."""

    name: str
    batch_tokens: tuple[int, int]
    why_tokens: str
    filled: float
    """The share of its context that a running request is taken to hold."""
    why_sequences: str
    slots: int
    """Sequences at a time in llama.cpp, which sets memory aside for each, where nobody says."""


MAX_SEQUENCES = (256, 1024)
"""vLLM's own limits, by the size of the GPU."""

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
    """Whether a GPU is of those for which vLLM takes its larger defaults."""
    return gpu.vendor != "cpu" and gpu.usable_bytes >= LARGE_BYTES
