"""What fits on which GPUs: properties that hold for every model, and figures that engines log."""

import json
import re

import huggingface_hub
import pytest
from configs import LLAMA_8B
from huggingface_hub.utils import (
    SafetensorsFileMetadata,
    SafetensorsRepoMetadata,
    TensorInfo,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quantkit.advise import hub, shape
from quantkit.advise.memory import GIB, fits
from quantkit.advise.parallel import bytes_per_gpu
from quantkit.advise.weights import weight_bytes
from quantkit.errors import SourceError
from quantkit.hardware import gpus
from quantkit.recipe import load

NAMES = ("awq-w4a16", "fp8-dynamic", "int8-w8a8+kv-fp8", "gguf-q4_k_m")
RECIPES = {name: load(name) for name in (*NAMES, "int8-w8a8")} | {"unquantised": None}
GEMMA = LLAMA_8B | {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 1024,
    "head_dim": 128, "query_pre_attn_scalar": 128,
}  # fmt: skip
SHAPES = {
    "8B": shape.from_config(LLAMA_8B, "8B"),
    "one key head": shape.from_config(LLAMA_8B | {"num_key_value_heads": 1}, "one key head"),
    "windows": shape.from_config(GEMMA, "windows"),
    "70B": shape.of("70B"),
}
cases = {
    "model": st.sampled_from(sorted(SHAPES)),
    "name": st.sampled_from(sorted(RECIPES)),
    "memory": st.one_of(st.integers(4, 200), st.integers(68, 73)).map(lambda n: n * GIB),
    "count": st.sampled_from([1, 2, 4, 8]),
    "context": st.integers(1, 140_000),
    "users": st.integers(1, 300),
}


def gpu(memory: int) -> gpus.GPU:
    return gpus.GPU("a GPU", "nvidia", memory / 1e9, 1000.0, memory_bytes=memory)


def lies(model, name, memory, count, context, users=1):
    return fits(SHAPES[model], RECIPES[name], gpu(memory), count, context, users)


@settings(max_examples=60, deadline=None)
@given(**cases, more=st.integers(1, 8 * GIB))
def test_more_memory_never_makes_a_format_unfit(model, name, memory, count, context, users, more):
    before = lies(model, name, memory, count, context, users)
    after = lies(model, name, memory + more, count, context, users)
    assert after.kv_tokens >= before.kv_tokens
    assert after.fits or not before.fits


@settings(max_examples=60, deadline=None)
@given(**cases, longer=st.integers(1, 100_000))
def test_a_longer_context_never_raises_the_number_of_users(
    model, name, memory, count, context, users, longer
):
    before = lies(model, name, memory, count, context, users)
    after = lies(model, name, memory, count, context + longer, users)
    assert after.users <= before.users
    assert before.fits or not after.fits


@settings(max_examples=60, deadline=None)
@given(**cases)
def test_more_gpus_never_reduce_what_the_cache_holds(model, name, memory, count, context, users):
    assume(count > 1)
    before = lies(model, name, memory, count // 2, context, users)
    after = lies(model, name, memory, count, context, users)
    assert after.kv_tokens >= before.kv_tokens
    assert after.weight_bytes <= before.weight_bytes


@settings(max_examples=60, deadline=None)
@given(**cases)
def test_the_parts_fill_the_memory_and_no_more(model, name, memory, count, context, users):
    fit = lies(model, name, memory, count, context, users)
    if fit.kv_bytes:
        assert fit.weight_bytes + fit.overhead_bytes + fit.kv_bytes == fit.usable_bytes
    assert fit.users * fit.user_bytes <= fit.kv_bytes < (fit.users + 1) * fit.user_bytes or (
        fit.kv_bytes == 0 == fit.users
    )
    assert fit.fits is (fit.reason == "")


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_one_gpu_holds_the_checkpoint_and_several_hold_all_of_it(name):
    model, recipe = SHAPES["8B"], RECIPES[name]
    whole = model.size_bytes if recipe is None else weight_bytes(model, recipe)
    assert bytes_per_gpu(model, recipe, 1) == whole
    for count in (2, 4, 8):
        # Norms and some scales are on every GPU; of whole layers one may get one more.
        most = 1.01 if name != "gguf-q4_k_m" else 1 + 0.2 * (count - 1)
        assert whole <= count * bytes_per_gpu(model, recipe, count) < most * whole


def test_norms_and_key_heads_are_copied_where_they_cannot_be_cut():
    model = shape.from_config(LLAMA_8B | {"num_key_value_heads": 2}, "two key heads")
    hidden, inner, layers, words = 4096, 14336, 32, 128256
    block = 2 * hidden * hidden // 4 + 2 * 128 * hidden + 3 * hidden * inner // 4 + 2 * hidden
    assert bytes_per_gpu(model, None, 4) == 2 * (layers * block + hidden + 2 * words // 4 * hidden)


def test_the_cache_of_llama_3_8b_is_what_vllm_logs():
    # vllm-project/vllm pull request 10511: 79.22 GiB, 0.9 of it, weights 14.96, left 53.29.
    fit = fits(SHAPES["8B"], None, gpu(int(79.22 * GIB)))
    assert fit.weight_bytes / GIB == pytest.approx(14.96, abs=0.01)
    assert fit.kv_bytes / GIB == pytest.approx(53.29, rel=0.03)
    # 128 KiB a token, so 8,192 of them are one GiB.
    assert fit.user_bytes == GIB
    assert fit.users == fit.kv_bytes // GIB


@pytest.mark.parametrize(
    ("changed", "count", "word"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128}, 8, "12 heads"),
        ({"num_attention_heads": 24, "num_key_value_heads": 6, "head_dim": 128}, 4, "6 key heads"),
        ({"intermediate_size": 14338}, 4, "MLP of 14338"),
        ({"intermediate_size": 1536}, 8, "between its scales"),
        (  # as Phi 3 medium on 5 GPUs: 32,011 words are padded to 32,064
            {"num_attention_heads": 40, "num_key_value_heads": 10, "head_dim": 128}
            | {"intermediate_size": 17920, "vocab_size": 32011},
            5,
            "a vocabulary of 32064",
        ),
    ],
)
def test_what_gpus_cannot_share_does_not_fit_and_says_why(changed, count, word):
    model = shape.from_config(LLAMA_8B | changed, "odd")
    recipe = load("rtn-w4a16") if "scales" in word else None
    fit = fits(model, recipe, gpu(80 * GIB), count)
    assert not fit.fits
    assert word in fit.reason


def test_refusals_name_the_numbers():
    assert "weights take" in lies("70B", "unquantised", 24 * GIB, 1, 1024).reason
    reason = lies("8B", "fp8-dynamic", 24 * GIB, 1, 65536, users=50).reason
    assert "of 50 users," in reason


def test_a_cache_in_fp8_serves_twice_the_users():
    plain, small = (lies("8B", name, 24 * GIB, 1, 4096) for name in ("int8-w8a8", NAMES[2]))
    assert small.user_bytes * 2 == plain.user_bytes
    assert small.users in (2 * plain.users, 2 * plain.users + 1)


@pytest.mark.parametrize(
    ("size", "like", "layers"),
    [("1B", "Llama-3.2-1B", 16), ("3B", "Llama-3.2-3B", 28), ("14B", "Qwen2.5-14B", 48),
     ("7B", "Mistral-7B-v0.3", 32), ("8B", "Llama-3.1-8B", 32), ("70B", "Llama-3.1-70B", 80)],
)  # fmt: skip
def test_a_nominal_size_is_the_model_that_is_called_so(size, like, layers):
    found = shape.of(size)
    assert found.config["num_hidden_layers"] == layers
    assert found.note == f"taken to be like {like} with {layers} layers"


@pytest.mark.parametrize("text", ["70B", "70b", "70 B", "70000M"])
def test_sizes_are_read_in_every_spelling(text):
    found = shape.of(text)
    assert found.assumed
    assert "Llama-3.1-70B" in found.note
    assert found.n_parameters == pytest.approx(70e9, rel=0.02)


@pytest.mark.parametrize("text", ["0.5B", "1B", "2B", "7B", "13B", "34B", "120B", "405B"])
def test_shapes_of_a_size_have_that_size(text):
    assert shape.of(text).n_parameters == pytest.approx(float(text[:-1]) * 1e9, rel=0.25)


@pytest.mark.parametrize("text", ["no such place", "./nowhere", "a/b/c", "7"])
def test_what_is_no_model_is_refused(text):
    with pytest.raises(SourceError, match=re.escape(text)):
        shape.of(text)


def test_a_family_without_formulas_is_refused_by_name():
    with pytest.raises(SourceError, match="mamba"):
        shape.from_config({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, "m")


@pytest.mark.parametrize(
    "changed",
    [
        {"num_hidden_layers": "x"},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": 0},
        {"hidden_size": None},
        {"hidden_size": 3},
        {"num_key_value_heads": "2"},
        {"head_dim": 64.0},
        {"sliding_window": True},
        {"rope_scaling": "linear"},
        {"rope_parameters": [1]},
        {"layer_types": "sliding_attention"},
        {"layer_types": [1, 2]},
        {"kv_lora_rank": 8},
    ],
    ids=str,
)
def test_configs_that_make_no_sense_are_refused_in_words(changed):
    with pytest.raises(SourceError, match="config"):
        fits(shape.from_config(LLAMA_8B | changed, "odd"), None, gpu(80 * GIB))


def test_headers_without_the_numbers_that_memory_needs_are_refused():
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 768}
    with pytest.raises(SourceError, match="no usable hidden_size"):
        shape.from_tensors(gpt2, [], "gpt2")


@pytest.fixture
def on_the_hub(monkeypatch, tmp_path):
    """A model of which the hub gives the config, and headers where there are any."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.setattr(hub, "locate", lambda name, weights: tmp_path)

    def answer(headers):
        def metadata(name):
            if headers is None:
                raise OSError("the hub cannot be reached")
            tensors = {
                key: TensorInfo(dtype="F32", shape=list(size), data_offsets=(0, 0))
                for key, size in headers.items()
            }
            file = SafetensorsFileMetadata(metadata={}, tensors=tensors)
            return SafetensorsRepoMetadata(None, False, {}, {"model.safetensors": file})

        monkeypatch.setattr(huggingface_hub, "get_safetensors_metadata", metadata)
        return shape.of("somebody/something")

    return answer


def test_a_hub_model_is_what_its_headers_say(on_the_hub):
    sizes = {tensor.name: tensor.shape for tensor in SHAPES["8B"].tensors}
    found = on_the_hub(sizes)
    assert found.label == "somebody/something"
    assert {t.name: t.shape for t in found.tensors} == sizes
    assert {t.dtype for t in found.tensors} == {"F32"}
    assert found.architecture.linears == SHAPES["8B"].architecture.linears


def test_a_hub_model_without_headers_is_what_its_config_says(on_the_hub):
    assert on_the_hub(None).tensors == SHAPES["8B"].tensors
