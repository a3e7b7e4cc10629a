"""`convert --repair`: what is mechanical is mended and listed, and numbers stay what they are."""

import json

import pytest
import torch
import wild
from tiny import READABLE, save_llama

import quantkit
from quantkit import opening
from quantkit.formats import packing
from quantkit.model.source import read_tensors

MENDED = {
    "wrong-prefix": "compressed-tensors",
    "ignored-container": "compressed-tensors",
    "unknown-key": "compressed-tensors",
    "padded-3-bit": "compressed-tensors",
    "global-scales": "compressed-tensors",
    "plain-in-fp8": "compressed-tensors",
    "gptq-without-desc-act": "gptq",
    "undeclared-act-order": "gptq",
}
"""Broken checkpoints that are whole afterwards."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("repair")
    sizes = {"hidden_size": 256, "num_key_value_heads": 2, "head_dim": 64}
    source = save_llama(out / "source", **READABLE | sizes)
    names = {*MENDED, "W4A16", "NVFP4", "w3a16"}
    return {c.name: c for c in wild.make(out / "corpus", source, lambda name: name in names)}


def stored(folder):
    return {name: tensor.read() for name, tensor in read_tensors(folder).items()}


def same(one, other):
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("name", "form"), MENDED.items())
def test_broken_ones_are_whole_afterwards(corpus, tmp_path, name, form, run_cli):
    folder = corpus[name].folder
    assert not quantkit.predict(folder, version="0.26").ok
    out = tmp_path / "mended"
    result = run_cli(["convert", folder, "--to", form, "--repair", "-o", out])
    assert result.code == 0, result.stderr
    assert quantkit.predict(out, version="0.26").faults == []
    assert quantkit.verify(out, read_weights=False).faults == []
    record = json.loads((out / "repaired.json").read_text())
    assert record["exact"]
    assert record["changes"]
    before, after = stored(folder), stored(out)
    touched = {one["where"] for one in record["changes"]}
    for tensor, value in after.items():
        if name != "global-scales" and tensor not in touched:
            assert same(before[tensor], value), tensor


def test_dense_integers_are_those_that_were_padded(corpus, tmp_path, run_cli):
    out = tmp_path / "mended"
    folder = corpus["padded-3-bit"].folder
    run_cli(["convert", folder, "--to", "compressed-tensors", "--repair", "-o", out])
    sound, after = stored(corpus["w3a16"].folder), stored(out)
    for name, value in sound.items():
        assert same(value, after[name]), name
    packed = after[f"{wild.DOWN}.weight_packed"]
    columns = int(after[f"{wild.DOWN}.weight_shape"][1])
    assert packing.unpack(packed, 3, columns).abs().max() <= 4


def test_other_widths_are_read_dense_and_padded(corpus):
    """The same numbers, however they are packed, and near to the source's."""
    dense, padded = (
        opening.find(str(corpus[name].folder), None, False) for name in ("w3a16", "padded-3-bit")
    )
    for name in dense.tensors:
        assert torch.equal(dense.read(name), padded.read(name)), name
    values = dense.read(f"{wild.DOWN}.weight")
    assert values.shape == (256, 256)
    assert quantkit.verify(corpus["w3a16"].folder).faults == []


def test_global_scales_are_made_equal_without_a_number_changing(corpus, tmp_path, run_cli):
    out = tmp_path / "mended"
    folder = corpus["global-scales"].folder
    run_cli(["convert", folder, "--to", "compressed-tensors", "--repair", "-o", out])
    before, after = stored(folder), stored(out)
    for name in [n for n in before if n.endswith(".weight_packed")]:
        module = name.removesuffix(".weight_packed")
        assert same(before[name], after[name])
        values = [
            (kept[f"{module}.weight_scale"].float() / kept[f"{module}.weight_global_scale"])
            for kept in (before, after)
        ]
        assert torch.equal(*values), module


def test_what_would_be_rounded_needs_leave_and_tells_its_error(corpus, tmp_path, run_cli):
    from foreign import changed

    made = corpus["NVFP4"].folder
    name = wild.QUERY.replace("q_proj", "k_proj")
    whole = stored(made)[f"{name}.weight_global_scale"]
    odd = changed(made, tmp_path / "odd", **{f"{name}.weight_global_scale": whole * 1.3})
    asked = ["convert", odd, "--to", "compressed-tensors", "--repair", "-o", tmp_path / "out"]
    refused = run_cli(asked)
    assert refused.code == 3
    assert "--allow-rounding" in refused.stderr
    result = run_cli([*asked, "--allow-rounding", "--json"])
    assert result.code == 0, result.stderr
    told = json.loads(result.stdout)
    assert not told["exact"]
    (change,) = told["changes"]
    assert change["where"] == f"{name}.weight_global_scale"
    assert 0 < change["error"] < 0.05


def test_what_is_sound_ours_or_in_another_format_is_refused(corpus, tmp_path, run_cli):
    sound = corpus["W4A16"].folder
    result = run_cli(["convert", sound, "--to", "compressed-tensors", "--repair"])
    assert result.code == 3
    assert "has nothing to repair" in result.stderr
    result = run_cli(["convert", sound, "--to", "gptq", "--repair"])
    assert result.code == 3
    assert "--repair keeps the format" in result.stderr
    assert run_cli(["convert", sound, "--to", "gptq", "--allow-rounding"]).code == 2


def together(made, folder):
    """The experts of each block in one tensor, gate above up, as transformers 5 holds them."""
    import re

    from foreign import changed

    held, parts = stored(made), {}
    for name in held:
        if match := re.match(r"(.*\.experts)\.(\d+)\.(\w+)\.(\w+)$", name):
            block, index, layer, part = match.groups()
            parts.setdefault((block, part), {})[int(index), layer] = held[name]
    new = {}
    for (block, part), found in parts.items():
        n = 1 + max(index for index, _ in found)
        both = []
        for index in range(n):
            gate, up = (found[index, layer] for layer in ("gate_proj", "up_proj"))
            is_shape = part == "weight_shape"
            both.append(gate * torch.tensor([2, 1]) if is_shape else torch.cat((gate, up)))
        new[f"{block}.gate_up_proj.{part}"] = torch.stack(both)
        new[f"{block}.down_proj.{part}"] = torch.stack([found[n, "down_proj"] for n in range(n)])
    gone = {name: None for name in held if re.search(r"\.experts\.\d+\.", name)}
    return changed(made, folder, **gone, **new)


def test_experts_in_one_tensor_are_split_without_a_number_changing(tmp_path, run_cli):
    (case,) = wild.make(tmp_path / "corpus", wanted=lambda name: name == "experts")
    fused = together(case.folder, tmp_path / "fused")
    assert {one.rule.id for one in quantkit.predict(fused, version="0.24").faults} >= {
        "experts-together"
    }
    assert any("in one tensor" in told for told in quantkit.predict(fused, version="0.26").left_out)
    asked = ["convert", fused, "--to", "compressed-tensors", "--repair", "-o", tmp_path / "out"]
    result = run_cli(asked)
    assert result.code == 0, result.stderr
    before, after = stored(case.folder), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(same(before[name], after[name]) for name in before)
    assert quantkit.predict(tmp_path / "out", version="0.24", gpu="H200").faults == []
    record = json.loads((tmp_path / "out" / "repaired.json").read_text())
    assert record["exact"]
    assert len(record["changes"]) == 2 * 2 * 3  # blocks, layers, parts


def test_experts_of_gpt_oss_are_put_together_without_a_number_changing(tmp_path, run_cli):
    from foreign import changed

    (case,) = wild.make(tmp_path / "corpus", wanted=lambda name: name == "gpt-oss")
    held = stored(case.folder)
    apart, gone = {}, {}
    for name, value in held.items():
        block, found, rest = name.partition(".experts.")
        if not found:
            continue
        gone[name] = None
        layer, _, part = rest.rpartition("_")
        own = {"blocks": "weight_packed", "scales": "weight_scale", "bias": "bias"}[part]
        layers = ("gate_proj", "up_proj") if layer == "gate_up_proj" else (layer,)
        for index, expert in enumerate(value):
            for place, single in enumerate(layers):
                rows = expert[place :: len(layers)]
                rows = rows.flatten(1) if part == "blocks" else rows
                apart[f"{block}.experts.{index}.{single}.{own}"] = rows.contiguous()
    split = changed(case.folder, tmp_path / "apart", **gone, **apart)
    assert quantkit.predict(split, version="0.26").verdict == "loads, answers garbage"
    result = run_cli(["convert", split, "--to", "mxfp4", "--repair", "-o", tmp_path / "out"])
    assert result.code == 0, result.stderr
    after = stored(tmp_path / "out")
    assert held.keys() == after.keys()
    assert all(same(held[name], after[name]) for name in held)
    assert quantkit.predict(tmp_path / "out", version="0.26").verdict == "loads"


def test_experts_that_are_stored_transposed_are_not_torn_apart(tmp_path):
    from quantkit.errors import CheckpointError
    from quantkit.export import expert_layout
    from quantkit.model.headers import StoredTensor

    name = "model.layers.0.mlp.experts.gate_up_proj.weight_packed"
    tensor = StoredTensor(name, "I32", (4, 256, 32), tmp_path / "x", 0)
    with pytest.raises(CheckpointError, match="stored transposed"):
        expert_layout.split({name: tensor}, {"hidden_size": 256, "moe_intermediate_size": 64})


def test_native_fp8_of_all_experts_is_cut_by_rows_and_blocks(tmp_path):
    from quantkit.export import expert_layout
    from quantkit.model.headers import StoredTensor

    block = "model.layers.0.mlp.experts"
    weight = StoredTensor(f"{block}.gate_up_proj", "F8_E4M3", (2, 512, 256), tmp_path / "x", 0)
    scale = StoredTensor(
        f"{block}.gate_up_proj_scale_inv", "F32", (2, 4, 2), tmp_path / "x", 1 << 18
    )
    config = {"hidden_size": 256, "moe_intermediate_size": 256}
    found, changes = expert_layout.split({t.name: t for t in (weight, scale)}, config)
    assert len(changes) == 2
    up = found[f"{block}.1.up_proj.weight"]
    assert (up.shape, up.start) == ((256, 256), (512 + 256) * 256)
    up = found[f"{block}.1.up_proj.weight_scale_inv"]
    assert (up.shape, up.start) == ((2, 2), (1 << 18) + 4 * (8 + 4))
    assert len(found) == 2 * 2 * 2
