"""gpt-oss's experts as vLLM loads them: one tensor per block, MXFP4 blocks beside scales.

vLLM initialises their parameters to zeros and copies what it finds into the first rows and columns,
so missing or undersized tensors go unnoticed.
"""

import math
from collections.abc import Iterator

from quantkit.dispatch.rules import Consequence, Finding, finding
from quantkit.dispatch.schemes import Judged

GROUP = 32


def findings(judged: Judged) -> Iterator[Finding]:
    """Expert tensors that are missing, or differ in shape from vLLM's parameters."""
    if judged.method != "mxfp4" or judged.checkpoint.config.get("model_type") != "gpt_oss":
        return
    text, tensors = judged.checkpoint.text, judged.checkpoint.tensors
    keys = ("hidden_size", "intermediate_size", "num_local_experts", "num_hidden_layers")
    if gone := [key for key in keys if not isinstance(text.get(key), int)]:
        yield finding("required-key", "config.json", f"{gone[0]} is missing")
        return
    width, inner, n_experts, n_blocks = (int(text[key]) for key in keys)
    sizes = {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}
    for index in range(n_blocks):
        for layer, (rows, columns) in sizes.items():
            groups = (n_experts, rows, columns // GROUP)
            parts = {"blocks": (*groups, GROUP // 2), "scales": groups, "bias": groups[:2]}
            for part, shape in parts.items():
                name = f"model.layers.{index}.mlp.experts.{layer}_{part}"
                stored = tensors.get(name)
                if stored is None:
                    yield finding("mxfp4-experts", name, "it is missing; vLLM computes with zeros")
                elif tuple(stored.shape) != shape:
                    words = f"{list(stored.shape)}, config.json gives {list(shape)}"
                    fixed = n_experts * (rows if layer == "gate_up_proj" else columns // 2)
                    yield finding(
                        "mxfp4-experts", name, words, _how(part, stored.shape, shape, fixed)
                    )


def _how(part: str, stored: tuple[int, ...], shape: tuple[int, ...], fixed: int) -> Consequence:
    """Too large, or not divisible into vLLM's dimensions: an error; too small: zeros remain."""
    if part == "blocks":
        n = math.prod(stored)
        return "refuses" if n % fixed or n > math.prod(shape) else "garbage"
    alike = len(stored) == len(shape) and stored[0] == shape[0]
    fits = alike and all(one <= other for one, other in zip(stored, shape, strict=True))
    return "garbage" if fits else "refuses"


def blocks(judged: Judged) -> dict[str, tuple[int, int]]:
    """Experts of each block stored this way, with rows and columns of gate and up together."""
    end = ".gate_up_proj_blocks"
    return {
        name.removesuffix(end): (spec.shape[1], spec.shape[2] * GROUP)
        for name, spec in judged.checkpoint.tensors.items()
        if name.endswith(f".experts{end}") and len(spec.shape) == 4
    }


def n_layers(judged: Judged) -> int:
    """Number of parameters that hold all experts of a block and are stored this way."""
    return sum(
        name.endswith("_blocks") and ".experts." in name for name in judged.checkpoint.tensors
    )
