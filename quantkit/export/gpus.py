"""Which GPUs run a format in its own arithmetic, in a few words."""

# By how many bits weights and activations have; what engines of today have kernels for.
EVERYWHERE = "any GPU, in 16 bits"
WEIGHT_ONLY = "NVIDIA from Ampere (compute capability 8.0), computed in 16 bits"
FP8 = "NVIDIA from Ada (8.9); weights only on Ampere"
INT8 = "NVIDIA from Turing (7.5) to Hopper (9.0)"
LLAMA_CPP = "llama.cpp: any GPU or CPU"


def native(format: str, weight_type: str | None, activation_bits: int | None) -> str:
    """For a quantised checkpoint."""
    if format == "gguf":
        return LLAMA_CPP
    if activation_bits is None:
        return WEIGHT_ONLY
    return FP8 if weight_type == "float" else INT8
