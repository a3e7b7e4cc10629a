"""Server settings: context, sequences, batch, and the memory that follows from them.

`recommend` compares formats by them and the serving plan turns them into flags, so both print the
same memory and capacity.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from quantkit.advise import memory
from quantkit.advise.memory import Extras, Fit
from quantkit.advise.profiles import MAX_SEQUENCES, Profile, is_large
from quantkit.advise.shape import ModelShape
from quantkit.advise.split import ONE, Split
from quantkit.hardware.gpus import GPU
from quantkit.recipe import AnyRecipe

if TYPE_CHECKING:
    from quantkit.advise.offload import Offload

UTILISATION = 0.9
"""Share of a GPU's memory that an engine may use, near vLLM's own default."""
APPLE_SHARE = 0.75
"""Share of an Apple device's memory that macOS lets its GPU use."""

NOTHING = Extras()


@dataclass(frozen=True)
class SizingRequest:
    """A model in a format on GPUs, and the traffic a server must handle."""

    shape: ModelShape
    recipe: AnyRecipe | None
    gpu: GPU
    count: int
    context: int
    users: int | None
    """None: as many as fit."""
    profile: Profile
    split: Split
    kv_bits: int
    is_gguf: bool = False
    """Whether llama.cpp serves it."""
    utilisation: float = UTILISATION
    extras: Extras = NOTHING
    """What else occupies each GPU."""


@dataclass(frozen=True)
class Size:
    """Server settings, and the resulting memory use on GPUs."""

    profile: Profile
    context: int
    sequences: int
    batch_tokens: int
    kv_bits: int
    fit: Fit | None
    """None if the model's memory is unknown."""
    split: Split = ONE
    why_split: str = ""
    """Why it is not tensor parallel over all GPUs; empty if it is."""
    offload: "Offload | None" = None
    """The part in the host's memory; None if everything is on GPUs."""
    is_reduced: bool = False
    """Whether its batches are smaller than the profile's, for lack of memory."""


def usable_share(gpu: GPU, utilisation: float) -> float:
    """Share of a device's memory that engines may use."""
    return min(utilisation, APPLE_SHARE if gpu.vendor == "apple" else 1.0)


def fitted(wanted: SizingRequest) -> tuple[Size, Fit]:
    """The profile's batches, or smaller ones if only those leave room."""
    size = size_of(wanted)
    # If the weights alone are too large, no batch is small enough.
    if size.fit is not None and not size.fit.fits and size.fit.weight_bytes < size.fit.usable_bytes:
        size = first_fitting([size, size_of(wanted, is_reduced=True)]) or size
    assert size.fit is not None
    return size, size.fit


def first_fitting(tried: Sequence[Size]) -> Size | None:
    """The first with room for all requested users, else the first with room for any."""
    for size in tried:
        if size.fit is None or size.fit.fits:
            return size
    return next((size for size in tried if size.fit and size.fit.users), None)


@cache
def _vllm(batch_tokens: int, n_sequences: int) -> memory.Engine:
    return replace(memory.VLLM, batch_tokens=batch_tokens, n_logits=n_sequences)


def size_of(wanted: SizingRequest, is_reduced: bool = False) -> Size:
    """The settings for a request; `is_reduced` uses the batches of smaller GPUs."""
    profile, context = wanted.profile, wanted.context
    large = is_large(wanted.gpu) and not is_reduced
    limit = MAX_SEQUENCES[large]
    if wanted.gpu.vendor == "cpu":  # where everything else needs memory and cores too
        limit = wanted.users or profile.slots
    most = min(wanted.users, limit) if wanted.users and profile.filled == 1 else limit
    batch = profile.batch_tokens[large]
    if is_reduced:
        batch = min(batch, memory.VLLM_SMALL.batch_tokens)
    fit = memory.fits(
        wanted.shape,
        wanted.recipe,
        wanted.gpu,
        wanted.count,
        context,
        wanted.users or 1,
        memory.Serving(
            usable_share(wanted.gpu, wanted.utilisation),
            wanted.kv_bits,
            memory.LLAMA_CPP if wanted.is_gguf else _vllm(batch, most),
            wanted.extras or memory.Extras(),
            wanted.split,
        ),
    )
    if wanted.is_gguf:
        sequences = min(fit.users, wanted.users or profile.slots)
    else:
        shared = min(wanted.extras.shared_tokens, context - 1)
        shared -= shared % memory.VLLM.page_tokens
        own = (fit.kv_tokens - shared) / ((context - shared) * profile.filled)
        sequences = min(max(1, int(own)), most)
    batch = max(sequences, min(batch, sequences * context))
    return Size(
        profile, context, max(1, sequences), batch, wanted.kv_bits, fit, wanted.split,
        is_reduced=is_reduced,
    )  # fmt: skip
