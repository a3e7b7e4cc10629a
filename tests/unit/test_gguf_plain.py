"""Plain and nonlinear GGUF blocks are ggml's own, byte for byte."""

import ggml_judge
import gguf
import pytest
import torch

from quantkit.gguf import mxfp4, nonlinear, plain, search, values
from quantkit.model.source import ModelSource

KINDS = plain.KINDS | nonlinear.KINDS | mxfp4.KINDS
by_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
ROWS, COLUMNS = 24, 1024


def normal(generator):
    return torch.randn(ROWS, COLUMNS, generator=generator)


def heavy_tails(generator):
    """Student's t with three degrees of freedom: a normal over the root of a mean of squares."""
    squares = torch.randn(3, ROWS, COLUMNS, generator=generator).square().mean(0)
    return 0.02 * normal(generator) / squares.sqrt()


def outliers(generator):
    x = 0.02 * normal(generator)
    return torch.where(torch.rand(x.shape, generator=generator) < 0.003, 50 * x, x)


def coarse(generator):
    """Numbers of three bits: many are equal, and many lie halfway between two levels."""
    return torch.randint(-4, 5, (ROWS, COLUMNS), generator=generator) / 8


def positive(generator):
    return torch.rand(ROWS, COLUMNS, generator=generator) + 0.1


def importance_for(columns, kind="uneven"):
    """Like real ones uneven; with `gaps`, half of the columns never saw an input."""
    if kind == "none":
        return None
    uneven = 10 * torch.rand(columns, generator=torch.Generator().manual_seed(1)) ** 4
    if kind == "zeros":
        return torch.zeros(columns)
    return uneven * (torch.arange(columns) % 97 < 48) if kind == "gaps" else uneven


@by_kind
@pytest.mark.parametrize("importance", ["none", "uneven", "gaps"])
@pytest.mark.parametrize("numbers", [normal, heavy_tails, outliers, coarse, positive])
def test_random_blocks_are_those_of_ggml(kind, numbers, importance):
    check(kind, numbers(torch.Generator().manual_seed(0)), importance_for(COLUMNS, importance))


@by_kind
@pytest.mark.parametrize("importance", ["none", "uneven"])
def test_blocks_of_a_real_model_are_those_of_ggml(kind, importance):
    tensors = ModelSource.open("demo").tensors
    for name in ("embed_tokens", "layers.0.self_attn.k_proj", "layers.5.mlp.down_proj"):
        weight = tensors[f"model.{name}.weight"].read()[:64].float()
        check(kind, weight, importance_for(weight.shape[1], importance))


def check(kind, x, importance):
    ours, theirs = KINDS[kind](x, importance), ggml_judge.quantize(x, kind, importance)
    found = ggml_judge.compare(x, ours, theirs, kind, importance)
    if not ggml_judge.IS_EXACT:
        assert found.total_ratio <= ggml_judge.ABOUT_THE_SAME
        return
    assert found.identical >= 0.999
    assert found.worst_gap <= 1e-4
    assert found.total_ratio <= 1.001


def some_zeros(x):
    return x * (torch.arange(COLUMNS) % 512 < 256)


ODD = {
    "zeros": torch.zeros_like,
    "negative zeros": lambda x: -torch.zeros_like(x),
    "zeros of both signs": lambda x: x * 0,
    "some blocks of zeros": some_zeros,
    "one positive number": lambda x: torch.full_like(x, 5),
    "one negative number": lambda x: torch.full_like(x, -5),
    "both extremes": lambda x: x.sign(),
    "huge": lambda x: x * 1e4,
    "too large for float16": lambda x: x * 1e9,
    "tiny": lambda x: x * 1e-8,
    "almost empty": lambda x: x * 1e-15,
    "empty": lambda x: x * 1e-20,
    "below normal numbers": lambda x: x * 1e-40,
}


@by_kind
@pytest.mark.parametrize("importance", ["none", "uneven", "zeros"])
@pytest.mark.parametrize("change", ODD.values(), ids=ODD)
@pytest.mark.skipif(not ggml_judge.IS_EXACT, reason="ggml is built with fused multiply-adds")
def test_odd_blocks_are_exactly_those_of_ggml(kind, change, importance):
    x = change(normal(torch.Generator().manual_seed(2))[:4])
    weights = importance_for(COLUMNS, importance)
    assert torch.equal(KINDS[kind](x, weights), ggml_judge.quantize(x, kind, weights))


@by_kind
def test_rows_do_not_depend_on_each_other(kind):
    x, weights = normal(torch.Generator().manual_seed(3)), importance_for(COLUMNS)
    whole = KINDS[kind](x, weights)
    assert torch.equal(whole, torch.cat([KINDS[kind](part, weights) for part in x.split(7)]))


@pytest.mark.parametrize("kind", plain.KINDS | nonlinear.KINDS, ids=lambda kind: kind.name)
def test_importance_lowers_the_error_that_it_weighs(kind):
    if kind == gguf.GGMLQuantizationType.Q8_0:
        pytest.skip("eight bits have no use for it")
    x, weights = normal(torch.Generator().manual_seed(4)), importance_for(COLUMNS)
    aware, unaware = (
        ggml_judge.block_errors(x, KINDS[kind](x, given), kind, weights).sum()
        for given in (weights, None)
    )
    assert aware < 0.97 * unaware


def test_halves_go_away_from_zero_in_q8_0():
    x = torch.zeros(1, 32)
    x[0, :6] = torch.tensor([127, 0.5, -0.5, 2.5, -2.5, 0.49999997])
    (block,) = plain.q8_0(x, None)
    assert block[:2].view(torch.float16).item() == 1
    assert block[2:8].view(torch.int8).tolist() == [127, 1, -1, 3, -3, 0]


def test_sums_go_in_order():
    terms = torch.tensor([1e8, 1.0, -1e8, 1.0])
    assert search.ordered_sum(terms).item() == 1


def test_weights_that_were_mxfp4_before_lose_nothing():
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (64, 4 * 17), dtype=torch.uint8, generator=generator)
    data[:, ::17] = torch.randint(90, 160, (64, 4), dtype=torch.uint8, generator=generator)
    data[0] = 0
    kind = gguf.GGMLQuantizationType.MXFP4
    weight = values.dequantize(data, kind)
    assert torch.equal(values.dequantize(mxfp4.mxfp4(weight, None), kind), weight)
