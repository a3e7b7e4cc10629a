"""K-quants in torch are ggml's own: same bytes for ordinary, heavy-tailed, real and odd weights."""

import ggml_judge
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES

from quantkit.gguf import search
from quantkit.gguf.kquants import KINDS
from quantkit.model.source import ModelSource

ROWS, COLUMNS = 16, 768
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def names_that_differ(weights, kind, importance=None):
    """Which of some tensors with equal columns ggml would write otherwise; one search for all."""
    x = torch.cat(list(weights.values()))
    sizes = [len(each) for each in weights.values()]
    ours, theirs = KINDS[kind](x, importance), ggml_judge.quantize(x, kind, importance)
    parts = zip(weights.items(), ours.split(sizes), theirs.split(sizes), strict=True)
    if ggml_judge.IS_EXACT:
        return [name for (name, _), a, b in parts if not torch.equal(a, b)]
    found = {
        name: ggml_judge.compare(x, a, b, kind, importance)
        for (name, x), a, b in parts
        if name not in ODD
    }
    return [name for name, c in found.items() if c.total_ratio > ggml_judge.ABOUT_THE_SAME]


def noise(seed=0, shape=(ROWS, COLUMNS)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some(share, seed=9, shape=(ROWS, COLUMNS)):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share).float()


def student_t():
    return 0.02 * noise() / noise(1, (3, ROWS, COLUMNS)).square().mean(0).sqrt()


def groups_of_many_sizes():
    size = noise(2, (ROWS, COLUMNS // 16, 1)).mul(3).exp()
    return (noise().view(ROWS, -1, 16) * size).view(ROWS, COLUMNS)


CONSTANTS = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.3, -0.3, 1e-16, -1e-16, 1e-30, 6e4])
WEIGHTS = {
    "normal": noise(),
    "student-t": student_t(),
    "outliers": noise() * (1 + 99 * some(0.002)),
    "bf16": (0.02 * noise()).bfloat16().float(),
    "groups of many sizes": groups_of_many_sizes(),
    "mostly zeros": noise() * some(0.05),
    "few numbers": (noise() * 2).round(),
    "positive": noise().abs() + 1,
    "negative": -noise().abs(),
    "nearly constant": 1e-6 * noise() - 1,
    "constant": CONSTANTS[:, None].repeat(1, COLUMNS),
    "huge": 1e4 * noise(),
    "scales below fp16": 1e-8 * noise(),
    "scales that fp16 hardly holds": 2e-6 * noise(),
    "close to nothing": 1e-15 * noise(),
    "below normal numbers": 1e-39 * noise(),
}
ODD = {*WEIGHTS} - {"normal", "student-t", "bf16", "groups of many sizes"}
IMPORTANCE = {
    "none": None,
    "ordinary": noise(3, (COLUMNS,)).square(),
    "of many sizes": noise(4, (COLUMNS,)).mul(4).exp(),
    # Hardly a column counts: the searches of ggml make negative scales.
    "mostly zeros": noise(5, (COLUMNS,)).square() * some(0.08, 6, (COLUMNS,)),
    "zeros": torch.zeros(COLUMNS),
}


@each_kind
@pytest.mark.parametrize("importance", IMPORTANCE.values(), ids=IMPORTANCE.keys())
def test_bytes_are_those_of_ggml(kind, importance):
    if not ggml_judge.IS_EXACT and importance is IMPORTANCE["mostly zeros"]:
        pytest.skip("with fused multiply-adds ggml goes astray where hardly a column counts")
    assert names_that_differ(WEIGHTS, kind, importance) == []


@each_kind
def test_tensors_of_the_demo_model_are_those_of_ggml(kind):
    layer = "model.layers.0.mlp."
    names = ("model.embed_tokens.weight", f"{layer}gate_proj.weight", f"{layer}up_proj.weight")
    tensors = ModelSource.open("demo").tensors
    weights = {name: tensors[name].read().float()[:96] for name in names}
    assert names_that_differ(weights, kind) == []
    assert names_that_differ(weights, kind, noise(7, (256,)).square()) == []


@each_kind
def test_a_row_does_not_depend_on_its_neighbours(kind):
    x, importance = WEIGHTS["student-t"], IMPORTANCE["ordinary"]
    for given in (None, importance):
        whole = KINDS[kind](x, given)
        assert whole.shape == (ROWS, COLUMNS // 256 * GGML_QUANT_SIZES[kind][1])
        assert torch.equal(whole[5:7], KINDS[kind](x[5:7], given))


@each_kind
def test_strides_of_the_weights_do_not_matter(kind):
    x, importance = WEIGHTS["normal"], IMPORTANCE["ordinary"]
    turned = x.t().contiguous().t()
    assert torch.equal(KINDS[kind](turned, importance), KINDS[kind](x, importance))


@each_kind
def test_importance_lowers_the_error_that_it_weighs(kind):
    x, importance = WEIGHTS["student-t"], IMPORTANCE["of many sizes"]
    with_it, without = (
        ggml_judge.block_errors(x, KINDS[kind](x, given), kind, importance).sum()
        for given in (importance, None)
    )
    assert with_it < without


@each_kind
def test_a_changed_default_dtype_changes_nothing(kind):
    x = noise()
    expected = KINDS[kind](x, None)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = KINDS[kind](x, None)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_roots_are_rounded_once():
    values = noise(8, (100_000,)).square()
    assert np.array_equal(search.root(values).numpy(), np.sqrt(values.numpy()))


def test_nearest_integers_are_even_at_ties():
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 2.5000002])
    assert search.nearest(values).tolist() == [0, 2, 2, 0, -2, 3]
