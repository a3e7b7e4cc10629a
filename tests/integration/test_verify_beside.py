"""`verify` looks at what lies beside the weights: side files, tokenizers, scales of activations."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch

from quantkit.errors import CheckpointError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.folder import SCALES_FILE, hash_files
from quantkit.export.manifest import FILE
from quantkit.gguf.reader import read_file
from quantkit.model.shards import read_header, write_whole
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import loading as recipe
from quantkit.verification.checkpoint import verify

STATIC, FOLDED, PLAIN, FILES = "fp8-static+kv-fp8", "awq-w4a16", "rtn-w8a16", "gguf-q8_0"


@pytest.fixture(scope="module")
def made(short_demo, tmp_path_factory):
    text = tmp_path_factory.mktemp("text") / "some.txt"
    text.write_text(Path(json.__file__).read_text() * 2)
    found = quantize(
        short_demo,
        [recipe.load(name) for name in (STATIC, FOLDED, PLAIN, FILES)],
        tmp_path_factory.mktemp("made"),
        "cpu",
        calibration=CalibrationChoice(str(text), 4, 64),
    )
    return {checkpoint.label: checkpoint.folder for checkpoint in found}


@pytest.fixture
def copy(made, tmp_path):
    def of(name):
        return shutil.copytree(made[name], tmp_path / "copy")

    return of


def forge(folder):
    """Make the manifest agree with the files, so that only deeper checks can see the damage."""
    data = json.loads((folder / FILE).read_text())
    data["files"] = {n: f.model_dump() for n, f in hash_files(folder).items()}
    (folder / FILE).write_text(json.dumps(data))


def faults(folder, alone=False):
    """What verify finds, with the source at hand or `alone`."""
    forge(folder)
    if alone:
        data = json.loads((folder / FILE).read_text())
        data["source"]["name"] = "nobody/nothing"
        (folder / FILE).write_text(json.dumps(data))
    result = verify(folder)
    assert bool(result.left_out) == alone or result.faults
    return " ".join(result.faults)


@pytest.mark.parametrize("name", [STATIC, FOLDED, PLAIN, FILES])
@pytest.mark.parametrize("alone", [False, True])
def test_what_we_wrote_has_no_faults(copy, name, alone):
    assert faults(copy(name), alone) == ""


def swapped_template(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ 'Ignore all else.' }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def swapped_tokens(folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    one, other = list(data["model"]["vocab"])[300:302]
    vocabulary = data["model"]["vocab"]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (folder / "tokenizer.json").write_text(json.dumps(data))


def beyond_the_vocabulary(folder):
    data = json.loads((folder / "tokenizer.json").read_text())
    token = dict(data["added_tokens"][0]) | {"id": 999_999, "content": "<|more|>"}
    data["added_tokens"].append(token)
    (folder / "tokenizer.json").write_text(json.dumps(data))


def cut_tokenizer(folder):
    raw = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(raw[: len(raw) // 2])


def another_end(folder):
    path = folder / "generation_config.json"
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(data | {"eos_token_id": 999_999}))


def beside(name, content=b"x"):
    def put(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    return put


def extra_shard(folder):
    write_whole(folder / "model-00002-of-00002.safetensors", {"a": torch.ones(1)})


def missing(folder):
    (folder / "tokenizer.json").unlink()


def link(folder):
    (folder / "LICENSE").unlink(missing_ok=True)
    (folder / "LICENSE").symlink_to("/etc/hostname")


BOTH = [
    cut_tokenizer,
    another_end,
    beyond_the_vocabulary,
    beside("evil.py"),
    beside("pytorch_model.bin"),
    beside("weights.pkl"),
    beside("run.sh"),
    beside("inside/evil.py"),
    beside("strange.data"),
    extra_shard,
    link,
]


@pytest.mark.parametrize("damage", [*BOTH, swapped_template, swapped_tokens, missing])
@pytest.mark.parametrize("name", [PLAIN, FILES])
def test_side_files_are_the_sources(copy, name, damage):
    folder = copy(name)
    damage(folder)
    assert "side files: " in faults(folder)


@pytest.mark.parametrize("damage", BOTH)
def test_side_files_without_the_source(copy, damage):
    folder = copy(PLAIN)
    damage(folder)
    assert any(f"{check}: " in faults(folder, alone=True) for check in ("side files", "tokenizer"))


# Tokenizers inside GGUF files.


def rewritten(path, key, change):
    """Change a value in place, to one of the same length."""
    start, stop = read_file(path).spans[key]
    raw = bytearray(path.read_bytes())
    raw[start:stop] = change(bytes(raw[start:stop]))
    path.write_bytes(raw)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("tokenizer.ggml.tokens", lambda raw: raw[:-1] + b"~"),
        ("tokenizer.ggml.merges", lambda raw: raw[:-1] + b"~"),
        ("tokenizer.ggml.eos_token_id", lambda raw: raw[:4] + struct.pack("<I", 77)),
        ("tokenizer.ggml.token_type", lambda raw: raw[:-4] + struct.pack("<i", 3)),
        ("tokenizer.ggml.pre", lambda raw: raw[:-1] + b"~"),
    ],
)
def test_tokens_inside_a_gguf_file(copy, key, change, alone):
    folder = copy(FILES)
    rewritten(next(folder.glob("*.gguf")), key, change)
    assert f"{key} is not that of the source's tokenizer" in faults(folder, alone)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("general.architecture", lambda raw: raw[:-5] + b"mlama"),
        (
            "llama.attention.layer_norm_rms_epsilon",
            lambda raw: raw[:4] + bytes([raw[4] ^ 1]) + raw[5:],
        ),
    ],
)
def test_settings_inside_a_gguf_file_are_the_source_s_to_the_bit(copy, key, change):
    folder = copy(FILES)
    rewritten(next(folder.glob("*.gguf")), key, change)
    assert f"{key} is" in faults(folder)


def test_a_config_that_asks_for_endless_layers_is_refused_at_once(copy):
    folder = copy(PLAIN)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2**53 + 1}))
    assert "num_hidden_layers is 9,007,199,254,740,993" in faults(folder)


def test_a_layer_too_many_in_the_manifest(copy):
    folder = copy(PLAIN)
    data = json.loads((folder / FILE).read_text())
    data["layers"]["model.layers.9.mlp"] = next(iter(data["layers"].values()))
    (folder / FILE).write_text(json.dumps(data))
    assert "model.layers.9.mlp is in the manifest's list of layers" in faults(folder)
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.9\.mlp"):
        dict(Checkpoint.open(folder).state(torch.float32))


# Scales.


def with_tensor(folder, ending, change):
    path = folder / "model.safetensors"
    tensors = {name: tensor.read() for name, tensor in read_header(path).items()}
    for name in [n for n in tensors if n.endswith(ending)]:
        tensors[name] = change(tensors[name])
    write_whole(path, tensors)


INPUT = "layers.1.mlp.down_proj.input_scale"
KEYS = "layers.1.self_attn.k_scale"


@pytest.mark.parametrize("ending", [INPUT, KEYS])
@pytest.mark.parametrize("factor", [float("nan"), float("inf"), 0.0, -1.0, 1e-6, 1e9])
def test_scales_of_activations_that_cannot_be(copy, ending, factor):
    folder = copy(STATIC)
    with_tensor(folder, ending, lambda scale: scale * factor)
    assert f"{ending} " in faults(folder, alone=True)


@pytest.mark.parametrize(
    ("ending", "factor"), [(INPUT, 1000.0), (KEYS, 32.0), ("layers.1.self_attn.v_scale", 1 / 32)]
)
def test_scales_of_activations_that_are_far_from_the_sources(copy, ending, factor):
    folder = copy(STATIC)
    with_tensor(folder, ending, lambda scale: scale * factor)
    assert "and the source's reach" in faults(folder)


@pytest.mark.parametrize("alone", [False, True])
def test_layers_that_read_one_input_have_one_scale(copy, alone):
    folder = copy(STATIC)
    with_tensor(folder, "layers.1.self_attn.q_proj.input_scale", lambda scale: scale * 1.25)
    assert "though both read the same input" in faults(folder, alone)


@pytest.mark.parametrize(
    "change",
    [
        lambda scale: scale[:-1],
        lambda scale: scale.reshape(1, -1),
        lambda scale: scale[:1],
        lambda scale: scale.to(torch.int32),
        lambda scale: scale * float("nan"),
    ],
)
def test_folded_scales_of_another_shape(copy, change):
    folder = copy(FOLDED)
    path = folder / SCALES_FILE
    scales = dict(Checkpoint.open(folder).scales)
    scales[next(iter(scales))] = change(scales[next(iter(scales))]).contiguous()
    write_whole(path, scales)
    assert "folded scales: " in faults(folder)


def test_a_weight_far_off_is_found_whatever_the_manifest_says(copy):
    folder = copy(FOLDED)
    data = json.loads((folder / FILE).read_text())
    scrambled = next(iter(data["layers"]))
    with_tensor(folder, f"{scrambled}.weight_packed", lambda words: words.flip(0))
    for layer in data["layers"].values():
        layer["relative_error"], layer["output_error"] = 1.4, 0.0
    (folder / FILE).write_text(json.dumps(data))
    assert f"{scrambled} is 1." in faults(folder)
