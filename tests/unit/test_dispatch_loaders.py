"""What vLLM's loaders of single families read, foretold from config and headers."""

import pytest

from quantkit import formats
from quantkit.dispatch import prediction
from quantkit.recipe import Recipe
from quantkit.tensorspec import TensorSpec

WIDTH = 256


def faults(config, layers, version, recipe="rtn-w4a16"):
    """Rules that a checkpoint of these layers breaks, and how."""
    chosen, _ = Recipe.load(recipe).resolved({name: shape[1] for name, shape in layers.items()})
    specs = [
        part
        for name, shape in layers.items()
        for part in formats.specs(name, TensorSpec(f"{name}.weight", "BF16", shape), chosen)
    ]
    whole = {**config, "quantization_config": formats.config(chosen, ["lm_head"])}
    told = prediction.of_tensors(whole, specs, version)
    return {one.rule.id: one.consequence for one in told.faults}


def experts(*names):
    block = "model.layers.0.block_sparse_moe.experts"
    return {f"{block}.{e}.{name}": (WIDTH, WIDTH) for e in range(2) for name in names}


@pytest.mark.parametrize(
    ("kind", "layers", "version", "broken"),
    [
        ("lfm2", {"model.layers.0.conv.in_proj": (768, WIDTH)}, "0.26", "plain-mixer"),
        ("lfm2_moe", {"model.layers.0.conv.out_proj": (WIDTH, WIDTH)}, "0.27", "plain-mixer"),
        ("lfm2", {"model.layers.0.conv.in_proj": (768, WIDTH)}, "0.28", None),
        (
            "jamba",
            dict.fromkeys(
                ("model.layers.0.mamba.in_proj", "model.layers.0.mamba.x_proj"), (WIDTH, WIDTH)
            ),
            "0.32",
            "plain-mixer",
        ),
        ("bamba", {"model.layers.0.mamba.in_proj": (WIDTH, WIDTH)}, "0.32", None),
        ("granitemoehybrid", experts("gate_proj", "up_proj", "down_proj"), "0.28", True),
        ("granitemoehybrid", experts("gate_proj", "up_proj", "down_proj"), "0.29", None),
        ("granitemoehybrid", experts("w1", "w2", "w3"), "0.32", True),
        ("granitemoe", experts("w1", "w2", "w3"), "0.26", None),
    ],
)
def test_layers_that_a_loader_does_not_take_are_foretold(kind, layers, version, broken):
    found = faults({"model_type": kind}, layers, version)
    wanted = {"granite-experts" if broken is True else broken: "refuses"} if broken else {}
    assert found == wanted


@pytest.mark.parametrize(
    ("recipe", "version", "broken"),
    [
        ("rtn-w4a16", "0.26", True),
        ("rtn-w4a16", "0.32", False),
        ("fp8-dynamic", "0.26", False),
        ("int8-w8a8", "0.31", False),
    ],
)
def test_rows_that_are_sorted_by_head(recipe, version, broken):
    layers = {"gpt_neox.layers.0.attention.query_key_value": (3 * WIDTH, WIDTH)}
    config = {"model_type": "gpt_neox", "hidden_size": WIDTH}
    wanted = {"neox-rows": "refuses"} if broken else {}
    assert faults(config, layers, version, recipe) == wanted


@pytest.mark.parametrize(("version", "how"), [("0.26", "refuses"), ("0.32", "garbage")])
def test_experts_of_gpt_oss_are_read_in_one_form(version, how):
    layers = {
        f"model.layers.0.mlp.experts.{e}.{name}": (WIDTH, WIDTH)
        for e in range(2)
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    assert faults({"model_type": "gpt_oss"}, layers, version) == {"gpt-oss-experts": how}


@pytest.mark.parametrize(
    ("kinds", "version", "broken"),
    [(None, "0.29", True), (None, "0.30", False), (["hash_moe", "moe"], "0.32", True)],
)
def test_deepseek_v4_is_read_as_published(kinds, version, broken):
    config = {"model_type": "deepseek_v4", "mlp_layer_types": kinds}
    found = faults(config, {"layers.0.attn.wo_a": (WIDTH, WIDTH)}, version)
    assert found == ({"deepseek-v4": "refuses"} if broken else {})


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        ({"model_type": "qwen3_next"}, {"model.layers.0.self_attn.q_proj": (512, WIDTH)}),
        ({"model_type": "hy_v3"}, {"model.layers.0.mlp.shared_mlp.gate_proj": (128, WIDTH)}),
        (
            {"model_type": "gemma4_text", "per_layer_config": {"0": {"head_dim": 512}}},
            {"model.layers.0.self_attn.q_proj": (2048, WIDTH)},
        ),
        (
            {"model_type": "zamba2", "attention_head_dim": 128},
            {"model.layers.0.shared_transformer.self_attn.k_proj": (512, WIDTH)},
        ),
    ],
)
def test_sizes_that_families_have_are_no_fault(config, layers):
    sizes = {
        "hidden_size": WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 512, "num_hidden_layers": 1,
    }  # fmt: skip
    assert faults(sizes | config, layers, "0.26") == {}
    if config["model_type"] == "qwen3_next":  # and others have no gate
        assert faults(sizes | {"model_type": "qwen3"}, layers, "0.26") == {
            "config-shape": "refuses"
        }


@pytest.mark.parametrize("name", ["gpt_neox.embed_in", "model.embed_tokens_per_layer"])
def test_embeddings_of_any_name_are_no_layers(name):
    layer = "model.layers.0.mlp.down_proj"
    chosen, _ = Recipe.load("rtn-w4a16").resolved({layer: WIDTH})
    specs = formats.specs(layer, TensorSpec(f"{layer}.weight", "BF16", (WIDTH, WIDTH)), chosen)
    specs.append(TensorSpec(f"{name}.weight", "BF16", (4096, WIDTH)))
    config = {"quantization_config": formats.config(chosen, ["lm_head"])}
    assert prediction.of_tensors(config, specs, "0.26").faults == []


def test_families_that_are_gone_and_configs_of_another_form():
    layers = {"model.layers.0.mlp.down_proj": (WIDTH, WIDTH)}
    gone = {"model_type": "bamba", "architectures": ["BambaForCausalLM"]}
    assert faults(gone, layers, "0.23") == {}
    assert faults(gone, layers, "0.24") == {"family-gone": "refuses"}
    new = {"model_type": "muse_glimmer", "architectures": ["MuseGlimmerForConditionalGeneration"]}
    assert faults(new, layers, "0.26") == {"family-new": "garbage"}
    assert faults(new, layers, "0.28") == {}
    rope = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}
    laguna = {"model_type": "laguna", "rope_parameters": rope}
    assert faults(laguna, layers, "0.26") == {"laguna-rope": "refuses"}
    assert faults(laguna, layers, "0.32") == {}
    assert faults(laguna | {"rope_parameters": {"rope_theta": 1e4}}, layers, "0.26") == {}
