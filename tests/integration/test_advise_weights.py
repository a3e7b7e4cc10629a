"""Bytes of a checkpoint foretold from a shape are those that plans and runs come to."""

import contextlib
import json
import subprocess
import sys

import pytest
import torch
import transformers
from families import FAMILIES, SMALL, make_source

from quantkit import resources
from quantkit.advise import parallel
from quantkit.advise import shape as shapes
from quantkit.advise.weights import weight_bytes
from quantkit.errors import QuantkitError, RecipeError, SourceError
from quantkit.formats import FORMATS
from quantkit.gguf import plan as gguf_plan
from quantkit.gguf.layout import Layout
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.plan import checkpoint as planning
from quantkit.recipe import GGUFRecipe, load

RECIPES = [load(name) for name in resources.names("recipes")]
RECIPES += [load(f"{r.name}+kv-fp8") for r in RECIPES if not isinstance(r, GGUFRecipe)]
for recipe in [r for r in RECIPES if not isinstance(r, GGUFRecipe)]:
    for format in FORMATS[1:]:
        with contextlib.suppress(RecipeError):
            RECIPES.append(recipe.in_format(format))
UNTIED = {**SMALL, "tie_word_embeddings": False}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    "long_factor": [1.5] * 8, "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 128,
}  # fmt: skip
ODD = {
    "llama with biases": transformers.LlamaConfig(**UNTIED, attention_bias=True, mlp_bias=True),
    "llama tied, narrow, rotary factors": transformers.LlamaConfig(
        **SMALL | {"hidden_size": 96, "intermediate_size": 320}, tie_word_embeddings=True,
        rope_parameters=LLAMA3,
    ),
    "llama of blocks of 128": transformers.LlamaConfig(
        **SMALL | {"head_dim": 128, "num_hidden_layers": 9, "intermediate_size": 512}
    ),
    "qwen3 with biases": transformers.Qwen3Config(**UNTIED, attention_bias=True),
    "granite with biases": transformers.GraniteConfig(**UNTIED, attention_bias=True, mlp_bias=True),
    "phi3 with factors": transformers.Phi3Config(
        **{k: v for k, v in SMALL.items() if k != "head_dim"}, rope_parameters=LONG,
        original_max_position_embeddings=128,
    ),
    "gemma2 as llama.cpp knows it": transformers.Gemma2Config(**SMALL, query_pre_attn_scalar=32),
    "gemma3 as llama.cpp knows it": transformers.Gemma3TextConfig(
        **SMALL, query_pre_attn_scalar=32
    ),
    "gemma2 untied": transformers.Gemma2Config(**UNTIED, sliding_window=16),
}  # fmt: skip
EVERY = FAMILIES | ODD


@pytest.fixture(scope="module", params=EVERY)
def source(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return make_source(request.param.split()[0], folder, EVERY[request.param])[1]


def outcome(action):
    """What comes out: bytes, or the kind of a refusal."""
    try:
        return action()
    except QuantkitError as error:
        return type(error)


def test_bytes_are_those_of_the_plan_in_every_family_and_recipe(source):
    architecture = Architecture.of(source.folder)
    stored = architecture.stored(source)
    by_headers = shapes.of(str(source.folder))
    by_config = shapes.of(str(source.folder / "config.json"))
    kept = {tensor.name for tensor in stored}  # a tied head is a layer without a tensor
    assert by_headers.architecture.linears == {
        name: size for name, size in architecture.linears.items() if f"{name}.weight" in kept
    }
    assert list(by_headers.architecture.attentions) == architecture.attentions
    assert {(t.name, t.dtype, t.shape) for t in by_config.tensors} == {
        (t.name, t.dtype, t.shape) for t in stored
    }
    layout = outcome(lambda: Layout.of(source))
    counted = 0
    for recipe in RECIPES:
        for importance in (False, True) if isinstance(recipe, GGUFRecipe) else (False,):
            if isinstance(recipe, GGUFRecipe):
                planned = layout  # or a refusal
                if isinstance(layout, Layout):
                    planned = gguf_plan.make(layout, recipe, importance).size_bytes
            else:
                planned = outcome(
                    lambda r=recipe: planning.make(architecture, stored, r).size_bytes
                )
            for shape in (by_headers, by_config):
                told = outcome(lambda s=shape, r=recipe, i=importance: weight_bytes(s, r, i))
                assert told == planned, (recipe.name, importance)
            counted += isinstance(planned, int)
    assert counted >= 16


def test_bytes_are_those_of_checkpoints_really_written(run_cli, short_demo, tmp_path):
    names = ["awq-w4a16", "fp8-block", "fp8-static+kv-fp8", "gguf-q4_0", "gguf-q4_k_m"]
    text = tmp_path / "text.txt"
    text.write_text("Rain falls on the roof, and the cat sleeps until noon. " * 60)
    model = str(short_demo.folder)
    command = ["quantize", model, "-o", tmp_path / "out", "--calibration", text, "--quiet"]
    command += ["--samples", 4, "--length", 32, *(part for n in names for part in ("-r", n))]
    result = run_cli(command)
    assert result.code == 0, result.stderr
    for name in names:
        manifest = json.loads((tmp_path / "out" / name / "quantkit.json").read_text())
        told = weight_bytes(shapes.of(model), load(name), has_importance=True)
        assert told == manifest["size_bytes"], name


def test_configs_as_older_versions_wrote_them_tell_the_same(tmp_path):
    _, source = make_source("llama", tmp_path, ODD["llama tied, narrow, rotary factors"])
    old = json.loads((tmp_path / "config.json").read_text())
    rope = old.pop("rope_parameters")
    old["rope_theta"] = rope.pop("rope_theta")
    old["rope_scaling"] = {**rope, "type": rope.pop("rope_type")}
    old["torch_dtype"] = old.pop("dtype")
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    recipe = load("gguf-q4_k_m")
    planned = gguf_plan.make(Layout.of(ModelSource.open(str(tmp_path))), recipe, False).size_bytes
    assert weight_bytes(shapes.of(str(path)), recipe) == planned
    assert source.size_bytes == shapes.of(str(path)).size_bytes


@pytest.mark.parametrize("kind", ["Qwen2Moe", "Qwen3Moe"])
def test_experts_are_layers_and_routers_are_not(kind, tmp_path):
    few = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = getattr(transformers, f"{kind}Config")(**SMALL, **few)
    transformers.AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(
        tmp_path
    )
    source, architecture = ModelSource.open(str(tmp_path)), Architecture.of(tmp_path)
    shape = shapes.of(str(tmp_path))
    assert shape.architecture.linears == architecture.linears
    assert set(shape.routers) == set(architecture.routers)
    for name in ("rtn-w4a16", "fp8-dynamic+kv-fp8"):
        plan = planning.make(architecture, architecture.stored(source), load(name))
        assert weight_bytes(shape, load(name)) == plan.size_bytes


def test_an_answer_takes_no_torch():
    code = (
        "import sys; from quantkit.advise import memory, shape\n"
        "from quantkit.hardware import gpus\n"
        "from quantkit.recipe import load\n"
        "for r in ('awq-w4a16+kv-fp8', 'gguf-q4_k_m'):\n"
        "    assert memory.fits(shape.of('70B'), load(r), gpus.find('H100')).fits\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


MIXED = SMALL | {"num_experts_per_tok": 2}
MIXTURES = {
    "mixtral": transformers.MixtralConfig(**MIXED, num_local_experts=4),
    "olmoe": transformers.OlmoeConfig(**MIXED, num_experts=4),
    "qwen2_moe": transformers.Qwen2MoeConfig(
        **MIXED, num_experts=4, moe_intermediate_size=64, shared_expert_intermediate_size=96
    ),
    "qwen3_moe": transformers.Qwen3MoeConfig(**MIXED, num_experts=4, moe_intermediate_size=64),
    "qwen3_moe, every second block": transformers.Qwen3MoeConfig(
        **MIXED, num_experts=4, moe_intermediate_size=64, decoder_sparse_step=2
    ),
    "qwen3_moe, one block without": transformers.Qwen3MoeConfig(
        **MIXED, num_experts=4, moe_intermediate_size=64, mlp_only_layers=[0]
    ),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_follows_from_its_config(tmp_path, name):
    model = transformers.AutoModelForCausalLM.from_config(MIXTURES[name])
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    stored, told = shapes.of(str(tmp_path)), shapes.of(str(tmp_path / "config.json"))
    assert {(t.name, t.shape) for t in told.tensors} == {(t.name, t.shape) for t in stored.tensors}
    assert set(told.routers) == set(stored.routers)
    assert parallel.n_experts(told) == parallel.n_experts(stored) == 4
    for recipe in ("fp8-dynamic", "gptq-w4a16"):
        assert weight_bytes(told, load(recipe)) == weight_bytes(stored, load(recipe))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"num_experts": 10**9}, "number of experts"),
        ({"num_experts": "many"}, "num_experts"),
        ({"num_experts": 0, "num_local_experts": 0}, "number of experts"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers"),
        ({"decoder_sparse_step": 1.5}, "decoder_sparse_step"),
        ({"num_experts_per_tok": "8"}, "num_experts_per_tok"),
    ],
)
def test_a_mixture_whose_numbers_are_none_is_refused(changed, said):
    config = MIXTURES["qwen3_moe"].to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    with pytest.raises(SourceError, match=f"no usable .*{said}"):
        shapes.from_config(config | changed, "odd")
