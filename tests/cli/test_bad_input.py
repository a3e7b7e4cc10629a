"""Model folders that cannot be quantised: each is refused with one message and leaves nothing."""

import json
import subprocess
import sys

import pytest
import transformers

INDEX = "model.safetensors.index.json"


def test_folder_that_is_no_model(refused, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    assert refused(folder) == f"{folder} is not a model folder: it has no config.json"


def test_missing_folder(refused, tmp_path):
    message = refused(tmp_path / "nothing")
    assert message.startswith(f"there is no folder {tmp_path / 'nothing'}; MODEL is a folder")


def test_file_as_model(refused, tmp_path):
    file = tmp_path / "model.bin"
    file.touch()
    assert refused(file) == f"{file} is a file; MODEL is a folder, a hub id or `demo`"


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--dry-run"], "--dry-run"),
        (["--engine", "llmcompressor"], "--engine"),
    ],
)
def test_what_a_gguf_file_cannot_do_is_said_before_anything_is_written(
    run_cli, tmp_path, option, words
):
    file, out = tmp_path / "model.gguf", tmp_path / "out"
    file.touch()
    result = run_cli(["quantize", str(file), "-r", "gguf-q8_0", "-o", str(out), *option])
    assert result.code == 2
    assert words in result.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody/nothing-of-this-name", "HF_HUB_OFFLINE is set; give a folder"),
        ("we!rd name", "check the name"),
        ("a/b/c", "there is no folder a/b/c"),
        ("a" * 300, ""),
    ],
    ids=["hub", "impossible-id", "path", "long"],
)
def test_name_that_stands_for_nothing(refused, name, words):
    message = refused(name)
    assert name in message
    assert words in message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "\udcff",
        "[" * 100_000,
    ],
    ids=["empty", "cut", "list", "null", "no-utf8", "deep"],
)
def test_config_of_broken_json(refused, tiny_model, text):
    folder = tiny_model()
    (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    assert refused(folder).startswith(f"{folder / 'config.json'} is not valid JSON: ")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, "BertForMaskedLM"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "BertModel"),
        (
            {
                "architectures": ["T5ForConditionalGeneration"],
                "model_type": "t5",
                "is_encoder_decoder": True,
            },
            "T5ForConditionalGeneration",
        ),
        ({"is_encoder_decoder": True}, "decoders that generate text"),
        ({"architectures": []}, "llama"),
        ({"architectures": None}, "llama"),
        ({"architectures": [1]}, ""),
        ({"architectures": 5}, ""),
        ({"architectures": "BertModel"}, "BertModel"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_unsupported_kind(refused, tiny_model, edit_config, config, words):
    folder = edit_config(tiny_model(), **config)
    message = refused(folder)
    assert message.startswith(f"{folder} has an unsupported architecture")
    assert words in message
    assert "quantkit supports" in message
    assert "unquantised" in message


@pytest.mark.parametrize(
    "keys",
    [
        {"num_local_experts": 8},
        {"num_experts": 64},
        {"n_routed_experts": 64},
        {"moe_num_experts": 64},
        {"ffn_config": {"moe_num_experts": 16}},
    ],
    ids=["mixtral", "qwen", "deepseek", "ernie", "dbrx"],
)
def test_mixture_of_experts(refused, tiny_model, edit_config, keys):
    folder = edit_config(tiny_model(), **keys)
    message = refused(folder)
    assert message.startswith(f"{folder} is an MoE model")
    assert "finds no experts in it" in message


def test_modelling_code_of_its_own(refused, tiny_model, edit_config):
    auto_map = {"AutoConfig": "configuration_new.NewConfig"}
    folder = edit_config(tiny_model(), model_type="new", auto_map=auto_map)
    assert "--trust-remote-code" in refused(folder)


def test_a_type_that_nobody_knows(refused, tiny_model, edit_config):
    folder = edit_config(tiny_model(), model_type="new", architectures=["NewForCausalLM"])
    message = refused(folder)
    version = transformers.__version__
    assert f"{folder}/config.json has model_type new, which transformers {version}" in message
    assert "no code of its own (auto_map); upgrade transformers, or download the model" in message


def test_code_that_is_missing(refused, tiny_model, edit_config):
    folder = edit_config(
        tiny_model(), model_type="new", auto_map={"AutoConfig": "configuration_new.NewConfig"}
    )
    message = refused(folder, "--trust-remote-code")
    wanted = "config.json has its code in configuration_new.py (auto_map), which is missing"
    assert wanted in message


def test_quantised_already(refused, tiny_model, edit_config):
    folder = edit_config(tiny_model(), quantization_config={"quant_method": "awq"})
    message = refused(folder)
    assert message.startswith(f"{folder} is already quantised (awq)")


def test_quantised_already_in_words(refused, tiny_model, edit_config):
    assert "already quantised" in refused(edit_config(tiny_model(), quantization_config="awq"))


def test_our_own_output_as_source(run_cli, refused, tiny_model, tmp_path):
    first = tmp_path / "first"
    assert run_cli(["quantize", tiny_model(), "-r", "fp8-dynamic", "-o", first, "-q"]).code == 0
    message = refused(first / "fp8-dynamic")
    assert "is already quantised (compressed-tensors)" in message


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model_type": "frobnicate"}, "frobnicate"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "frobnicate"}, "frobnicate"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_attention_heads": 3}, "attention heads"),
        ({"num_attention_heads": 0}, ""),
        ({"pad_token_id": 100_000}, ""),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_config_that_describes_no_model(refused, tiny_model, edit_config, keys, words):
    folder = edit_config(tiny_model(), **keys)
    message = refused(folder)
    assert str(folder / "config.json") in message
    assert words in message


def test_no_weights(refused, tiny_model):
    folder = tiny_model()
    (folder / "model.safetensors").unlink()
    assert refused(folder) == f"{folder} is not a model folder: it has no safetensors weights"


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth"])
def test_pickled_weights_only(refused, tiny_model, file):
    folder = tiny_model()
    (folder / "model.safetensors").rename(folder / file)
    message = refused(folder)
    assert f"{folder} has pickled weights only ({file})" in message
    assert "save_pretrained" in message


@pytest.fixture
def sharded(tiny_model):
    folder = tiny_model(max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def first_shard(folder):
    return min(folder.glob("model-*.safetensors"))


def test_missing_shard(refused, sharded):
    shard = first_shard(sharded)
    shard.unlink()
    assert (
        refused(sharded)
        == f"{sharded / INDEX} names {shard.name}, which is missing; download it again"
    )


def test_missing_index(refused, sharded):
    (sharded / INDEX).unlink()
    assert INDEX in refused(sharded)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw[:-1],
        lambda raw: raw[: len(raw) // 2],
        lambda raw: raw[:20],
        lambda raw: raw + b"\0",
        lambda raw: b"",
        lambda raw: b"\xff" * 8 + raw[8:],
        lambda raw: raw[:8] + b"#" + raw[9:],
        lambda raw: raw.replace(b'"BF16"', b'"BF61"', 1),
        lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
    ],
    ids=["cut", "half", "head", "longer", "empty", "length", "json", "type", "lfs-pointer"],
)
def test_damaged_shard(refused, sharded, damage):
    shard = first_shard(sharded)
    shard.write_bytes(damage(shard.read_bytes()))
    message = refused(sharded)
    assert str(shard) in message
    assert "again" in message


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("../elsewhere.safetensors", "'../elsewhere.safetensors' is not a plain file name"),
        ("/etc/passwd", "'/etc/passwd' is not a plain file name"),
        ("sub/x.safetensors", "is not a plain file name"),
        ("..", "names .., which is missing"),
        ("", "which is missing"),
        ("gone.safetensors", "names gone.safetensors, which is missing"),
        (5, "is not a valid index"),
    ],
)
def test_index_that_points_elsewhere(refused, sharded, file, words):
    path = sharded / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = file
    path.write_text(json.dumps(index))
    message = refused(sharded)
    assert message.startswith(str(path))
    assert words in message


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": []}', '{"weight_map": null}'])
def test_broken_index(refused, sharded, text):
    (sharded / INDEX).write_text(text)
    assert refused(sharded).startswith(f"{sharded / INDEX} is not a valid index: ")


def test_index_that_promises_too_much(refused, sharded):
    path = sharded / INDEX
    index = json.loads(path.read_text())
    shard = first_shard(sharded)
    index["weight_map"]["model.extra.weight"] = shard.name
    path.write_text(json.dumps(index))
    assert refused(sharded) == f"{shard} lacks model.extra.weight, which {INDEX} places there"


def test_tensor_in_two_shards(refused, sharded):
    one, two = sorted(sharded.glob("model-*.safetensors"))[:2]
    two.write_bytes(one.read_bytes())
    assert INDEX in refused(sharded)


def test_message_stands_alone_in_a_process_of_its_own(tiny_model, edit_config, out):
    folder = edit_config(tiny_model(), hidden_act="frobnicate")
    command = [sys.executable, "-m", "quantkit", "quantize", folder, "-r", "rtn-w4a16", "-o", out]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 3
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("quantkit: ")
    assert not out.exists()


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--judge", "exact"], "--judge is for answers to --prompts"),
        (["--judge", "taste"], "'taste' is not exact, json or tool-calls"),
    ],
)
def test_a_judge_needs_prompts_and_a_name(run_cli, option, words):
    result = run_cli(["score", "demo", *option])
    assert result.code == 2
    assert words in " ".join(result.stderr.split())
