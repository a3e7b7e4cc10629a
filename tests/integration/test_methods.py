"""The arithmetic of the calibrated methods against a few lines of obvious code."""

import platform

import pytest
import torch

from quantkit import grid
from quantkit.methods import awq, gptq, products, refine, rounding, smoothquant
from quantkit.methods.contract import Linears
from quantkit.methods.products import Halves
from quantkit.methods.statistics import Statistics
from quantkit.recipe import WeightScheme

SCHEMES = [
    WeightScheme(num_bits=4, strategy="group", group_size=32),
    WeightScheme(num_bits=4, strategy="group", group_size=32, symmetric=False),
    WeightScheme(num_bits=8, strategy="channel"),
]


@pytest.fixture
def layer():
    """A weight, correlated inputs, and their statistics."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 160, generator=generator)
    mixing = torch.randn(160, 160, generator=generator) / 8 + torch.eye(160)
    inputs = torch.randn(2, 400, 160, generator=generator) @ mixing
    inputs[..., 7] *= 20
    statistics = Statistics.zeros(160, weight.device)
    statistics.add(inputs[:1])
    statistics.add(inputs[1:])
    statistics.complete()
    return weight, inputs.reshape(-1, 160), statistics


def test_sweeps_do_not_serve_a_few_huge_tokens_at_the_cost_of_all_others(monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    weight = normal(48, 256)
    mixing = normal(256, 256) / 16 + torch.eye(256)
    inputs = torch.nn.functional.silu(normal(2000, 256) @ mixing) * (normal(2000, 256) @ mixing)
    huge = torch.exp(2 * normal(256)) * normal(256).sign()
    inputs[::500] = huge * (48000 / huge.norm()) * (1 + 0.01 * normal(4, 256))
    others = inputs[torch.arange(2000) % 500 > 0]
    statistics = Statistics.zeros(256, weight.device)
    statistics.add(inputs)
    statistics.complete()
    gram, scheme = statistics.gram.clone(), SCHEMES[0]
    plain = (
        gptq.ColumnByColumn()
        .round(Linears(weight, torch.float32, scheme, {}, statistics))
        .quantized
    )
    swept, _ = refine.refine(weight, statistics.gram, plain, scheme, 2)
    assert torch.equal(statistics.gram, gram)
    monkeypatch.setattr(refine, "DAMPING", 0.0)
    undamped, _ = refine.refine(weight, statistics.gram, plain, scheme, 2)

    def lost(made, tokens):
        change = grid.dequantize(made, scheme) - weight
        return (tokens @ change.t()).square().sum().item()

    assert lost(swept, others) < 0.85 * lost(undamped, others)
    assert lost(swept, inputs) < lost(undamped, inputs) < lost(plain, inputs)


def test_statistics_are_sums_over_tokens(layer):
    _, inputs, statistics = layer
    assert torch.allclose(statistics.gram, inputs.t() @ inputs, rtol=1e-4, atol=1e-2)
    assert torch.allclose(statistics.mean_abs, inputs.abs().mean(0))
    assert torch.equal(statistics.max_abs, inputs.abs().amax(0))
    assert statistics.n_tokens == 800
    scale = torch.rand(160) + 0.5
    scaled = statistics.scaled(scale)
    again = Statistics.zeros(160, inputs.device)
    again.add(inputs / scale)
    again.complete()
    assert torch.allclose(scaled.gram, again.gram, rtol=1e-3, atol=1e-2)
    assert torch.allclose(scaled.max_abs, again.max_abs)


def test_gram_error_is_the_error_of_the_layers_output(layer):
    weight, inputs, statistics = layer
    change = torch.randn_like(weight)
    replayed = (inputs @ change.t()).square().sum()
    error = products.row_energies(change, Halves.of(statistics.gram)).sum()
    assert error == pytest.approx(replayed.item(), rel=1e-4)


def textbook_gptq(weight, gram, damping, scale, zero, scheme, order):
    """One column after the other, with the inverse matrix updated as in Optimal Brain Surgeon."""
    bottom, top = grid.limits(scheme)
    size = weight.shape[1] // scale.shape[1]
    weight = weight.double().clone()
    inverse = (gram.double() + damping * gram.diagonal().mean() * torch.eye(len(gram))).inverse()
    values = torch.zeros_like(weight)
    for j in order.tolist():
        s, z = scale[:, j // size].double(), 0 if zero is None else zero[:, j // size].double()
        values[:, j] = (weight[:, j] / s + z).round().clamp(bottom, top)
        error = (weight[:, j] - (values[:, j] - z) * s) / inverse[j, j]
        weight -= torch.outer(error, inverse[j])
        inverse -= torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
        inverse[j, j] = 1  # done with this column
    return values


@pytest.mark.parametrize("scheme", SCHEMES, ids=["symmetric", "zero points", "channel"])
def test_gptq_is_the_textbook(layer, scheme):
    weight, _, statistics = layer
    view = grid.tiles(weight, scheme)
    scale, zero = grid.parameters(view.amin(-1), view.amax(-1), scheme)
    factor = gptq.factor(statistics.gram)
    assert factor is not None
    assert factor.order[0] == 7
    ours = gptq.solve(weight, factor, scale, zero, scheme)
    expected = textbook_gptq(
        weight, statistics.gram, factor.damping, scale, zero, scheme, factor.order
    )
    same = (ours.values == expected).float().mean()
    # float32 against float64: a tie may fall the other way, and takes columns behind it along.
    assert same > (0.995 if platform.machine() in ("x86_64", "AMD64") else 0.98)


@pytest.mark.parametrize("at_once", [1, 500, grid.SEARCHED])
@pytest.mark.parametrize("scheme", SCHEMES, ids=["symmetric", "zero points", "channel"])
def test_each_tile_takes_the_first_of_its_best_ratios(layer, scheme, at_once, monkeypatch):
    """Whatever the number that is tried at once, as a walk over the ratios would."""
    monkeypatch.setattr(grid, "SEARCHED", at_once)
    weight, _, statistics = layer
    weight = weight.clone()
    weight[2] = 0  # where all ratios tie
    importance = statistics.gram.diagonal()

    def errors_of(scale, zero):
        return rounding.weighted_errors(weight, scale, zero, importance, scheme)

    ratios = (0.9, 0.7, 0.5, *((-1.0, -0.8) if scheme.symmetric else ()))
    scale, zero = grid.search_parameters(weight, scheme, torch.bfloat16, errors_of, ratios)
    view = grid.tiles(weight, scheme)
    low, high = view.amin(-1).bfloat16(), view.amax(-1).bfloat16()
    wanted, zeros = grid.parameters(low, high, scheme)
    least = torch.full(low.shape, float("inf"))
    for ratio in (1.0, *ratios):
        part, place = grid.parameters(low * abs(ratio), high * abs(ratio), scheme)
        part = -part if ratio < 0 else part
        error = errors_of(part[None], None if place is None else place[None])[0]
        better = error < least
        least = torch.where(better, error, least)
        wanted = torch.where(better, part, wanted)
        if place is not None:
            zeros = torch.where(better, place, zeros)
    assert torch.equal(scale, wanted)
    assert zero is None or torch.equal(zero, zeros)


def test_each_step_lowers_the_output_error(layer):
    weight, _, statistics = layer
    scheme = SCHEMES[0]
    view = grid.tiles(weight, scheme)
    plain = grid.parameters(view.amin(-1), view.amax(-1), scheme)
    importance = statistics.gram.diagonal()
    searched = grid.search_parameters(
        weight,
        scheme,
        torch.float32,
        lambda scale, zero: rounding.weighted_errors(weight, scale, zero, importance, scheme),
        (0.95, 0.9, 0.85, 0.8),
    )

    def error(quantized):
        change = grid.dequantize(quantized, scheme) - weight
        return products.row_energies(change, Halves.of(statistics.gram)).sum().item()

    rounded = error(grid.quantize(weight, *plain, scheme))
    better = error(grid.quantize(weight, *searched, scheme))
    factor = gptq.factor(statistics.gram)
    solved = error(gptq.solve(weight, factor, *searched, scheme))
    assert solved < better < rounded
    tries = awq.candidates(statistics.mean_abs, weight.abs().mean(0))
    errors = awq.errors(
        tries,
        Halves.of(statistics.gram),
        lambda scale: rounding.smoothed_change(weight, scale, scheme),
    )
    best = tries[int(errors.argmin())]
    assert errors.min() < 0.9 * errors[0]
    assert best[7] > best.median()  # the loud channel is protected


def test_damping_is_raised_until_the_matrix_factors():
    # Inputs of one direction only, summed in float32: indefinite by rounding.
    direction = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    gram = direction.t() @ direction
    gram[0, 0] -= 0.2 * gram.diagonal().mean()
    factor = gptq.factor(gram)
    assert factor is not None
    assert factor.damping > gptq.DAMPING[0]
    assert gptq.factor(torch.zeros(8, 8)) is None


def test_smoothquant_evens_out_activations(layer):
    weight, inputs, statistics = layer
    scale = smoothquant.scales(statistics.max_abs, weight.abs().amax(0), 0.5)
    before = inputs.abs().amax(0)
    after = (inputs / scale).abs().amax(0)
    assert after.max() / after.median() < before.max() / before.median() / 2
    silent = statistics.max_abs.clone()
    silent[3] = 0
    assert smoothquant.scales(silent, weight.abs().amax(0), 0.5)[3] == 1
