"""The exact parts of what makes few bits better: each against brute force or a closed form."""

import json

import pytest
import torch
from tiny import cut_demo

from quantkit import grid, numbers
from quantkit.methods import gptq, products, refine, rounding, statistics
from quantkit.methods.products import Halves
from quantkit.model.source import ModelSource
from quantkit.onepass import estimate, tuning
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe, WeightScheme
from quantkit.verification.checkpoint import verify

INT4 = WeightScheme(num_bits=4, strategy="group", group_size=32)
SCHEMES = [
    INT4,
    WeightScheme(num_bits=4, strategy="group", group_size=32, symmetric=False),
    WeightScheme(num_bits=2, strategy="group", group_size=64),
    WeightScheme(num_bits=4, type="float", strategy="tensor_group", group_size=16),
    WeightScheme(num_bits=4, type="float", strategy="group", group_size=32),
    WeightScheme(num_bits=8, strategy="channel"),
]


@pytest.fixture(scope="module")
def layer():
    """A weight, correlated inputs, and their Gram matrix."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 192, generator=generator)
    mixing = torch.randn(192, 192, generator=generator) / 8 + torch.eye(192)
    inputs = torch.randn(900, 192, generator=generator) @ mixing
    return weight, inputs, inputs.t() @ inputs


def rounded(weight, gram, scheme):
    """What GPTQ makes of a weight."""
    number = numbers.of(scheme)
    whole = number.global_scale(weight.abs().amax()) if number.has_global_scale else None
    view = grid.tiles(weight, scheme)
    low, high = view.amin(-1).bfloat16(), view.amax(-1).bfloat16()
    scale, zero = grid.parameters(low, high, scheme, None, whole)
    return gptq.solve(weight, gptq.factor(gram), scale, zero, scheme, whole)


def errors_of(made, weight, gram, scheme):
    return products.row_energies(grid.dequantize(made, scheme) - weight, Halves.of(gram))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.words())
def test_descent_lowers_the_error_of_every_row_and_keeps_the_types(layer, scheme):
    weight, _, gram = layer
    before = rounded(weight, gram, scheme)
    first = errors_of(before, weight, gram, scheme)
    for sweeps in (1, 2, 4):
        made, known = refine.refine(weight, gram, before, scheme, sweeps)
        errors = errors_of(made, weight, gram, scheme)
        torch.testing.assert_close(known, errors, rtol=1e-3, atol=0)
        assert (errors <= first * (1 + 1e-5)).all()
        assert made.scale.dtype == before.scale.dtype
        assert made.values.dtype == before.values.dtype
        again = grid.quantize(
            grid.dequantize(made, scheme), made.scale, made.zero_point, scheme, made.global_scale
        )
        assert torch.equal(grid.dequantize(again, scheme), grid.dequantize(made, scheme))
    assert errors.sum() < 0.97 * first.sum()


def test_after_the_descent_no_single_code_or_scale_can_do_better(layer, monkeypatch):
    weight, _, gram = layer
    monkeypatch.setattr(refine, "DAMPING", 0.0)
    weight = weight[:3]
    made, _ = refine.refine(weight, gram, rounded(weight, gram, INT4), INT4, 20)
    best = errors_of(made, weight, gram, INT4)
    for column in range(weight.shape[1]):
        for move in (-1, 1):
            values = made.values.clone()
            values[:, column] = (values[:, column] + move).clamp(-8, 7)
            other = grid.QuantizedWeight(values, made.scale, None)
            assert (errors_of(other, weight, gram, INT4) >= best * (1 - 1e-5)).all()
    bits = made.scale.view(torch.int16)
    for tile in range(bits.shape[1]):
        for move in (-2, -1, 1, 2):  # neighbours among bfloat16 numbers
            near = bits.clone()
            near[:, tile] += move
            other = grid.QuantizedWeight(made.values, near.view(torch.bfloat16), None)
            assert (errors_of(other, weight, gram, INT4) >= best * (1 - 1e-5)).all()


def test_negative_scales_turn_a_lopsided_range_around():
    scheme = WeightScheme(num_bits=2, strategy="group", group_size=32)
    weight = torch.tensor([[2.0, 1.0, 0.0, -1.0] * 8])
    scale, _ = grid.search_parameters(
        weight,
        scheme,
        torch.float32,
        lambda scale, zero: rounding.weighted_errors(weight, scale, zero, torch.ones(32), scheme),
        [-0.75],
    )
    assert scale.item() == -1.0
    made = grid.quantize(weight, scale, None, scheme)
    assert torch.equal(grid.dequantize(made, scheme), weight)


@pytest.mark.parametrize("number", ["int4", "nvfp4", "mxfp4"])
def test_the_nearest_stored_scale_is_the_nearest(number):
    steps = torch.rand(200) * 3 + 0.01
    if number == "int4":
        stored = numbers.of(INT4).nearest_scale(steps, torch.ones(200).bfloat16(), None)
        every = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
        found = stored.float()
    elif number == "nvfp4":
        whole = torch.tensor([7.0])
        like = torch.full((200,), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        stored = numbers.NVFP4().nearest_scale(steps, like, whole)
        found = stored.float() / whole
        codes = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
        every = codes.float() / whole
    else:
        like = torch.full((200,), 127, dtype=torch.uint8)
        found = numbers.MXFP4().steps(numbers.MXFP4().nearest_scale(steps, like, None), None)
        every = torch.exp2(torch.arange(-20.0, 20.0))
    nearest = (every - steps[:, None]).abs().amin(1)
    assert torch.allclose((found - steps).abs(), nearest, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.words())
def test_tuning_starts_from_the_codes_that_are_there(layer, scheme):
    weight, _, gram = layer
    made = rounded(weight, gram, scheme)
    position = tuning.Position.towards(weight, made, scheme)
    same = position.quantized()
    assert torch.equal(grid.dequantize(same, scheme), grid.dequantize(made, scheme))
    assert torch.equal(same.scale.view(torch.uint8), made.scale.view(torch.uint8))
    assert torch.allclose(position.weight(), grid.dequantize(made, scheme), atol=1e-6)
    position.move(position.slopes(position.weight()), 1.0, tuning.REACH)
    low, high = numbers.of(scheme).limits
    assert position.codes.min() >= low
    assert position.codes.max() <= high


def test_settings_of_torch_are_back_after_gradients():
    from torch.utils import deterministic

    assert not torch.are_deterministic_algorithms_enabled()
    assert deterministic.fill_uninitialized_memory
    with tuning.reproducible():
        assert torch.are_deterministic_algorithms_enabled()
        assert not deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert deterministic.fill_uninitialized_memory


def test_tune_is_an_option_of_recipes_that_have_a_gradient_stage():
    assert Recipe.load("gptq-w4a16").tuned().tuning_steps > 0
    with pytest.raises(Exception, match="rtn-w4a16 cannot be tuned"):
        Recipe.load("rtn-w4a16").tuned()


def test_merged_batches_are_learnt_from_one_at_a_time(tmp_path, monkeypatch):
    """Merging is for a pass's statistics; what gradients see, padding included, stays the same."""
    folder = cut_demo(tmp_path / "demo")
    text = tmp_path / "text.jsonl"
    words = [" ".join(f"word{i * j}" for j in range(5 + 7 * i)) for i in range(16)]
    text.write_text("\n".join(json.dumps({"text": line}) for line in words))
    monkeypatch.setitem(estimate.TOKENS_PER_BATCH, "cpu", 128)
    monkeypatch.setattr(statistics, "FIRST_SHARE", 0)  # of a few tokens it magnifies roundings
    seen, plain = [], tuning._Lesson.held_out_error

    def watched(self, weights):
        seen.append((len(self._visit.padding.keep), self._taught, self._held))
        return plain(self, weights)

    monkeypatch.setattr(tuning._Lesson, "held_out_error", watched)
    recipe = Recipe.load("gptq-w4a16").tuned(tune=4)
    recipe = recipe.model_copy(update={"options": recipe.options | {"distil": 1}})
    made = []
    for name, merged_bytes in (("apart", 0), ("merged", 1 << 40)):
        monkeypatch.setitem(estimate.MERGED_BYTES, "cpu", merged_bytes)
        source, choice = ModelSource.open(str(folder)), CalibrationChoice(str(text), 12, 64)
        made += quantize(source, [recipe], tmp_path / name, "cpu", calibration=choice)
    apart, merged = seen[0], seen[-1]
    assert merged[0] < apart[0]
    assert merged[1:] == apart[1:]
    one, two = (dict(checkpoint.state(torch.float32)) for checkpoint in made)
    for name, weight in one.items():  # sums of products are rounded in another order
        assert torch.isclose(weight, two[name], atol=1e-6).float().mean() > 0.97, name


def test_no_token_counts_more_for_being_large():
    torch.manual_seed(0)
    wanted = torch.randn(2, 5, 8)
    output = wanted + 0.1 * torch.randn(2, 5, 8)
    by_hand = [
        (a - b).norm() ** 2 / b.norm() ** 2
        for a, b in zip(output.flatten(0, 1), wanted.flatten(0, 1), strict=True)
    ]
    found = tuning.relative_error(output, wanted)
    assert torch.isclose(found, torch.stack(by_hand).mean())
    larger = torch.ones(2, 5, 1)
    larger[:, 0] = 50
    assert torch.isclose(tuning.relative_error(output * larger, wanted * larger), found)
    wanted[0, 0] = 0
    assert tuning.relative_error(output, wanted).isfinite()


def test_a_tuned_block_is_no_worse_on_held_out_batches_and_comes_out_the_same_twice(
    tmp_path, monkeypatch
):
    folder = cut_demo(tmp_path / "demo")  # random weights have little to learn
    errors = []
    plain = tuning._Lesson.held_out_error

    def watched(self, weights):
        errors.append(plain(self, weights))
        return errors[-1]

    monkeypatch.setattr(tuning._Lesson, "held_out_error", watched)
    monkeypatch.setitem(
        estimate.TOKENS_PER_BATCH, "cpu", 128
    )  # so that there are batches to hold out
    recipe = Recipe.load("gptq-w2a16").tuned(tune=32)
    made = [
        quantize(
            ModelSource.open(str(folder)),
            [recipe],
            tmp_path / name,
            calibration=CalibrationChoice("python-docs", 32, 64),
        )[0]
        for name in ("one", "two")
    ]
    before, after = errors[::2], errors[1::2]
    assert sum(after) < sum(before)
    one, two = (dict(checkpoint.state(torch.float32)) for checkpoint in made)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert verify(made[0].folder).ok
