"""Numbers read from GGUF blocks are those of llama.cpp's own package."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize as reference

from quantkit.gguf import values


@pytest.mark.parametrize("kind", values.KINDS, ids=lambda kind: kind.name)
def test_every_type_is_read_as_the_official_package_reads_it(kind):
    length, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (12, 3 * size), dtype=np.uint8)
    found = values.dequantize(torch.from_numpy(data.copy()), kind)
    expected = reference(data, kind)
    assert found.shape == (12, 3 * length)
    # Any bytes make some halves infinite; those must be alike too.
    assert np.array_equal(found.numpy(), expected, equal_nan=True)


def test_plain_floats_are_taken_as_they_are():
    numbers = torch.randn(3, 8)
    for kind, dtype in values.FLOATS.items():
        stored = numbers.to(dtype)
        assert torch.equal(values.dequantize(stored.view(torch.uint8), kind), stored.float())


def test_parts_make_the_same_as_the_whole(monkeypatch):
    kind = next(iter(values.KINDS))
    data = torch.randint(0, 256, (6, GGML_QUANT_SIZES[kind][1]), dtype=torch.uint8)
    whole = values.dequantize(data, kind)
    monkeypatch.setattr(values, "AT_ONCE", 32)
    assert torch.equal(values.dequantize(data, kind).nan_to_num(), whole.nan_to_num())
