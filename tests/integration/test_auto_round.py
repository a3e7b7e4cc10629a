"""Files that AutoRound wrote, in its own layout, GPTQ's and AWQ's, are read as it reads them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from quantkit.model.dequantized import dequantized
from quantkit.model.headers import read_header

LIBRARY = Path(__file__).parents[1] / "data" / "auto_round.safetensors"


@pytest.mark.parametrize("method", ["auto-round", "gptq", "awq"])
def test_numbers_are_those_that_the_library_multiplies_by(method):
    """Written and multiplied by AutoRound itself (`write_auto_round.py`)."""
    with safe_open(LIBRARY, "pt") as file:
        config = json.loads(file.metadata()[method])
    assert config["quantization_config"]["quant_method"] == method
    stored = read_header(LIBRARY)
    held = {n: t for n, t in stored.items() if n.startswith(f"{method}.")}
    found = dequantized(held, {**config, "dtype": "float32"})
    # its module multiplies in float16: one rounding of each weight
    expected = stored["expected"].read()
    weight = found[f"{method}.weight"].read()
    assert torch.equal(weight.half().float(), expected)
