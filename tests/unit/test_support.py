"""The one table of what runs where, and that everything that states it reads it."""

import re

import pytest

from quantkit import resources
from quantkit.advise.formats import RATES
from quantkit.errors import UnknownName
from quantkit.export import card_text
from quantkit.export.manifest import Manifest, Source, StoredFile
from quantkit.hardware.gpus import find, load
from quantkit.hardware.support import ENGINES, FORMATS, format_of, runs, where
from quantkit.recipe import load as load_recipe
from quantkit.report.hardware import runs_on
from quantkit.scoring import provenance
from quantkit.scoring.scorecard import Scorecard, Settings

GPUS = load()
RECIPES = resources.names("recipes")
every_recipe = pytest.mark.parametrize("name", [*RECIPES, "fp8-dynamic+kv-fp8"])
VENDORS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "cpu": "CPU"}
every_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("V100", "emulated no no no no no no emulated"),
        ("T4", "emulated native native native emulated emulated no emulated"),
        ("RTX 3090", "native native native native emulated emulated emulated emulated"),
        ("A100", "native native native native emulated emulated emulated emulated"),
        ("L40S", "native native native native native emulated native emulated"),
        ("H200", "native native native native native native native emulated"),
        ("B200", "native native native no native native native emulated"),
        ("RTX 5090", "native native native no native native native emulated"),
        ("MI250X", "native emulated emulated emulated no no emulated emulated"),
        ("MI300X", "native emulated emulated emulated native native native emulated"),
        ("RX 7900 XTX", "native native emulated emulated no no emulated emulated"),
        ("Arc B580", "native native no emulated emulated emulated no no"),
        ("Gaudi 3", "native no no no native no no no"),
        ("M3 Ultra", "no no no no no no no no"),
        ("server CPU", "native native no native emulated no no no"),
    ],
)
def test_what_vllm_runs(name, expected):
    assert [runs(find(name), format).how for format in FORMATS[:8]] == expected.split()


WEIGHTS_ONLY = "emulated native emulated emulated native emulated"
NONE = "no no no no no no"


@pytest.mark.parametrize(
    ("name", "floats", "integers"),
    [
        ("V100", NONE, "no no no no no no"),
        ("T4", "emulated native emulated no no no", "no native native native native native"),
        ("A100", WEIGHTS_ONLY, "no native native native native native"),
        ("L40S", WEIGHTS_ONLY, "no native native native native native"),
        ("H100 SXM", WEIGHTS_ONLY, "native native native native native native"),
        ("B200", "native " * 6, "no native native native native native"),
        ("RTX 5090", "native " * 6, "no native native native native native"),
        ("MI300X", "emulated no emulated emulated emulated emulated", NONE),
        ("MI355X", "emulated no emulated native native native", NONE),
        ("Arc B580", "no no no emulated emulated emulated", NONE),
        ("Gaudi 3", NONE, NONE),
        ("server CPU", NONE, NONE),
    ],
)
def test_what_vllm_runs_of_the_newer_formats(name, floats, integers):
    """NVFP4 (also weights only, also with FP8), MXFP4 (also weights only), MXFP8; then W4AFP8 and
    integers of 2, 3, 5, 6 and 7 bits."""
    said = [runs(find(name), format).how for format in FORMATS[8:]]
    assert said == [*floats.split(), *integers.split()]


@pytest.mark.parametrize("name", ["A100", "RTX 3090", "L4", "H200"])
def test_weights_in_mxfp4_run_like_those_in_nvfp4(name):
    for format in ("nvfp4-a16", "mxfp4-a16"):
        assert runs(find(name), format).how == "native"
        assert "16 bits" in runs(find(name), format).reason


def test_activations_that_vllm_rounds_unasked_are_named():
    assert runs(find("T4"), "mxfp4-a16").how == "no"  # E8M0 scales need BF16
    for name in ("B200", "RTX 5090", "MI355X", "Arc B580"):
        assert "rounds activations to 4 bits" in runs(find(name), "mxfp4-a16").reason
        assert "rounds" not in runs(find(name), "mxfp4").reason


@every_gpu
def test_llama_cpp_runs_gguf_and_nothing_else(gpu):
    native = {f for f in FORMATS if runs(gpu, f, "llama.cpp").how == "native"}
    assert native == (set() if "Gaudi" in gpu.name else {"gguf", "bf16"})


@every_gpu
def test_every_answer_has_a_reason(gpu):
    answers = [runs(gpu, format, engine) for format in FORMATS for engine in ENGINES]
    assert all(len(answer.reason) > 15 for answer in answers)


def test_fp8_on_a_cpu_is_emulated_where_no_amx_is_needed():
    gpu = find("CPU 2 x DDR5-5600")
    assert runs(gpu, "fp8-w8a8").how == "emulated"
    assert "0.24" in runs(gpu, "fp8-w8a8").reason
    for format in ("fp8-block", "kv-fp8"):
        assert (runs(gpu, format).how, "AMX" in runs(gpu, format).reason) == ("no", True)
    assert runs(find("Raspberry Pi 5"), "fp8-w8a8").how == "no"


def test_formats_and_engines_are_checked():
    with pytest.raises(UnknownName, match="format 'w4a4'"):
        runs(find("T4"), "w4a4")
    with pytest.raises(UnknownName, match="Did you mean vllm"):
        runs(find("T4"), "bf16", "vlm")


def test_native_formats_have_a_rate():
    rates = {"bf16": "fp16_tflops", **RATES}
    for gpu in GPUS:
        for format, rate in rates.items():
            if runs(gpu, format).how == "native" and gpu.vendor != "cpu":
                assert getattr(gpu, rate), (gpu.name, format)


@pytest.mark.parametrize("name", RECIPES)
def test_the_comment_of_every_recipe_is_what_the_table_says(name):
    text = (resources.folder("recipes") / f"{name}.yaml").read_text()
    comment = " ".join(re.findall(r"^# ?(.*)$", text, re.M))
    assert f"Runs on: {where(format_of(load_recipe(name)))}." in comment


def manifest_of(name):
    recipe = load_recipe(name)
    return Manifest(
        name=recipe.name,
        format="gguf" if name.startswith("gguf") else "compressed-tensors",
        source=Source(
            name="org/Model", revision=None, fingerprint="f" * 64, size_bytes=16_000, dtype="BF16"
        ),
        recipe=recipe,
        recipe_digest=recipe.digest,
        n_parameters=8_000,
        size_bytes=4_000,
        bits_per_weight=4.0,
        quantized_bits_per_weight=4.25,
        layers={},
        files={"model.safetensors": StoredFile(sha256="0" * 64, size_bytes=4_000)},
        versions={},
        device="cpu",
        seconds=1.0,
        peak_host_bytes=1,
        peak_device_bytes=None,
        created="2026-01-01T00:00:00+00:00",
    )


@every_recipe
def test_cards_say_what_the_table_says(name):
    manifest = manifest_of(name)
    text = card_text.body(manifest)
    assert f"Runs on: {where(format_of(manifest.recipe))}." in text
    has_cache = f"Its FP8 KV cache runs on: {where('kv-fp8')}." in text
    assert has_cache is name.endswith("+kv-fp8")


@every_recipe
def test_reports_say_what_the_table_says(name):
    manifest = manifest_of(name)
    scored = Scorecard(
        name=name,
        recipe=name,
        format=manifest.format,
        size_bytes=1,
        bits_per_weight=4.0,
        digest="0",
        source_fingerprint="f" * 64,
        scores={},
        settings=Settings(tasks={}, limit=None, num_fewshot=None, max_length=1, seed=0),
        made=provenance.of_manifest(manifest),
        versions={},
        device="cpu",
        seconds=1.0,
        created="2026-01-01T00:00:00+00:00",
    )
    assert runs_on(scored) == where(format_of(manifest.recipe))
    assert runs_on(scored.model_copy(update={"recipe": None})) == where("bf16")


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "gguf"])
def test_words_name_who_runs_it_and_nobody_else(format):
    native, _, emulated = where(format).partition("; emulated on ")
    for how, said in (("native", native), ("emulated", emulated)):
        for vendor, word in VENDORS.items():
            mine = [gpu for gpu in GPUS if gpu.vendor == vendor and gpu.generation != "Gaudi"]
            assert (word in said) is any(runs(gpu, format).how == how for gpu in mine), (how, word)


def test_what_vllm_says_of_its_kernels():
    """Its table of supported hardware and its page on FP8, August 2026."""
    assert where("w4a16").startswith("NVIDIA from Turing (7.5)")
    assert where("fp8-w8a8").startswith("NVIDIA from Ada (8.9), AMD from MI300")
    assert "emulated on NVIDIA Turing (7.5) to Ampere" in where("fp8-w8a8")
    assert where("int8-w8a8").startswith("NVIDIA Turing (7.5) to Hopper")
