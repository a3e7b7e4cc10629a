"""Which GPUs run a format in its own arithmetic, in a few words."""

from quantkit.score.scorecard import Scorecard

# By how many bits weights and activations have; what engines of today have kernels for.
EVERYWHERE = "any GPU, in 16 bits"
WEIGHT_ONLY = "NVIDIA from Ampere (compute capability 8.0), computed in 16 bits"
FP8 = "NVIDIA from Ada (8.9); weights only on Ampere"
INT8 = "NVIDIA from Turing (7.5) to Hopper (9.0)"
LLAMA_CPP = "llama.cpp: any GPU or CPU"


def runs_on(card: Scorecard) -> str | None:
    """For one scored model; None where it is not known how it was made."""
    if card.recipe is None:
        return EVERYWHERE
    if card.format == "gguf":
        return LLAMA_CPP
    if card.made is None:
        return None
    if card.made.activation_bits is None:
        return WEIGHT_ONLY
    return FP8 if card.made.weight_type == "float" else INT8
