"""The second engine: its recipes, its refusals, and what is checked of its results.

The normal suite runs a fake in its place; tests marked slow run llm-compressor itself.
"""

import json
from importlib import metadata

import pytest
import torch
import transformers

from quantkit import formats, resources
from quantkit.errors import HardwareError, MethodError, MissingDependency, RecipeError, SourceError
from quantkit.export.manifest import FILE, Manifest
from quantkit.methods.contract import Linears
from quantkit.methods.rtn import RTN
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.onepass import llmcompressor
from quantkit.onepass.external import EngineOutput, Fold
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.onepass.run import quantize
from quantkit.pipeline import finished_before
from quantkit.plan import checkpoint as planning
from quantkit.progress import Silent
from quantkit.recipe import Recipe
from quantkit.verification.checkpoint import verify

CPU = torch.device("cpu")
DATA = CalibrationChoice("python-docs", 4, 64)
ATTENTION = "model.layers.0.self_attn"
NORM = "model.layers.0.input_layernorm"
SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 32, "vocab_size": 64}


class FakeEngine:
    """Rounds to nearest in place of llm-compressor; `spoil` may change what it made."""

    def __init__(self, folds=(), spoil=lambda state: None):
        self.folds = list(folds)
        self.spoil = spoil

    def __call__(self, source, plan, ids, dtype, progress):
        state = {name: tensor.read() for name, tensor in source.tensors.items()}
        for fold in self.folds:
            feeder = state[f"{fold.feeder}.weight"]
            scale = fold.scale if feeder.dim() == 1 else fold.scale[:, None]
            state[f"{fold.feeder}.weight"] = (feeder / scale).to(feeder.dtype)
            for reader in fold.readers:
                weight = state[f"{reader}.weight"]
                state[f"{reader}.weight"] = (weight * fold.scale).to(weight.dtype)
        for module in plan.quantized:
            weight = state.pop(f"{module}.weight")
            linears = Linears(weight, weight.dtype, plan.recipe.weights)
            rounded = RTN.rounding.round(linears).quantized
            state |= formats.pack(module, rounded, plan.recipe)
        self.spoil(state)
        return EngineOutput(state, self.folds)


@pytest.fixture
def use(monkeypatch):
    """Put a fake in the engine's place."""

    def put(**settings):
        monkeypatch.setattr(llmcompressor, "version", lambda: "0.14.0.1")
        monkeypatch.setattr(llmcompressor, "carry_out", FakeEngine(**settings))

    return put


def run(model, out, recipe="rtn-w4a16", engine="llmcompressor"):
    source = ModelSource.open(str(model))
    return quantize(source, [Recipe.load(recipe)], out, calibration=DATA, run=Run(engine=engine))[0]


STEPS = {
    "fp8-dynamic": ["QuantizationModifier"],
    "fp8-static": ["QuantizationModifier"],
    "fp8-tensor": ["QuantizationModifier"],
    "fp8-block": ["QuantizationModifier"],
    "rtn-w8a16": ["QuantizationModifier"],
    "rtn-w4a16": ["QuantizationModifier"],
    "gptq-w4a16": ["GPTQModifier"],
    "gptq-w8a16": ["GPTQModifier"],
    "awq-w4a16": ["AWQModifier", "QuantizationModifier"],
    "awq-gptq-w4a16": ["AWQModifier", "GPTQModifier"],
    "int8-w8a8": ["SmoothQuantModifier", "GPTQModifier"],
    **{
        name: ["QuantizationModifier"]
        for name in ("mxfp8", "rtn-w5a16", "rtn-w6a16", "rtn-nvfp4-a16", "rtn-mxfp4-a16")
    },
    **{name: ["GPTQModifier"] for name in ("nvfp4", "nvfp4-a16", "nvfp4-fp8", "w4afp8")},
    **{name: ["GPTQModifier"] for name in ("mxfp4", "mxfp4-a16")},
    **{f"gptq-w{bits}a16": ["GPTQModifier"] for bits in (2, 3, 5, 6)},
    **{f"best-w{bits}a16": ["AWQModifier", "GPTQModifier"] for bits in (2, 3, 4)},
}


@pytest.mark.parametrize(
    "recipe", [name for name in resources.names("recipes") if not name.startswith("gguf-")]
)
def test_a_recipe_in_its_words(recipe):
    source = ModelSource.open("demo")
    architecture = Architecture.of(source.folder)
    plan = planning.make(architecture, architecture.stored(source), Recipe.load(recipe))
    found = llmcompressor.modifiers(plan)
    assert [name for name, _ in found] == STEPS[recipe]
    arguments = found[-1][1]
    assert json.loads(json.dumps(arguments)) == arguments
    assert arguments["ignore"] == ["lm_head"]
    # One and the same description goes to the engine and into config.json.
    config = formats.config(plan.recipe, plan.ignored)
    assert arguments["config_groups"] == config["config_groups"]
    if recipe == "int8-w8a8":
        assert found[0][1] == {"smoothing_strength": 0.5}


def test_a_missing_or_unknown_version_names_the_extra(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(MissingDependency, match=r"pip install .*\[llmcompressor\]"):
        llmcompressor.version()
    monkeypatch.setattr(metadata, "version", lambda name: "0.15.1")
    with pytest.raises(MissingDependency, match=r"0\.15\.1 .* 0\.14"):
        llmcompressor.version()


def test_what_it_cannot_do_is_refused_first(monkeypatch, use):
    use()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HardwareError, match="needs a GPU"):
        llmcompressor.check([Recipe.load("awq-w4a16")], CPU, Silent())
    recipe = Recipe.load("gptq-w4a16").model_copy(update={"options": {"propagate": False}})
    with pytest.raises(RecipeError, match="no option propagate"):
        llmcompressor.check([recipe], CPU, Silent())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(HardwareError, match="CUDA_VISIBLE_DEVICES"):
        llmcompressor.check([], CPU, Silent())


def test_its_result_is_a_checkpoint_like_any_other(use, tmp_path):
    use()
    theirs = run("demo", tmp_path / "theirs")
    ours = run("demo", tmp_path / "ours", engine="native")
    assert theirs.manifest.engine == "llmcompressor 0.14.0.1"
    assert ours.manifest.engine == "native"
    assert theirs.manifest.digest == ours.manifest.digest
    for name, layer in ours.manifest.layers.items():
        assert theirs.manifest.layers[name].relative_error == pytest.approx(layer.relative_error)
    assert verify(theirs.folder).ok


def test_a_manifest_of_before_has_the_native_engine(tmp_path):
    folder = run("demo", tmp_path, engine="native").folder
    data = json.loads((folder / FILE).read_text())
    del data["engine"]
    (folder / FILE).write_text(json.dumps(data))
    assert Manifest.read(folder).engine == "native"


def test_a_run_takes_up_only_what_the_same_engine_made(use, tmp_path):
    use()
    checkpoint = run("demo", tmp_path)
    found = [
        finished_before(
            ModelSource.open("demo"), [Recipe.load("rtn-w4a16")], tmp_path, None, engine
        )
        for engine in ("native", "llmcompressor")
    ]
    assert [len(one) for one in found] == [0, 1]
    assert found[1][0].folder == checkpoint.folder


def scale(size: int) -> torch.Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(0)) + 0.5


def test_folded_scales_are_undone(use, tmp_path):
    readers = [f"{ATTENTION}.{part}_proj" for part in "qkv"]
    up, down = (f"model.layers.0.mlp.{part}_proj" for part in ("up", "down"))
    use(folds=[Fold(NORM, readers, scale(256)), Fold(up, [down], scale(768))])
    checkpoint = run("demo", tmp_path, "rtn-w8a16")
    result = verify(checkpoint.folder)
    assert result.ok, result.faults
    assert not result.left_out
    assert result.worst[0][1] < 0.02


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s: s.pop(f"{ATTENTION}.q_proj.weight_scale"), "weight_scale is missing"),
        (
            lambda s: s.update(
                {f"{ATTENTION}.q_proj.weight_scale": s[f"{ATTENTION}.q_proj.weight_scale"].float()}
            ),
            r"weight_scale is F32 \[256, 2\], not BF16",
        ),
        (
            lambda s: s.update({f"{ATTENTION}.q_proj.weight_g_idx": torch.zeros(256)}),
            "weight_g_idx",
        ),
        (lambda s: s[f"{NORM}.weight"].mul_(2), r"input_layernorm\.weight"),
        (lambda s: s.clear(), "and .* more"),
    ],
    ids=["missing", "type", "extra", "changed", "nothing"],
)
def test_any_difference_to_the_plan_stops_the_run(use, tmp_path, spoil, words):
    use(spoil=spoil)
    with pytest.raises(MethodError, match=words):
        run("demo", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_experts_are_linear_layers_and_routers_are_left_alone(use, tiny_experts, tmp_path):
    router = "model.layers.0.mlp.gate"
    experts = [f"model.layers.0.mlp.experts.{n}" for n in range(4)]
    readers = [router, *(f"{e}.{part}" for e in experts for part in ("gate_proj", "up_proj"))]
    use(folds=[Fold("model.layers.0.post_attention_layernorm", readers, scale(128))])
    checkpoint = run(tiny_experts, tmp_path / "out")
    assert checkpoint.folder.name == "rtn-w4a16"
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert f"{experts[3]}.{part}.weight_packed" in checkpoint.tensors
    assert f"{router}.weight" in checkpoint.tensors
    config = json.loads((checkpoint.folder / "config.json").read_text())
    ignore = config["quantization_config"]["ignore"]
    assert ignore == ["lm_head", router, "model.layers.1.mlp.gate"]
    result = verify(checkpoint.folder)
    assert result.ok, result.faults
    assert not result.left_out
    tiny_experts.rename(tmp_path / "moved")
    assert "tensors" in verify(checkpoint.folder).passed  # from the config alone


def test_the_gate_of_a_shared_expert_is_left_alone_like_a_router(tmp_path):
    config = transformers.Qwen2MoeConfig(
        **SMALL, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32
    )
    config.architectures = ["Qwen2MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    architecture = Architecture.of(tmp_path)
    block = "model.layers.0.mlp"
    assert set(architecture.routers) == {f"{block}.gate"}
    assert f"{block}.shared_expert_gate" in architecture.unquantised
    alone = {*architecture.routers, *architecture.unquantised}
    assert not alone & set(architecture.linears)
    assert architecture.linears[f"{block}.experts.3.down_proj"] == (64, 32)
    assert architecture.linears[f"{block}.shared_expert.gate_proj"] == (32, 64)


def test_the_command_line_gives_its_results_a_name_of_their_own(run_cli, use, tmp_path):
    use()
    command = ["quantize", "demo", "-r", "rtn-w4a16", "-o", tmp_path, "--engine", "llmcompressor"]
    assert run_cli(command).code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["rtn-w4a16-llmcompressor"]
    result = run_cli([*command[:-1], "llmcompresor"])
    assert result.code == 2
    assert "did you mean llmcompressor?" in result.stderr


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (transformers.Llama4TextConfig(**SMALL, num_local_experts=4), "one tensor for all experts"),
        (transformers.MixtralConfig(**SMALL, num_local_experts=4), "other names"),
        (transformers.LlamaConfig(**SMALL, num_experts=4), "finds no experts"),
    ],
    ids=["llama4", "mixtral", "none"],
)
def test_experts_of_other_forms_are_refused(use, tmp_path, config, words):
    use()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(SourceError, match=words):
        run(tmp_path / "model", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def awq_on_cpu(monkeypatch):
    """AWQ refuses to run without a GPU only because it pins memory."""
    cache = pytest.importorskip("llmcompressor.pipelines.cache")
    monkeypatch.setattr(cache.IntermediatesCache, "pin_memory", lambda self, index: None)
    monkeypatch.setattr(llmcompressor, "check", lambda *args: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["gptq-w4a16", "int8-w8a8", "fp8-static", "fp8-block", "rtn-w8a16"]
)
def test_llm_compressor_itself(recipe, tmp_path):
    pytest.importorskip("llmcompressor")
    checkpoint = run("demo", tmp_path, recipe)
    assert checkpoint.manifest.engine.startswith("llmcompressor 0.14")
    result = verify(checkpoint.folder)
    assert result.ok, result.faults
    assert not result.left_out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["awq-w4a16", "awq-gptq-w4a16"])
def test_awq_of_llm_compressor(awq_on_cpu, recipe, tiny_model, tmp_path):
    checkpoint = run(tiny_model(vocab_size=4096), tmp_path / "out", recipe)
    assert any(name.endswith(".out_scale") for name in checkpoint.scales)
    result = verify(checkpoint.folder)
    assert result.ok, result.faults


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gptq-w4a16", "fp8-dynamic", "awq-w4a16", "int8-w8a8"])
def test_experts_by_llm_compressor(awq_on_cpu, recipe, tiny_experts, tmp_path):
    checkpoint = run(tiny_experts, tmp_path / "out", recipe)
    result = verify(checkpoint.folder)
    assert result.ok, result.faults
    assert not result.left_out
