"""What `recommend` would offer of a family is what `quantize` takes, whatever the GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest

from quantkit.advise import shape as shapes
from quantkit.advise.question import Catalogue
from quantkit.errors import QuantkitError
from quantkit.gguf.layout import Layout
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.plan import checkpoint as planning
from quantkit.recipe import GGUFRecipe

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # for what the program itself imports
# Under a name of its own: the tests have a module `families` too.
spec = importlib.util.spec_from_file_location("families_program", BENCHMARKS / "families.py")
families = sys.modules.get("families_program") or importlib.util.module_from_spec(spec)
if "families_program" not in sys.modules:
    sys.modules[spec.name] = families
    spec.loader.exec_module(families)

QUICK = ("qwen3", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_vl")
NOT_BUILT = ("mimo_v2", "bailing_hybrid", "gemma3n", "gpt2", "zamba2")
KINDS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in families.kinds()
    if name not in NOT_BUILT
]


@pytest.mark.parametrize("family", KINDS)
def test_what_is_offered_is_taken(tmp_path, family):
    families.build(family, tmp_path / "model")
    catalogue = Catalogue(shapes.of(str(tmp_path / "model")))
    wanted = [
        each.recipe
        for each in catalogue.formats
        if each.recipe is not None and not isinstance(catalogue.work(each), str)
    ]
    assert wanted
    source = ModelSource.open(str(tmp_path / "model"))
    architecture = Architecture.of(source.folder, tensors=source.tensors)
    stored, refused, sizes = architecture.stored(source), {}, {}
    for recipe in wanted:
        try:
            if isinstance(recipe, GGUFRecipe):
                Layout.of(source)
            else:
                sizes[recipe.name] = planning.make(architecture, stored, recipe).size_bytes
        except QuantkitError as error:
            refused[recipe.name] = str(error)
    assert not refused
    told = {each.name: catalogue.work(each) for each in catalogue.formats if each.name in sizes}
    plain = [each.name for each in wanted if each.name in sizes and each.kv_cache is None]
    assert {name: told[name].stored_bytes for name in plain} == {n: sizes[n] for n in plain}
