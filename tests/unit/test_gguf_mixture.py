"""Tensors get the types that llama.cpp's quantiser gives them."""

import gguf
import pytest
from gguf import GGMLQuantizationType as Kind

from quantkit.errors import RecipeError, SourceError, UnknownName
from quantkit.gguf import mixture
from quantkit.gguf.mixture import FILE_TYPES, Choice, choose

ROLES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def llama(n_layers=32, columns=256, tied=False, roles=ROLES):
    """Names and shapes of a model, in an order that no rule may depend on."""
    tensors = [("output_norm.weight", (columns,)), ("rope_freqs.weight", (32,))]
    if not tied:
        tensors.append(("output.weight", (512, columns)))
    for layer in reversed(range(n_layers)):
        tensors += [(f"blk.{layer}.{role}.weight", (64, columns)) for role in roles]
        tensors.append((f"blk.{layer}.attn_norm.weight", (columns,)))
        tensors.append((f"blk.{layer}.attn_q.bias", (columns,)))
    return [*tensors, ("token_embd.weight", (512, columns))]


def facts(n_layers=32, heads=32, shared=32, experts=0, family="llama"):
    return {
        "general.architecture": family,
        f"{family}.block_count": n_layers,
        f"{family}.attention.head_count": heads,
        f"{family}.attention.head_count_kv": shared,
        f"{family}.expert_count": experts,
    }


def exceptions(file_type, tensors, metadata, importance=False, **more):
    """What differs from the file's main type, as {name: type}, after checking what stays F32."""
    choices = choose(file_type, tensors, metadata, importance, **more)
    assert list(choices) == [name for name, _ in tensors]
    for name, shape in tensors:
        if len(shape) == 1:
            assert choices.pop(name) == Choice(Kind.F32)
    assert all(choice.fallback_from is None for choice in choices.values())
    kinds = {name: choice.kind for name, choice in choices.items()}
    return {name: kind.name for name, kind in kinds.items() if kind != mixture.BASE[file_type]}


def layers(role, kind, where):
    return {f"blk.{layer}.{role}.weight": kind for layer in where}


# The first four of 32, the last four, and every third between.
MORE = {0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31}
ALL = range(32)
HEAD = {"output.weight": "Q6_K"}
OF_32_LAYERS = {
    "F32": {},
    "F16": {},
    "BF16": {},
    "Q8_0": {},
    "Q4_0": HEAD,
    "Q4_1": HEAD,
    "Q5_0": HEAD,
    "Q5_1": HEAD,
    "Q6_K": {},
    "Q3_K_S": HEAD,
    "Q5_K_S": HEAD,
    "Q2_K": HEAD
    | layers("attn_v", "Q3_K", ALL)
    | layers("attn_output", "Q3_K", ALL)
    | layers("ffn_down", "Q3_K", ALL),
    "Q3_K_M": HEAD
    | layers("attn_v", "Q5_K", range(2))
    | layers("attn_v", "Q4_K", range(2, 32))
    | layers("attn_output", "Q4_K", ALL)
    | layers("ffn_down", "Q5_K", range(2))
    | layers("ffn_down", "Q4_K", range(2, 32)),
    "Q3_K_L": HEAD
    | layers("attn_v", "Q5_K", ALL)
    | layers("attn_output", "Q5_K", ALL)
    | layers("ffn_down", "Q5_K", ALL),
    "Q4_K_S": HEAD | layers("attn_v", "Q5_K", range(4)) | layers("ffn_down", "Q5_K", range(4)),
    "Q4_K_M": HEAD | layers("attn_v", "Q6_K", MORE) | layers("ffn_down", "Q6_K", MORE),
    "Q5_K_M": HEAD | layers("attn_v", "Q6_K", MORE) | layers("ffn_down", "Q6_K", MORE),
    "IQ4_NL": HEAD | layers("ffn_down", "Q5_K", range(4)),
    "IQ4_XS": HEAD | layers("ffn_down", "Q5_K", range(4)),
    # Without experts it is Q8_0.
    "MXFP4_MOE": {name: "Q8_0" for name, shape in llama() if len(shape) > 1},
    # Converted from a checkpoint, which has both in 16 bits.
    "NVFP4": {"output.weight": "BF16", "token_embd.weight": "BF16"},
}


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_every_file_type_of_a_model_with_32_layers(file_type):
    assert exceptions(file_type, llama(), facts()) == OF_32_LAYERS[file_type]


CHANGED_BY_IMPORTANCE = {
    "Q4_0": HEAD | layers("ffn_down", "Q4_1", range(4)),
    "Q5_0": HEAD | layers("ffn_down", "Q5_1", range(4)),
    "IQ4_NL": HEAD,
    "IQ4_XS": HEAD,
}


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_importance_changes_four_file_types(file_type):
    expected = (OF_32_LAYERS | CHANGED_BY_IMPORTANCE)[file_type]
    assert exceptions(file_type, llama(), facts(), importance=True) == expected


CHANGED_BY_SHARING = {
    "Q2_K": OF_32_LAYERS["Q2_K"] | layers("attn_v", "Q4_K", ALL),
    "IQ4_NL": OF_32_LAYERS["IQ4_NL"] | layers("attn_v", "Q5_K", ALL),
    "IQ4_XS": OF_32_LAYERS["IQ4_XS"] | layers("attn_v", "Q5_K", ALL),
}


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_values_shared_by_four_heads_get_more_bits(file_type):
    expected = (OF_32_LAYERS | CHANGED_BY_SHARING)[file_type]
    assert exceptions(file_type, llama(), facts(shared=8)) == expected
    assert exceptions(file_type, llama(), facts(shared=10)) == OF_32_LAYERS[file_type]


def test_heads_may_be_given_for_every_layer():
    metadata = facts() | {"llama.attention.head_count_kv": [8] + [32] * 31}
    assert exceptions("IQ4_XS", llama(), metadata) == CHANGED_BY_SHARING["IQ4_XS"]


# From here on the facts are those that llama.cpp keeps for its own tests of public models.
def test_qwen3_of_28_layers():
    more = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    model, metadata = llama(28), facts(28, 16, 8, family="qwen3")
    expected = HEAD | layers("attn_v", "Q6_K", more) | layers("ffn_down", "Q6_K", more)
    assert exceptions("Q4_K_M", model, metadata) == expected
    assert exceptions("Q5_K_M", model, metadata) == expected
    assert exceptions("Q4_K_S", model, metadata) == HEAD | layers(
        "attn_v", "Q5_K", range(4)
    ) | layers("ffn_down", "Q5_K", range(3))
    found = exceptions("Q3_K_M", model, metadata)
    assert found["blk.0.ffn_down.weight"] == "Q5_K"
    assert found["blk.1.ffn_down.weight"] == "Q4_K"


def test_qwen3_of_40_layers_with_five_heads_a_value():
    expected = HEAD | layers("attn_v", "Q5_K", range(40)) | layers("ffn_down", "Q5_K", range(5))
    metadata = facts(40, 40, 8, family="qwen3")
    assert exceptions("IQ4_NL", llama(40), metadata) == expected
    assert exceptions("IQ4_XS", llama(40), metadata) == expected


def test_llama_of_70_billion():
    model, metadata = llama(80), facts(80, 64, 8)
    five = layers("attn_v", "Q5_K", range(80))
    assert exceptions("Q3_K_S", model, metadata) == HEAD | five
    rest = layers("attn_output", "Q3_K", range(80)) | layers("ffn_down", "Q3_K", range(80))
    assert exceptions("Q2_K", model, metadata) == HEAD | five | rest
    found = exceptions("Q3_K_M", model, metadata)
    assert {k: v for k, v in found.items() if "attn_v" in k} == five
    downs = {k for k, v in found.items() if "ffn_down" in k and v == "Q5_K"}
    assert downs == set(layers("ffn_down", "Q5_K", range(5)))


@pytest.mark.parametrize(
    ("metadata", "large"),
    [
        (facts(80, 64, 8), True),
        (facts(80, 64, 8, family="qwen2"), True),
        (facts(80, 64, 64), False),  # the 65B model of the first Llama
        (facts(80, 64, 8, family="qwen3"), False),
    ],
)
def test_only_models_that_llama_cpp_calls_70b_raise_their_values(metadata, large):
    found = exceptions("Q3_K_S", llama(80), metadata)
    assert ("blk.40.attn_v.weight" in found) is large


def test_joined_attention_counts_as_values():
    # Qwen3.5 has 64 layers, three of four with attn_qkv.
    model = [("output.weight", (512, 256)), ("token_embd.weight", (512, 256))]
    for layer in range(64):
        role = "attn_v" if layer % 4 == 3 else "attn_qkv"
        model.append((f"blk.{layer}.{role}.weight", (64, 256)))
    more = [*range(8), *range(10, 56, 3), *range(56, 64)]
    expected = {name: "Q6_K" for name, _ in model if mixture._layer(name) in more}
    found = exceptions("Q5_K_M", model, facts(64, 24, 4, family="qwen35"))
    assert found == HEAD | expected
    assert "blk.52.attn_qkv.weight" in found
    assert "blk.55.attn_v.weight" in found


def test_tied_embeddings_are_the_output():
    model = llama(tied=True)
    found = exceptions("Q4_K_M", model, facts())
    assert found["token_embd.weight"] == "Q6_K"
    assert exceptions("Q4_0", model, facts()) == {"token_embd.weight": "Q6_K"}
    assert exceptions("Q8_0", model, facts()) == {}
    assert exceptions("F16", model, facts()) == {}


def test_eight_experts():
    roles = ("attn_q", "attn_k", "attn_v", "attn_output")
    model = llama(roles=roles)
    model += [(f"blk.{i}.ffn_down_exps.weight", (8, 64, 256)) for i in ALL]
    model += [(f"blk.{i}.ffn_gate_inp.weight", (8, 256)) for i in ALL]
    gates = {name for name, _ in model if "gate_inp" in name}
    outputs = {"Q4_K_M": "Q5_K", "Q3_K_M": "Q5_K", "Q3_K_L": "Q3_K", "Q4_0": "Q4_0", "Q8_0": "Q8_0"}
    for file_type, output in outputs.items():
        choices = choose(file_type, model, facts(shared=8, experts=8), False)
        assert {choices.pop(name) for name in gates} == {Choice(Kind.F32)}
        kinds = {name: choice.kind.name for name, choice in choices.items()}
        assert {kinds[f"blk.{i}.{role}.weight"] for i in ALL for role in ("attn_k", "attn_v")} == {
            "Q8_0"
        }
        assert kinds["blk.5.attn_output.weight"] == output
        assert kinds["blk.5.attn_q.weight"] == mixture.BASE[file_type].name
    choices = choose("Q4_K_M", model, facts(shared=8, experts=8), False)
    raised = {i for i in ALL if choices[f"blk.{i}.ffn_down_exps.weight"].kind == Kind.Q6_K}
    assert raised == MORE


def test_shared_experts_do_not_shift_the_layers():
    model = llama(roles=("attn_v",))
    for layer in ALL:
        model.append((f"blk.{layer}.ffn_down_exps.weight", (16, 64, 256)))
        model.append((f"blk.{layer}.ffn_down_shexp.weight", (64, 256)))
    found = exceptions("Q4_K_M", model, facts(experts=16))
    for role in ("attn_v", "ffn_down_exps", "ffn_down_shexp"):
        assert {n for n in found if role in n} == set(layers(role, "", MORE))


@pytest.mark.parametrize(
    ("wanted", "columns", "found"),
    [
        ("Q4_K_S", 288, "Q5_0"),
        ("Q5_K_S", 288, "Q5_1"),
        ("Q6_K", 288, "Q8_0"),
        ("Q2_K", 288, "IQ4_NL"),
        ("Q3_K_S", 288, "IQ4_NL"),
        ("IQ4_XS", 288, "IQ4_NL"),
        ("Q4_K_S", 272, "F16"),
        ("Q4_0", 272, "F16"),
        ("Q8_0", 272, "F16"),
    ],
)
def test_columns_that_blocks_do_not_divide(wanted, columns, found):
    choices = choose(wanted, llama(8, columns), facts(8), True)
    assert choices["blk.5.attn_q.weight"] == Choice(Kind[found], mixture.BASE[wanted])
    head = Kind.Q8_0 if wanted == "Q8_0" else Kind.Q6_K
    assert choices["output.weight"] == Choice(Kind.F16 if columns == 272 else Kind.Q8_0, head)


def test_blocks_of_32_need_no_fallback_but_for_the_output():
    choices = choose("Q4_0", llama(8, 288), facts(8), False)
    assert choices["blk.5.attn_q.weight"] == Choice(Kind.Q4_0)
    assert choices["output.weight"] == Choice(Kind.Q8_0, Kind.Q6_K)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("blk.0.attn_norm.weight", (64,)),
        ("blk.0.attn_q_norm.weight", (8, 64)),
        ("blk.0.attn_q.bias", (8, 64)),
        ("blk.0.ffn_gate_inp.weight", (8, 64)),
        ("position_embd.weight", (8, 64)),
        ("token_types.weight", (2, 64)),
        ("blk.0.ssm_conv1d.weight", (8, 64)),
        ("blk.0.attn_q.weight", (1, 64)),
    ],
)
def test_small_tensors_stay_in_full(name, shape):
    choices = choose("Q4_0", [(name, shape), ("blk.0.ffn_up.weight", (8, 64))], facts(), False)
    assert choices == {name: Choice(Kind.F32), "blk.0.ffn_up.weight": Choice(Kind.Q4_0)}


def test_the_first_override_that_matches_counts():
    overrides = {r"^blk\.0\..*attn": "q8_0", "attn_k": "F16", "token_embd": "Q5_K"}
    choices = choose("Q4_K_M", llama(), facts(), False, overrides)
    assert choices["blk.0.attn_k.weight"] == Choice(Kind.Q8_0)
    assert choices["blk.1.attn_k.weight"] == Choice(Kind.F16)
    assert choices["token_embd.weight"] == Choice(Kind.Q5_K)
    assert choices["blk.0.attn_norm.weight"] == Choice(Kind.F32)
    assert choices["blk.0.ffn_up.weight"] == Choice(Kind.Q4_K)


def test_an_overridden_tensor_falls_back_as_any_other():
    choices = choose("Q8_0", llama(4, 288), facts(4), False, {"attn_k": "Q4_K"})
    assert choices["blk.0.attn_k.weight"] == Choice(Kind.Q5_0, Kind.Q4_K)


def test_what_is_overridden_is_not_counted():
    choices = choose("Q4_K_S", llama(), facts(), False, {r"blk\.0\.attn_v": "Q8_0"})
    five = {i for i in ALL if choices[f"blk.{i}.attn_v.weight"].kind == Kind.Q5_K}
    assert five == {1, 2, 3, 4}


@pytest.mark.parametrize(
    ("overrides", "error", "reason"),
    [
        ({"attn_k": "Q4_X"}, UnknownName, "unknown tensor type 'Q4_X'"),
        ({"attn_k": "IQ1_S"}, UnknownName, "unknown tensor type"),
        ({"attn_(": "Q4_K"}, RecipeError, r"'attn_\(' is not a regular expression"),
        ({"attn_x": "Q4_K"}, RecipeError, "'attn_x' matches no tensor"),
        ({"attn_norm": "Q4_K"}, RecipeError, "'attn_norm' matches no tensor"),
        ({"attn": "Q4_K", "attn_k": "Q8_0"}, RecipeError, "'attn_k' matches no tensor"),
    ],
)
def test_overrides_that_mean_nothing(overrides, error, reason):
    with pytest.raises(error, match=reason):
        choose("Q4_K_M", llama(), facts(), False, overrides)


def test_a_name_that_is_no_file_type():
    with pytest.raises(UnknownName, match="Did you mean Q4_K_M, Q4_K_S"):
        choose("Q4_K", llama(), facts(), False)


def test_metadata_without_layers():
    with pytest.raises(SourceError, match=r"lack llama\.block_count"):
        choose("Q4_K_M", llama(), {"general.architecture": "llama"}, False)


def test_only_experts_are_mxfp4():
    model = [
        ("token_embd.weight", (512, 256)),
        ("blk.0.attn_k_b.weight", (4, 256, 64)),
        ("blk.0.ffn_gate_inp.weight", (4, 256)),
        ("blk.0.ffn_down_exps.weight", (4, 256, 96)),
        ("blk.0.ffn_down_exps.bias", (4, 256)),
        ("blk.0.ffn_down_shexp.weight", (256, 96)),
    ]
    found = choose("MXFP4_MOE", model, facts(1, experts=4), False)
    assert [choice.kind.name for choice in found.values()] == [
        "Q8_0", "Q8_0", "F32", "MXFP4", "F32", "Q8_0",
    ]  # fmt: skip


def test_a_layer_beyond_the_model():
    model = [("blk.9.ffn_down_exps.weight", (4, 64, 256))]
    with pytest.raises(SourceError, match="weight is not in any of the model's 8 layers"):
        choose("Q4_K_M", model, facts(8, experts=4), False)


def test_numbers_of_file_types_are_those_in_the_files():
    assert FILE_TYPES["F32"] == 0
    assert FILE_TYPES["Q4_K_M"] == 15
    assert FILE_TYPES["IQ4_XS"] == 30
    numbers = {int(t) for t in gguf.LlamaFileType}
    assert set(FILE_TYPES.values()) <= numbers
    assert len(set(FILE_TYPES.values())) == len(FILE_TYPES) == 21
