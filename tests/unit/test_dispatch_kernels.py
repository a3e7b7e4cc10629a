"""vLLM's choice of a kernel by version, and the one table of support that must say the same."""

from dataclasses import replace

import pytest

from quantkit import recipe as recipes
from quantkit import resources
from quantkit.advise import refusals, shape
from quantkit.dispatch import prediction
from quantkit.hardware import expert_kernels, gpus, kernels, support
from quantkit.hardware.kernels import KernelQuery, choose
from quantkit.tensorspec import TensorSpec

DEVICES = {
    gpu.capability: gpu
    for gpu in gpus.load()
    if gpu.vendor == "nvidia" and gpu.capability is not None
}
"""One of each compute capability that the table of GPUs has."""


def of_table(gpu, format):
    rules = support.VLLM[format].get("nvidia", ())
    return next((rule.how for rule in rules if support._holds(rule, gpu)), "no")


@pytest.mark.parametrize("gpu", DEVICES.values(), ids=[str(c) for c in DEVICES])
@pytest.mark.parametrize("format", kernels.USUAL)
def test_the_words_of_support_are_those_of_the_kernels(gpu, format):
    chosen = kernels.usual(format, gpu.capability)
    how = "no" if chosen is None else "emulated" if chosen[1] else "native"
    assert of_table(gpu, format) == how == support.runs(gpu, format).how
    assert support.runs(gpu, format).reason


@pytest.fixture(scope="module")
def model():
    return shape.of("7b")


@pytest.mark.parametrize("name", resources.names("recipes"))
def test_what_support_calls_impossible_is_what_the_rules_refuse(model, name):
    recipe = recipes.load(name)
    key = support.format_of(recipe)
    if key == "gguf":
        pytest.skip("llama.cpp's")
    for gpu in DEVICES.values():
        if gpu.capability < 7.5:
            continue  # which vLLM's methods themselves refuse
        refused = refusals.refusal(model, recipe, gpu)
        assert (refused is not None) == (support.runs(gpu, key).how == "no"), (gpu.name, refused)


def test_recommend_does_not_offer_what_the_rules_refuse():
    """Groups of 16 in GPTQ's format: the table of support knows 4 bits alone."""
    from quantkit.advise.candidates import evaluate
    from quantkit.advise.formats import Format
    from quantkit.advise.question import Catalogue, Question

    small, gpu = shape.of("demo"), gpus.find("H200")
    usual = recipes.load("rtn-w4a16").in_format("gptq")
    weights = usual.weights.model_copy(update={"group_size": 16})
    for recipe, words in ((usual, None), (usual.model_copy(update={"weights": weights}), "is 16")):
        assert support.runs(gpu, support.format_of(recipe)).how == "native"
        format = Format(recipe.name, recipe, support.format_of(recipe), "vllm")
        (candidate,) = evaluate(Question(Catalogue(small, (format,)), context=256), gpu)
        if words is None:
            assert candidate.problem is None or candidate.lacks != "support"
        else:
            assert candidate.lacks == "support"
            assert words in candidate.problem


@pytest.mark.parametrize(
    ("asked", "versions"),
    [
        (
            KernelQuery("fp8-block", 4096, 4096, 89, (0, 0), method="fp8"),
            {(0, 26): "Triton FP8 blocks", (0, 28): "Triton FP8 blocks", (0, 29): "Marlin FP8"},
        ),
        (
            KernelQuery("wna16", 4096, 4096, 80, (0, 0), bits=8),
            {(0, 26): "AllSpark", (0, 30): "AllSpark", (0, 31): "Marlin"},
        ),
        (
            KernelQuery("wna16", 4096 + 64, 4096, 90, (0, 0), bits=4, group_size=128),
            {(0, 26): "Marlin", (0, 31): "Marlin", (0, 32): "Humming"},
        ),
        (
            KernelQuery("nvfp4", 4096, 4096, 90, (0, 0), group_size=16),
            {(0, 31): "Marlin FP4", (0, 32): "Humming FP4", (0, 33): "Humming FP4"},
        ),
        (
            KernelQuery("nvfp4-a16", 4096, 4096, 100, (0, 0), group_size=16),
            {(0, 29): "Marlin FP4", (0, 30): "FlashInfer CuTe DSL NVFP4 W4A16"},
        ),
        (
            KernelQuery("mxfp4-a16", 4096, 4096, 90, (0, 0), group_size=32),
            {(0, 26): "Marlin FP4", (0, 32): "Humming FP4"},
        ),
        (
            KernelQuery("mxfp4-a16", 4096, 4096, 100, (0, 0), group_size=32),
            {(0, 32): "FlashInfer MXFP4 (4-bit activations)"},
        ),
        (
            KernelQuery("fp8", 4096, 4096, 80, (0, 0), method="compressed-tensors"),
            {(0, 24): "Marlin FP8", (0, 25): "Humming FP8"},
        ),
    ],
)
def test_kernels_change_with_versions(asked, versions):
    from dataclasses import replace

    for version, name in versions.items():
        assert choose(replace(asked, version=version))[0] == name, version


@pytest.mark.parametrize(
    ("kind", "capability", "version", "changes", "kernel"),
    [
        ("wna16", 90, (0, 26), {"group_size": 128}, "Marlin"),
        ("wna16", 90, (0, 32), {"group_size": 128}, "Humming"),
        ("wna16", 80, (0, 29), {"group_size": 128}, "Marlin"),
        ("wna16", 90, (0, 29), {"group_size": 128}, None),
        ("wna16", 100, (0, 32), {"group_size": 32}, "FlashInfer TRT-LLM MxInt4"),
        ("wna16", 80, (0, 26), {"group_size": 128, "columns": 192}, "Triton WNA16"),
        ("int8", 80, (0, 28), {}, "Triton INT8"),
        ("fp8", 90, (0, 30), {}, "CUTLASS FP8 (Triton for some shapes)"),
        ("fp8", 90, (0, 26), {"static": True, "per_tensor": True}, "FlashInfer CUTLASS FP8"),
        ("fp8", 90, (0, 26), {"per_tensor": True}, "Triton FP8"),
        ("fp8", 80, (0, 26), {}, "Marlin FP8"),
        ("fp8", 100, (0, 26), {}, None),
        ("fp8", 100, (0, 32), {}, "Triton FP8"),
        ("fp8-block", 90, (0, 32), {}, "Triton FP8 blocks"),
        ("fp8-block", 100, (0, 32), {}, "FlashInfer TRT-LLM FP8 blocks"),
        ("nvfp4", 100, (0, 30), {"group_size": 16}, "FlashInfer TRT-LLM NVFP4"),
        ("nvfp4", 90, (0, 26), {"group_size": 16}, "Marlin FP4"),
        ("mxfp4", 100, (0, 29), {"group_size": 32}, "CUTLASS MXFP4"),
        ("mxfp4", 90, (0, 26), {"group_size": 32}, "Marlin MXFP4"),
        ("mxfp4", 90, (0, 32), {"group_size": 32}, "Marlin MXFP4"),  # not asked by its oracle
        ("mxfp4", 110, (0, 32), {"group_size": 32}, None),
        ("mxfp4", 120, (0, 32), {"group_size": 32}, "Marlin MXFP4"),
        ("mxfp4", 75, (0, 32), {"group_size": 32}, None),
        ("mxfp4-a16", 89, (0, 32), {"group_size": 32}, "Marlin MXFP4"),
        ("mxfp4-a16", 100, (0, 32), {"group_size": 32}, "CUTLASS MXFP4 (4-bit activations)"),
        ("mxfp4-a16", 110, (0, 32), {"group_size": 32}, None),
        ("mxfp8", 103, (0, 28), {"group_size": 32}, "FlashInfer TRT-LLM MXFP8"),
        ("mxfp8", 90, (0, 26), {"group_size": 32}, "Marlin MXFP8"),
        ("mxfp8", 90, (0, 29), {"group_size": 32}, None),
        ("mxfp8", 90, (0, 32), {"group_size": 32}, "Humming MXFP8"),
        ("mxfp8", 80, (0, 30), {"group_size": 32}, "Marlin MXFP8"),
        ("mxfp8", 120, (0, 30), {"group_size": 32}, "Marlin MXFP8"),
        ("mxfp8", 75, (0, 32), {"group_size": 32}, None),
    ],
)
def test_experts_get_the_first_backend_that_takes_them(kind, capability, version, changes, kernel):
    bits = 4 if kind in ("wna16", "nvfp4", "mxfp4", "mxfp4-a16") else 8
    sizes = {"rows": 768, "columns": 2048, "bits": bits} | changes
    asked = KernelQuery(
        kind, capability=capability, version=version, method="compressed-tensors", **sizes
    )
    found = expert_kernels.choose(asked)
    assert (found[0] if found else None) == kernel
    assert expert_kernels.choose(replace(asked, method="quark")) is None
    assert expert_kernels.choose(replace(asked, version=(0, 25))) is None


STATIC = {"static": True, "per_tensor": True}


@pytest.mark.parametrize(
    ("method", "kind", "capability", "changes", "at_26", "at_32"),
    [
        ("gptq", "wna16", 80, {"group_size": 128}, "Marlin", "Marlin"),
        ("gptq", "wna16", 90, {"group_size": 128}, "Marlin", "Humming"),
        ("gptq", "wna16", 100, {"group_size": 32}, "Marlin", "Marlin"),
        ("gptq", "wna16", 90, {"group_size": 128, "act_order": True}, "Marlin", "Marlin"),
        ("gptq", "wna16", 80, {"group_size": 256}, "Triton WNA16", "Triton WNA16"),
        ("gptq", "wna16", 80, {"group_size": 128, "bits": 3}, None, None),
        ("awq", "wna16", 75, {"group_size": 128, "symmetric": False}, "Marlin", "Marlin"),
        ("awq", "wna16", 90, {"group_size": 128, "symmetric": False}, "Marlin", "Humming"),
        ("awq", "wna16", 89, {"group_size": 64, "columns": 2112}, "Triton WNA16", "Triton WNA16"),
        ("awq", "wna16", 90, {"group_size": 128, "bits": 8}, None, None),
        ("fp8", "fp8", 90, {"per_tensor": True}, "Triton FP8", "Triton FP8"),
        ("fp8", "fp8", 90, STATIC, "FlashInfer CUTLASS FP8", "FlashInfer CUTLASS FP8"),
        ("fp8", "fp8", 100, STATIC, "FlashInfer TRT-LLM FP8", "FlashInfer TRT-LLM FP8"),
        ("fp8", "fp8", 86, STATIC, "Marlin FP8", "Marlin FP8"),
        ("fp8", "fp8-block", 90, {}, "Triton FP8 blocks", "Triton FP8 blocks"),
        ("modelopt", "fp8", 89, STATIC, "Triton FP8", "Triton FP8"),
        ("modelopt", "fp8", 90, {}, None, None),
        ("modelopt", "nvfp4", 90, {"group_size": 16}, "Marlin FP4", "Humming FP4"),
        ("modelopt", "nvfp4", 120, {"group_size": 16}, *["FlashInfer CUTLASS NVFP4"] * 2),
        ("modelopt", "nvfp4-a16", 100, {"group_size": 16}, "Marlin FP4", "Marlin FP4"),
        ("modelopt", "mxfp8", 90, {"group_size": 32}, "Marlin MXFP8", "Humming MXFP8"),
        ("modelopt", "mxfp8", 100, {"group_size": 32}, *["FlashInfer TRT-LLM MXFP8"] * 2),
        ("modelopt", "mxfp4", 100, {"group_size": 32}, None, None),
        ("mxfp4", "gpt-oss", 100, {}, *["FlashInfer TRT-LLM MXFP4"] * 2),
        ("mxfp4", "gpt-oss", 90, {}, "Triton MXFP4", "Triton MXFP4"),
        ("mxfp4", "gpt-oss", 89, {}, "Marlin MXFP4", "Marlin MXFP4"),
        ("mxfp4", "gpt-oss", 120, {}, None, None),
        ("compressed-tensors", "gpt-oss", 90, {}, None, None),
        ("compressed-tensors", "wna16", 80, {"group_size": 128, "bits": 5}, None, "Humming"),
    ],
)
def test_experts_of_other_methods(method, kind, capability, changes, at_26, at_32):
    bits = 4 if kind.startswith(("wna16", "nvfp4")) else 8
    sizes = {"rows": 768, "columns": 2048, "bits": bits} | changes
    for version, kernel in (((0, 26), at_26), ((0, 32), at_32)):
        found = expert_kernels.choose(KernelQuery(kind, capability=capability, version=version,
                                            method=method, **sizes))  # fmt: skip
        assert (found[0] if found else None) == kernel


HIDDEN, INNER, GROUP = 512, 256, 128


def gptq(rows, columns):
    """Tensors of one layer, their types and shapes."""
    return {
        "qweight": ("I32", (columns // 8, rows)), "qzeros": ("I32", (columns // GROUP, rows // 8)),
        "scales": ("F16", (columns // GROUP, rows)), "g_idx": ("I32", (columns,)),
    }  # fmt: skip


def awq(rows, columns):
    return {
        "qweight": ("I32", (columns, rows // 8)), "qzeros": ("I32", (columns // GROUP, rows // 8)),
        "scales": ("F16", (columns // GROUP, rows)),
    }  # fmt: skip


def fp8(rows, columns):
    tiles = (-(-rows // 128), -(-columns // 128))
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": ("F32", tiles)}


def modelopt(rows, columns):
    return {
        "weight": ("U8", (rows, columns // 2)), "weight_scale": ("F8_E4M3", (rows, columns // 16)),
        "weight_scale_2": ("F32", ()), "input_scale": ("F32", ()),
    }  # fmt: skip


def mxfp4(rows, columns):
    return {
        "weight_packed": ("U8", (rows, columns // 2)), "weight_scale": ("U8", (rows, columns // 32))
    }  # fmt: skip


def mxfp8(rows, columns):
    return {
        "weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("U8", (rows, columns // 32))
    }  # fmt: skip


def microscaled(bits, **arguments):
    """A section of compressed-tensors as its own presets MXFP4 and MXFP8 write it."""
    weights = {"num_bits": bits, "type": "float", "strategy": "group", "group_size": 32,
               "scale_dtype": "torch.uint8"} | arguments  # fmt: skip
    inputs = {**weights, "dynamic": True}
    form = "mxfp4-pack-quantized" if bits == 4 else "mxfp8-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "section", "kernel"),
    [
        (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True,
                "desc_act": False}, "Marlin for experts"),
        (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
               "version": "gemm"}, "Marlin for experts"),
        (fp8, {"quant_method": "fp8", "activation_scheme": "dynamic",
               "weight_block_size": [128, 128]}, "Triton FP8 blocks for experts"),
        (modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "Marlin FP4 for experts"),
        (mxfp4, microscaled(4), "Marlin MXFP4 for experts"),
        (mxfp8, microscaled(8), "Marlin MXFP8 for experts"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)  # fmt: skip
def test_the_kernel_of_each_block_of_experts_is_named(parts, section, kernel):
    found = mixture(parts, section, "0.26", "H200")
    assert {one.layer: one.kernel for one in found.kernels} == {
        BLOCK.format(layer): kernel for layer in range(2)
    }
    assert not any("experts" in left for left in found.left_out)


BLOCK = "model.layers.{}.mlp.experts"


def mixture(parts, section, version, gpu):
    """What is foretold of two blocks of four experts."""
    specs = [
        TensorSpec(f"{BLOCK.format(layer)}.{expert}.{name}.{part}", dtype, shape)
        for layer in range(2)
        for expert in range(4)
        for name, rows, columns in (
            ("gate_proj", INNER, HIDDEN), ("up_proj", INNER, HIDDEN), ("down_proj", HIDDEN, INNER),
        )
        for part, (dtype, shape) in parts(rows, columns).items()
    ]  # fmt: skip
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
        "num_experts": 4, "hidden_size": HIDDEN, "moe_intermediate_size": INNER,
        "num_hidden_layers": 2, "quantization_config": section,
    }  # fmt: skip
    return prediction.of_tensors(config, specs, version, gpus.find(gpu))


def test_mx_experts_by_version_and_gpu():
    fast = mixture(mxfp4, microscaled(4), "0.32", "B200")
    assert {one.kernel for one in fast.kernels} == {"CUTLASS MXFP4 for experts"}
    assert [one.rule.id for one in fast.findings] == []
    slow = mixture(mxfp8, microscaled(8), "0.32", "H200")
    assert {one.kernel for one in slow.kernels} == {"Humming MXFP8 for experts"}
    (finding,) = slow.findings
    assert finding.rule.id == "slow-kernel"
    assert "MXFP8 tensor cores start at 10.0" in str(finding)
    # 0.32 has a choice of its own for FP8 inputs by MXFP4 weights, 0.26 has not
    section = microscaled(4)
    section["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True,
    }  # fmt: skip
    assert mixture(mxfp4, section, "0.26", "B200").kernels
    unsure = mixture(mxfp4, section, "0.32", "B200")
    assert unsure.kernels == []
    assert any("kernels of experts" in left for left in unsure.left_out)


def test_mxfp8_needs_its_scales_declared():
    """vLLM knows MXFP8 by scale_dtype, and has no other scheme for FP8 in groups of 32."""
    found = mixture(mxfp8, microscaled(8, scale_dtype=None), "0.26", "B200")
    assert [one.rule.id for one in found.faults] == ["no-scheme"]
    assert "scale_dtype" in str(found.faults[0])
    assert mixture(mxfp8, microscaled(8), "0.26", "B200").faults == []


def test_turing_has_no_kernel_for_mxfp8():
    """vLLM picks Marlin from 7.5 on, which has E8M0 scales in BF16 alone."""
    for gpu, kernel in (("T4", None), ("A100", "Marlin MXFP8")):
        capability = round(10 * gpus.find(gpu).capability)
        asked = KernelQuery(
            "mxfp8", 4096, 4096, capability, (0, 26), 8, 32, method="compressed-tensors"
        )
        assert (choose(asked) or (None,))[0] == kernel
    section = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    refused = mixture(mxfp8, section, "0.26", "T4")
    assert [one.rule.id for one in refused.faults] == ["capability"]
    assert {one.kernel for one in mixture(mxfp8, section, "0.26", "A100").kernels} == {
        "Marlin MXFP8 for experts"
    }
