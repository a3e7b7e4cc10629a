"""What comes of scales that no quantiser means, where that depends on the kernel.

Headers do not tell them: `quantkit verify` finds them in the numbers.
"""

from quantkit.dispatch import rules
from quantkit.dispatch.rules import Finding

MARLIN = "Marlin FP4"
MARLIN_LEAST, MARLIN_MOST = 512.0, 960.0
"""What Marlin takes a NaN for where it computes in BF16. Its form of scales has five bits for the
exponent and no sign, NaN has all of them set, and in BF16 that is a number like others; a sound
scale ends at 448."""
AMPERE = 80
NAN_WORDS = "kernels that multiply in FP4 answer NaN, Marlin in BF16 from 16 wrong weights for each"


def of_nan(layer: str, kernel: str | None, dtype: str, capability: int) -> Finding:
    """A group's E4M3 scale that is NaN, in a layer that gets a kernel on a GPU; `dtype` is that of
    the model's config, `capability` ten times NVIDIA's."""
    if kernel == MARLIN and computes_in(dtype, capability) == "bfloat16":
        words = (
            f"Marlin takes a scale that is NaN for one from {MARLIN_LEAST:g} to {MARLIN_MOST:g}: "
            "16 weights of a row are wrong"
        )
        return rules.found("nan-group-scale", layer, words, "accuracy")
    return rules.found("nan-group-scale", layer, "a scale is NaN, and so is what it multiplies")


def computes_in(dtype: str, capability: int) -> str:
    """The type that vLLM takes by default (config/model.py: _resolve_auto_dtype)."""
    return "float16" if dtype == "float16" or capability < AMPERE else "bfloat16"
