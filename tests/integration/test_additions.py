"""What stands behind a plus: a cache with a scale for each head, and a head of 8 bits."""

import json

import pytest
import torch
from tiny import READABLE, save_llama

from quantkit.errors import RecipeError
from quantkit.model.source import ModelSource
from quantkit.onepass import kvcache
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe, load
from quantkit.scoring import loading
from quantkit.verification.checkpoint import verify

NAMES = ["fp8-dynamic+kv-fp8-head", "fp8-dynamic+kv-fp8", "gptq-w4a16+head-int8"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    save_llama(folder, **READABLE)
    return ModelSource.open(str(folder))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("made")
    (out / "text.txt").write_text("Rain falls on the roof, and the cat sleeps until noon. " * 40)
    data = CalibrationChoice(str(out / "text.txt"), 4, 64)
    recipes = [Recipe.load(name) for name in NAMES]
    return dict(zip(NAMES, quantize(source, recipes, out, "cpu", calibration=data), strict=True))


def test_every_head_has_the_scale_of_its_own_largest(made):
    by_head, whole = (made[name].kv_scales for name in NAMES[:2])
    assert by_head.keys() == whole.keys()
    differ = 0
    for name, tensor in by_head.items():
        heads = tensor.read()
        assert heads.shape == (2, 1, 1)
        assert torch.equal(heads.amax().reshape(1), whole[name].read())
        differ += heads[0].item() != heads[1].item()
    assert differ
    config = json.loads((made[NAMES[0]].folder / "config.json").read_text())
    assert config["quantization_config"]["kv_cache_scheme"]["strategy"] == "attn_head"


@pytest.mark.parametrize("name", NAMES)
def test_they_pass_verification(made, source, name):
    assert not verify(made[name].folder, source).faults


def test_scoring_rounds_each_head_by_its_scale(made):
    checkpoint = made[NAMES[0]]
    model = loading.load(checkpoint, torch.device("cpu"))
    seen = []
    attention = model.model.layers[0].self_attn

    def see(keys, values):
        seen.append(keys)
        return keys, values

    handle = kvcache.intercept(attention, see)
    attention._forward_pre_hooks.move_to_end(handle.id, last=False)  # behind the rounding
    with torch.no_grad():
        model(torch.arange(12)[None])
    (keys,) = seen
    scale = checkpoint.kv_scales["model.layers.0.self_attn.k_scale"].read().float()
    codes = keys.float() / scale
    torch.testing.assert_close(codes, codes.to(torch.float8_e4m3fn).float(), rtol=0.01, atol=1e-3)


def test_the_head_is_in_eight_bits_and_the_rest_in_four(made):
    checkpoint = made["gptq-w4a16+head-int8"]
    recipe = checkpoint.manifest.weights_recipe
    assert recipe.part("lm_head").weights.num_bits == 8
    assert recipe.part("model.layers.0.mlp.up_proj").weights.num_bits == 4
    assert checkpoint.manifest.layers["lm_head"].relative_error < 0.02
    config = json.loads((checkpoint.folder / "config.json").read_text())["quantization_config"]
    assert "lm_head" not in config["ignore"]
    assert [group["targets"] for group in config["config_groups"].values()][-1] == [
        "re:(.*\\.)?lm_head$"
    ]


def test_what_cannot_be_is_refused(tiny_model, tmp_path):
    tied = ModelSource.open(str(tiny_model(tied=True)))
    with pytest.raises(RecipeError, match="lm_head"):
        quantize(tied, [load("rtn-w4a16+head-int8")], tmp_path, "cpu")
    with pytest.raises(RecipeError, match="already"):
        load("rtn-w4a16+head-int8+head-int8")
    with pytest.raises(RecipeError, match="kv-fp8"):
        load("fp8-static+kv-fp8-head").in_format("fp8")
    with pytest.raises(RecipeError, match="llama"):
        load("gguf-q8_0+head-int8")
