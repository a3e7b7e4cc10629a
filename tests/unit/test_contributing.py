"""The diffs of CONTRIBUTING are real: applied to a copy of the package, what they add works."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIFFS = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
USES = {
    "method": """
from quantkit import methods
from quantkit.recipe import Recipe
said = dict(name="own", summary="x", method="shrink", weights=dict(num_bits=8, strategy="channel"))
recipe = Recipe.validated({**said, "options": {"reach": 0.8}}, "here")
assert not recipe.needs_calibration and "clipping" in recipe.explain()
import torch
from quantkit.methods.contract import Linears
linears = Linears(torch.randn(4, 32), torch.float32, recipe.weights, recipe.options)
rounded = methods.find("shrink").rounding.round(linears).quantized
assert (rounded.values.abs() == 127).any() and rounded.scale.shape == (4, 1)
""",
    "metric": """
from quantkit import metrics
assert metrics.of("humaneval/pass_at_1").label == "solved"
assert "pass_at_1" in metrics.paired_by(metrics.ANSWERS)
""",
    "family": """
from quantkit.advise import kv
from quantkit.advise.families import completed, shapes
config = completed(dict(model_type="cohere2", hidden_size=64, intermediate_size=96, vocab_size=50,
    num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, sliding_window=16))
assert "lm_head.weight" not in shapes(config, "it")
assert [layer.window for layer in kv.layers(config)] == [16, 16, 16, None]
""",
    "number": """
import torch
from quantkit import formats, grid, methods, numbers
from quantkit.methods.contract import Linears
from quantkit.recipe import Recipe
from quantkit.tensorspec import TensorSpec
weights = dict(num_bits=6, type="float", strategy="channel")
recipe = Recipe.validated(dict(name="own", summary="x", method="rtn", weights=weights), "here")
assert "FP6 (E3M2)" in recipe.explain() and recipe.weights.words().startswith("FP6")
weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
linears = Linears(weight, torch.float32, recipe.weights)
rounded = methods.find("rtn").rounding.round(linears).quantized
assert len(numbers.of(recipe.weights).widen(rounded.values).abs().unique()) <= 32
stored = formats.pack("layer", rounded, recipe)
specs = formats.specs("layer", TensorSpec("layer.weight", "F32", (8, 64)), recipe)
assert {spec.name: spec.shape for spec in specs} == {n: tuple(t.shape) for n, t in stored.items()}
back = grid.dequantize(formats.unpack("layer", stored, recipe), recipe.weights)
off = float((back - weight).norm() / weight.norm())
assert 0.01 < off < numbers.of(recipe.weights).max_relative_error, off
group = formats.config(recipe, [])["config_groups"]["group_0"]
assert (group["weights"]["num_bits"], group["format"]) == (6, "float-quantized")
""",
}


def files_of(diff: str) -> list[str]:
    return re.findall(r"^\+\+\+ b/(\S+)", diff, re.M)


def test_each_takes_as_few_files_as_it_says():
    method, metric, family, number = (files_of(diff) for diff in DIFFS)
    assert method == ["quantkit/methods/shrink.py", "quantkit/methods/__init__.py"]
    assert (metric, family) == (["quantkit/metrics.py"], ["quantkit/families/__init__.py"])
    assert number[0] == "quantkit/numbers/fp6.py"
    assert len(number) <= 4
    for diff in DIFFS[1:3]:
        assert len(re.findall(r"^\+[^+]", diff, re.M)) == 1  # one row


@pytest.mark.parametrize(("name", "diff"), list(zip(USES, DIFFS, strict=True)), ids=list(USES))
def test_what_a_diff_adds_works(name, diff, tmp_path):
    ignored = shutil.ignore_patterns("__pycache__", "demo-model")
    shutil.copytree(ROOT / "quantkit", tmp_path / "quantkit", ignore=ignored)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    patch = tmp_path / "it.diff"
    patch.write_text(diff)
    apply = ["git", "apply", "--recount", "--unidiff-zero", str(patch)]
    subprocess.run(apply, cwd=tmp_path, check=True)
    subprocess.run([sys.executable, "-c", USES[name]], cwd=tmp_path, check=True)
