"""vLLM's choice of a kernel by version, and the one table of support that must say the same."""

import pytest

from quantkit import recipe as recipes
from quantkit import resources
from quantkit.advise import dispatched, shape
from quantkit.hardware import gpus, kernels, support
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
