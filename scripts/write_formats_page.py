"""Write docs/formats.md: what every recipe stores, in how many bits, and where it runs."""

from pathlib import Path

from quantkit import formats, resources
from quantkit.hardware import support
from quantkit.recipe import GGUFRecipe, Recipe, load
from quantkit.recipe.files import ADDITIONS
from quantkit.tensorspec import TensorSpec

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "formats.md"
ROWS = COLUMNS = 4096
MODULE = "layer"
INTRODUCTION = """# Formats

Made by `make docs` from the recipes and the table of what runs where.

A recipe says how numbers are chosen; the format says how they lie in files. Most recipes write
compressed-tensors, which vLLM reads. `--format gptq`, `awq` and `fp8` write the same numbers in the
older forms that other engines read, `convert --to` changes one form into another without touching a
number, and refuses where a form cannot hold them. NVFP4 also goes into NVIDIA's form (`--to
modelopt`) and into a file for llama.cpp (`--to gguf`, rows a multiple of 64), so that one set of
weights serves vLLM, TensorRT-LLM and llama.cpp.

## Which to take

- **Blackwell**: `nvfp4`; `nvfp4-fp8` where attention suffers, as in large mixtures of experts. FP8
  (`fp8-dynamic`) where quality comes first.
- **Hopper and Ada**: `fp8-dynamic`; `w4afp8` on Hopper and `awq-gptq-w4a16` on both where memory is
  short. An `nvfp4-a16` checkpoint runs there too, weight-only.
- **Ampere and Turing**: `awq-gptq-w4a16`, `int8-w8a8` for large batches.
- **MI350 and later**: `mxfp4`, `mxfp8`; **MI300**: `fp8-dynamic`.
- **CPU, Apple, mixed memory**: `gguf-q4_k_m`.

`quantkit recommend MODEL --gpu NAME` answers this for one model, with room and speed.

## How FP4 is rounded

FP4 has eight magnitudes, so what decides is the scale of each small group. NVFP4 has one E4M3 scale
for 16 weights and one global scale for what an engine fuses; MXFP4 has a power of two for 32.
quantkit tries the neighbouring scales of every group against the inputs that the group sees (its
block of the Gram matrix) instead of taking the largest magnitude, then runs GPTQ on that grid.
Whether GPTQ or plain rounding with these scales is better differs from layer to layer, so held-out
calibration tokens decide, and `quantkit.json` keeps both errors (`held_out`). With `rtn-` recipes
the bytes equal those of compressed-tensors. Scoring rounds activations as the kernels do: per 16
with local scales for NVFP4, per 32 for MX.

For `w4afp8` vLLM's kernel keeps group scales in E4M3 times one scale per row; scales are chosen so
that they survive this, and scoring applies it.
"""
NUMBERS = """## What is stored

Bits are those of a layer of 4,096 x 4,096 weights, scales included. "Emulated" saves memory and no
time: the weights are widened before they are used.
"""
HEADING = """| recipe | weights | activations | bits | tensors of a layer | runs on |
|---|---|---|---|---|---|"""
REFUSED = """## What cannot be

- A row that groups do not divide (16 for NVFP4, 32 for MX, 128 for `w4afp8`), layers that vLLM
  fuses with unlike kinds of numbers, and a NaN or zero scale are refused by name.
- `nf4`, bitsandbytes, `int4`, `exl3`, `hqq`: `quantkit quantize -r nf4` says what to take instead.
"""


def page() -> str:
    """The whole page."""
    recipes = [load(name) for name in resources.names("recipes")]
    plain = [recipe for recipe in recipes if isinstance(recipe, Recipe)]
    rows = [_row(recipe) for recipe in plain]
    files = [recipe for recipe in recipes if isinstance(recipe, GGUFRecipe)]
    usual = ", ".join(f"`{file.name}`" for file in files if file.method is None)
    by_gptq = ", ".join(f"`{file.name}`" for file in files if file.method is not None)
    table = "\n".join([HEADING, *rows])
    added = "\n".join(f"- `+{name}` {meaning}." for name, meaning in ADDITIONS.items())
    return (
        f"{INTRODUCTION}\n{NUMBERS}\n{table}\n\nFor {support.where('gguf')}: {usual}; each is what "
        "llama.cpp's own quantiser writes for that type. The same types and sizes, with levels by "
        f"GPTQ: {by_gptq}.\n\n## Additions\n\nAppended to any recipe except GGUF, as in "
        f"`-r nvfp4+kv-fp8`:\n\n{added}\n\n{REFUSED}"
    )


def _row(recipe: Recipe) -> str:
    weight = TensorSpec(f"{MODULE}.weight", "BF16", (ROWS, COLUMNS))
    own, _ = recipe.parts[0].resolved({MODULE: COLUMNS})
    specs = formats.specs(MODULE, weight, own)
    bits = 8 * sum(spec.size_bytes for spec in specs) / (ROWS * COLUMNS)
    stored = ", ".join(f"`{s.name.removeprefix(MODULE + '.')}` {s.dtype}" for s in specs)
    inputs = own.input_activations.words() if own.input_activations else "16 bits"
    others = [f"{g.targets[0]}: {g.weights.words()}" for g in recipe.groups]
    words = "; ".join([own.weights.words(), *others])
    where = support.where(support.format_of(recipe))
    cells = f"`{recipe.name}`", words, inputs, f"{bits:.2f}", stored, where
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
