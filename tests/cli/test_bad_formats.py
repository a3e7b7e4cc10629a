"""Formats that do not fit, and folders that must not be converted: one sentence, nothing left."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.export.manifest import FILE
from quantkit.model.source import ModelSource
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.verification.checkpoint import verify

LAYER = "model.layers.0.mlp.down_proj"


@pytest.fixture
def refused(run_cli, tmp_path):
    """Run a command that must fail with one sentence and leave no output."""

    def run(*arguments, code=3):
        result = run_cli([*arguments, "-o", tmp_path / "new"])
        assert result.code == code, result
        assert result.stdout == ""
        said = result.stderr.strip().rpartition("\n\n")[2]  # below the usage, where that is shown
        assert said.count("\n") == 0
        assert not (tmp_path / "new").exists()
        return result.stderr

    return run


@pytest.fixture
def made(tiny_model, tmp_path):
    """A checkpoint of a recipe, in a format."""

    def make(name, format="compressed-tensors"):
        source = ModelSource.open(str(tiny_model()))
        recipe = Recipe.load(name).in_format(format)
        return quantize(source, [recipe], tmp_path / "out", device="cpu")[0].folder

    return make


@pytest.mark.parametrize(
    ("recipe", "format", "words"),
    [
        ("fp8-dynamic", "fp8", "only in compressed-tensors"),
        ("fp8-dynamic", "gptq", "gptq holds integers"),
        ("rtn-w8a16", "awq", "awq has 4 bits"),
        ("awq-w4a16", "gptq", "only without zero points"),
        ("int8-w8a8", "gptq", "leaves activations in 16 bits"),
        ("gptq-w4a16+kv-fp8", "gptq", "no KV cache scales with gptq"),
    ],
)
def test_formats_that_do_not_fit_are_refused_before_the_model_is_read(
    refused, tmp_path, recipe, format, words
):
    missing = tmp_path / "no-such-model"
    assert words in refused("quantize", missing, "-r", recipe, "--format", format)


@pytest.mark.parametrize(
    ("recipe", "format", "words"),
    [
        ("rtn-w4a16", "gtpq", "did you mean gptq"),
        ("gguf-q4_0", "gptq", "--format"),
    ],
)
def test_formats_that_are_none_are_wrong_usage(refused, tmp_path, recipe, format, words):
    command = ["quantize", tmp_path / "no-such-model", "-r", recipe, "--format", format]
    assert words in refused(*command, code=2)


def test_layers_that_do_not_fill_words_are_refused(refused, tiny_model, tmp_path):
    recipe = tmp_path / "rows.yaml"
    recipe.write_text("summary: s\nmethod: rtn\nweights: {num_bits: 4, strategy: channel}\n")
    model = tiny_model(intermediate_size=252)
    words = refused("quantize", model, "-r", recipe, "--format", "gptq")
    assert "252 x 128, and gptq packs 8 rows and columns at a time" in words


def test_the_second_engine_points_to_convert(refused, tiny_model, monkeypatch):
    from quantkit.onepass import llmcompressor

    monkeypatch.setattr(llmcompressor, "version", lambda: "0.14.0.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = refused(
        "quantize", tiny_model(), "-r", "rtn-w4a16", "--format", "gptq", "--engine", "llmcompressor"
    )
    assert "quantkit convert --to gptq" in words


def test_what_cannot_be_converted(refused, made, run_cli, tmp_path):
    folder = made("fp8-dynamic")
    assert "exists only in compressed-tensors" in refused("convert", folder, "--to", "fp8")
    assert "fp8 or compressed-tensors" in refused("convert", folder, "--to", "gptq")
    assert "compressed-tensors form already" in refused(
        "convert", folder, "--to", "compressed-tensors"
    )
    assert "did you mean awq?" in refused("convert", folder, "--to", "awqq", code=2)
    assert "has no quantkit.json" in refused("convert", tmp_path, "--to", "gptq")
    assert "there is no folder" in refused("convert", tmp_path / "none", "--to", "gptq")
    message = refused("convert", tmp_path / "none", "--to", "bf16")
    assert all(word in message for word in (str(tmp_path / "none"), "quantised folder", "GGUF"))


def test_outputs_that_are_there_stay(run_cli, made, tmp_path):
    folder = made("rtn-w4a16")
    before = sorted(path.name for path in folder.iterdir())
    result = run_cli(["convert", folder, "--to", "gptq", "-o", folder, "--force"])
    assert (result.code, "the checkpoint itself" in result.stderr) == (3, True)
    assert sorted(path.name for path in folder.iterdir()) == before
    command = ["convert", folder, "--to", "gptq", "-o", tmp_path / "new"]
    assert run_cli([*command, "--json"]).code == 0
    result = run_cli(command)
    assert (result.code, "use --force" in result.stderr) == (3, True)
    told = json.loads(run_cli([*command, "--force", "--json"]).stdout)
    assert told["manifest"]["converted_from"]["name"] == "rtn-w4a16"
    card = (tmp_path / "new" / "README.md").read_text()
    assert "a folder in gptq form for vLLM" in card
    assert "compressed-tensors (digest" in card


def test_without_a_folder_the_new_one_lies_beside_the_old(run_cli, made):
    folder = made("rtn-w4a16")
    told = json.loads(run_cli(["convert", folder, "--to", "gptq", "--json"]).stdout)
    assert told["path"] == str(folder.resolve().parent / "rtn-w4a16-gptq")
    assert told["manifest"]["name"] == "rtn-w4a16-gptq"
    again = run_cli(["convert", folder, "--to", "gptq"])
    assert (again.code, "use --force" in again.stderr) == (3, True)


def damage(folder, change):
    """Change tensors, and hash the file anew as if that had been meant."""
    from quantkit.export.folder import hash_files

    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    record = json.loads((folder / FILE).read_text())
    record["files"] = {name: file.model_dump() for name, file in hash_files(folder).items()}
    (folder / FILE).write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s[f"{LAYER}.g_idx"].copy_(s[f"{LAYER}.g_idx"].flip(0)), "it has an act-order"),
        (lambda s: s[f"{LAYER}.qzeros"][0, 0].add_(1), "qzeros is not that of a symmetric layer"),
        (lambda s: s.pop(f"{LAYER}.scales"), "scales is missing"),
        (lambda s: s[f"{LAYER}.scales"][0, 0].neg_(), "scales that are not finite and positive"),
        (lambda s: s[f"{LAYER}.qweight"].copy_(s[f"{LAYER}.qweight"].flip(1)), "off its source"),
    ],
    ids=["order", "zeros", "missing", "negative", "swapped"],
)
def test_a_wrong_gptq_layer_is_found(made, refused, change, words):
    folder = made("rtn-w4a16", "gptq")
    damage(folder, change)
    faults = verify(folder).faults
    assert any(LAYER in fault and words in fault for fault in faults), faults
    if "positive" not in words and "off" not in words:  # else the numbers can be carried over
        assert LAYER in refused("convert", folder, "--to", "compressed-tensors")


def test_a_changed_file_is_not_converted(made, refused, tmp_path):
    folder = made("rtn-w4a16")
    path = folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    words = refused("convert", folder, "--to", "gptq")
    assert "is damaged: model.safetensors was changed" in words
    assert "quantkit verify" in words


def test_blocks_of_llama_cpp_have_no_other_form(run_cli, refused, tmp_path):
    assert run_cli(["quantize", "demo", "-r", "gguf-q4_0", "-o", tmp_path / "out"]).code == 0
    words = refused("convert", tmp_path / "out" / "gguf-q4_0", "--to", "gptq")
    assert "holds a GGUF file, whose blocks no other format has" in words


def test_convert_names_what_transformers_needs_to_load_it(made, run_cli, tmp_path):
    folder = made("rtn-w4a16")
    older = run_cli(["convert", folder, "--to", "gptq", "-o", tmp_path / "gptq"])
    assert older.code == 0
    assert "gptqmodel" in older.stderr
    back = ["convert", tmp_path / "gptq", "--to", "compressed-tensors", "-o", tmp_path / "back"]
    assert "gptqmodel" not in run_cli(back).stderr
