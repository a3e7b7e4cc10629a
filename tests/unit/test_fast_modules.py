"""Norms and gated units in one kernel: only where a class computes the same."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from quantkit.model import fast_modules

STATES = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(fast_modules, "_is_fit", lambda weight: weight.dtype == torch.bfloat16)
    monkeypatch.setattr(fast_modules, "_same", {})


def mlp(activation: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=256, intermediate_size=512, hidden_act=activation)
    return LlamaMLP(config).bfloat16()


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
def test_a_norm_as_llama_has_it_is_replaced_while_its_block_is_loaded(kind):
    norm = kind(256).bfloat16()
    norm.weight.data = (1 + torch.randn(256) / 3).bfloat16()
    with torch.no_grad(), fast_modules.accelerated(norm):
        assert "forward" in vars(norm)
        found = norm(STATES)
    assert "forward" not in vars(norm)
    assert torch.equal(found, norm(STATES))


@pytest.mark.parametrize("kind", [Gemma2RMSNorm, Olmo2RMSNorm])
def test_a_norm_that_rounds_elsewhere_or_adds_one_stays(kind):
    norm = kind(256).bfloat16()
    with torch.no_grad(), fast_modules.accelerated(norm):
        assert "forward" not in vars(norm)


def test_a_gated_unit_is_replaced_only_with_silu():
    unit = mlp("silu")
    with torch.no_grad(), fast_modules.accelerated(unit):
        assert "forward" in vars(unit)
        seen = []
        unit.down_proj.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        found = unit(STATES)
    assert torch.equal(found, unit(STATES))
    assert seen[0].shape == (3, 5, 512)
    other = mlp("gelu")  # of the same class, in the same process
    with torch.no_grad(), fast_modules.accelerated(other):
        assert "forward" not in vars(other)


def test_gradients_come_from_the_modules_own_forward():
    norm, unit = LlamaRMSNorm(256).bfloat16(), mlp("silu")
    states = STATES.clone().requires_grad_()
    for module in (norm, unit):
        with fast_modules.accelerated(module):
            module(states).sum().backward()
        assert states.grad is not None
        states.grad = None


def test_float32_stays_as_it_is():
    norm = LlamaRMSNorm(256)
    with fast_modules.accelerated(norm):
        assert "forward" not in vars(norm)
