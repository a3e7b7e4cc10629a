"""Which recipes fit into which format, what a recipe says of it, and the tensors to be."""

import pytest

from quantkit import formats, resources
from quantkit.errors import RecipeError, UnknownName
from quantkit.formats import FORMATS
from quantkit.model.headers import TensorSpec
from quantkit.recipe import Recipe

WEIGHT = TensorSpec("a.weight", "BF16", (256, 512))
HELD = {
    "rtn-w4a16": ("gptq", "awq"),
    "gptq-w4a16": ("gptq", "awq"),
    "awq-gptq-w4a16": ("gptq", "awq"),
    "awq-w4a16": ("awq",),
    "rtn-w8a16": ("gptq",),
    "gptq-w8a16": ("gptq",),
    "fp8-static": ("fp8",),
    "fp8-tensor": ("fp8",),
    "fp8-block": ("fp8",),
    "fp8-static+kv-fp8": ("fp8",),
    "nvfp4": ("modelopt",),
    "nvfp4-a16": ("modelopt",),
    "rtn-nvfp4-a16": ("modelopt",),
    "nvfp4-fp8": (),
    "mxfp4": (),
    "mxfp4-a16": (),
    "rtn-mxfp4-a16": (),
    "mxfp8": (),
    "w4afp8": (),
    "gptq-w2a16": (),
    "gptq-w3a16": (),
    "best-w4a16": ("gptq", "awq"),
    "best-w3a16": (),
    "best-w2a16": (),
    "gptq-w5a16": (),
    "gptq-w6a16": (),
    "rtn-w5a16": (),
    "rtn-w6a16": (),
    "fp8-dynamic": (),
    "int8-w8a8": (),
    "gptq-w4a16+kv-fp8": (),
}
SCHEMES = {
    "int8 rows": {"num_bits": 8, "strategy": "channel"},
    "int4 rows": {"num_bits": 4, "strategy": "channel"},
    "int8 zero points": {"num_bits": 8, "group_size": 64, "symmetric": False},
    "fp8 rows": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "fp8 weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
}


def recipe(weights, **more):
    return Recipe(name="own", summary="own", method="rtn", weights=weights, **more)


def test_the_table_knows_every_recipe():
    shipped = [name for name in resources.names("recipes") if not name.startswith("gguf-")]
    assert set(shipped) == {name for name in HELD if "+" not in name}


@pytest.mark.parametrize("name", HELD)
@pytest.mark.parametrize("format", FORMATS[1:])
def test_a_recipe_is_written_where_its_numbers_fit(name, format):
    asked = Recipe.load(name)
    if format in HELD[name]:
        made = asked.in_format(format)
        assert (made.name, made.format) == (f"{name}-{format}", format)
        assert made.weights == asked.weights
        assert made.digest != asked.digest
        assert made.in_format("compressed-tensors") == asked
    else:
        with pytest.raises(
            RecipeError, match=f"{name} cannot be written as {format}: ".replace("+", r"\+")
        ):
            asked.in_format(format)


@pytest.mark.parametrize(
    ("weights", "format", "words"),
    [
        ("int8 zero points", "gptq", "only without zero points"),
        ("int8 rows", "awq", "4 bits per weight"),
        ("int4 rows", "awq", "use gptq"),
        ("int4 rows", "fp8", "for integers use"),
        ("fp8 rows", "fp8", "only in compressed-tensors.*fp8-tensor"),
        ("fp8 rows", "gptq", "gptq holds integers"),
        ("fp8 weights", "fp8", "always rounds activations"),
    ],
)
def test_a_refusal_says_why_and_what_to_use(weights, format, words):
    with pytest.raises(RecipeError, match=words) as caught:
        recipe(SCHEMES[weights]).in_format(format)
    assert "\n" not in str(caught.value)


def test_activations_and_caches_that_a_format_has_no_place_for():
    with pytest.raises(RecipeError, match="8-bit ones need compressed-tensors"):
        Recipe.load("int8-w8a8").in_format("gptq")
    with pytest.raises(RecipeError, match="no KV cache scales with awq"):
        Recipe.load("awq-w4a16+kv-fp8").in_format("awq")
    with pytest.raises(UnknownName, match="Did you mean gptq"):
        Recipe.load("gptq-w4a16").in_format("gptqq")


def test_a_recipe_file_may_name_its_format(tmp_path):
    path = tmp_path / "mine.yaml"
    words = "summary: s\nmethod: rtn\nformat: {}\nweights: {{num_bits: {}, group_size: 64}}\n"
    path.write_text(words.format("gptq", 8))
    found = Recipe.load(str(path))
    assert (found.name, found.format) == ("mine", "gptq")
    assert "Files in gptq form." in found.explain()
    for format, bits, problem in (
        ("awq", 8, "format: awq has 4 bits per weight"),
        ("gtpq", 4, "format: 'gtpq' is unknown; did you mean gptq?"),
    ):
        path.write_text(words.format(format, bits))
        with pytest.raises(RecipeError, match=problem.replace("?", r"\?")):
            Recipe.load(str(path))


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("rtn-w8a16", "b512af07dafd5f3a4e3a4e4bd37801dda85040d790b0cc23eff5c9b36952ec7a"),
        ("fp8-static+kv-fp8", "66d67af9fa2c37c6c43a370e765edfb8dcabcbe7bc75452e2153205e1b0a7d44"),
    ],
)
def test_digests_of_before_stay(name, digest):
    """Checkpoints and journals of earlier versions are found by them."""
    assert Recipe.load(name).digest == digest


@pytest.mark.parametrize("name", [name for name in HELD if HELD[name]])
def test_no_format_costs_more_than_its_indices(name):
    """Beside packed numbers and scales there are only zero points and the order of columns."""
    asked, _ = Recipe.load(name).resolved({"a": 512})
    usual = sum(s.size_bytes for s in formats.specs("a", WEIGHT, asked))
    for format in HELD[name]:
        specs = formats.specs("a", WEIGHT, asked.in_format(format))
        assert all(spec.name.startswith("a.") for spec in specs)
        assert sum(spec.size_bytes for spec in specs) < 1.07 * usual


def test_one_scale_a_row_is_one_group():
    rows = recipe(SCHEMES["int8 rows"]).in_format("gptq")
    shapes = {spec.name: spec.shape for spec in formats.specs("a", WEIGHT, rows)}
    assert shapes == {
        "a.qweight": (128, 256),
        "a.qzeros": (1, 64),
        "a.scales": (1, 256),
        "a.g_idx": (512,),
    }


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gptq-w4a16", "W4A16 g128"),
        ("awq-w4a16", "W4A16 g128 asymmetric"),
        ("int8-w8a8", "W8A8 per channel"),
        ("fp8-dynamic", "FP8 per channel"),
        ("fp8-static", "FP8 per tensor, static activations"),
        ("fp8-block", "FP8 blocks"),
        ("mxfp8", "MXFP8"),
        ("nvfp4", "NVFP4"),
        ("mxfp4-a16", "MXFP4-A16"),
        ("w4afp8", "W4AFP8 g128"),
    ],
)
def test_a_format_has_one_label_in_cards_checks_and_predictions(name, expected):
    from quantkit.dispatch.schemes import compressed
    from quantkit.export import format_map
    from quantkit.formats import declared

    recipe = Recipe.load(name)
    weights = recipe.weights.model_copy(
        update={"group_size": 128} if recipe.weights.group_size == "auto" else {}
    )
    recipe = recipe.model_copy(update={"weights": weights})
    assert format_map.label(recipe) == expected
    config = formats.of(recipe).config(recipe, ["lm_head"])
    assert [p.label for p in declared.of({"quantization_config": config}, "here").parts] == [
        expected
    ]
    (group,) = config["config_groups"].values()
    assert compressed(group, config["format"], (0, 32), 90).tag == expected
