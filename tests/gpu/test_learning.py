"""What gradients move: steps of codes and scales by kernels, against their torch twins."""

import pytest
import torch

from quantkit import grid
from quantkit.onepass import tuning
from quantkit.recipe import WeightScheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def learner(scheme, dtype=torch.bfloat16):
    """Codes and scales that can learn; without zero points half of the scales are negative."""
    torch.manual_seed(0)
    weight = torch.randn(301, 2304, device="cuda")
    weight[3, :96] = 0
    view = grid.tiles(weight, scheme)
    scale, zero = grid.parameters(view.amin(-1).to(dtype), view.amax(-1).to(dtype), scheme)
    if zero is None:
        scale[::2] *= -1
    return tuning.Position.towards(weight, grid.quantize(weight, scale, zero, scheme), scheme)


def after_steps(scheme, dtype, gradients, share=0.5):
    """All that a learner has after some steps, with momentum and without, as bytes."""
    position, reach = learner(scheme, dtype), tuning.Reach(codes=0.3, scales=0.02)
    means, weight = position.means(), position.weight().to(gradients.dtype)
    for gradient in gradients:
        position.learn(gradient, means, 0.9)
        position.rewrite(weight, means, share, reach)
        position.rewrite(weight, position.slopes(gradient), share, reach)
    made = position.quantized()
    found = {"weight": weight, "codes": position.codes, "factors": position.factors}
    found |= {
        "values": made.values,
        "scale": made.scale,
        "of scales": means[0],
        "of codes": means[1],
    }
    return {name: part.view(torch.uint8) for name, part in found.items()}, made, position.before


LEARNT = [
    WeightScheme(num_bits=4, strategy="group", group_size=128),
    WeightScheme(num_bits=4, strategy="group", group_size=64, symmetric=False),
    WeightScheme(num_bits=2, strategy="group", group_size=32),
    WeightScheme(num_bits=4, strategy="group", group_size=32).model_copy(update={"group_size": 96}),
    WeightScheme(num_bits=8, strategy="channel"),
    WeightScheme(num_bits=4, strategy="channel", symmetric=False),
]


@pytest.mark.parametrize("scheme", LEARNT, ids=str)
@pytest.mark.parametrize(
    ("stored", "computed"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
def test_steps_of_codes_and_scales_are_those_of_their_twins(scheme, stored, computed, monkeypatch):
    torch.manual_seed(1)
    # Sums of whole numbers are exact in any order.
    gradients = torch.randint(-9, 10, (5, 301, 2304), device="cuda").to(computed)
    fused, made, before = after_steps(scheme, stored, gradients)
    monkeypatch.setattr(tuning.Position, "_is_fused", False)
    plain, _, _ = after_steps(scheme, stored, gradients)
    assert [name for name in plain if not torch.equal(fused[name], plain[name])] == []
    assert (made.values != before.values).float().mean() > 0.1
    assert (made.scale != before.scale).float().mean() > 0.1


@pytest.mark.parametrize("scheme", LEARNT, ids=str)
def test_slopes_of_a_gradient_are_those_of_their_twins(scheme, monkeypatch):
    torch.manual_seed(1)
    gradient = torch.randn(301, 2304, device="cuda").bfloat16()
    sums, *others = learner(scheme).slopes(gradient)
    assert torch.equal(learner(scheme).slopes(gradient)[0], sums)
    turned = gradient.t().contiguous().t()
    assert torch.equal(learner(scheme).slopes(turned)[0], sums)
    monkeypatch.setattr(tuning.Position, "_is_fused", False)
    plain, *expected = learner(scheme).slopes(gradient)
    assert torch.equal(others[0], expected[0])
    torch.testing.assert_close(sums, plain, rtol=1e-4, atol=1e-4)  # in another order
