"""Triton kernels against their torch twins."""

import pytest
import torch

from quantkit import grid
from quantkit.quantize.methods import gptq
from quantkit.recipe import WeightScheme

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("columns", [576, 1024])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_kernel_equals_its_twin(columns, symmetric, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(300, columns, device="cuda")
    inputs = torch.randn(4 * columns, columns, device="cuda") * torch.rand(columns, device="cuda")
    scheme = WeightScheme(num_bits=4, strategy="group", group_size=64, symmetric=symmetric)
    view = grid.tiles(weight, scheme)
    scale, zero = grid.parameters(view.amin(-1), view.amax(-1), scheme)
    gram = inputs.t() @ inputs
    factor = gptq.factor(gram)
    fused = gptq.solve(weight, factor, scale, zero, scheme)
    monkeypatch.setattr(gptq, "_kernel", lambda: gptq.update_block)
    plain = gptq.solve(weight, factor, scale, zero, scheme)
    assert (fused.values == plain.values).float().mean() > 0.999

    def error(result):
        change = grid.dequantize(result, scheme) - weight
        return ((change @ gram) * change).sum().item()

    assert error(fused) == pytest.approx(error(plain), rel=1e-3)
