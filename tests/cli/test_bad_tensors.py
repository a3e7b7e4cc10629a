"""Weights that do not fit their config, or are no numbers: refused by name, nothing is left."""

import json

import pytest
import torch

LINEAR = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def stored():
    def read(folder, name):
        from safetensors import safe_open

        with safe_open(folder / "model.safetensors", "pt") as file:
            return file.get_tensor(name).clone()

    return read


@pytest.mark.parametrize("recipe", ["rtn-w4a16", "fp8-dynamic"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [LINEAR, NORM, EMBEDDING, "lm_head.weight"])
def test_no_number(refused, tiny_model, edit_tensors, stored, name, value, recipe):
    folder = tiny_model()
    tensor = stored(folder, name)
    tensor.view(-1)[-1] = value
    edit_tensors(folder, {name: tensor})
    message = refused(folder, recipe=recipe)
    assert f"{name} in {folder / 'model.safetensors'} holds NaN or infinity" in message
    assert "download it again" in message


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_no_number_in_other_types(refused, tiny_model, edit_tensors, stored, dtype):
    folder = tiny_model(dtype=dtype)
    tensor = stored(folder, LINEAR)
    tensor[0, 0] = float("nan")
    assert LINEAR in refused(edit_tensors(folder, {LINEAR: tensor}))


def test_no_number_with_several_recipes(refused, tiny_model, edit_tensors, stored):
    folder = tiny_model()
    tensor = stored(folder, LINEAR)
    tensor[3, 3] = float("nan")
    edit_tensors(folder, {LINEAR: tensor})
    assert LINEAR in refused(folder, "-r", "fp8-dynamic", "-r", "rtn-w8a16")


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"intermediate_size": 512}, "model.layers.0.mlp.gate_proj.weight"),
        ({"vocab_size": 300}, EMBEDDING),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight"),
    ],
)
def test_shapes_that_do_not_match_the_config(refused, tiny_model, edit_config, keys, name):
    folder = edit_config(tiny_model(), **keys)
    message = refused(folder)
    assert f"the weights in {folder} do not fit its config" in message
    assert f"{name} is [" in message
    assert "where config.json says" in message


def test_long_lists_of_problems_are_cut(refused, tiny_model, edit_config):
    message = refused(edit_config(tiny_model(), num_hidden_layers=3))
    assert "model.layers.2.self_attn.q_proj.weight is missing" in message
    assert message.count("is missing") == 3
    assert message.endswith("(and 6 more)")


@pytest.mark.parametrize("name", [LINEAR, NORM, EMBEDDING, "lm_head.weight"])
def test_missing_tensor(refused, tiny_model, edit_tensors, name):
    message = refused(edit_tensors(tiny_model(), {name: None}))
    assert message.endswith(f"do not fit its config: {name} is missing")


def test_a_stray_tensor_of_another_shape_is_no_other_name(refused, tiny_model, edit_tensors):
    message = refused(edit_tensors(tiny_model(), {NORM: None, "model.extra": torch.ones(3)}))
    assert message.endswith(f"do not fit its config: {NORM} is missing")


@pytest.mark.parametrize(
    ("dtype", "code"),
    [(torch.float64, "F64"), (torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")],
)
def test_weights_of_another_type(refused, tiny_model, edit_tensors, stored, dtype, code):
    folder = tiny_model()
    edit_tensors(folder, {LINEAR: stored(folder, LINEAR).to(dtype)})
    assert f"{LINEAR} is {code}, not one of BF16, F16, F32" in refused(folder)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.int64),
        torch.ones(0),
        torch.tensor(1.0),
        torch.ones(2, dtype=torch.bool),
    ],
    ids=["int64", "empty", "scalar", "bool"],
)
def test_tensor_that_the_config_does_not_know_is_copied(
    run_cli, tiny_model, edit_tensors, stored, out, tensor
):
    folder = edit_tensors(tiny_model(), {"model.extra": tensor})
    result = run_cli(["quantize", folder, "-r", "rtn-w4a16", "-o", out])
    assert result.code == 0
    assert "model.extra is not part of the model" in result.stderr
    assert torch.equal(stored(out / "rtn-w4a16", "model.extra"), tensor)


def test_fp8_tensor_that_the_config_does_not_know(refused, tiny_model, edit_tensors):
    folder = edit_tensors(tiny_model(), {"model.extra": torch.ones(2).to(torch.float8_e4m3fn)})
    assert "model.extra is F8_E4M3: part of a quantised model" in refused(folder)


def test_tied_embeddings_that_differ(refused, tiny_model, edit_tensors, stored):
    folder = tiny_model(tied=True)
    edit_tensors(folder, {"lm_head.weight": stored(folder, EMBEDDING) + 1})
    message = refused(folder)
    assert f"ties lm_head.weight to {EMBEDDING}" in message
    assert "set tie_word_embeddings to false" in message


def test_tied_embeddings_stored_twice_are_written_once(
    run_cli, tiny_model, edit_tensors, stored, out
):
    folder = tiny_model(tied=True)
    edit_tensors(folder, {"lm_head.weight": stored(folder, EMBEDDING)})
    assert run_cli(["quantize", folder, "-r", "rtn-w4a16", "-o", out, "-q"]).code == 0
    from safetensors.torch import load_file

    written = load_file(out / "rtn-w4a16" / "model.safetensors")
    assert "lm_head.weight" not in written
    assert torch.equal(written[EMBEDDING], stored(folder, EMBEDDING))


def test_tied_embeddings_of_two_types(refused, tiny_model, edit_tensors, stored):
    folder = tiny_model(tied=True)
    edit_tensors(folder, {"lm_head.weight": stored(folder, EMBEDDING).to(torch.float32) + 1})
    assert "lm_head.weight" in refused(folder)


def test_no_number_in_tied_embeddings_stored_twice(refused, tiny_model, edit_tensors, stored):
    folder = tiny_model(tied=True)
    tensor = stored(folder, EMBEDDING)
    tensor[0, 0] = float("nan")
    edit_tensors(folder, {EMBEDDING: tensor, "lm_head.weight": tensor.clone()})
    assert "NaN" in refused(folder)


@pytest.mark.parametrize("recipe", ["rtn-w4a16", "rtn-w8a16"])
def test_group_size_that_divides_nothing(refused, tiny_model, recipe):
    folder = tiny_model(hidden_size=80, intermediate_size=160)
    message = refused(folder, recipe=recipe)
    assert f"recipe {recipe}: group size auto does not divide the width 80" in message
    assert "model.layers.0.self_attn.q_proj" in message
    assert "strategy channel" in message


def test_channels_take_any_width(run_cli, tiny_model, out):
    folder = tiny_model(hidden_size=80, intermediate_size=160)
    result = run_cli(["quantize", folder, "-r", "fp8-dynamic", "-o", out, "-q", "--json"])
    assert result.code == 0
    assert json.loads(result.stdout)[0]["path"] == str(out / "fp8-dynamic")
