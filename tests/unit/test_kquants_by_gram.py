"""K-quants by GPTQ: plain blocks of llama.cpp's size, with less error of the output."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize

from quantkit.gguf import blocks, by_gram, kquants, values
from quantkit.methods.statistics import Statistics

KINDS = sorted(by_gram.KINDS, key=lambda kind: kind.name)


def inputs(columns: int, n_tokens: int, seed: int = 0) -> Statistics:
    """Inputs whose channels go together, as those of real layers do."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    found = Statistics.zeros(columns, torch.device("cpu"))
    found.add(torch.randn(n_tokens, columns, generator=generator) @ mixing)
    found.complete()
    return found


def weights(rows: int, columns: int) -> torch.Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    weight[1, :256] = 0  # a super-block without anything in it
    weight[2, :16] = 0
    return weight


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_levels_are_put_back_where_they_were(kind):
    data = blocks.quantize(weights(5, 512), kind, torch.rand(512) + 0.1)
    plain = values.dequantize(data, kind)
    scale, low = values.steps(data, kind)
    place = kquants.LEVELS[kind]
    wide = [part.repeat_interleave(512 // part.shape[1], 1) for part in (scale, low)]
    levels = torch.where(wide[0] == 0, 0.0, (plain + wide[1]) / wide[0]).round() + place.zero
    again = kquants.with_levels(data, kind, levels.to(torch.uint8))
    assert torch.equal(values.dequantize(again, kind), plain)
    moved = torch.full((5, 512), place.top, dtype=torch.uint8)
    found = values.dequantize(kquants.with_levels(data, kind, moved), kind)
    torch.testing.assert_close(found, (place.top - place.zero) * wide[0] - wide[1])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_outputs_lose_less_and_no_row_more(kind):
    weight, seen = weights(24, 512), inputs(512, 2048)
    gram = seen.gram.double()
    solved = by_gram.quantize(weight, kind, by_gram.Inputs.of(seen))
    usual = blocks.quantize(weight, kind, gram.diagonal().float() / 2048)
    assert solved.data.shape == usual.shape
    # What the official reader makes of the bytes.
    read = [
        torch.from_numpy(np.array(dequantize(data.numpy(), kind))).double() - weight
        for data in (solved.data, usual)
    ]
    ours, theirs = (((change @ gram) * change).sum(1) for change in read)
    assert (ours <= theirs * (1 + 1e-4)).all()
    assert ours.sum() < 0.8 * theirs.sum()
    output = ((weight.double() @ gram) * weight).sum()
    wanted = read[0].square().sum(), weight.square().sum(), ours.sum(), output
    assert solved.sums == pytest.approx([float(part) for part in wanted], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_sweeps_lose_less_still_and_leave_the_matrix_as_it_was(kind, monkeypatch):
    weight, seen = weights(24, 512), inputs(512, 2048)
    before = seen.gram.clone()
    with_sweeps = by_gram.quantize(weight, kind, by_gram.Inputs.of(seen))
    assert torch.equal(seen.gram, before)
    monkeypatch.setattr(by_gram, "SWEEPS", 0)
    without = by_gram.quantize(weight, kind, by_gram.Inputs.of(seen))
    assert with_sweeps.sums[2] < 0.99 * without.sums[2]


def test_too_few_tokens_leave_the_usual_bytes():
    weight, seen = weights(4, 512), inputs(512, 600)
    solved = by_gram.quantize(weight, Kind.Q3_K, by_gram.Inputs.of(seen))
    assert solved.damping is None
    usual = blocks.quantize(weight, Kind.Q3_K, (seen.gram.diagonal() / 600).contiguous())
    assert torch.equal(solved.data, usual)
