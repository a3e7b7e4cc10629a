"""Sources that are quantised already: read back as the 16-bit weights that they stand for."""

import json

import pytest
import torch
import transformers
from conftest import SIZES, with_tokenizer

import quantkit
from quantkit.errors import SourceError
from quantkit.model.headers import StoredTensor, read_header
from quantkit.model.shards import write_whole
from quantkit.model.source import ModelSource
from quantkit.recipe import Recipe

FORMS = [
    ("rtn-w4a16", None),
    ("rtn-w8a16", None),
    ("rtn-w4a16", "gptq"),
    ("rtn-w4a16", "awq"),
    ("fp8-dynamic", None),
    ("fp8-block", "fp8"),
    ("fp8-tensor", "fp8"),
    ("rtn-nvfp4-a16", None),
    ("rtn-nvfp4-a16", "modelopt"),
    ("rtn-mxfp4-a16", None),
    ("mxfp8", None),
]
DEEPSEEK = {
    "moe_intermediate_size": 192, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    config = transformers.LlamaConfig(
        **SIZES | {"vocab_size": 4096, "num_key_value_heads": 4, "dtype": "bfloat16"}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = transformers.AutoModelForCausalLM.from_config(config)
    made.to(torch.bfloat16).save_pretrained(folder)
    return with_tokenizer(folder)


@pytest.mark.parametrize(("recipe", "form"), FORMS, ids=[f"{r}-{f}" for r, f in FORMS])
def test_every_format_is_read_back(model, tmp_path, recipe, form):
    (made,) = quantkit.quantize(model, [recipe], out=tmp_path, format=form, device="cpu")
    source = ModelSource.open(str(made.folder), requantize=True)
    assert "quantization_config" not in source.config
    assert set(source.tensors) == set(ModelSource.open(str(model)).tensors)
    for module in made.manifest.layers:
        expected = made.weight(module).to(torch.bfloat16)
        assert torch.equal(source.tensors[f"{module}.weight"].read(), expected), module


def test_a_quantised_source_is_refused_without_leave(model, tmp_path):
    (made,) = quantkit.quantize(model, ["fp8-dynamic"], out=tmp_path / "one", device="cpu")
    with pytest.raises(SourceError, match=r"--requantize"):
        quantkit.quantize(made.folder, ["rtn-w4a16"], out=tmp_path / "two", device="cpu")
    (again,) = quantkit.quantize(
        made.folder, ["rtn-w4a16"], out=tmp_path / "two", device="cpu", requantize=True
    )
    assert any("compressed-tensors" in note for note in again.manifest.notes)
    config = json.loads((again.folder / "config.json").read_bytes())
    assert config["quantization_config"]["format"] == "pack-quantized"
    assert quantkit.verify(again, source=made.folder).ok


def test_experts_of_mxfp4_are_those_of_transformers(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    n_experts, inner, width = 2, 32, 64
    shapes = {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}
    stored = {}
    for layer, (rows, columns) in shapes.items():
        start = f"model.layers.0.mlp.experts.{layer}"
        groups = (n_experts, rows, columns // 32)
        random = {"generator": generator, "dtype": torch.uint8}
        stored[f"{start}_blocks"] = torch.randint(0, 256, (*groups, 16), **random)
        stored[f"{start}_scales"] = torch.randint(120, 130, groups, **random)
        stored[f"{start}_bias"] = torch.randn(n_experts, rows, generator=generator).bfloat16()
    write_whole(tmp_path / "model.safetensors", stored)
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ModelSource.open(str(tmp_path), requantize=True).tensors
    experts = "model.layers.0.mlp.experts"
    for layer in shapes:
        blocks, scales, bias = (
            stored[f"{experts}.{layer}_{part}"] for part in ("blocks", "scales", "bias")
        )
        whole = convert_moe_packed_tensors(blocks, scales)  # [experts, columns, rows]
        names = ("gate_proj", "up_proj") if layer == "gate_up_proj" else (layer,)
        for index in range(n_experts):
            for place, name in enumerate(names):
                start = f"{experts}.{index}.{name}"
                expected = whole[index].t()[place :: len(names)]
                assert torch.equal(found[f"{start}.weight"].read(), expected)
                expected = bias[index, place :: len(names)]
                assert torch.equal(found[f"{start}.bias"].read(), expected)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """gpt-oss as published: experts in MXFP4, all of a block in one tensor."""
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_local_experts": 4}
    config = transformers.GptOssConfig(
        **SIZES | sizes | {"vocab_size": 4096, "num_experts_per_tok": 2, "dtype": "bfloat16"}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    stored = {}
    for name, tensor in read_header(folder / "model.safetensors").items():
        stored[name] = tensor.read()
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        n_experts, columns, rows = stored.pop(name).shape
        groups = (n_experts, rows, columns // 32)
        random = {"generator": generator, "dtype": torch.uint8}
        stored[f"{name}_blocks"] = torch.randint(0, 256, (*groups, 16), **random)
        stored[f"{name}_scales"] = torch.randint(118, 122, groups, **random)
    (folder / "model.safetensors").unlink()
    write_whole(folder / "model.safetensors", stored)
    described = json.loads((folder / "config.json").read_bytes())
    described["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
    }
    (folder / "config.json").write_text(json.dumps(described))
    return with_tokenizer(folder)


def parameters(folder, **arguments):
    model = transformers.GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, **arguments
    )
    return dict(model.named_parameters())


def test_mxfp4_experts_become_the_tensors_that_transformers_makes_of_them(mixture, tmp_path):
    asked = transformers.Mxfp4Config(dequantize=True)
    expected = parameters(mixture, quantization_config=asked)
    quantkit.convert(mixture, to="bf16", out=tmp_path / "plain")
    found = parameters(tmp_path / "plain")
    assert expected.keys() == found.keys()
    for name, parameter in expected.items():
        assert torch.equal(found[name], parameter), name


def test_mxfp4_experts_that_stay_alone_are_16_bits_in_one_tensor(mixture, tmp_path):
    recipe = Recipe.load("fp8-dynamic").model_copy(update={"ignore": ["lm_head", "re:.*experts.*"]})
    with pytest.raises(SourceError, match=r"already quantised \(mxfp4\).*--requantize"):
        quantkit.quantize(mixture, [recipe], out=tmp_path, device="cpu")
    (made,) = quantkit.quantize(mixture, [recipe], out=tmp_path, device="cpu", requantize=True)
    assert "from weights that mxfp4 had quantised" in made.manifest.notes
    assert quantkit.verify(made, source=mixture).ok
    quantkit.convert(mixture, to="bf16", out=tmp_path / "plain")
    plain = read_header(tmp_path / "plain" / "model.safetensors")
    stored = read_header(made.folder / "model.safetensors")
    experts = [name for name in plain if ".experts." in name]
    assert {name for name in stored if ".experts." in name} == set(experts)
    assert len(experts) == 2 * 4
    for name in experts:
        assert torch.equal(stored[name].read(), plain[name].read()), name


def test_mxfp4_experts_lose_nothing_in_a_file_for_llama_cpp(mixture, tmp_path):
    (made,) = quantkit.quantize(
        mixture, ["gguf-mxfp4_moe"], out=tmp_path / "out", device="cpu", requantize=True
    )
    assert quantkit.verify(made, source=mixture).ok
    source = ModelSource.open(str(mixture), requantize=True)
    experts = {n: weight for n, weight in made.state(torch.float32) if ".experts." in n}
    assert experts.keys() == {name for name in source.tensors if ".experts." in name}
    for name, weight in experts.items():
        assert torch.equal(weight, source.tensors[name].read().float()), name
    assert {e.kind.name for n, e in made.gguf.tensors.items() if "_exps.weight" in n} == {"MXFP4"}


def test_a_report_says_what_the_source_was(model, tmp_path, run_cli):
    (made,) = quantkit.quantize(model, ["fp8-dynamic"], out=tmp_path / "one", device="cpu")
    asked = ["run", made.folder, "-r", "rtn-w4a16", "--requantize", "--tasks", "python_docs"]
    asked += ["--limit", "1", "--max-length", "64", "--device", "cpu", "-o", tmp_path / "two"]
    assert run_cli(asked).code == 0
    words = "The source of rtn-w4a16 had been quantised already (compressed-tensors)"
    report = json.loads((tmp_path / "two" / "report.json").read_bytes())
    assert any(words in note for note in report["notes"])
    assert words in (tmp_path / "two" / "report.md").read_text()


def fp8_blocks(weight):
    """Blocks of 128 x 128 as DeepSeek has them; the last of a row or column may be smaller."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    padded = torch.zeros(rows * 128, columns * 128)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    tiles = padded.view(rows, 128, columns, 128)
    scale = tiles.abs().amax((1, 3)) / 448
    coded = (tiles / scale[:, None, :, None]).flatten(2).flatten(0, 1)
    return coded[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn), scale


def test_deepseek_s_fp8_blocks_are_read_expert_by_expert(tmp_path, monkeypatch):
    """A mixture as published: blocks that do not divide layers, and a head that predicts ahead."""
    config = transformers.DeepseekV3Config(
        **SIZES | DEEPSEEK | {"vocab_size": 4096, "num_key_value_heads": 4, "dtype": "bfloat16"}
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = transformers.DeepseekV3ForCausalLM(config).to(torch.bfloat16)
    built.save_pretrained(tmp_path / "model")
    stored, exact = {}, {}
    path = tmp_path / "model" / "model.safetensors"
    plain = {name: tensor.read() for name, tensor in read_header(path).items()}
    last = [name for name in plain if name.startswith("model.layers.1.")]
    plain |= {name.replace(".1.", ".2.", 1): plain[name].clone() for name in last}
    for name, tensor in plain.items():
        stored[name] = exact[name] = tensor
        if name.endswith("_proj.weight") or "_proj_with_mqa" in name:
            values, scale = fp8_blocks(tensor)
            stored[name], stored[f"{name}_scale_inv"] = values, scale
            wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            wide = wide[: tensor.shape[0], : tensor.shape[1]]
            exact[name] = (values.float() * wide).to(torch.bfloat16)
    path.unlink()
    write_whole(path, stored)
    described = json.loads((tmp_path / "model" / "config.json").read_bytes())
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    described["quantization_config"] = blocks | {"activation_scheme": "dynamic"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    source = ModelSource.open(str(with_tokenizer(tmp_path / "model")), requantize=True)
    assert set(source.tensors) == set(exact)
    for name, tensor in exact.items():
        assert torch.equal(source.tensors[name].read(), tensor), name
    sizes, read = [], StoredTensor.read

    def noted(self, *arguments, **named):
        sizes.append(self.size_bytes)
        return read(self, *arguments, **named)

    monkeypatch.setattr(StoredTensor, "read", noted)
    (made,) = quantkit.quantize(
        tmp_path / "model", ["rtn-w4a16"], out=tmp_path / "out", device="cpu", requantize=True
    )
    assert max(sizes) <= max(t.nbytes for n, t in stored.items() if "layers" in n)
    assert quantkit.verify(made, source=tmp_path / "model").ok
    head = {n: t for n, t in exact.items() if n.startswith("model.layers.2.")}
    for name, tensor in head.items():
        assert torch.equal(made.tensors[name].read(), tensor), name
