"""Plans of servers: flags that engines know, numbers that follow from memory."""

import json
import subprocess
import sys

import pytest
from configs import LLAMA_8B
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit import resources
from quantkit.advise import memory, shape
from quantkit.advise.profiles import MAX_SEQUENCES, PROFILES
from quantkit.advise.split import Split
from quantkit.errors import CheckpointError, HardwareError, UnknownName
from quantkit.hardware import gpus
from quantkit.hardware.support import format_of
from quantkit.mixed.candidates import MIXES, mixes_for
from quantkit.recipe import Recipe, load
from quantkit.serving import adapters, draft, target
from quantkit.serving.plan import Demand, Flag, make

# Taken from the help of vLLM 0.26.0 and 0.32.0, and of llama.cpp's build 11549.
VLLM_FLAGS = {
    "--served-model-name", "--host", "--port", "--tensor-parallel-size", "--dtype",
    "--gpu-memory-utilization", "--max-model-len", "--max-num-seqs", "--max-num-batched-tokens",
    "--kv-cache-dtype", "--kv-cache-memory-bytes", "--enable-prefix-caching",
    "--enable-chunked-prefill", "--enforce-eager", "--enable-lora", "--lora-modules",
    "--max-loras", "--max-lora-rank", "--speculative-config",
}  # fmt: skip
LLAMA_FLAGS = {
    "--alias", "--host", "--port", "--ctx-size", "--parallel", "--n-gpu-layers", "--split-mode",
    "--flash-attn", "--cache-type-k", "--cache-type-v", "--metrics", "--lora", "--spec-type",
    "--model-draft", "--spec-draft-n-max", "--spec-draft-ngl",
}  # fmt: skip
MODEL = shape.from_config(LLAMA_8B, "8B")
DRAFT = shape.from_config(LLAMA_8B | {"num_hidden_layers": 8}, "a draft")
NAMES = ("awq-w4a16", "fp8-dynamic", "int8-w8a8+kv-fp8", "gguf-q4_k_m")
RECIPES = {name: load(name) for name in NAMES} | {"as it is": None}


def planned(name="fp8-dynamic", gpu="L40S", **asked):
    wanted = target.planned(MODEL, RECIPES[name], f"out/{name}")
    return make(wanted, Demand(gpus.find(gpu), **asked))


def value(plan, flag):
    return next((f.words[1:] for f in plan.flags if f.name == flag), None)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(RECIPES)),
    gpu=st.sampled_from(["RTX4090", "L40S", "A100", "H200", "MI300X"]),
    count=st.sampled_from([1, 2, 4]),
    context=st.integers(64, 131072),
    users=st.one_of(st.none(), st.integers(1, 500)),
    profile=st.sampled_from(sorted(PROFILES)),
    kv_bits=st.sampled_from([None, 16]),
)
def test_every_plan_is_one_that_the_engine_takes(
    name, gpu, count, context, users, profile, kv_bits
):
    asked = dict(count=count, context=context, users=users, profile=profile, kv_bits=kv_bits)
    try:
        plan = planned(name, gpu, **asked)
    except HardwareError:  # too small, or of another generation
        return
    known = LLAMA_FLAGS if plan.engine == "llama.cpp" else VLLM_FLAGS
    assert {flag.name for flag in plan.flags} <= known
    assert all(flag.why for flag in plan.flags)
    assert len({flag.name for flag in plan.flags}) == len(plan.flags)
    size = plan.size
    if plan.engine == "llama.cpp":
        assert size.sequences <= size.fit.users
        assert int(value(plan, "--ctx-size")[0]) == context * size.sequences
        return
    sequences = int(value(plan, "--max-num-seqs")[0])
    batch = int(value(plan, "--max-num-batched-tokens")[0])
    # vLLM refuses fewer batched tokens than sequences, and warns of more than can be held.
    assert sequences <= batch <= max(sequences, sequences * context)
    assert 1 <= sequences <= max(MAX_SEQUENCES)
    # No sequences without room for their share of the context.
    assert sequences == 1 or sequences * context * size.profile.filled <= size.fit.kv_tokens
    if profile == "chat" and users:
        assert sequences <= users


@settings(max_examples=40, deadline=None)
@given(context=st.integers(64, 60_000), longer=st.integers(1, 60_000))
def test_a_longer_context_never_runs_more_requests(context, longer):
    before, after = planned(context=context), planned(context=context + longer)
    assert after.size.sequences <= before.size.sequences


def test_the_numbers_are_those_of_the_memory_model():
    plan = planned("int8-w8a8+kv-fp8", "A100", count=2, context=16384, users=40)
    fit = plan.size.fit
    assert fit.usable_bytes == int(gpus.find("A100").usable_bytes * 0.9)
    assert fit.usable_bytes == fit.weight_bytes + fit.overhead_bytes + fit.kv_bytes
    assert value(plan, "--tensor-parallel-size") == ("2",)
    assert value(plan, "--max-model-len") == ("16384",)
    assert value(plan, "--max-num-seqs") == ("40",)
    assert value(plan, "--kv-cache-dtype") == ("fp8",)


def test_profiles_trade_waiting_for_throughput():
    plans = [planned("fp8-dynamic", "H200", context=8192, profile=p) for p in PROFILES]
    chat, mixed, batch = plans
    for flag in ("--max-num-seqs", "--max-num-batched-tokens"):
        numbers = [int(value(plan, flag)[0]) for plan in (chat, mixed, batch)]
        assert numbers == sorted(numbers)
        assert len(set(numbers)) == 3


def test_a_smaller_cache_serves_more_and_says_that_it_has_no_scales():
    plain, small = (planned("fp8-dynamic", context=8192, kv_bits=b) for b in (16, 8))
    assert small.size.sequences > 1.9 * plain.size.sequences
    why = next(f.why for f in small.flags if f.name == "--kv-cache-dtype")
    assert "without scales" in why
    assert value(plain, "--kv-cache-dtype") is None
    llama = planned("gguf-q4_k_m", "RTX4090", kv_bits=8)
    assert value(llama, "--cache-type-k") == value(llama, "--cache-type-v") == ("q8_0",)


def test_what_does_not_fit_is_refused_or_cut_with_a_word():
    with pytest.raises(HardwareError, match="as it is does not fit on 1 x RTX 4090"):
        planned("as it is", "RTX4090", context=131072)
    plan = planned("as it is", "RTX4090", utilisation=0.7)
    assert plan.size.context < 8192
    assert any("was cut to" in note for note in plan.notes)
    waits = planned("as it is", "RTX4090", context=4096, users=40)
    assert any("of 40 users," in note for note in waits.notes)


def test_old_gpus_compute_in_half_and_formats_they_lack_are_refused():
    assert value(planned("as it is", "T4", context=1024, count=4), "--dtype") == ("half",)
    with pytest.raises(HardwareError, match="does not run kv-fp8"):
        planned("awq-w4a16", "T4", kv_bits=8)


@pytest.mark.parametrize(
    ("gpu", "told"),
    [("MI300X", "--formats int4-int8"), ("Arc B580", "--formats mxfp4"), ("V100", "quantkit gpus")],
)
def test_a_mixed_checkpoint_that_a_gpu_does_not_run_says_what_to_choose_from(gpu, told):
    five, four = ({"num_bits": bits, "group_size": 128} for bits in (5, 4))
    mixed = {"name": "mixed-5bits", "summary": "mixed", "method": "gptq", "weights": five}
    mixed["groups"] = [{"targets": ["re:.*o_proj$"], "weights": four}]
    wanted = target.planned(MODEL, Recipe.model_validate(mixed), "out/mixed")
    assert make(wanted, Demand(gpus.find("L40S")))
    with pytest.raises(HardwareError, match=f"does not run mixed-5bits.*{told}"):
        make(wanted, Demand(gpus.find(gpu)))


def test_mixes_for_a_gpu_are_those_of_the_support_table():
    found = {name: mixes_for(gpus.find(name)) for name in ("MI210", "MI300X", "H100 SXM", "V100")}
    assert "int4-int8" in found["MI210"]
    assert "int" not in found["MI300X"]
    assert "fp8" in found["MI300X"]
    assert "fp8" not in found["MI210"]  # which has no FP8
    assert found["H100 SXM"] == list(MIXES)
    assert found["V100"] == []


def test_a_draft_takes_its_share_of_the_memory():
    own = target.Target("d", "d", DRAFT, None, is_gguf=False)
    guess = draft.Draft("draft_model", 4, own)
    without, having = planned(context=8192), planned(context=8192, draft=guess)
    extra = having.size.fit.weight_bytes - without.size.fit.weight_bytes
    assert extra == DRAFT.size_bytes
    assert having.size.fit.user_bytes == without.size.fit.user_bytes * 40 // 32
    config = json.loads(value(having, "--speculative-config")[0])
    assert config == {"method": "draft_model", "num_speculative_tokens": 4, "model": "d"}
    both = planned(context=8192, draft=guess, count=2)
    config = json.loads(value(both, "--speculative-config")[0])
    assert config["draft_tensor_parallel_size"] == 2


def test_ngrams_need_no_model():
    found = draft.parse("ngram", target.planned(MODEL, None, "out"), 5)
    plan = planned(draft=found)
    config = json.loads(value(plan, "--speculative-config")[0])
    assert config["method"] == "ngram"
    assert config["num_speculative_tokens"] == 5
    assert config["prompt_lookup_min"] <= config["prompt_lookup_max"]
    llama = planned("gguf-q4_k_m", "RTX4090", draft=found)
    assert value(llama, "--spec-type") == ("ngram-simple",)


def test_a_draft_of_another_vocabulary_is_refused():
    with pytest.raises(CheckpointError, match="4096 tokens, not 128256"):
        draft.parse(str(resources.DEMO_MODEL), target.planned(MODEL, None, "out"))
    demo = target.open_target(resources.DEMO_MODEL)
    found = draft.parse(str(resources.DEMO_MODEL), demo)
    assert found.target.shape.size_bytes == found.extras(1).fixed_bytes


@pytest.mark.parametrize(
    ("architecture", "kind"), [("LlamaForCausalLMEagle3", "eagle3"), ("EagleModel", "eagle")]
)
def test_heads_are_told_apart(tmp_path, architecture, kind):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    wanted = target.planned(MODEL, None, "out")
    with pytest.raises(CheckpointError, match="no weights next to its config"):
        draft.parse(f"eagle:{tmp_path}", wanted)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    found = draft.parse(f"eagle:{tmp_path}", wanted)
    assert (found.kind, found.extras(1).fixed_bytes) == (kind, 1000)


def adapter(folder, rank):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return f"{folder.name}={folder}"


def test_gpus_that_cut_layers_have_one_factor_of_an_adapter_whole(tmp_path):
    found = adapters.parse([adapter(tmp_path / "one", 16)], is_gguf=False)
    # Cut are rows of all but o and down, of which it is columns: what is read, or given, is whole.
    layer = 4 * 4096 + 2 * (4096 + 14336 // 4) + (4096 + 14336 // 4)
    layer += 2 * 1024 + 2 * 1024 // 4  # q and o, k and v
    head = 4096 + 128256 // 4
    assert adapters.size_bytes(MODEL, found, Split(4)) == 2 * 16 * (32 * layer + head)
    whole = 2 * 4096 * 2 + 2 * 5120 + 3 * 18432
    # The last of five stages has the head and 6 layers, those before it 7 or 6.
    in_a_row = max(7 * whole, 6 * whole + 4096 + 128256)
    assert adapters.size_bytes(MODEL, found, Split(1, 5)) == 2 * 16 * in_a_row


def test_adapters_are_checked_named_and_counted(tmp_path):
    texts = [adapter(tmp_path / "one", 8), adapter(tmp_path / "two", 20)]
    found = adapters.parse(texts, is_gguf=False)
    plan = planned(adapters=found, context=8192)
    assert value(plan, "--lora-modules") == tuple(texts)
    assert value(plan, "--max-lora-rank") == ("32",)
    assert value(plan, "--max-loras") == ("2",)
    extra = plan.size.fit.weight_bytes - planned(context=8192).size.fit.weight_bytes
    # Per layer: q and o 4096 + 4096 each, k and v 4096 + 1024, the MLP 3 x (4096 + 14336).
    widths = 32 * (4 * 4096 + 2 * 5120 + 3 * 18432) + 4096 + 128256
    assert extra == 2 * 32 * widths * 2
    with pytest.raises(CheckpointError, match="two adapters are called one"):
        adapters.parse([texts[0], texts[0]], is_gguf=False)
    with pytest.raises(CheckpointError, match="rank 4096"):
        adapters.parse([adapter(tmp_path / "wide", 4096)], is_gguf=False)
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        adapters.parse([texts[0]], is_gguf=True)


def test_flags_in_the_users_words_replace_ours():
    plan = planned().with_extra(["--max-num-seqs", "3", "--no-enable-chunked-prefill", "-x=1"])
    assert plan.flags[-3:] == (
        Flag(("--max-num-seqs", "3"), "as you asked"),
        Flag(("--no-enable-chunked-prefill",), "as you asked"),
        Flag(("-x=1",), "as you asked"),
    )
    names = [flag.name for flag in plan.flags]
    assert names.count("--max-num-seqs") == 1
    assert "--enable-chunked-prefill" not in names


def test_formats_are_told_by_their_recipes():
    names = ("fp8-dynamic", "fp8-block", "int8-w8a8", "gptq-w4a16", "rtn-w8a16", "gguf-q4_k_m")
    formats = ["fp8-w8a8", "fp8-block", "int8-w8a8", "w4a16", "w8a16", "gguf"]
    assert [format_of(load(name)) for name in names] == formats
    assert format_of(None) == "bf16"


def test_an_unknown_profile_is_named():
    with pytest.raises(UnknownName, match="Did you mean batch"):
        planned(profile="batsh")


def test_a_cpu_gets_a_cache_of_its_own_size():
    cpu = gpus.GPU("a CPU", "cpu", 64.0, 100.0)
    plan = make(target.planned(MODEL, RECIPES["fp8-dynamic"], "out/x"), Demand(cpu, context=2048))
    wanted = int(value(plan, "--kv-cache-memory-bytes")[0])
    assert wanted == plan.size.sequences * plan.size.fit.user_bytes
    assert plan.size.sequences == PROFILES["chat"].slots
    assert value(plan, "--gpu-memory-utilization") is None


def test_a_plan_before_there_is_a_checkpoint_needs_no_torch():
    program = (
        "import sys\n"
        "from quantkit.advise import shape\n"
        "from quantkit.hardware import gpus\n"
        "from quantkit.recipe import load\n"
        "from quantkit.serving import emit, plan, target\n"
        "wanted = target.planned(shape.of('8B'), load('awq-w4a16'), 'out/awq-w4a16')\n"
        "made = plan.make(wanted, plan.Demand(gpus.find('L40S'), users=8))\n"
        "assert all(emit.files(made, kind) for kind in emit.KINDS)\n"
        "print([n for n in ('torch', 'transformers', 'numpy') if n in sys.modules])\n"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_what_lies_beside_is_taken_from_the_cache():
    gpu = gpus.find("L40S")
    plain = memory.fits(MODEL, None, gpu)
    beside = memory.fits(
        MODEL, None, gpu, serving=memory.Serving(extras=memory.Extras(1 << 30, 1 << 10))
    )
    assert plain.kv_bytes - beside.kv_bytes == 1 << 30
    assert beside.user_bytes - plain.user_bytes == 8192 << 10


def test_a_profile_gives_way_where_its_batches_leave_no_room():
    model = target.planned(shape.of("8B"), load("awq-gptq-w4a16"), "out")
    plan = make(model, Demand(gpus.find("RTX 3080"), context=16384, profile="batch"))
    assert plan.value("--max-num-batched-tokens") == "2048"
    assert "more would leave too little room" in " ".join(plan.notes)
    roomy = make(model, Demand(gpus.find("RTX 4090"), context=8192, profile="batch"))
    assert (roomy.value("--max-num-batched-tokens"), roomy.notes) == ("8192", ())
