"""Norms, gated units and rotary embeddings in one kernel: only where it computes the same."""

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from quantkit.model import fast_modules, rotary

STATES = torch.randn(3, 5, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.fixture(autouse=True)
def on_a_cpu_too(monkeypatch):
    monkeypatch.setattr(fast_modules, "_is_fit", lambda weight: weight.dtype == torch.bfloat16)
    monkeypatch.setattr(fast_modules, "_same", {})
    monkeypatch.setattr(rotary, "_same", {})


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


def attention() -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2
    )
    config._attn_implementation = "sdpa"
    return LlamaDecoderLayer(config, 0).bfloat16()


def test_rotary_embeddings_are_replaced_while_a_block_is_loaded(monkeypatch):
    block, own = attention(), modeling_llama.apply_rotary_pos_emb
    angles = torch.randn(2, 3, 5, 64).bfloat16()
    wanted = block(STATES, position_embeddings=tuple(angles))
    seen = []
    rotate = rotary.rotate
    monkeypatch.setattr(rotary, "rotate", lambda *given: seen.append(given) or rotate(*given))
    with torch.no_grad(), fast_modules.accelerated(block):
        seen.clear()
        with fast_modules.accelerated(attention()):
            pass
        assert torch.equal(block(STATES, position_embeddings=tuple(angles)), wanted)
    assert len(seen) == 1
    with fast_modules.accelerated(block):  # gradients come from the function itself
        assert block(STATES, position_embeddings=tuple(angles)).requires_grad
    assert len(seen) == 1
    assert modeling_llama.apply_rotary_pos_emb is own


@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, cos, sin: (q[..., :96], k[..., :96], cos, sin),  # not all of a head rotates
        lambda q, k, cos, sin: (q, k, cos.float(), sin.float()),
        lambda q, k, cos, sin: (q[:, ::2], k, cos, sin),
        lambda q, k, cos, sin: (q, k, cos, sin, 1),
    ],
)
def test_other_rotations_are_left_to_the_family(change, monkeypatch):
    monkeypatch.setattr(rotary, "rotate", None)
    made = (
        torch.randn(2, 9, 6, 128).transpose(1, 2).bfloat16(),
        torch.randn(2, 2, 9, 128).bfloat16(),
    )
    given = change(*made, *torch.randn(2, 1, 9, 128).bfloat16())
    with torch.no_grad():
        assert rotary._rotated(lambda *taken: taken, *given) == given


@pytest.mark.parametrize("width", [64, 80])
def test_one_row_of_angles_serves_all_samples(width):
    query, key = torch.randn(3, 9, 6, width).transpose(1, 2), torch.randn(3, 2, 9, width)
    given = query.bfloat16(), key.bfloat16(), *torch.randn(2, 1, 9, width).bfloat16()
    assert rotary._fits(*given)
    expected = modeling_llama.apply_rotary_pos_emb(*given)
    assert all(torch.equal(a, b) for a, b in zip(rotary.rotate(*given), expected, strict=True))


def test_a_function_that_interleaves_stays():
    """Cohere's pairs neighbours, not halves, and rounds elsewhere."""
    own, device = modeling_cohere.apply_rotary_pos_emb, torch.device("cpu")
    assert not rotary._gives_the_same(own, device)
    assert rotary._gives_the_same(modeling_llama.apply_rotary_pos_emb, device)
