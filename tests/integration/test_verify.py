"""`verify` accepts what we wrote and finds every kind of damage."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit import resources
from quantkit.errors import CheckpointError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.folder import SCALES_FILE
from quantkit.export.manifest import FILE
from quantkit.model.shards import ShardWriter, TensorSpec, read_header, write_whole
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.storage import sha256_of
from quantkit.verification.checkpoint import verify

pytestmark = pytest.mark.usefixtures("coarse_awq")

GATE = "model.layers.1.mlp.gate_proj.weight"
# One for each way of storing weights: with and without zero points, packed and not, folded.
RECIPES = ["awq-w4a16", "fp8-block", "fp8-dynamic", "fp8-static", "int8-w8a8", "rtn-w4a16"]


@pytest.fixture(scope="module")
def checkpoints(short_demo, tmp_path_factory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("out")
    recipes = [Recipe.load(name) for name in [*RECIPES, "rtn-w8a16"]]
    few = CalibrationChoice("python-docs", 8, 128)
    made = quantize(short_demo, recipes, out, calibration=few)
    return {checkpoint.label: checkpoint.folder for checkpoint in made}


def copy_of(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    if target.exists():
        shutil.rmtree(target)
    return shutil.copytree(folder, target)


def forge_hashes(folder: Path) -> None:
    """Make the manifest agree with the files, so that only the deeper checks can see damage."""
    manifest = json.loads((folder / FILE).read_text())
    for name, file in manifest["files"].items():
        path = folder / name
        file.update(sha256=sha256_of(path), size_bytes=path.stat().st_size)
    (folder / FILE).write_text(json.dumps(manifest))


def rewrite(folder: Path, change) -> None:
    """Write the weights anew after `change` had its way with {name: tensor}."""
    path = folder / "model.safetensors"
    tensors = {name: stored.read() for name, stored in read_header(path).items()}
    codes = {name: stored.dtype for name, stored in read_header(path).items()}
    change(tensors)
    path.unlink()
    writer = ShardWriter(
        path, [TensorSpec(n, codes.get(n, "BF16"), tuple(t.shape)) for n, t in tensors.items()]
    )
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_we_wrote_passes(checkpoints, recipe):
    result = verify(checkpoints[recipe])
    assert result.ok, result.faults
    assert set(result.passed) >= {"files", "tensors", "config", "weights", "source"}
    assert not result.left_out
    assert 0 < result.worst[0][1] < 0.2


def test_without_its_source_it_says_what_was_left_out(checkpoints, tmp_path):
    folder = copy_of(checkpoints["rtn-w4a16"], tmp_path)
    manifest = json.loads((folder / FILE).read_text())
    manifest["source"]["name"] = "somebody/a-model"
    (folder / FILE).write_text(json.dumps(manifest))
    result = verify(folder)
    assert result.ok, result.faults
    assert "somebody/a-model" in result.left_out[0]


@pytest.mark.parametrize("recipe", RECIPES)
@settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_changed_byte_range_is_found(checkpoints, tmp_path, recipe, data):
    folder = copy_of(checkpoints[recipe], tmp_path)
    path = folder / "model.safetensors"
    size = path.stat().st_size
    start = data.draw(st.integers(0, size - 1))
    length = data.draw(st.integers(1, min(4096, size - start)))
    with path.open("rb+") as stream:
        stream.seek(start)
        old = stream.read(length)
        stream.seek(start)
        stream.write(bytes(byte ^ data.draw(st.integers(1, 255)) for byte in old[:1]) + old[1:])
    assert not verify(folder).ok


@pytest.mark.parametrize("recipe", RECIPES)
def test_scrambled_weights_are_found_even_with_forged_hashes(checkpoints, tmp_path, recipe):
    folder = copy_of(checkpoints[recipe], tmp_path)
    stored = [t for t in read_header(folder / "model.safetensors").values() if t.size_bytes > 4096]
    weight = next(t for t in stored if "down_proj" in t.name)
    with (folder / "model.safetensors").open("rb+") as stream:
        stream.seek(weight.start)
        stream.write(bytes(range(256)) * (weight.size_bytes // 512))
    forge_hashes(folder)
    faults = " ".join(verify(folder).faults)
    assert weight.name.rpartition(".")[0] in faults


@pytest.mark.parametrize("recipe", RECIPES)
@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_dropped_or_swapped_tensor_is_found_even_with_forged_hashes(
    checkpoints, tmp_path, recipe, data
):
    folder = copy_of(checkpoints[recipe], tmp_path)
    names = sorted(read_header(folder / "model.safetensors"))
    victim = data.draw(st.sampled_from([n for n in names if "weight_scale" in n]))

    def drop(tensors):
        del tensors[victim]

    def swap(tensors):
        twins = [
            n
            for n, t in tensors.items()
            if n.endswith("weight_scale")
            and t.shape == tensors[victim].shape
            and not torch.equal(t, tensors[victim])  # fused layers may share one scale
        ]
        other = data.draw(st.sampled_from(twins))
        tensors[victim], tensors[other] = tensors[other], tensors[victim]

    rewrite(folder, data.draw(st.sampled_from([drop, swap])))
    forge_hashes(folder)
    result = verify(folder)
    assert not result.ok
    assert any(victim.rpartition(".")[0] in fault for fault in result.faults)


def test_other_faults_are_listed_together(checkpoints, tmp_path):
    folder = copy_of(checkpoints["fp8-dynamic"], tmp_path)
    (folder / "extra.bin").write_bytes(b"x")
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    config["rms_norm_eps"] = 1e-5
    (folder / "config.json").write_text(json.dumps(config))
    faults = "\n".join(verify(folder).faults)
    for word in ("extra.bin", "tokenizer.json", "quantization_config", "rms_norm_eps"):
        assert word in faults


def test_another_source_is_refused(checkpoints, tmp_path):
    other = copy_of(resources.DEMO_MODEL, tmp_path)

    def nudge(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"] * 2

    rewrite(other, nudge)
    result = verify(checkpoints["rtn-w8a16"], source=ModelSource.open(str(other)))
    assert any("not the model" in fault for fault in result.faults)


def test_no_manifest_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="not a quantkit checkpoint"):
        verify(tmp_path)
    (tmp_path / FILE).write_text('{"schema_version": 99}')
    with pytest.raises(CheckpointError, match="newer quantkit"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("factor", [1e20, float("inf"), float("nan"), 0.0, -1.0], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_that_are_no_scales_are_found(checkpoints, tmp_path, recipe, factor):
    """Neither NaN nor infinity may slip through a comparison, hashes rewritten or not."""
    folder = copy_of(checkpoints[recipe], tmp_path)
    names = sorted(n for n in read_header(folder / "model.safetensors") if "weight_scale" in n)

    def spoil(tensors):
        tensors[names[0]] = (tensors[names[0]].float() * factor).to(tensors[names[0]].dtype)

    rewrite(folder, spoil)
    forge_hashes(folder)
    assert any(names[0].rpartition(".")[0] in fault for fault in verify(folder).faults)


def test_scales_of_inputs_and_folded_scales_are_read(checkpoints, tmp_path):
    for value in (float("nan"), float("inf"), 0.0, -1.0):
        folder = copy_of(checkpoints["fp8-static"], tmp_path)

        def spoil(tensors, value=value):
            name = next(n for n in tensors if n.endswith(".input_scale"))
            tensors[name].fill_(value)

        rewrite(folder, spoil)
        forge_hashes(folder)
        assert any("input_scale is not finite" in fault for fault in verify(folder).faults)
        folder = copy_of(checkpoints["awq-w4a16"], tmp_path)
        path = folder / SCALES_FILE
        scales = {name: stored.read() for name, stored in read_header(path).items()}
        name = next(iter(scales))
        scales[name].view(-1)[0] = value
        path.unlink()
        write_whole(path, scales)
        forge_hashes(folder)
        assert any(f"{name} is not finite" in fault for fault in verify(folder).faults)


def test_a_manifest_without_numbers_is_refused(checkpoints, tmp_path):
    folder = copy_of(checkpoints["rtn-w4a16"], tmp_path)
    manifest = json.loads((folder / FILE).read_text())
    layer = next(iter(manifest["layers"].values()))
    layer["relative_error"] = float("nan")
    (folder / FILE).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="relative_error"):
        verify(folder)


def test_quiet_columns_do_not_make_a_layer_wrong(short_demo, tmp_path):
    """One input far above all others: SmoothQuant makes its column loud, and others round away.

    Without the folded scales such a layer is further off than a swapped one; with them it is not.
    """
    source = shutil.copytree(short_demo.folder, tmp_path / "source")
    norm = "model.layers.1.post_attention_layernorm.weight"
    rewrite(source, lambda tensors: tensors[norm][7].mul_(20_000))
    (made,) = quantize(
        ModelSource.open(str(source)),
        [Recipe.load("int8-w8a8")],
        tmp_path / "out",
        calibration=CalibrationChoice("python-docs", 8, 64),
    )
    result = verify(made.folder)
    assert result.ok, result.faults
    assert result.worst[0][1] > 0.9
    rewrite(made.folder, lambda t: t.update({GATE: t[GATE].flip(0)}))
    forge_hashes(made.folder)
    assert any("off its source" in fault for fault in verify(made.folder).faults)
