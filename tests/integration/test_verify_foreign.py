"""`verify` on checkpoints that others made: sound ones pass, each known damage is named."""

import shutil

import pytest
import torch
from foreign import by_library, changed, configured, disowned, in_mxfp4, save_gpt_oss
from tiny import READABLE, save_llama, with_tokenizer

import quantkit
from quantkit.model.source import read_tensors

PRESETS = ["W4A16", "W4A16_ASYM", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "MXFP4"]
LAYOUTS = [("rtn-w4a16", "gptq"), ("rtn-w4a16", "awq"), ("fp8-block", "fp8")]
DOWN = "model.layers.0.mlp.down_proj"
QUERY = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    return save_llama(folder, **READABLE | {"num_key_value_heads": 4})


@pytest.fixture(scope="module")
def library(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("library")
    return {preset: by_library(model, out / preset, preset)[0] for preset in PRESETS}


@pytest.fixture(scope="module")
def layouts(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("layouts")
    found = {}
    for recipe, form in LAYOUTS:
        (made,) = quantkit.quantize(
            model, [recipe], out=out / f"ours-{form}", format=form, device="cpu"
        )
        found[form] = disowned(made.folder, out / form)
    return found


@pytest.mark.parametrize("preset", PRESETS)
def test_what_the_library_wrote_is_sound(model, library, preset):
    alone = quantkit.verify(library[preset])
    assert alone.faults == []
    assert any("give it with --source" in words for words in alone.left_out)
    found = quantkit.verify(library[preset], source=model)
    assert found.faults == []
    assert len(found.worst) == 5
    assert quantkit.predict(library[preset], version="0.26", gpu="H200").faults == []


@pytest.mark.parametrize("form", ["gptq", "awq", "fp8"])
def test_known_layouts_are_sound(model, layouts, form, run_cli):
    result = run_cli(["verify", layouts[form], "--source", model])
    assert result.code == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "verdict: sound"


def spoilt(folder, name, value):
    """A copy of a tensor with one number replaced."""
    tensor = read_tensors(folder)[name].read().clone()
    tensor.view(-1)[3] = value
    return tensor


def missing(made, folder):
    return changed(made, folder, **{f"{DOWN}.weight_scale": None})


def not_a_number(made, folder):
    name = f"{DOWN}.weight_scale"
    return changed(made, folder, **{name: spoilt(made, name, float("nan"))})


def negative(made, folder):
    name = f"{DOWN}.weight_scale"
    return changed(made, folder, **{name: spoilt(made, name, -1.0)})


def truncated(made, folder):
    shutil.copytree(made, folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return folder


def other_prefix(made, folder):
    shutil.copytree(made, folder)
    return configured(folder, ignore=["language_model.lm_head"])


def unlike(made, folder):
    """The query projection in 16 bits, as its neighbours are not."""
    stored = read_tensors(made)
    parts = [name for name in stored if name.startswith(f"{QUERY}.")]
    weight = torch.randn(128, 128, dtype=torch.bfloat16)
    changed(made, folder, **dict.fromkeys(parts), **{f"{QUERY}.weight": weight})
    return configured(folder, ignore=["lm_head", QUERY])


def other_groups(made, folder):
    shutil.copytree(made, folder)
    from json import loads

    section = loads((folder / "config.json").read_bytes())["quantization_config"]
    section["config_groups"]["group_0"]["weights"]["group_size"] = 64
    return configured(folder, **section)


DAMAGE = [
    (missing, f"{DOWN}.weight_scale is missing"),
    (not_a_number, f"{DOWN}.weight_scale: 1 of 256 scales is NaN"),
    (negative, f"{DOWN}.weight_scale: 1 of 256 scales is negative"),
    (truncated, "is truncated or corrupt"),
    (other_prefix, "`ignore` has language_model.lm_head, which is not a module of this model"),
    (unlike, "different schemes: q_proj in 16 bits, k_proj W4A16 g128"),
    (other_groups, f"{DOWN}.weight_scale is [128, 2], W4A16 g64 needs [128, 4]"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE, ids=[d.__name__ for d, _ in DAMAGE])
def test_damage_is_named_and_exits_with_1(library, tmp_path, damage, words, run_cli):
    result = run_cli(["verify", damage(library["W4A16"], tmp_path / "broken")])
    assert result.code == 1
    assert words in " ".join(result.stdout.split())
    assert result.stdout.splitlines()[-1] == "verdict: wrong"


def test_one_bad_layer_stands_out(model, library, tmp_path):
    name = f"{DOWN}.weight_scale"
    scale = read_tensors(library["FP8_DYNAMIC"])[name].read()
    broken = changed(library["FP8_DYNAMIC"], tmp_path / "broken", **{name: scale * 1.09})
    assert quantkit.verify(broken).faults == []
    (fault,) = quantkit.verify(broken, source=model).faults
    assert fault.startswith(f"weights: {DOWN} is 0.09")
    assert "times as much as layers of FP8 per channel are here" in fault


def test_zero_scales_are_damage_in_wide_types_only():
    from quantkit.verification.foreign import impossible

    zero = torch.zeros(2)
    assert impossible(zero) == "2 of 2 scales are zero"
    assert impossible(zero.to(torch.float8_e4m3fn)) == ""
    assert impossible(torch.tensor([1e-40])) == "1 of 1 scales is denormal"
    assert impossible(torch.tensor([255], dtype=torch.uint8)) == "1 of 1 scales is NaN (E8M0)"
    nan = torch.tensor([float("nan")]).to(torch.float8_e4m3fn)
    assert impossible(nan) == "1 of 1 scales is NaN"


def test_what_cannot_be_checked_exits_with_3(layouts, tmp_path, run_cli):
    folder = shutil.copytree(layouts["awq"], tmp_path / "unknown")
    result = run_cli(["verify", configured(folder, quant_method="aqlm")])
    assert result.code == 3
    assert "quantised by aqlm, which quantkit does not read" in " ".join(result.stderr.split())


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpt-oss")
    source = with_tokenizer(save_gpt_oss(out / "source"))
    return source, in_mxfp4(source, out / "mxfp4")


def test_experts_of_gpt_oss_are_held_against_the_source(gpt_oss):
    source, made = gpt_oss
    found = quantkit.verify(made, source=source)
    assert (found.faults, found.left_out) == ([], [])
    assert ".mlp.experts." in found.worst[0][0]
    assert 0.05 < found.worst[0][1] < 0.15


EXPERTS = "model.layers.1.mlp.experts"


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("down_proj_scales", None, "is missing"),
        ("down_proj_blocks", None, "is missing"),
        ("gate_up_proj_bias", None, "is missing"),
        ("gate_up_proj_scales", slice(0, 64), "is [4, 64, 8], mxfp4 needs [4, 512, 8]"),
        ("gate_up_proj_scales", 0xFF, "1 of 16,384 scales is NaN (E8M0)"),
    ],
)
def test_damaged_experts_of_gpt_oss_are_named(gpt_oss, tmp_path, part, value, words):
    name = f"{EXPERTS}.{part}"
    tensor = read_tensors(gpt_oss[1])[name].read().clone()
    if isinstance(value, int):
        tensor.view(-1)[5] = value
    elif value is not None:
        tensor = tensor[:, value].contiguous()
    broken = changed(gpt_oss[1], tmp_path / "x", **{name: None if value is None else tensor})
    faults = quantkit.verify(broken).faults
    assert any(name in fault and words in fault for fault in faults), faults


def test_a_wrong_expert_of_gpt_oss_stands_out(gpt_oss, tmp_path):
    source, made = gpt_oss
    name = f"{EXPERTS}.down_proj_scales"
    scales = read_tensors(made)[name].read().clone()
    scales[2] += 1
    broken = changed(made, tmp_path / "x", **{name: scales})
    assert quantkit.verify(broken).faults == []
    (fault,) = quantkit.verify(broken, source=source).faults
    assert f"{EXPERTS}.2.down_proj" in fault
