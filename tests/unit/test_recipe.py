import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit import resources
from quantkit.errors import RecipeError, UnknownName
from quantkit.recipe import (
    GGUF_TYPES,
    ActivationScheme,
    GGUFRecipe,
    KVCacheScheme,
    Recipe,
    WeightScheme,
    load,
    read,
)

SHIPPED = sorted((Path(__file__).parents[2] / "recipes").rglob("*.y*ml"))
W4 = {"num_bits": 4, "strategy": "group", "group_size": 128}
W8 = {"num_bits": 8, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
PER_TOKEN = {"type": "float", "strategy": "token", "dynamic": True}
in_one_folder = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
GOOD = {"summary": "a test", "method": "rtn", "weights": W4}


def write(folder: Path, data: Any, name: str = "mine") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def problems(folder: Path, data: Any) -> str:
    path = write(folder, data)
    with pytest.raises(RecipeError) as caught:
        read(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_there_are_shipped_recipes():
    assert {"fp8-dynamic", "rtn-w4a16", "rtn-w8a16"} <= {path.stem for path in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe_is_valid_and_says_what_it_is_for(path):
    recipe = read(path)
    assert recipe.name == path.stem
    assert recipe.summary
    assert path.read_text().startswith("# ")
    told = recipe.gguf if isinstance(recipe, GGUFRecipe) else recipe.method
    assert told in recipe.explain()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipe_is_found_by_name(path):
    assert load(path.stem) == read(path)


def test_listing_names_every_shipped_recipe():
    assert resources.names("recipes") == sorted(path.stem for path in SHIPPED)


def test_defaults(tmp_path):
    recipe = read(write(tmp_path, GOOD))
    assert recipe.name == "mine"
    assert (recipe.targets, recipe.ignore) == (["Linear"], ["lm_head"])
    assert recipe.input_activations is None
    assert recipe.weights.symmetric
    assert not recipe.demo


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({**GOOD, "metod": "rtn"}, "metod: unknown key; did you mean method?"),
        ({**GOOD, "weights": {**W4, "groupsize": 1}}, "weights.groupsize: unknown key; did you"),
        ({**GOOD, "zzz": 1}, "zzz: unknown key; choose from: name, summary, demo, method, weights"),
        (
            {**GOOD, "weights": FP8, "input_activations": {**PER_TOKEN, "dynamics": True}},
            "input_activations.dynamics: unknown key; did you mean dynamic?",
        ),
        ({**GOOD, "options": {"damp": 1}}, "options: method rtn has no option damp"),
    ],
    ids=["root", "weights", "nothing-near", "activations", "options"],
)
def test_unknown_key_is_named(tmp_path, data, line):
    assert line in problems(tmp_path, data)


def test_unknown_method_offers_a_near_one(tmp_path):
    assert "method: 'rtnn' is unknown; did you mean rtn?" in problems(
        tmp_path, {**GOOD, "method": "rtnn"}
    )


def test_all_problems_of_the_fields_at_once(tmp_path):
    message = problems(
        tmp_path, {"method": 3, "weights": {"num_bits": 9, "strategy": "row"}, "target": []}
    )
    for start in ("summary: ", "method: ", "weights.num_bits: ", "weights.strategy: ", "target: "):
        assert f"\n  {start}" in message


def test_all_problems_at_once_across_fields(tmp_path):
    message = problems(
        tmp_path, {**GOOD, "method": "rtnn", "weights": {**W4, "num_bit": 4}, "target": ["Linear"]}
    )
    for word in ("num_bit", "target", "rtnn"):
        assert word in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("summary", 5),
        ("summary", None),
        ("method", ["rtn"]),
        ("weights", "w4a16"),
        ("weights", None),
        ("input_activations", True),
        ("targets", "Linear"),
        ("targets", [1]),
        ("ignore", {"a": 1}),
        ("options", [1]),
        ("demo", "perhaps"),
        ("name", "../up"),
        ("name", ""),
        ("name", "a" * 81),
    ],
)
def test_wrong_type_or_value_names_the_key(tmp_path, key, value):
    assert f"\n  {key}" in problems(tmp_path, {**GOOD, key: value})


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({**W4, "num_bits": 9}, "9 bits: choose 2 to 8"),
        ({**W4, "type": "nf4"}, "nf4: a run-time format of bitsandbytes"),
        ({**W4, "num_bits": 1}, "1 bits: choose 2 to 8"),
        ({**W4, "num_bits": 3, "symmetric": False}, "zero points for 4 and 8 bits only"),
        ({**W4, "num_bits": "many"}, "weights.num_bits"),
        ({**W4, "group_size": 16}, "group_size 16: vLLM takes 32, 64 or 128"),
        ({**W4, "group_size": 0}, "group_size 0"),
        ({**W4, "group_size": -1}, "group_size -1"),
        ({**W4, "group_size": "large"}, "weights.group_size"),
        ({"num_bits": 4, "strategy": "group"}, "group_size goes with strategy group"),
        ({**W8, "group_size": 128}, "group_size goes with strategy group"),
        ({**W8, "strategy": "tensor"}, "use channel or group"),
        ({**FP8, "num_bits": 4}, "4-bit floats are NVFP4"),
        ({**FP8, "num_bits": 6}, "type float has num_bits 4 or 8"),
        ({**FP8, "symmetric": False}, "and symmetric true"),
        ({**FP8, "strategy": "group", "group_size": 128}, "MXFP4 or MXFP8: group_size 32"),
        ({**NVFP4, "group_size": 32}, "means NVFP4: num_bits 4, group_size 16"),
        ({**NVFP4, "strategy": "group"}, "MXFP4 or MXFP8: group_size 32"),
        ({**W4, "strategy": "tensor_group", "group_size": 16}, "is for NVFP4: type float"),
    ],
)
def test_weights_that_nothing_serves(tmp_path, weights, words):
    assert words in problems(tmp_path, {**GOOD, "weights": weights})


@pytest.mark.parametrize(
    ("weights", "activations", "words"),
    [
        (
            {**W4, "group_size": 64},
            PER_TOKEN,
            "symmetric 4-bit integers of group_size 128 (W4AFP8)",
        ),
        (W8, PER_TOKEN, "FP8 activations need FP8 weights"),
        (W4, {**PER_TOKEN, "type": "int"}, "need 8-bit weights of the same type"),
        (NVFP4, PER_TOKEN, "NVFP4 weights go with NVFP4 activations, or with none"),
        (FP8, {**PER_TOKEN, "dynamic": False}, "strategy tensor goes with dynamic false"),
        (FP8, {**PER_TOKEN, "strategy": "tensor"}, "strategy tensor goes with dynamic false"),
        (FP8, {**PER_TOKEN, "num_bits": 4}, "4-bit activations are NVFP4 or MXFP4"),
        (FP8, {**PER_TOKEN, "num_bits": 5}, "input_activations.num_bits"),
        (FP8, {"type": "float"}, "input_activations.strategy"),
    ],
)
def test_activations_that_nothing_serves(tmp_path, weights, activations, words):
    data = {**GOOD, "weights": weights, "input_activations": activations}
    assert words in problems(tmp_path, data)


@pytest.mark.parametrize("key", ["targets", "ignore"])
def test_pattern_that_does_not_compile(tmp_path, key):
    assert "re:(" in problems(tmp_path, {**GOOD, key: ["re:("]})


def test_digest_is_of_the_content_alone(tmp_path):
    digest = read(write(tmp_path, GOOD)).digest
    same = {**GOOD, "name": "other", "summary": "other", "demo": True}
    assert read(write(tmp_path, same)).digest == digest
    spelt_out = {**GOOD, "targets": ["Linear"], "weights": {**W4, "symmetric": True}}
    assert read(write(tmp_path, spelt_out)).digest == digest


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {**W4, "group_size": 64}},
        {"weights": {**W4, "num_bits": 8}},
        {"weights": {**W4, "symmetric": False}},
        {"weights": W8},
        {"targets": ["re:.*mlp.*"]},
        {"ignore": []},
    ],
)
def test_digest_changes_with_the_content(tmp_path, change):
    one = read(write(tmp_path, GOOD, "one"))
    assert read(write(tmp_path, GOOD | change, "two")).digest != one.digest


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("awq-w4a16", "066a9d8593808c16a5ab09d8b6d62865a4ed043867147562eb5f226ce76c5c4c"),
        ("fp8-dynamic", "af3d3a676cb40f62ebc8a50fa193af74cc13a768655e108749970209285897f2"),
        ("rtn-w4a16", "823970df515293e5b7365a9ef5011d4d4b136fe7158cc381cde4b9cb039c5c67"),
    ],
)
def test_digests_that_checkpoints_hold_stay(name, digest):
    assert Recipe.load(name).digest == digest


@pytest.mark.parametrize("name", ["fp8-dynamic", "awq-gptq-w4a16", "./mine.yaml", "mine.yml"])
def test_an_addition_behind_a_name_or_a_file(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    for file in ("mine.yaml", "mine.yml"):
        (tmp_path / file).write_text(yaml.safe_dump(GOOD))
    base, recipe = Recipe.load(name), Recipe.load(f"{name}+kv-fp8")
    assert recipe.name == f"{base.name}+kv-fp8"
    assert recipe.kv_cache == KVCacheScheme()
    assert recipe.needs_calibration
    assert recipe.digest != base.digest
    same = {"kv_cache", "name", "summary"}
    assert recipe.model_dump(exclude=same) == base.model_dump(exclude=same)


def test_a_file_may_ask_for_it_itself(tmp_path):
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    recipe = read(write(tmp_path, {**GOOD, "kv_cache": {**scheme, "symmetric": True}}))
    assert recipe.needs_calibration
    assert recipe.digest == Recipe.load(f"{write(tmp_path, GOOD)}+kv-fp8").digest


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ({"num_bits": 4}, "kv_cache.num_bits: "),
        ({"type": "int"}, "kv_cache.type: "),
        ({"strategy": "token"}, "kv_cache.strategy: "),
        ({"dynamic": True}, "kv_cache.dynamic: "),
        ({"bits": 8}, "kv_cache.bits: unknown key; did you mean num_bits?"),
        ("fp8", "kv_cache: "),
    ],
)
def test_caches_that_nothing_serves(tmp_path, scheme, words):
    assert words in problems(tmp_path, {**GOOD, "kv_cache": scheme})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fp8-dynamic+kv-fp4", "unknown addition to a recipe 'kv-fp4'. Did you mean kv-fp8"),
        ("fp8-dynamic+x", "unknown addition to a recipe 'x'. Choose from: head-int8, kv-fp8"),
        ("fp8-dynamic+", "Choose from: head-int8, kv-fp8"),
        ("fp8-dynamics+kv-fp8", "unknown recipe 'fp8-dynamics'. Did you mean fp8-dynamic"),
        ("fp8-dynamic+kv-fp8+kv-fp8", "fp8-dynamic+kv-fp8 already has an FP8 KV cache"),
        ("some+folder/mine.yaml", "unknown recipe 'some+folder/mine.yaml'"),
    ],
)
def test_additions_that_cannot_be(name, words):
    with pytest.raises((RecipeError, UnknownName)) as caught:
        Recipe.load(name)
    assert words in str(caught.value)


def test_a_name_that_an_addition_makes_too_long(tmp_path):
    path = write(tmp_path, {**GOOD, "name": "a" * 78})
    with pytest.raises(RecipeError, match="name: "):
        Recipe.load(f"{path}+kv-fp8")


@pytest.mark.parametrize(
    ("widths", "size"),
    [((128, 256), 128), ((256, 192), 64), ((128, 96), 32), ((32,), 32)],
)
def test_auto_group_size_is_the_first_that_divides_every_layer(tmp_path, widths, size):
    recipe = read(write(tmp_path, {**GOOD, "weights": {**W4, "group_size": "auto"}}))
    resolved, word = recipe.resolved({f"layer{i}": width for i, width in enumerate(widths)})
    assert resolved.weights.group_size == size
    assert word == f"group size {size} (auto)"
    assert recipe.weights.group_size == "auto"


@pytest.mark.parametrize("asked", ["auto", 128])
def test_group_size_that_divides_nothing(tmp_path, asked):
    recipe = read(write(tmp_path, {**GOOD, "weights": {**W4, "group_size": asked}}))
    with pytest.raises(RecipeError) as caught:
        recipe.resolved({"good": 256, "first": 80, "second": 48})
    for words in ("recipe mine", f"group size {asked}", "width 80 of first", "2 such", "`ignore`"):
        assert words in str(caught.value)


def test_fixed_group_size_and_channels_stay(tmp_path):
    for weights in (W4, W8):
        recipe = read(write(tmp_path, {**GOOD, "weights": weights}))
        assert recipe.resolved({"layer": 256}) == (recipe, "")


def test_unknown_recipe_offers_a_near_one():
    with pytest.raises(UnknownName, match="Did you mean rtn-w4a16"):
        Recipe.load("rtn-w4a61")


@pytest.mark.parametrize("text", ["", "- a", "just words", "a: [", "\t", "a: 1\n b: 2", "a: \x00"])
def test_file_that_is_no_recipe(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=str(path)):
        read(path)


@pytest.mark.parametrize("text", ["a: !!bool maybe", "a: !!int ''", "a: !!timestamp x", "[" * 5000])
def test_file_that_the_parser_stumbles_over(tmp_path, text):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match=str(path)):
        read(path)


def test_missing_file(tmp_path):
    with pytest.raises(RecipeError, match=r"cannot read .*none\.yaml"):
        read(tmp_path / "none.yaml")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.dates()
words = st.sampled_from(["rtn", "int", "float", "group", "channel", "tensor", "token", "auto"])
values = st.recursive(
    scalars | words | st.sampled_from([3, 4, 8, 128]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3),
    max_leaves=6,
)


def mappings(model: type) -> st.SearchStrategy[dict[Any, Any]]:
    return st.dictionaries(st.sampled_from(list(model.model_fields)) | scalars, values, max_size=6)


sections = st.fixed_dictionaries(
    {},
    optional={
        "summary": st.just("x") | values,
        "method": st.just("rtn") | values,
        "weights": st.sampled_from([W4, W8, FP8]) | mappings(WeightScheme) | values,
        "input_activations": st.just(PER_TOKEN) | mappings(ActivationScheme) | values,
        "options": values,
    },
)


@in_one_folder
@given(st.builds(lambda base, more: {**more, **base}, sections, mappings(Recipe)))
def test_any_mapping_is_a_recipe_or_a_recipe_error(tmp_path, data):
    path = tmp_path / "mine.yaml"
    path.write_bytes(yaml.safe_dump(data, allow_unicode=True).encode("utf-8", "surrogatepass"))
    with contextlib.suppress(RecipeError):
        assert len(read(path).digest) == 64


@in_one_folder
@given(st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode()))
def test_any_bytes_are_a_recipe_error(tmp_path, raw):
    path = tmp_path / "mine.yaml"
    path.write_bytes(raw)
    with pytest.raises(RecipeError):
        read(path)


@pytest.mark.parametrize("method", ["gptq", "awq", "awq-gptq", "smoothquant-gptq"])
def test_fp8_weights_are_only_rounded(tmp_path, method):
    said = problems(tmp_path, {**GOOD, "method": method, "weights": FP8})
    assert f"method {method} rounds to integers; FP8 needs method rtn" in said


def test_every_gguf_type_has_a_recipe():
    made = [load(name) for name in resources.names("recipes")]
    files = [recipe for recipe in made if isinstance(recipe, GGUFRecipe)]
    assert sorted(file.gguf for file in files if file.method is None) == sorted(GGUF_TYPES)


def test_a_file_by_gptq_has_a_digest_of_its_own_and_says_what_it_needs():
    usual, best = load("gguf-q3_k_m"), load("gguf-best-q3_k_m")
    assert usual.digest != best.digest
    assert (usual.needs_calibration, best.needs_calibration) == (False, True)
    assert "--calibration" in best.explain()
    with pytest.raises(RecipeError, match="method"):
        GGUFRecipe.validated({**usual.public(), "method": "awq"}, "there")


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (
            {"gguf": "Q4_K_X"},
            "gguf: 'Q4_K_X' is not a llama.cpp file type",
        ),
        ({"gguf": "Q4_K_M", "tensors": {"ffn": "Q9"}}, "tensors: 'Q9' is not a block type"),
        ({"gguf": "Q4_K_M", "tensors": {"(": "Q8_0"}}, "tensors: '(' is not a valid pattern"),
        ({"gguf": "Q4_K_M", "weights": W4}, "weights: unknown key; choose from: name, summary"),
    ],
)
def test_problems_of_a_gguf_recipe_are_named(tmp_path, data, line):
    with pytest.raises(RecipeError) as caught:
        read(write(tmp_path, {"summary": "a test", **data}))
    assert line in str(caught.value)


def test_gguf_has_no_cache_of_fp8():
    with pytest.raises(RecipeError, match="cannot be combined with gguf-q8_0"):
        load("gguf-q8_0+kv-fp8")


def test_layers_of_a_mixed_recipe_are_named_by_kind_and_blocks():
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64}
    numbers = "|".join(map(str, [0, 1, 2, 3, 7]))
    targets = [
        rf"re:.*\blayers\.({numbers})\.self_attn\.(q_proj|k_proj|v_proj|qkv_proj)$",
        r"re:.*\blayers\.(5)\.mlp\.experts\..*$",
        "re:.*own.*",
    ]
    recipe = Recipe.validated(
        {
            "name": "mixed",
            "summary": "mixed",
            "method": "gptq",
            "weights": {**four, "num_bits": 5},
            "groups": [{"targets": targets, "weights": four}],
            "unquantised": [r"re:.*\blayers\.(9)\.mlp\.down_proj$"],
        },
        "there",
    )
    _, cache, kept, group, _ = recipe.explain().splitlines()
    assert cache.startswith("KV cache")  # model cards quote it
    assert group.startswith("4-bit integers")
    assert "self_attn.q_proj, k_proj, v_proj, qkv_proj (blocks 0-3, 7)" in group
    assert "mlp.experts (block 5)" in group
    assert "re:.*own.*" in group
    assert kept == "16 bits: mlp.down_proj (block 9)."
    file = GGUFRecipe.validated(
        {"name": "m", "summary": "m", "gguf": "Q4_K_M", "tensors": {r"^blk\.(0|1)\.a\.w$": "Q6_K"}},
        "there",
    )
    assert "Q6_K for a.w (blocks 0-1)" in file.explain()
