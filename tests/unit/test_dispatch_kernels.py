"""vLLM's choice of a kernel by version, and the one table of support that must say the same."""

from dataclasses import replace

import pytest

from quantkit import recipe as recipes
from quantkit import resources
from quantkit.advise import dispatched, shape
from quantkit.hardware import expert_kernels, gpus, kernels, support
from quantkit.hardware.kernels import Asked, choose

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
        refused = dispatched.refusal(model, recipe, gpu)
        assert (refused is not None) == (support.runs(gpu, key).how == "no"), (gpu.name, refused)


def test_recommend_does_not_offer_what_the_rules_refuse():
    """Groups of 16 in GPTQ's format: the table of support knows 4 bits alone."""
    from quantkit.advise.candidates import Catalogue, Question, evaluate
    from quantkit.advise.formats import Format

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
            Asked("fp8-block", 4096, 4096, 89, (0, 0), method="fp8"),
            {(0, 26): "Triton FP8 blocks", (0, 28): "Triton FP8 blocks", (0, 29): "Marlin FP8"},
        ),
        (
            Asked("wna16", 4096, 4096, 80, (0, 0), bits=8),
            {(0, 26): "AllSpark", (0, 30): "AllSpark", (0, 31): "Marlin"},
        ),
        (
            Asked("wna16", 4096 + 64, 4096, 90, (0, 0), bits=4, group_size=128),
            {(0, 26): "Marlin", (0, 31): "Marlin", (0, 32): "Humming"},
        ),
        (
            Asked("nvfp4", 4096, 4096, 90, (0, 0), group_size=16),
            {(0, 31): "Marlin FP4", (0, 32): "Humming FP4"},
        ),
        (
            Asked("nvfp4-a16", 4096, 4096, 100, (0, 0), group_size=16),
            {(0, 29): "Marlin FP4", (0, 30): "FlashInfer CuTe DSL NVFP4 W4A16"},
        ),
        (
            Asked("fp8", 4096, 4096, 80, (0, 0), method="compressed-tensors"),
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
        ("mxfp4", 100, (0, 32), {"group_size": 32}, None),
    ],
)
def test_experts_get_the_first_backend_that_takes_them(kind, capability, version, changes, kernel):
    bits = 4 if kind in ("wna16", "nvfp4", "mxfp4") else 8
    sizes = {"rows": 768, "columns": 2048, "bits": bits} | changes
    asked = Asked(
        kind, capability=capability, version=version, method="compressed-tensors", **sizes
    )
    found = expert_kernels.choose(asked)
    assert (found[0] if found else None) == kernel
    assert expert_kernels.choose(replace(asked, method="gptq")) is None
    assert expert_kernels.choose(replace(asked, version=(0, 25))) is None
