"""The forms that a checkpoint's files can have for vLLM, and which numbers each can hold.

compressed-tensors holds everything that a recipe can say. The others are the older forms that many
tools read: AutoGPTQ's, AutoAWQ's, and the FP8 that vLLM calls its own.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quantkit.schemes import ActivationScheme, KVCacheScheme, WeightScheme

COMPRESSED_TENSORS = "compressed-tensors"
GPTQ = "gptq"
AWQ = "awq"
FP8 = "fp8"
FORMATS = (COMPRESSED_TENSORS, GPTQ, AWQ, FP8)


def objection(
    format: str,
    weights: "WeightScheme",
    activations: "ActivationScheme | None",
    kv_cache: "KVCacheScheme | None",
) -> str | None:
    """Why these numbers cannot be written in a format, and what can hold them; None if they can."""
    if format == COMPRESSED_TENSORS:
        return None
    if format == FP8:
        return _objection_of_fp8(weights, activations)
    if weights.type == "float":
        return f"{format} holds integers; FP8 weights go into fp8 or compressed-tensors"
    if activations is not None:
        return f"{format} leaves activations in 16 bits; 8-bit ones need compressed-tensors"
    if kv_cache is not None:
        return (
            f"vLLM reads no scales of a KV cache beside {format} weights; "
            "fp8 and compressed-tensors have them"
        )
    if format == GPTQ and not weights.symmetric:
        return "vLLM reads gptq only without zero points; use awq or compressed-tensors"
    if format == AWQ and weights.num_bits != 4:
        return f"awq has 4 bits a weight; {weights.num_bits} go into gptq or compressed-tensors"
    if format == AWQ and weights.strategy != "group":
        return "awq has a scale for each group; one scale a row goes into gptq"
    return None


def _objection_of_fp8(
    weights: "WeightScheme", activations: "ActivationScheme | None"
) -> str | None:
    if weights.type != "float":
        return "fp8 holds FP8 weights; integers go into gptq, awq or compressed-tensors"
    if weights.strategy == "channel":
        return (
            "FP8 with one scale a row exists only in compressed-tensors; for fp8 use the recipe "
            "fp8-tensor, fp8-static or fp8-block"
        )
    if activations is None:
        return "fp8 always rounds activations too; weights alone need compressed-tensors"
    return None
