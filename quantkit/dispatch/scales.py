"""Effect of invalid scales, where it depends on the kernel.

Headers do not show them: `quantkit verify` finds them in the numbers.
"""

from quantkit.dispatch import rules
from quantkit.dispatch.rules import Finding

MARLIN = "Marlin FP4"
MARLIN_LEAST, MARLIN_MOST = 512.0, 960.0
"""What Marlin reads a NaN as when it computes in BF16. Its scale format has five exponent bits and
no sign, NaN has all of them set, and in BF16 that is an ordinary number; valid scales end at 448.
"""
AMPERE = 80
NAN_WORDS = "kernels that multiply in FP4 answer NaN, Marlin in BF16 from 16 wrong weights for each"


def of_nan(layer: str, kernel: str | None, dtype: str, capability: int) -> Finding:
    """A NaN in a group's E4M3 scales, in a layer with this kernel on a GPU.

    `dtype` is that of the model's config, `capability` ten times NVIDIA's.
    """
    if kernel == MARLIN and computes_in(dtype, capability) == "bfloat16":
        words = (
            f"Marlin takes a scale that is NaN for one from {MARLIN_LEAST:g} to {MARLIN_MOST:g}: "
            "16 weights of a row are wrong"
        )
        return rules.finding("nan-group-scale", layer, words, "accuracy")
    return rules.finding("nan-group-scale", layer, "a scale is NaN, and so is what it multiplies")


def computes_in(dtype: str, capability: int) -> str:
    """vLLM's default dtype (config/model.py: _resolve_auto_dtype)."""
    return "float16" if dtype == "float16" or capability < AMPERE else "bfloat16"
