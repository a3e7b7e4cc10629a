"""The older formats in real vLLM: the same greedy text as compressed-tensors.

vLLM lives in an environment of its own, whose Python QUANTKIT_VLLM names. On a CPU its
kernels take 4-bit weights; FP8 with one scale a tensor or a block needs a GPU.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from quantkit import resources
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe

PROGRAM = Path(__file__).parents[2] / "benchmarks/vllm_generate.py"
DATA = CalibrationChoice("python-docs", 8, 128)
CHECKED = """
import sys
from vllm.engine.arg_utils import EngineArgs
for folder in sys.argv[1:]:
    config = EngineArgs(folder, dtype="float16", max_model_len=128).create_engine_config()
    print("METHOD", config.model_config.quantization)
"""


@pytest.fixture(scope="module")
def python():
    found = os.environ.get("QUANTKIT_VLLM")
    if not found:
        pytest.skip("QUANTKIT_VLLM names no environment with vLLM")
    return found


def make(out, *names):
    recipes = []
    for name in names:
        base, _, format = name.partition(" ")
        recipes.append(Recipe.load(base).in_format(format or "compressed-tensors"))
    made = quantize(ModelSource.open("demo"), recipes, out, device="cpu", calibration=DATA)
    return [str(checkpoint.folder) for checkpoint in made]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "format"), [("gptq-w4a16", "gptq"), ("awq-w4a16", "awq")])
def test_vllm_writes_the_same_from_either_format(python, tmp_path, recipe, format):
    folders = make(tmp_path / "out", recipe, f"{recipe} {format}")
    result = tmp_path / "texts.json"
    command = [python, PROGRAM, "--out", result, resources.DEMO_MODEL, *folders]
    subprocess.run(command, check=True, capture_output=True, timeout=900)
    models = json.loads(result.read_text())["models"]
    assert len(models[recipe]["texts"]) == 4
    assert models[f"{recipe}-{format}"] == models[recipe]


@pytest.mark.slow
def test_vllm_takes_the_configs(python, tmp_path):
    folders = make(tmp_path / "out", "fp8-tensor fp8", "fp8-static fp8", "fp8-block fp8")
    folders += make(tmp_path / "more", "rtn-w8a16 gptq", "rtn-w4a16 awq")
    done = subprocess.run(
        [python, "-c", CHECKED, *folders], check=True, capture_output=True, text=True, timeout=600
    )
    found = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("METHOD")]
    # vLLM's own names for them differ from version to version.
    assert found[:3] == ["fp8"] * 3
    assert "gptq" in found[3]
    assert "awq" in found[4]
