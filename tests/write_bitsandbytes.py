"""Writes tests/data/bitsandbytes.safetensors: weights of bitsandbytes, and what it makes of them.

    python tests/write_bitsandbytes.py      # with bitsandbytes and torch; no GPU, no quantkit

The library quantises small weights on the CPU; beside what its checkpoints hold stands what its
own functions dequantise. Sizes leave the last block incomplete, in both quantisations.
"""

from importlib.metadata import version
from pathlib import Path

import bitsandbytes.functional as library
import torch
from safetensors.torch import save_file

OUT = Path(__file__).parent / "data" / "bitsandbytes.safetensors"
CASES = (
    ("nf4", "nf4", False, (10, 30)),
    ("double", "nf4", True, (200, 84)),  # more than 256 blocks
    ("fp4", "fp4", True, (10, 30)),
)


def main() -> None:
    torch.manual_seed(0)
    held = {}
    for name, kind, nested, shape in CASES:
        weight = torch.randn(shape).bfloat16() * 0.05
        packed, state = library.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        held[f"{name}.weight"] = packed
        for part, tensor in state.as_dict(packed=True).items():
            held[f"{name}.weight.{part}"] = tensor
        state.dtype = torch.float32
        held[f"expected.{name}"] = library.dequantize_4bit(packed, state)
    weight = torch.randn(16, 40).half()
    values, rows, _ = library.int8_vectorwise_quant(weight)
    held["int8.weight"], held["int8.SCB"] = values, rows
    held["int8.weight_format"] = torch.tensor(0, dtype=torch.uint8)
    held["expected.int8"] = library.int8_vectorwise_dequant(values, rows)
    OUT.parent.mkdir(exist_ok=True)
    whole = {name: tensor.contiguous() for name, tensor in held.items()}
    save_file(whole, OUT, {"bitsandbytes": version("bitsandbytes")})


if __name__ == "__main__":
    main()
