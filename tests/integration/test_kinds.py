"""One model of each kind that people quantise: taken, written by its own names, read back."""

import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from stopping import stopping_at

import quantkit
from quantkit.advise import shape, weights
from quantkit.dispatch import prediction
from quantkit.errors import RecipeError, SourceError
from quantkit.export.checkpoint import Checkpoint
from quantkit.model import fused
from quantkit.model.architecture import Architecture
from quantkit.model.headers import read_header
from quantkit.model.source import ModelSource
from quantkit.plan import checkpoint as planning
from quantkit.recipe import Recipe
from quantkit.scoring import loading

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # for what the program itself imports
# Under a name of its own: the tests have a module `families` too.
spec = importlib.util.spec_from_file_location("families_program", BENCHMARKS / "families.py")
families = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = families
spec.loader.exec_module(families)

KINDS = {
    "gpt_oss": "experts in one tensor, transposed, alternating, with biases",
    "gemma3": "a language model behind a vision tower",
    "granitemoehybrid": "state-space blocks, and experts under other names",
    "gpt_neox": "tensors that transformers renames",
    "gemma3n_text": "several streams side by side, and keys and values that no layer uses",
}
pytestmark = pytest.mark.usefixtures("coarse_awq")

RECIPES = ["fp8-dynamic", "awq-gptq-w4a16"]
WITHOUT_EXPERTS = Recipe.load("rtn-w4a16").model_copy(
    update={"name": "rtn-attention", "ignore": ["lm_head", "re:.*experts.*"]}
)
NOT_JOINED = ("gpt_oss", "granitemoehybrid")
"""transformers reads their experts in one tensor only."""


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    families.build(request.param, folder / "model")
    return folder / "model", families.make(folder / "model", RECIPES, folder / "out")


def test_what_is_written_is_what_transformers_computes(made):
    source, checkpoints = made
    for checkpoint in checkpoints:
        found = families.check(checkpoint, source, checkpoint.folder.parent)
        assert found["ok"], found
        joins = json.loads((source / "config.json").read_bytes())["model_type"] not in NOT_JOINED
        assert (found["transformers"] == families.SAME_WEIGHTS) == joins, found


def test_transformers_leaves_alone_by_its_own_names_what_was_left_alone(tmp_path):
    """Its loader knows a layer by its module: Phi-MoE's routers have another name in files."""
    families.build("phimoe", tmp_path / "model")
    (made,) = families.make(tmp_path / "model", ["rtn-w4a16"], tmp_path / "out")
    found = families.check(made, tmp_path / "model", tmp_path)
    assert found["transformers"] == families.SAME_WEIGHTS
    config = json.loads((made.folder / "config.json").read_bytes())
    ignore = config["quantization_config"]["ignore"]
    assert {"model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.router"} <= set(ignore)
    # Names that another version of transformers has are no fault, those of quantised layers are.
    for name, is_sound in (
        ("model.layers.0.other", True),
        (next(iter(made.manifest.layers)), False),
    ):
        config["quantization_config"]["ignore"] = [*ignore, name]
        (made.folder / "config.json").write_text(json.dumps(config))
        told = quantkit.verify(made, source=tmp_path / "model").faults
        assert any("quantization_config" in fault for fault in told) != is_sound, told


def test_names_are_those_that_were_read(made):
    source, (checkpoint, _) = made
    opened = ModelSource.open(str(source))
    layers = set(checkpoint.manifest.layers)
    kept = {name for name in opened.tensors if name.removesuffix(".weight") not in layers}
    assert kept <= set(checkpoint.tensors)
    assert {f"{name}.weight" for name in layers} <= set(opened.tensors)


def test_vllm_is_foretold_to_load_what_is_written(made):
    source, checkpoints = made
    for checkpoint in checkpoints:
        told = {one.rule.id for one in prediction.predict(checkpoint.folder).faults}
        is_known = ModelSource.open(str(source)).config["model_type"] == "gpt_oss"
        assert told == ({"gpt-oss-experts"} if is_known else set())


def test_every_command_knows_the_family(made, run_cli, tmp_path):
    source, (checkpoint, _) = made
    tasks = ["--tasks", "python_docs", "--limit", "1", "--max-length", "64", "--device", "cpu"]
    for asked in (
        ["recommend", source, "--gpu", "L40S", "--min-quality", "0.5"],
        ["serve", checkpoint.folder, "--dry-run", "--gpu", "L40S"],
        ["score", checkpoint.folder, *tasks, "-o", tmp_path],
        ["card", checkpoint.folder],
    ):
        result = run_cli(asked)
        assert result.code == 0, (asked[0], result.stderr)


@pytest.mark.parametrize("family", ["qwen3_5_moe", "deepseek_v4"])
def test_caches_of_an_unusual_form_are_advised_on_and_served(family, run_cli, tmp_path):
    families.build(family, tmp_path / family)
    advice = run_cli(["recommend", tmp_path / family, "--gpu", "L40S", "--json"])
    assert advice.code == 0, advice.stderr
    (answer,) = json.loads(advice.stdout)["answers"]
    offered = {one["format"] for one in answer["candidates"] if one["serves"]}
    assert "fp8-dynamic" in offered
    assert ("fp8-dynamic+kv-fp8" in offered) == (family == "qwen3_5_moe")
    served = run_cli(["serve", tmp_path / family, "--dry-run", "--gpu", "L40S"])
    assert served.code == 0, served.stderr
    assert "vllm serve" in served.stdout


@pytest.mark.parametrize("family", ["deepseek_v4", "deepseek_v32"])
def test_a_cache_without_scales_is_refused_and_not_offered(family, tmp_path):
    families.build(family, tmp_path / family)
    recipe = Recipe.load("fp8-dynamic+kv-fp8")
    with pytest.raises(RecipeError, match="caches keys and values in a form that has scales"):
        plan(tmp_path / family, recipe)
    with pytest.raises(RecipeError, match="caches keys and values in a form that has scales"):
        weights.plan(shape.of(str(tmp_path / family)), recipe)


def test_all_that_is_not_language_is_copied_and_ignored(tmp_path):
    families.build("gemma3", tmp_path / "model")
    (checkpoint,) = families.make(tmp_path / "model", ["fp8-dynamic"], tmp_path / "out")
    stored = read_header(tmp_path / "model" / "model.safetensors")
    towers = [n for n in stored if "vision_tower" in n or "multi_modal_projector" in n]
    assert len(towers) > 10
    for name in towers:
        assert torch.equal(checkpoint.tensors[name].read(), stored[name].read())
    config = json.loads((checkpoint.folder / "config.json").read_bytes())["quantization_config"]
    linears = {n.removesuffix(".weight") for n in towers if n.endswith("q_proj.weight")}
    assert linears <= set(config["ignore"])
    assert "re:.*vision_tower.*" in config["ignore"]


def test_an_audio_tower_is_left_alone_as_a_vision_tower_is(tmp_path):
    text = {"model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    audio = {"model_type": "qwen2_audio_encoder", "d_model": 64, "encoder_layers": 2}
    audio |= {"encoder_attention_heads": 2, "encoder_ffn_dim": 128, "num_mel_bins": 16}
    config = transformers.Qwen2AudioConfig(
        text_config=text | {"vocab_size": 4096}, audio_config=audio | {"max_source_positions": 50}
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    found = plan(tmp_path / "model")
    assert len(found.quantized) == 2 * 7
    assert all(".layers." in name and "language_model" in name for name in found.quantized)
    assert {"re:.*audio_tower.*", "re:.*multi_modal_projector.*"} <= set(found.ignored)


def test_a_class_by_its_published_name_is_taken(tmp_path):
    """Kimi K2.5's config names a class that transformers writes otherwise."""
    families.build("kimi_k25", tmp_path)
    wanted = Architecture.of(tmp_path).linears
    config = json.loads((tmp_path / "config.json").read_bytes())
    config["architectures"] = ["KimiK25ForConditionalGeneration"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert Architecture.of(tmp_path).linears == wanted


def test_a_class_that_transformers_has_is_taken_under_another_type(tmp_path):
    """Kimi K2 says kimi_k2, names DeepSeek V3's class and brings code; so does vLLM read it."""
    families.build("deepseek_v3", tmp_path / "model")
    wanted = Architecture.of(tmp_path / "model").linears
    path = tmp_path / "model" / "config.json"
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    changed = {"model_type": "kimi_k2", "auto_map": code}
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changed))
    (tmp_path / "model" / "configuration_deepseek.py").write_text("import gone_with_old_versions")
    for trusted in (False, True):
        assert Architecture.of(tmp_path / "model", trusted).linears == wanted
    (made,) = families.make(tmp_path / "model", ["rtn-w4a16"], tmp_path / "out")
    assert quantkit.verify(made, source=tmp_path / "model").ok
    assert families.logits(loading.load(made, torch.device("cpu"))).isfinite().all()
    assert json.loads((made.folder / "config.json").read_bytes())["model_type"] == "kimi_k2"


def test_layers_that_no_engine_serves_quantised_are_named(tmp_path):
    families.build("gpt2", tmp_path)
    with pytest.raises(SourceError, match=r"Conv1D.*transformer\.h\.0\.attn\.c_attn.*unquantised"):
        Architecture.of(tmp_path)


def test_a_model_whose_layers_all_stay_in_16_bits_is_refused_with_the_reason(tmp_path):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 128}
    transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(SourceError, match=r"every linear layer.*mixer\.in_proj: it belongs to a"):
        Architecture.of(tmp_path)


def test_a_model_without_attention_heads_is_taken_by_looking(tmp_path):
    sizes = {"hidden_size": 64, "attention_hidden_size": 64, "num_hidden_layers": 2}
    config = transformers.RwkvConfig(**sizes, intermediate_size=128, vocab_size=128)
    transformers.RwkvForCausalLM(config).save_pretrained(tmp_path)
    found = Architecture.of(tmp_path)
    assert (len(found.linears), found.n_kv_heads) == (2 * 7 + 1, 0)


def test_arguments_that_cannot_be_recorded_are_named(tmp_path):
    """BLOOM's blocks take a tensor with a row for every head of every sample."""
    config = transformers.BloomConfig(vocab_size=4096, hidden_size=128, n_layer=2, n_head=4)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path / "model")
    for path in families.resources.DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "model")
    with pytest.raises(SourceError, match=r"BloomBlock takes an argument.*need no data work"):
        families.make(tmp_path / "model", ["gptq-w4a16"], tmp_path / "out")
    assert families.make(tmp_path / "model", ["fp8-dynamic"], tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "last"),
    [
        ("deepseek_v32", "indexer.wk"),
        ("laguna", "self_attn.g_proj"),
        ("lfm2", "conv.in_proj"),
        ("jamba", "mamba.out_proj"),
        ("gpt_neox", "attention.query_key_value"),
        ("deepseek_v4", "indexer.compressor.wkv"),
        ("gemma3n_text", "layers.3.self_attn.q_proj"),
        ("gemma4", "layers.5.self_attn.q_proj"),
    ],
)
def test_what_vllm_keeps_in_16_bits_is_left_alone(tmp_path, family, last):
    families.build(family, tmp_path / "model")
    found = plan(tmp_path / "model")
    assert any(name.endswith(f".{last}") for name in found.ignored)
    assert not any(name.endswith(f".{last}") for name in found.quantized)


def test_rows_that_vllm_sorts_are_quantised_where_every_tensor_has_them(tmp_path):
    families.build("gpt_neox", tmp_path / "model")
    last = ".attention.query_key_value"
    assert "sorts their rows by head" in " ".join(plan(tmp_path / "model").notes)
    for name in ("fp8-dynamic", "int8-w8a8"):
        found = plan(tmp_path / "model", Recipe.load(name))
        assert any(module.endswith(last) for module in found.quantized)
        assert not found.notes


def test_mixers_of_the_second_mamba_are_quantised(tmp_path):
    families.build("bamba", tmp_path / "model")
    found = plan(tmp_path / "model")
    assert {"model.layers.0.mamba.in_proj", "model.layers.0.mamba.out_proj"} <= set(found.quantized)


def test_what_blocks_share_is_named_in_the_models_order(tmp_path):
    families.build("zamba2", tmp_path / "model")
    kept = Architecture.of(tmp_path / "model").unquantised
    owner, other = ([n for n in kept if f".{i}.shared_transformer." in n] for i in (1, 2))
    assert len(owner) > 5
    assert owner == [name.replace(".2.", ".1.", 1) for name in other]
    # Inside vLLM the shared block has no number.
    for name in ("model.feed_forward.down_proj", "model.qkv_proj", "model.o_proj"):
        assert any(re.match(p.removeprefix("re:"), name) for p in kept if p.startswith("re:"))


def test_a_head_is_left_alone_by_both_of_its_names(tmp_path):
    families.build("gpt_neox", tmp_path / "model")
    assert {"embed_out", "lm_head"} <= set(plan(tmp_path / "model").ignore)


def test_experts_that_vllm_does_not_read_are_said(tmp_path):
    families.build("gpt_oss", tmp_path / "model")
    words = "read the experts of gpt-oss in MXFP4 or in 16 bits, all of a block in one tensor"
    assert words in " ".join(plan(tmp_path / "model").notes)
    assert words not in " ".join(plan(tmp_path / "model", WITHOUT_EXPERTS).notes)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_vl_moe"])
def test_experts_that_stay_in_16_bits_stay_as_they_were(family, tmp_path):
    """In tensors of all experts, as every loader of the family reads them."""
    families.build(family, tmp_path / "model")
    made = families.make(tmp_path / "model", [WITHOUT_EXPERTS, calibrated()], tmp_path / "out")
    original = read_header(tmp_path / "model" / "model.safetensors")
    whole = [name for name in original if ".experts." in name]
    assert whole
    for checkpoint in made:
        stored = read_header(checkpoint.folder / "model.safetensors")
        assert {name for name in stored if ".experts." in name} == set(whole)
        for name in whole:
            assert torch.equal(stored[name].read(), original[name].read())
        found = families.check(checkpoint, tmp_path / "model", tmp_path)
        assert (found["ok"], found["transformers"]) == (True, families.SAME_WEIGHTS), found
        assert not prediction.predict(checkpoint.folder).faults


def test_a_stopped_pass_beside_16_bit_experts_goes_on_to_the_same_bytes(tmp_path):
    families.build("gpt_oss", tmp_path / "model")

    def make(out):
        (made,) = families.make(tmp_path / "model", [calibrated()], tmp_path / out)
        return made.manifest.files["model.safetensors"].sha256

    expected = make("whole")
    with stopping_at(1, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        make("stopped")
    assert make("stopped") == expected


def calibrated():
    """The same with attention by GPTQ."""
    changes = {"name": "gptq-attention", "ignore": WITHOUT_EXPERTS.ignore}
    return Recipe.load("gptq-w4a16").model_copy(update=changes)


def plan(folder, recipe=None):
    source = ModelSource.open(str(folder))
    architecture = Architecture.of(source.folder, tensors=source.tensors)
    stored = architecture.stored(source)
    return planning.make(architecture, stored, recipe or Recipe.load("rtn-w4a16"))


def test_scales_before_a_router_are_exact(tmp_path):
    model = families.build("qwen3_moe", tmp_path / "model")
    with torch.no_grad():  # channels that matter more than others
        model.model.layers[1].post_attention_layernorm.weight[::16] *= 32
    model.save_pretrained(tmp_path / "model")
    source = ModelSource.open(str(tmp_path / "model"))
    (checkpoint,) = families.make(tmp_path / "model", ["awq-gptq-w4a16"], tmp_path / "out")
    router = "model.layers.1.mlp.gate.weight"
    norm = "model.layers.1.post_attention_layernorm.weight"
    scale = 1 / checkpoint.scales[f"{router}.folded"]
    assert (scale != 1).any()
    assert torch.equal(scale.log2(), scale.log2().round())
    before, after = source.tensors[router].read(), checkpoint.tensors[router].read()
    assert torch.equal(after.float(), before.float() * scale)
    before, after = source.tensors[norm].read(), checkpoint.tensors[norm].read()
    assert torch.equal(after.float(), before.float() / scale)
    for index in range(4):
        experts = f"model.layers.1.mlp.experts.{index}"
        assert torch.equal(checkpoint.scales[f"{experts}.up_proj.in_scale"], scale)
        folded = checkpoint.scales[f"{experts}.down_proj.in_scale"]
        assert torch.equal(checkpoint.scales[f"{experts}.up_proj.out_scale"], folded)


def test_static_input_scales_are_one_for_all_experts(tmp_path):
    families.build("qwen3_moe", tmp_path / "model")
    (checkpoint,) = families.make(tmp_path / "model", ["fp8-static"], tmp_path / "out")
    for layers in (("gate_proj", "up_proj"), ("down_proj",)):
        names = [
            f"model.layers.0.mlp.experts.{index}.{layer}.input_scale"
            for index in range(4)
            for layer in layers
        ]
        assert len({checkpoint.tensors[name].read().item() for name in names}) == 1


def test_experts_of_either_orientation_are_taken_apart(tmp_path):
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(2, 12, 4, generator=generator)  # 2 experts, inner 6, width 4
    down = torch.randn(2, 4, 6, generator=generator)
    for turned in (False, True):
        for kind in ("llama4", "gpt_oss"):
            folder = tmp_path / f"{kind}-{turned}"
            folder.mkdir()
            tensors = {"m.experts.gate_up_proj": both, "m.experts.down_proj": down}
            if turned:
                tensors = {n: t.transpose(1, 2).contiguous() for n, t in tensors.items()}
            families.write_whole(folder / "model.safetensors", tensors)
            stored = read_header(folder / "model.safetensors")
            found = fused.separated(stored, {"model_type": kind})
            alternating = kind == "gpt_oss"
            gate, up = (both[1, 0::2], both[1, 1::2]) if alternating else both[1].chunk(2)
            assert torch.equal(found["m.experts.1.gate_proj.weight"].read(), gate)
            assert torch.equal(found["m.experts.1.up_proj.weight"].read(), up)
            assert torch.equal(found["m.experts.1.down_proj.weight"].read(), down[1])


def test_a_head_that_predicts_ahead_stays_as_it_was(tmp_path):
    """DeepSeek's is one more block, in which transformers sees tensors that it does not know."""
    families.build("deepseek_v3", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    stored = {name: tensor.read() for name, tensor in read_header(path).items()}
    start = "model.layers.2."
    last = {n: t for n, t in stored.items() if ".layers.1." in n}
    head = {n.replace("model.layers.1.", start): t.clone() for n, t in last.items()}
    head[f"{start}eh_proj.weight"] = torch.randn(128, 256).bfloat16()
    head[f"{start}shared_head.head.weight"] = stored["lm_head.weight"].clone()
    families.save_file(stored | head, path, {"format": "pt"})
    made = families.make(tmp_path / "model", RECIPES, tmp_path / "out")
    for checkpoint in made:
        assert families.check(checkpoint, tmp_path / "model", tmp_path)["ok"]
        kept = read_header(checkpoint.folder / "model.safetensors")
        for name, tensor in head.items():
            assert torch.equal(kept[name].read(), tensor)
        config = json.loads((checkpoint.folder / "config.json").read_bytes())
        linears = {n.removesuffix(".weight") for n, t in head.items() if t.ndim == 2}
        assert linears <= set(config["quantization_config"]["ignore"])
        assert not any(name.startswith(start) for name in checkpoint.manifest.layers)


def test_experts_of_such_a_head_stay_in_one_tensor(tmp_path):
    families.build("qwen3_5_moe", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    stored = {name: tensor.read() for name, tensor in read_header(path).items()}
    head = {
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(4, 256, 128).bfloat16(),
        "mtp.layers.0.mlp.experts.down_proj": torch.randn(4, 128, 128).bfloat16(),
        "mtp.fc.weight": torch.randn(128, 256).bfloat16(),
    }
    families.save_file(stored | head, path, {"format": "pt"})
    (made,) = families.make(tmp_path / "model", ["rtn-w4a16"], tmp_path / "out")
    assert quantkit.verify(made, source=tmp_path / "model").ok
    kept = read_header(made.folder / "model.safetensors")
    assert {name for name in kept if name.startswith("mtp.")} == set(head)
    for name, tensor in head.items():
        assert torch.equal(kept[name].read(), tensor)
    config = json.loads((made.folder / "config.json").read_bytes())
    wanted = {"mtp.fc", "mtp.layers.0.mlp.experts.0.gate_proj"}  # vLLM asks by the first expert's
    assert wanted <= set(config["quantization_config"]["ignore"])
    assert any(".experts." in name for name in made.manifest.layers)


CODE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class OddConfig(LlamaConfig):
    model_type = "odd"

class Expert(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.one = torch.nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.two = torch.nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, states):
        return self.two(torch.nn.functional.gelu(self.one(states)))

class Mixture(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.experts = torch.nn.ModuleList(Expert(config) for _ in range(4))
        self.chooser = torch.nn.Linear(config.hidden_size, 8, bias=False)

    def forward(self, states):
        flat = states.reshape(-1, states.shape[-1])
        chosen, result = self.chooser(flat)[:, :3].argmax(-1), torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            if len(mine := (chosen == index).nonzero().flatten()):
                result[mine] = expert(flat[mine])
        return result.view(states.shape)

class OddForCausalLM(LlamaForCausalLM):
    config_class = OddConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Mixture(config)
"""


def test_a_model_with_code_of_its_own_is_taken_by_looking(tmp_path, run_cli):
    """A type that nobody knows, a router by another name, an expert that no token goes to."""
    folder = tmp_path / "model"
    known = {}
    exec(CODE, known)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = known["OddConfig"](**sizes, vocab_size=4096, num_attention_heads=4, num_experts=4)
    torch.manual_seed(0)
    known["OddForCausalLM"](config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "modeling_odd.py").write_text(CODE)
    described = json.loads((folder / "config.json").read_bytes()) | {
        "auto_map": {
            "AutoConfig": "modeling_odd.OddConfig",
            "AutoModelForCausalLM": "modeling_odd.OddForCausalLM",
        }
    }
    (folder / "config.json").write_text(json.dumps(described))
    for path in families.resources.DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(path, folder)
    asked = ["quantize", folder, "-r", "gptq-w4a16", "--calibration", "python-docs", "-o"]
    asked += [tmp_path / "out", "--samples", "8", "--length", "64", "--device", "cpu"]
    refused = run_cli(asked)
    assert refused.code == 3
    assert "read it, then allow it with --trust-remote-code" in refused.stderr
    made = run_cli([*asked, "--trust-remote-code"])
    assert made.code == 0, made.stderr
    checkpoint = Checkpoint.open(tmp_path / "out" / "gptq-w4a16")
    assert len(checkpoint.manifest.layers) == 2 * (4 + 4 * 2)
    found = json.loads((checkpoint.folder / "config.json").read_bytes())["quantization_config"]
    assert {f"model.layers.{n}.mlp.chooser" for n in (0, 1)} <= set(found["ignore"])
    assert (checkpoint.folder / "modeling_odd.py").read_text() == CODE
    verified = run_cli(["verify", checkpoint.folder, "--trust-remote-code"])
    assert verified.code == 0, verified.stderr
    ours = loading.load(checkpoint, torch.device("cpu"), trust_remote_code=True)
    model = known["OddForCausalLM"](config).float()
    model.load_state_dict(dict(checkpoint.state(torch.float32)))
    assert families.gap(families.logits(ours), families.logits(model)) < 1e-4


def test_experts_of_other_widths_are_refused_for_versions_that_cannot_read_them(tmp_path):
    families.build("qwen3_moe", tmp_path / "model")
    (checkpoint,) = families.make(tmp_path / "model", ["rtn-w5a16"], tmp_path / "out")
    early = prediction.predict(checkpoint.folder, version="0.28")
    assert {found.rule.id for found in early.faults} == {"expert-width"}
    assert prediction.predict(checkpoint.folder, version="0.29").ok


TAUGHT = Recipe.load("gptq-w4a16").model_copy(
    update={"name": "taught", "options": {"tune": 4, "distil": 2}}
)


@pytest.mark.parametrize("family", ["deepseek_v32", "qwen3_vl", "idefics3"])
def test_models_with_choices_or_additions_learn_by_gradients(family, tmp_path):
    # A choice of tokens has no gradient; what the model adds to the states is not the block's.
    families.build(family, tmp_path / "model")
    (checkpoint,) = families.make(tmp_path / "model", [TAUGHT], tmp_path / "out")
    assert any("distilled" in note for note in checkpoint.manifest.notes)
    (tmp_path / "copies").mkdir()
    found = families.check(checkpoint, tmp_path / "model", tmp_path / "copies")
    assert found["ok"], found


def test_models_whose_blocks_share_more_than_states_say_that_nothing_learns(tmp_path):
    families.build("gemma3n_text", tmp_path / "model")
    (checkpoint,) = families.make(tmp_path / "model", [TAUGHT], tmp_path / "out")
    assert any("no distillation" in note for note in checkpoint.manifest.notes)
