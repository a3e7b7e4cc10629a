"""How GPUs share a model: what each holds by obvious arithmetic, and which way is chosen."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quantkit.advise import document, families, formats, memory, parallel, shape, words, work
from quantkit.advise.candidates import UNUSUAL, evaluate, merit
from quantkit.advise.memory import GIB, fits
from quantkit.advise.parallel import obstacle, stage_bytes, ways_to_share
from quantkit.advise.question import Catalogue, Limits, Question
from quantkit.advise.recommendation import recommend
from quantkit.advise.split import ANY, Split, SplitConstraint
from quantkit.advise.weights import weight_bytes
from quantkit.errors import AdviceError
from quantkit.hardware import gpus
from quantkit.model.headers import TensorSpec
from quantkit.recipe import load
from quantkit.serving import plan, target

HIDDEN, INNER, LAYERS, WORDS = 4096, 14336, 32, 128256
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": WORDS,
    "max_position_embeddings": 131072,
}  # fmt: skip
LLAMA = shape.from_config(LLAMA_8B, "8B")
TIED = shape.from_config(LLAMA_8B | {"tie_word_embeddings": True}, "tied")
BLOCK = 2 * HIDDEN * HIDDEN + 2 * 1024 * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN
NAMES = ("awq-w4a16", "fp8-dynamic", "fp8-block", "gptq-w8a16+kv-fp8")
RECIPES = {name: load(name) for name in NAMES} | {"unquantised": None}


def mixture(n_experts=12, inner=768, heads=32, dense=()):
    """A model as Qwen3-30B-A3B is, with fewer layers; `dense` ones have no experts."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": inner,
        "num_hidden_layers": 4, "num_attention_heads": heads, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 4096, "num_experts": n_experts, "num_experts_per_tok": 2,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": (4096, 2048), "model.norm.weight": (2048,)}
    for layer in range(4):
        place = f"model.layers.{layer}"
        tensors |= {
            f"{place}.self_attn.q_proj.weight": (heads * 128, 2048),
            f"{place}.self_attn.k_proj.weight": (512, 2048),
            f"{place}.self_attn.v_proj.weight": (512, 2048),
            f"{place}.self_attn.o_proj.weight": (2048, heads * 128),
            f"{place}.input_layernorm.weight": (2048,),
        }
        if layer in dense:
            tensors[f"{place}.mlp.gate_proj.weight"] = (6144, 2048)
            tensors[f"{place}.mlp.up_proj.weight"] = (6144, 2048)
            tensors[f"{place}.mlp.down_proj.weight"] = (2048, 6144)
            continue
        tensors[f"{place}.mlp.gate.weight"] = (n_experts, 2048)
        for expert in range(n_experts):
            own = f"{place}.mlp.experts.{expert}"
            tensors[f"{own}.gate_proj.weight"] = (inner, 2048)
            tensors[f"{own}.up_proj.weight"] = (inner, 2048)
            tensors[f"{own}.down_proj.weight"] = (2048, inner)
    tensors["lm_head.weight"] = (4096, 2048)
    stored = [TensorSpec(name, "BF16", size) for name, size in tensors.items()]
    return shape.from_tensors(config, stored, "mixture")


MIXTURE = mixture()


def whole(model):
    """A model of which every expert and every block is looked at."""
    full = replace(model)
    full.__dict__["thin"], full.__dict__["sample"] = (full, 1), shape.Sample(full)
    return full


def widened(tensor):
    """The MLP of one layer at twice its width."""
    if ".5.mlp." not in tensor.name:
        return tensor
    return TensorSpec(tensor.name, "BF16", tuple(n * 2 if n == INNER else n for n in tensor.shape))


def test_the_first_stage_has_the_embeddings_and_the_last_the_head():
    first, middle, last = stage_bytes(LLAMA, None, Split(pipeline=3))
    assert first == 2 * (11 * BLOCK + WORDS * HIDDEN)
    assert middle == 2 * 11 * BLOCK
    assert last == 2 * (10 * BLOCK + HIDDEN + WORDS * HIDDEN)


def test_a_tied_head_is_on_both_ends_of_a_pipeline():
    first, last = stage_bytes(TIED, None, Split(pipeline=2))
    assert first == 2 * (16 * BLOCK + WORDS * HIDDEN)
    assert last == 2 * (16 * BLOCK + WORDS * HIDDEN + HIDDEN)


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("tensor", [1, 2])
def test_stages_together_hold_the_checkpoint(name, tensor):
    recipe = RECIPES[name]
    for pipeline in (2, 3, 5):
        split = stage_bytes(LLAMA, recipe, Split(tensor, pipeline))
        assert sum(split) == stage_bytes(LLAMA, recipe, Split(tensor))[0]
    whole = LLAMA.size_bytes if recipe is None else weight_bytes(LLAMA, recipe)
    assert sum(stage_bytes(LLAMA, recipe, Split(pipeline=4))) == whole


def test_whole_experts_are_given_out_and_the_rest_is_cut():
    split = Split(8, has_whole_experts=True)
    (found,) = stage_bytes(MIXTURE, None, split)
    expert = 3 * 768 * 2048
    # 12 over 8: the first four have two. Four key heads are copied, router and norms everywhere.
    attention = (2 * 32 * 128 * 2048) // 8 + 2 * 128 * 2048
    block = attention + 2048 + 12 * 2048 + 2 * expert
    assert found == 2 * (4 * block + 2048 + 2 * 4096 * 2048 // 8)
    cut = stage_bytes(MIXTURE, None, Split(8))[0]
    assert found - cut == 2 * 4 * (2 * expert - 12 * expert // 8)


@pytest.mark.parametrize("name", [*NAMES, "int8-w8a8", "unquantised"])
def test_one_expert_speaks_for_all_that_are_like_it(name):
    recipe = None if name == "unquantised" else load(name)
    full = whole(MIXTURE)
    assert MIXTURE.thin[1] == 12
    assert len(full.tensors) - len(MIXTURE.thin[0].tensors) == 4 * 11 * 3
    for split in (Split(), Split(2, 2), Split(4, has_whole_experts=True), Split(1, 3)):
        assert stage_bytes(MIXTURE, recipe, split) == stage_bytes(full, recipe, split)
        assert obstacle(MIXTURE, recipe, split) == obstacle(full, recipe, split)
    form = formats.of(recipe)
    assert work.of(MIXTURE, form) == work.of(full, form)


@pytest.mark.parametrize("name", [*NAMES, "nvfp4", "gguf-q4_k_m", "unquantised"])
def test_one_block_speaks_for_all_that_are_like_it(name):
    recipe = None if name == "unquantised" else load(name)
    form = formats.of(recipe)
    # One block has a wider MLP than the others, two have experts and two do not.
    wide = shape.from_tensors(LLAMA_8B, [widened(t) for t in LLAMA.tensors], "wide")
    half = mixture(dense=(1, 2))
    assert LLAMA.sample.layers == {("model.layers", 0): tuple(range(LAYERS))}
    assert sorted(wide.sample.layers) == [("model.layers", 0), ("model.layers", 5)]
    assert half.sample.layers == {("model.layers", 0): (0, 3), ("model.layers", 1): (1, 2)}
    assert half.sample.n_experts == 12
    mixed = MIXTURE if name.startswith("gguf") else half  # of which llama.cpp has no name
    for model in (LLAMA, TIED, wide, mixed):
        full = whole(model)
        for split in (Split(), Split(2, 2), Split(1, 3)):
            assert stage_bytes(model, recipe, split) == stage_bytes(full, recipe, split)
            assert obstacle(model, recipe, split) == obstacle(full, recipe, split)
        assert work.of(model, form) == work.of(full, form)


def test_experts_that_follow_from_a_config_are_all_there():
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 4096, "num_experts": 12, "num_experts_per_tok": 2,
        "max_position_embeddings": 4096, "mlp_only_layers": [1],
    }  # fmt: skip
    found = shape.from_config(config, "mixture")
    stored = [TensorSpec(*one) for one in (
        (name, "BF16", size)
        for name, size in families.shapes(families.completed(config, "x"), "x").items()
    )]  # fmt: skip
    assert [(t.name, t.shape) for t in found.tensors] == [(t.name, t.shape) for t in stored]
    assert tuple(found.tensors) == shape.from_tensors(config, stored, "mixture").tensors
    thin, n = replace(found).thin  # which drops what it was given
    assert (thin.tensors, n) == (found.thin[0].tensors, 12)
    assert found.n_parameters == sum(spec.n_elements for spec in stored)


def test_blocks_that_a_recipe_names_are_counted_one_by_one():
    recipe = load("fp8-dynamic")
    named = recipe.model_copy(update={"ignore": ["lm_head", "re:.*layers.3.mlp.*"]})
    kept = 3 * HIDDEN * INNER - 2 * (2 * INNER + HIDDEN)  # without scales in 16 bits
    assert weight_bytes(LLAMA, named) - weight_bytes(LLAMA, recipe) == kept


def test_experts_that_differ_or_are_named_are_counted_one_by_one():
    last = MIXTURE.tensors[-2]
    assert ".experts.11." in last.name
    odd = replace(last, shape=(last.shape[0], last.shape[1] // 2))
    uneven = replace(MIXTURE, tensors=(*MIXTURE.tensors[:-2], odd, MIXTURE.tensors[-1]))
    assert uneven.thin == (uneven, 1)
    recipe = load("fp8-dynamic")
    named = recipe.model_copy(update={"ignore": ["lm_head", "re:.*experts.3.*"]})
    assert weight_bytes(MIXTURE, named) > weight_bytes(MIXTURE, recipe)


def gpu(memory_gib):
    return gpus.GPU("a GPU", "nvidia", memory_gib, 1000.0, memory_bytes=memory_gib * GIB)


def test_the_gpu_with_the_least_room_decides():
    split = Split(pipeline=3)
    fit = fits(LLAMA, None, gpu(24), 3, 8192, serving=memory.Serving(split=split))
    room = []
    for stage, size in enumerate(stage_bytes(LLAMA, None, split)):
        own = memory.overhead_bytes(LLAMA, memory.VLLM_SMALL, 1, has_head=stage == 2)
        own += memory.VLLM_SMALL.talk_bytes
        n_layers = (11, 11, 10)[stage]
        room.append((fit.usable_bytes - size - own) // (n_layers * 8192 * 2 * 8 * 128 * 2))
    assert fit.users == min(room)
    assert room.index(min(room)) == 0  # embeddings, and a layer more than the last
    assert fit.user_bytes == 11 * 8192 * 2 * 8 * 128 * 2


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(RECIPES)),
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.integers(1, 6),
    room=st.integers(8, 80),
    more=st.integers(1, 20),
    context=st.integers(64, 60_000),
)
def test_more_memory_and_shorter_contexts_never_hurt_a_pipeline(
    name, tensor, pipeline, room, more, context
):
    split, recipe = Split(tensor, pipeline), RECIPES[name]
    how = memory.Serving(split=split)
    assume(not obstacle(LLAMA, recipe, split))
    before = fits(LLAMA, recipe, gpu(room), split.n_gpus, context, serving=how)
    assert fits(LLAMA, recipe, gpu(room + more), split.n_gpus, context, serving=how).users >= (
        before.users
    )
    shorter = fits(
        LLAMA,
        recipe,
        gpu(room),
        split.n_gpus,
        max(1, context // 2),
        serving=how,
    )
    assert shorter.users >= before.users
    assert before.split == split


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (1, [Split()]),
        (2, [Split(2), Split(1, 2)]),
        (3, [Split(2), Split(1, 3)]),
        (4, [Split(4), Split(2, 2), Split(1, 4)]),
        (6, [Split(4), Split(2, 3), Split(1, 6)]),
        (7, [Split(4), Split(1, 7)]),
    ],
)
def test_ways_use_all_gpus_or_cut_layers_over_as_many_as_divide(count, expected):
    assert ways_to_share(LLAMA, None, count, ANY) == expected


def test_more_gpus_than_anybody_has_are_no_endless_search():
    most = 32 * LAYERS
    found = ways_to_share(LLAMA, None, 10**9, SplitConstraint(tensor=8))
    assert found[0] == Split(8, LAYERS)
    assert all(split.n_gpus <= most for split in found)


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (SplitConstraint(tensor=2), [Split(2, 2)]),
        (SplitConstraint(pipeline=4), [Split(1, 4)]),
        (SplitConstraint(tensor=4, pipeline=1), [Split(4)]),
        (SplitConstraint(tensor=3), []),
        (SplitConstraint(has_whole_experts=True), []),
    ],
)
def test_constraints_are_obeyed(constraint, expected):
    found = ways_to_share(LLAMA, None, 4, constraint)
    assert [split for split in found if split.n_gpus == 4] == expected
    assert all(constraint.allows(split) for split in found)


def test_layers_and_files_of_llama_cpp_have_limits_of_their_own():
    assert obstacle(LLAMA, None, Split(pipeline=33)) == "32 layers are fewer than 33 GPUs"
    assert "no tensor parallel" in obstacle(LLAMA, load("gguf-q4_k_m"), Split(2))
    assert ways_to_share(LLAMA, load("gguf-q4_k_m"), 3, ANY) == [Split(1, 3)]


def test_experts_that_cannot_be_cut_between_their_scales_are_given_out_whole():
    block = load("fp8-block")
    assert "between its scales" in obstacle(MIXTURE, block, Split(4))
    whole = Split(4, has_whole_experts=True)
    assert obstacle(MIXTURE, block, whole) == ""
    assert ways_to_share(MIXTURE, block, 4, ANY)[0] == whole
    assert ways_to_share(MIXTURE, load("fp8-dynamic"), 4, ANY)[0] == Split(4)
    odd = mixture(inner=700)
    assert obstacle(odd, None, Split(8)) == "an expert of 700 cannot be divided over 8 GPUs"
    assert obstacle(odd, None, Split(8, has_whole_experts=True)) == ""


def ask(model=None, **more):
    return Question(Catalogue(model or LLAMA), **more)


def by_name(question, name="fp8-dynamic", device="L40S"):
    found = evaluate(question, gpus.find(device))
    return next(c for c in found if c.format.name == name)


def test_a_split_within_the_limits_is_chosen_over_a_better_one_beyond_them():
    without = ask(count=4, users=256, objective="throughput")
    best = by_name(without, "fp8-dynamic+kv-fp8", "A100")
    quicker = min(best.others, key=lambda one: one.speed.step.typical)
    assert quicker.speed.step.typical < best.speed.step.typical
    between = (quicker.speed.step.typical + best.speed.step.typical) / 2
    chosen = by_name(without.but(limits=Limits(tpot=between)), "fp8-dynamic+kv-fp8", "A100")
    assert chosen.serves
    assert chosen.split == quicker.split


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["unquantised", "fp8-dynamic", "awq-gptq-w4a16"]),
    device=st.sampled_from(["L40S", "H100 SXM", "RTX 4090"]),
    count=st.integers(1, 8),
    users=st.integers(1, 100),
    objective=st.sampled_from(["latency", "throughput", "memory"]),
)
def test_the_way_that_is_chosen_is_the_best_for_the_objective(
    name, device, count, users, objective
):
    question = ask(count=count, users=users, objective=objective)
    chosen = by_name(question, name, device)
    fitting = [one for one in (chosen, *chosen.others) if one.speed is not None]
    assert {one.split for one in (chosen, *chosen.others)} == set(
        ways_to_share(LLAMA, chosen.format.recipe, count, ANY)
    )
    if chosen.speed is None:
        assert not fitting
        assert chosen.room == max(one.room for one in (chosen, *chosen.others))
        return
    best = min(merit(one, objective) for one in fitting)
    # Cutting every layer over all GPUs is left only for something clearly better.
    slack = UNUSUAL if chosen.split == Split(count) else 1.0
    usual = next((one for one in fitting if one.split == Split(count)), chosen)
    assert merit(chosen, objective) <= best * slack * (1 + 1e-9)
    assert merit(chosen, objective) <= merit(usual, objective) * (1 + 1e-9)


def test_what_does_not_divide_is_shared_another_way_and_says_why():
    seventy = shape.of("70B")
    one = by_name(ask(seventy, count=3))
    assert one.split == Split(2)
    told = words.sharing(one, ask(seventy, count=3))
    assert told.startswith(
        "tensor parallel over 2 GPUs of the 3 (1 left idle): 64 heads cannot be divided over 3"
    )
    assert "a pipeline of 3 GPUs would take" in told
    many = ask(seventy, count=3, objective="throughput", users=16)
    assert by_name(many).split == Split(pipeline=3)
    assert "tensor parallel over 2 GPUs does not fit" in words.sharing(by_name(many), many)


def test_one_line_tells_how_gpus_share_the_answer():
    assert words.sharing(by_name(ask()), ask()) == ""
    two = ask(count=2)
    assert words.sharing(by_name(two), two).startswith("tensor parallel over 2 GPUs; a pipeline")
    wished = ask(count=4, constraint=SplitConstraint(pipeline=2))
    told = words.sharing(by_name(wished), wished)
    assert told.startswith("tensor parallel over 2 in a pipeline of 2: as you asked")
    files = by_name(two, "gguf-q8_0")
    assert words.sharing(files, two) == "whole layers on each of the 2 GPUs, one after another"
    alone = ask(count=3, constraint=SplitConstraint(tensor=1, pipeline=1))
    assert "one GPU of the 3 (room for 2 more such servers)" in words.sharing(by_name(alone), alone)


@pytest.mark.parametrize(
    ("question", "said"),
    [
        (
            {"count": 2, "constraint": SplitConstraint(tensor=2, pipeline=2)},
            "pipeline of 2 .*--count 4.*2",
        ),
        ({"constraint": SplitConstraint(tensor=0)}, "tensor.* 1"),
        (
            {"count": 2, "constraint": SplitConstraint(has_whole_experts=True)},
            "--expert-parallel",
        ),
    ],
)
def test_wishes_that_make_no_sense_are_refused(question, said):
    with pytest.raises(AdviceError, match=said):
        ask(**question)


def test_experts_want_gpus_that_cut_layers():
    with pytest.raises(AdviceError, match="tensor parallel over 2 or more"):
        ask(
            MIXTURE,
            context=4096,
            count=4,
            constraint=SplitConstraint(tensor=1, has_whole_experts=True),
        )


def test_a_wish_that_a_format_cannot_fulfil_leaves_it_out():
    found = recommend(ask(count=3, constraint=SplitConstraint(tensor=3)), gpus.find("L40S"))
    assert found.chosen is None
    problems = {c.format.name: c.problem for c in found.candidates}
    assert problems["fp8-dynamic"] == "32 heads cannot be divided over 3 GPUs"
    assert "no tensor parallel" in problems["gguf-q8_0"]
    assert found.reason.startswith("the GPUs cannot split it as asked: 32 heads")
    way = found.remedies[0]
    assert way.change.startswith("without --tensor-parallel")
    again = recommend(found.question.but(constraint=ANY), gpus.find("L40S"))
    assert (way.format, way.says.split(" with ")[0]) == (
        again.chosen.format.name,
        f"another way to split it: {again.chosen.split}",
    )


def test_whole_experts_wait_for_the_fullest_gpu():
    for users, is_slower in ((1, False), (256, True)):  # alone one waits for the CPU
        cut, whole = (
            by_name(
                ask(
                    MIXTURE,
                    context=4096,
                    users=users,
                    count=4,
                    constraint=SplitConstraint(4, has_whole_experts=w),
                ),
                "unquantised",
                "L4",
            )
            for w in (False, True)
        )
        assert (cut.split.has_whole_experts, whole.split.has_whole_experts) == (False, True)
        assert (whole.speed.step.typical > cut.speed.step.typical) == is_slower


def flags(model, recipe, count, split=None, device="L40S", context=2048):
    demand = plan.Demand(gpus.find(device), count, split=split, context=context, users=4)
    made = plan.make(target.planned(model, recipe, "out/it"), demand)
    return made, {flag.name: flag for flag in made.flags}


def test_the_plan_of_a_pipeline_says_which_layers_lie_where():
    made, found = flags(LLAMA, load("fp8-dynamic"), 3, Split(pipeline=3))
    assert "--tensor-parallel-size" not in found
    assert found["--pipeline-parallel-size"].words[1] == "3"
    assert found["--pipeline-parallel-size"].why.startswith(
        "pipeline parallel over 3 GPUs, 11, 11, 10 layers"
    )
    assert "32 heads cannot be divided over 3 GPUs" in found["--pipeline-parallel-size"].why
    assert made.to_json()["pipeline_parallel"] == 3
    both = flags(LLAMA, load("fp8-dynamic"), 4, Split(2, 2))[1]
    assert both["--tensor-parallel-size"].words[1] == both["--pipeline-parallel-size"].words[1]


def test_the_plan_of_a_mixture_gives_experts_out():
    _, found = flags(MIXTURE, load("fp8-block"), 4)
    assert found["--tensor-parallel-size"].words[1] == "4"
    assert found["--enable-expert-parallel"].why.startswith("expert parallel: 3 of 12")
    assert "--enable-expert-parallel" not in flags(MIXTURE, load("fp8-dynamic"), 4)[1]


def test_a_plan_finds_a_way_of_its_own_where_layers_cannot_be_cut_over_all():
    made, found = flags(LLAMA, load("fp8-dynamic"), 3)
    assert found["--tensor-parallel-size"].words[1] == "2"
    assert made.where.startswith("2 x L40S")
    assert any("1 of the 3 GPUs is left idle: 32 heads" in note for note in made.notes)
    # 70B in 8 bits needs all three.
    device = "A100 SXM 40GB"
    _, large = flags(shape.of("70B"), load("fp8-dynamic"), 3, device=device, context=8192)
    assert large["--pipeline-parallel-size"].words[1] == "3"


def test_json_tells_how_gpus_share_it():
    found = recommend(ask(count=3), gpus.find("L40S"))
    told = json.loads(json.dumps(document.to_json([found])))["answers"][0]
    assert told["sharing"].startswith("tensor parallel over 2 GPUs of the 3")
    row = next(c for c in told["candidates"] if c["format"] == found.chosen.format.name)
    assert row["split"] == {"tensor": 2, "pipeline": 1, "has_whole_experts": False}
    assert row["memory"]["n_gpus"] == 2


def test_gpus_of_the_usual_way_are_those_that_are_counted():
    assert parallel.usual(None, 4) == Split(4)
    assert parallel.usual(load("gguf-q8_0"), 4) == Split(pipeline=4)


def test_gpus_that_talk_keep_buffers_for_it():
    """Those that cut layers over NVLink the most, as vLLM has logged since 0.19."""
    taken = {}
    for name in ("L40S", "H100 SXM"):
        for split in (Split(1), Split(2), Split(4), Split(pipeline=2)):
            silent = replace(memory.VLLM, talk_bytes=0)
            with_it, without = (
                fits(
                    LLAMA,
                    None,
                    gpus.find(name),
                    split.n_gpus,
                    serving=memory.Serving(engine=engine, split=split),
                )
                for engine in (memory.VLLM, silent)
            )
            taken[name, str(split)] = (with_it.overhead_bytes - without.overhead_bytes) / GIB
    cut = pytest.approx(1.85)
    assert list(taken.values()) == [0, 0.5, 0.5, 0.5, 0, cut, cut, 0.5]


def test_a_mixture_computes_all_experts_that_a_token_chooses():
    dense = memory.overhead_bytes(LLAMA, memory.VLLM, 1)
    engine = replace(memory.VLLM, n_logits=1)
    config = {**LLAMA.config, "num_experts_per_tok": 4, "moe_intermediate_size": 1024}
    mixed = replace(LLAMA, config=config)
    # 4 experts of 3 x 1,024, and an output of each, against 3 x 14,336.
    more = memory.overhead_bytes(mixed, engine, 1) - memory.overhead_bytes(LLAMA, engine, 1)
    wide = max(0, 4 * (3 * 1024 + 4096) - 3 * 14336)
    assert more == engine.batch_tokens * wide * 2
    wider = replace(LLAMA, config=config | {"moe_intermediate_size": 14336})
    assert memory.overhead_bytes(wider, memory.VLLM, 1) > 1.4 * dense
