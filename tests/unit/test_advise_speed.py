"""The roofline: arithmetic that can be checked by hand, properties, and known crossovers."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from configs import LLAMA_8B
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.advise import efficiency, experts, formats, links, parallel, shape, speed, work
from quantkit.advise.efficiency import Efficiency
from quantkit.advise.speed import Case, Load, estimate, prefill_seconds, step_seconds
from quantkit.advise.split import Split, stages
from quantkit.hardware import gpus
from quantkit.recipe import load

MEASURED = Path(__file__).parents[2] / "benchmarks" / "results" / "vllm-speed-h200.json"
SMALL = MEASURED.with_name("vllm-speed-small-h200.json")
SHAPE_1B = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
IDEAL = Efficiency(1, 1, 1, 0, 0, 1, 0)
LLAMA = shape.from_config(LLAMA_8B, "8B")
NAMES = ("fp8-dynamic", "int8-w8a8", "gptq-w8a16", "awq-gptq-w4a16", "gguf-q4_k_m", "gguf-bf16")
FORMATS = {name: formats.of(load(name)) for name in NAMES} | {"unquantised": formats.of(None)}
WORKS = {name: work.of(LLAMA, form) for name, form in FORMATS.items()}
GPUS = {gpu.name: gpu for gpu in gpus.load()}
PLAIN = gpus.GPU(
    "a GPU", "nvidia", 80, 1000.0, fp16_tflops=100.0, fp8_tflops=200.0, int8_tops=300.0,
    compute_capability="9.0", link="NVLink", link_gb_s=200.0,
)  # fmt: skip
LINEARS = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 4096 * 14336)
HEAD = 128256 * 4096
NORMS = (2 * 32 + 1) * 4096
A_TOKEN = 2 * 32 * 8 * 128 * 2
"""Bytes of keys and values."""


def case(name, gpu=PLAIN, count=1, pipeline=1):
    split = parallel.usual(FORMATS[name].recipe, count)
    if pipeline > 1:
        split = Split(count, pipeline)
    return Case(LLAMA, WORKS[name], FORMATS[name], gpu, split)


def test_a_step_reads_weights_once_and_every_cache():
    weights = 2 * (LINEARS + HEAD + NORMS)  # the table of embeddings is looked up
    assert step_seconds(case("unquantised"), 1, 1000, IDEAL) == pytest.approx(
        (weights + 1000 * A_TOKEN) / 1e12
    )
    assert step_seconds(case("unquantised"), 3, 1000, IDEAL) == pytest.approx(
        (weights + 3 * 1000 * A_TOKEN) / 1e12
    )


def test_a_prompt_multiplies_with_every_layer_and_attends_to_what_came_before():
    products = 2 * LINEARS * 4096
    attention = 4 * 32 * 4096 * 4096**2 / 2
    head = 2 * 2 * HEAD / 1e12  # read once for each chunk of 2,048, multiplied with one token
    expected = (products + attention) / 100e12 + head
    assert prefill_seconds(case("unquantised"), 4096, IDEAL) == pytest.approx(expected)


def test_only_the_last_token_of_a_prompt_is_multiplied_with_the_head():
    wide = shape.from_config(LLAMA_8B | {"vocab_size": 1_000_000}, "wide")
    form = FORMATS["unquantised"]
    ours = prefill_seconds(Case(wide, work.of(wide, form), form, PLAIN), 2048, IDEAL)
    more_to_read = 2 * (1_000_000 - 128256) * 4096 / 1e12
    assert ours - prefill_seconds(case("unquantised"), 2048, IDEAL) == pytest.approx(more_to_read)
    # A step draws a token for everybody: there the head counts for each of them.
    steps = [step_seconds(Case(m, work.of(m, form), form, PLAIN), 2048, 1, IDEAL)
             for m in (LLAMA, wide)]  # fmt: skip
    assert steps[1] - steps[0] == pytest.approx(2048 * 2 * (1_000_000 - 128256) * 4096 / 100e12)


@pytest.mark.parametrize(("name", "rate"), [("fp8-dynamic", 200), ("int8-w8a8", 300)])
def test_8_bit_formats_compute_at_their_own_rate_but_for_head_and_attention(name, rate):
    own, head = 2 * LINEARS * 4096 / (rate * 1e12), 2 * 2 * HEAD / 1e12
    attention = 4 * 32 * 4096 * 4096**2 / 2 / 100e12
    assert prefill_seconds(case(name), 4096, IDEAL) == pytest.approx(own + head + attention)


@pytest.mark.parametrize("name", ["fp8-dynamic", "awq-gptq-w4a16", "gptq-w8a16", "gguf-q4_k_m"])
def test_weight_only_formats_compute_in_16_bits(name):
    ampere = replace(PLAIN, compute_capability="8.6")  # where FP8 is emulated
    ours, theirs = (
        prefill_seconds(case(n, ampere), 8192, IDEAL) - reads_of_head(n, 8192)
        for n in (name, "unquantised")
    )
    assert ours == pytest.approx(theirs)
    assert case(name, ampere).is_unpacked


def reads_of_head(name, prompt):
    """Formats have it in different numbers of bytes, and engines read it for other chunks."""
    chunks = prompt // speed.CHUNK_TOKENS[FORMATS[name].engine]
    return chunks * WORKS[name].head_bytes / 1e12


def test_several_gpus_share_a_step_and_talk_twice_a_layer():
    read = 2 * (LINEARS + HEAD + NORMS) / 1e12
    talk = 2 * 32 * (2 * 3 / 4 * 4096 * 2 / 100e9)  # a ring of four, one way of the link
    found = step_seconds(case("unquantised", count=4), 1, 1, IDEAL)
    assert found == pytest.approx(read / 4 + A_TOKEN / 4 / 1e12 + talk)


def test_gpus_of_llama_cpp_take_turns():
    one, two = (step_seconds(case("gguf-q4_k_m", count=n), 1, 512, IDEAL) for n in (1, 2))
    assert one == two


@pytest.mark.parametrize(
    "name", ["RTX 3090", "RTX A6000", "A40", "A100 PCIe 80GB", "H100 PCIe", "H100 NVL"]
)
def test_bridges_join_two_cards_and_more_talk_over_pcie(name):
    gpu = GPUS[name]
    fast, is_pcie = links.link_gb_s(gpu, 2)
    assert (fast, is_pcie) == (gpu.link_gb_s / 2, False)
    lanes = links.PCIE_LANE_GB_S[int(float(gpu.pcie.split()[0]))] * 16
    for n_gpus in (4, 8):
        assert links.link_gb_s(gpu, n_gpus) == (lanes, True)
    end = efficiency.of("vllm", "nvidia")[efficiency.TYPICAL]
    one_hop = 1 << 30
    over_bridge = links.reduce_seconds(gpu, 2, one_hop, end)
    over_pcie = links.reduce_seconds(gpu, 4, one_hop, end)
    # The same bytes, 3/2 of a ring's share, at PCIe's rate.
    assert over_pcie / over_bridge == pytest.approx(1.5 * fast / lanes, rel=0.02)
    assert links.link_gb_s(GPUS["A100 SXM 80GB"], 8) == (300.0, False)


def test_four_bridged_cards_are_slower_than_four_on_a_switch():
    """Cut over pairs, A100 PCIe cards talk by NVLink; cut over four, they do not."""
    shape_70b = shape.of("70B")
    recipe = FORMATS["awq-gptq-w4a16"]
    made = work.of(shape_70b, recipe)
    asked = Load(2048, 512, 8)
    gpu = GPUS["A100 PCIe 80GB"]
    switched = replace(gpu, link_gpus=None)
    four = estimate(Case(shape_70b, made, recipe, gpu, Split(4)), asked)
    once = estimate(Case(shape_70b, made, recipe, switched, Split(4)), asked)
    assert four.first_token.typical > 1.3 * once.first_token.typical
    pairs = Case(shape_70b, made, recipe, gpu, Split(2, 2))
    as_switched = Case(shape_70b, made, recipe, switched, Split(2, 2))
    # Within a pair nothing changes; handing on between pairs crosses PCIe.
    assert estimate(pairs, asked).first_token.typical == pytest.approx(
        estimate(as_switched, asked).first_token.typical, rel=0.1
    )


def test_links_fall_back_to_pcie():
    assert links.link_gb_s(GPUS["H100 SXM"]) == (450.0, False)
    one_way, is_pcie = links.link_gb_s(GPUS["L40S"])
    assert is_pcie
    assert one_way == pytest.approx(31.5, abs=0.1)
    assert links.link_gb_s(replace(PLAIN, link_gb_s=None))[1]


@given(st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=25, deadline=None)
def test_a_prompt_attends_to_its_window_and_to_nothing_later(prompt, window):
    config = LLAMA_8B | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    windowed = shape.from_config(config | {"sliding_window": window}, "windowed")
    form = FORMATS["unquantised"]
    counted = 32 * sum(min(i, window) for i in range(1, prompt + 1))
    found = Case(windowed, WORKS["unquantised"], form, PLAIN).prompt_pairs(prompt)
    # A token attends to itself, which the integral leaves half out.
    assert found == pytest.approx(counted - 32 * min(prompt, window) / 2)


def test_a_window_limits_what_is_read():
    config = LLAMA_8B | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    windowed = shape.from_config(config | {"sliding_window": 1024}, "windowed")
    form = FORMATS["unquantised"]
    near, far = (
        step_seconds(Case(windowed, work.of(windowed, form), form, PLAIN), 1, depth, IDEAL)
        for depth in (1024, 65536)
    )
    assert near == far


def test_more_tokens_want_more_experts():
    parts = work.Work(100, work.Part(20, 80), work.Part(), work.Part(10, 40), 8, 2)
    assert parts.bytes_read(1) == pytest.approx(20 + 80 / 4)
    assert parts.bytes_read(2) == pytest.approx(20 + 80 * (1 - 0.75**2))
    assert parts.bytes_read(1000) == pytest.approx(100)


def test_a_tied_table_is_read_as_the_last_layer():
    tied = shape.from_config(LLAMA_8B | {"tie_word_embeddings": True}, "tied")
    for name in ("unquantised", "gguf-q4_k_m"):
        found = work.of(tied, FORMATS[name])
        assert found.read.dense == found.stored_bytes
        assert (found.plain.dense, found.head) == (LINEARS, HEAD)
        assert 0 < found.head_bytes < found.read.dense


any_case = {
    "name": st.sampled_from(sorted(FORMATS)),
    "gpu": st.sampled_from(sorted(GPUS)),
    "count": st.sampled_from([1, 2, 8]),
    "pipeline": st.sampled_from([1, 3]),
    "users": st.integers(1, 300),
    "context": st.integers(2, 100_000),
}


@settings(max_examples=80, deadline=None)
@given(**any_case)
def test_ranges_are_in_order(name, gpu, count, pipeline, users, context):
    found = estimate(
        case(name, GPUS[gpu], count, pipeline), Load(context, max(1, context // 4), users)
    )
    for span in filter(None, (found.first_token, found.step, found.answer, found.total)):
        assert 0 <= span.low <= span.typical <= span.high
    assert found.total.typical <= users * found.each.typical * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(**any_case, more=st.floats(1.0, 10.0))
def test_a_better_gpu_is_never_slower(name, gpu, count, pipeline, users, context, more):
    load_, before = Load(context, max(1, context // 4), users), GPUS[gpu]
    faster = replace(before, bandwidth_gb_s=before.bandwidth_gb_s * more)
    if before.fp16_tflops:
        stronger = replace(before, fp16_tflops=before.fp16_tflops * more)
        both = (case(name, one, count, pipeline) for one in (stronger, before))
        assert_no_slower(*both, load_)
    assert_no_slower(*(case(name, one, count, pipeline) for one in (faster, before)), load_)


@settings(max_examples=60, deadline=None)
@given(**any_case, more=st.integers(1, 500))
def test_more_users_and_longer_contexts_never_speed_a_step_up(
    name, gpu, count, pipeline, users, context, more
):
    model = case(name, GPUS[gpu], count, pipeline)
    for end in efficiency.of(model.format.engine, model.gpu.vendor):
        now = step_seconds(model, users, context, end)
        assert step_seconds(model, users + more, context, end) >= now * (1 - 1e-9)
        assert step_seconds(model, users, context + more, end) >= now * (1 - 1e-9)


def assert_no_slower(better, before, load_):
    ours, theirs = estimate(better, load_), estimate(before, load_)
    assert ours.answer.typical <= theirs.answer.typical * (1 + 1e-9)
    assert ours.total.typical >= theirs.total.typical * (1 - 1e-9)


def typical(name, gpu, users, depth=1024):
    end = efficiency.VLLM[efficiency.TYPICAL]
    return step_seconds(case(name, GPUS[gpu]), users, depth, end)


def prompt(name, gpu, tokens):
    return prefill_seconds(case(name, GPUS[gpu]), tokens, efficiency.VLLM[efficiency.TYPICAL])


@pytest.mark.parametrize("gpu", ["L4", "L40S", "RTX 4090", "RTX 5090"])
def test_4_bits_win_at_small_batches_and_fp8_at_large_ones(gpu):
    for users in (1, 4, 8):
        assert typical("awq-gptq-w4a16", gpu, users) < typical("fp8-dynamic", gpu, users)
        assert typical("fp8-dynamic", gpu, users) < typical("unquantised", gpu, users)
    for users in (256, 512):
        assert typical("fp8-dynamic", gpu, users) < typical("awq-gptq-w4a16", gpu, users)


def test_where_memory_is_fast_unpacking_holds_4_bits_back():
    """As measured in vLLM on an H200: benchmarks/results/vllm-speed-h200.json."""
    measured = json.loads(MEASURED.read_text())["models"]
    for users in (1, 64):
        theirs = [
            measured[n][f"decode_{users}"]["step_s"] for n in ("awq-gptq-w4a16", "fp8-static")
        ]
        ours = [typical(n, "H200", users, 96) for n in ("awq-gptq-w4a16", "fp8-dynamic")]
        assert theirs[0] > theirs[1]
        assert ours[0] > ours[1]
        assert ours == pytest.approx(theirs, rel=0.2)


@pytest.mark.parametrize("gpu", ["T4", "A10", "RTX 3090", "A100 SXM 80GB"])
def test_before_fp8_it_is_int8_that_wins_at_large_batches(gpu):
    assert typical("awq-gptq-w4a16", gpu, 1) < typical("int8-w8a8", gpu, 1)
    for other in ("awq-gptq-w4a16", "fp8-dynamic"):
        assert typical("int8-w8a8", gpu, 256) < typical(other, gpu, 256)
        assert prompt("int8-w8a8", gpu, 8192) < prompt(other, gpu, 8192)


@pytest.mark.parametrize("gpu", ["L4", "L40S", "RTX 4090", "H100 SXM", "B200"])
def test_8_bits_win_long_prompts_and_weight_only_gains_nothing_there(gpu):
    assert prompt("fp8-dynamic", gpu, 8192) < 0.8 * prompt("awq-gptq-w4a16", gpu, 8192)
    assert prompt("awq-gptq-w4a16", gpu, 8192) >= prompt("unquantised", gpu, 8192)


def test_a_device_without_a_compute_rate_still_decodes():
    found = estimate(case("gguf-q4_k_m", GPUS["CPU 2 x DDR5-5600"]), Load(4096, 1024))
    assert found.first_token is None
    assert 5 < found.each.low < found.each.high < 30  # 4.6 GB a token at 90 GB/s


def test_a_device_in_the_users_words_is_estimated_like_a_listed_one():
    own = gpus.describe("24GB", "1008GB/s", "8.9", fp16_tflops=165.2)
    listed = GPUS["RTX 4090"]
    ours, theirs = (typical_of(gpu) for gpu in (own, listed))
    assert ours == pytest.approx(theirs, rel=1e-3)


def typical_of(gpu):
    return estimate(case("awq-gptq-w4a16", gpu), Load(8192, 2048)).answer.typical


def test_engines_have_their_own_limits():
    # Published: 28, 43, 68 and 75 tokens per second of an 18.3 GB file; the cap is in the middle.
    slow = case("gguf-q4_k_m", GPUS["H200"])
    free = case("gguf-q4_k_m", replace(GPUS["H200"], compute_capability="8.9"))
    end = efficiency.LLAMA_CPP[efficiency.TYPICAL]
    assert step_seconds(slow, 1, 64, end) > 1.5 * step_seconds(free, 1, 64, end)
    # Users of llama.cpp wait for each other beyond a few, but not to have kernels launched.
    four, eight = (step_seconds(slow, n, 64, end) for n in (4, 8))
    assert eight == pytest.approx(2 * four - speed.own_seconds(slow, end))


@pytest.mark.parametrize(
    ("gpu", "depth", "seen"), [("RTX 4090", 256, 196), ("RTX 3090 Ti", 4096, 167)]
)
def test_experts_hold_llama_cpp_back_as_they_were_seen_to(gpu, depth, seen):
    """Qwen3-30B-A3B in Q4_K_M; the sources are named beside the constants."""
    mixture, form = shape.of("Qwen3-30B-A3B"), FORMATS["gguf-q4_k_m"]
    one = Case(mixture, work.of(mixture, form), form, GPUS[gpu])
    low, typical, high = (1 / step_seconds(one, 1, depth, end) for end in efficiency.LLAMA_CPP)
    assert low < seen < high
    assert typical == pytest.approx(seen, rel=0.15)


def test_what_a_gpu_emulates_is_unpacked_like_weights_alone():
    """NVFP4 without FP4 tensor cores is Marlin's business, as INT4 is: no faster on prompts."""
    form = formats.of(load("nvfp4"))
    fp4 = Case(LLAMA, work.of(LLAMA, form), form, GPUS["A100 SXM 80GB"])
    int4 = case("awq-gptq-w4a16", GPUS["A100 SXM 80GB"])
    for end in efficiency.VLLM:
        ours, theirs = (prefill_seconds(one, 4096, end) for one in (fp4, int4))
        assert ours == pytest.approx(theirs, rel=0.01)


def test_checking_several_tokens_reads_weights_and_cache_once():
    weights = 2 * (LINEARS + HEAD + NORMS)
    several = speed.pass_seconds(case("unquantised"), 1, 5, 1000, IDEAL)
    assert several == pytest.approx((weights + 1000 * A_TOKEN) / 1e12)
    # At many users the products count, and each token more costs as much as the first.
    many = [speed.pass_seconds(case("unquantised"), 4096, n, 1, IDEAL) for n in (1, 2)]
    assert many[1] > 1.9 * many[0]


def test_a_pipeline_computes_layers_in_sequence_and_hands_them_on():
    weights = 2 * (LINEARS + HEAD + NORMS)
    handed = 3 * 2 * 4096 * 2 / 100e9  # three times, a state and its residual, one way of the link
    alone = step_seconds(case("unquantised", pipeline=4), 1, 1000, IDEAL)
    assert alone == pytest.approx((weights + 1000 * A_TOKEN) / 1e12 + handed)


def test_users_of_a_pipeline_are_computed_in_as_many_batches_as_it_has_stages():
    layers, head = 2 * (LINEARS + NORMS) / 1e12, 2 * HEAD / 1e12
    cache, handed = 10 * 1000 * A_TOKEN / 1e12, 10 * 3 * 2 * 4096 * 2 / 100e9
    # Each of four batches has 10 users; the last of four stages has the head, too, and decides.
    longest = (layers + cache + handed) / 4 + head
    found = step_seconds(case("unquantised", pipeline=4), 40, 1000, IDEAL)
    assert found == pytest.approx(4 * longest)
    # Sharing the cache is what a pipeline is for: all users at once would take longer.
    assert found < step_seconds(case("unquantised"), 40, 1000, IDEAL)


def test_the_chunks_of_a_prompt_follow_each_other_through_a_pipeline():
    one, four = (case("unquantised", pipeline=n) for n in (1, 4))
    chunks = 8
    whole = prefill_seconds(one, chunks * 2048, IDEAL)
    handed = 3 * chunks * 2048 * 2 * 4096 * 2 / 100e9
    expected = (whole + handed) * (1 / chunks + (chunks - 1) / chunks / 4)
    assert prefill_seconds(four, chunks * 2048, IDEAL) == pytest.approx(expected)
    # A prompt of one chunk gains nothing, but others wait for one stage of it only.
    first, turn = speed.prompt_seconds(four, 2048, IDEAL)
    assert turn == pytest.approx(first / 4)


@given(st.integers(1, 200), st.integers(1, 16))
def test_stages_have_all_layers_in_order_and_differ_by_one(n_layers, n_stages):
    found = stages(n_layers, n_stages)
    assert [layer for row in found for layer in row] == list(range(n_layers))
    sizes = [len(row) for row in found]
    assert len(sizes) == n_stages
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


@pytest.mark.parametrize(
    ("n_layers", "n_stages", "sizes"),
    [(32, 4, [8, 8, 8, 8]), (22, 4, [5, 6, 6, 5]), (5, 3, [2, 2, 1]), (3, 2, [2, 1])],
)
def test_layers_that_are_left_over_go_where_vllm_puts_them(n_layers, n_stages, sizes):
    assert [len(row) for row in stages(n_layers, n_stages)] == sizes


@given(st.integers(1, 512), st.integers(1, 16), st.integers(1, 4096), st.integers(1, 64))
def test_the_fullest_gpu_has_at_least_its_share_and_at_most_all(pool, n_gpus, tokens, more):
    wanted = min(tokens, pool)
    for n_wanted, n_experts, most in ((wanted, pool, -(-pool // n_gpus)), (tokens, None, tokens)):
        fullest = experts.unevenness(n_wanted, n_experts, n_gpus) * n_wanted / n_gpus
        assert n_wanted / n_gpus * (1 - 1e-9) <= fullest <= most * (1 + 1e-9)
    # More that is wanted is never done sooner.
    after = min(wanted + more, pool)
    ours, theirs = (experts.unevenness(n, pool, n_gpus) * n for n in (wanted, after))
    assert ours <= theirs * (1 + 1e-9)


def test_few_tokens_make_whole_experts_wait_for_each_other_and_many_do_not():
    # Eight tokens that want one of many experts each, on eight GPUs: drawn, the fullest has 2.6.
    drawn = random.Random(0)
    counts = [max(Counter(drawn.randrange(8) for _ in range(8)).values()) for _ in range(4000)]
    expected = sum(counts) / len(counts)
    assert experts.unevenness(8, None, 8) == pytest.approx(expected, rel=0.15)
    assert experts.unevenness(128, 128, 8) == 1.0
    assert experts.unevenness(1 << 20, None, 8) < 1.01


@pytest.mark.parametrize("users", [1, 64])
def test_small_models_wait_for_the_cpu(users):
    """As measured in vLLM on an H200."""
    measured = json.loads(SMALL.read_text())["shapes"]["llama-1b"]
    one = shape.from_config(LLAMA_8B | SHAPE_1B, "1B")
    for name, recorded in (("fp8-dynamic", "fp8-static"), ("awq-gptq-w4a16", "awq-gptq-w4a16")):
        of_format = Case(one, work.of(one, FORMATS[name]), FORMATS[name], gpus.find("H200"))
        ours = step_seconds(of_format, users, 96, efficiency.VLLM[efficiency.TYPICAL])
        assert ours == pytest.approx(measured[recorded][f"decode_{users}"]["step_s"], rel=0.1)


def test_what_bounds_a_step_is_told_for_any_number_of_users():
    small = shape.of("1B")
    form = FORMATS["awq-gptq-w4a16"]
    one = Case(small, work.of(small, form), form, gpus.find("H200"))
    assert {estimate(one, Load(128, 64, users)).bound for users in range(1, 65)} == {"host"}
    assert estimate(case("fp8-dynamic", gpus.find("H200")), Load(128, 64, 64)).bound != "host"


def test_the_cpu_prepares_every_batch_of_a_pipeline():
    end = replace(IDEAL, host_seconds=1.0, host_user_seconds=0.1)
    assert step_seconds(case("unquantised"), 8, 100, end) == pytest.approx(1.8)
    assert step_seconds(case("unquantised", pipeline=4), 8, 100, end) == pytest.approx(4.8)
    assert step_seconds(case("unquantised", pipeline=4), 2, 100, end) == pytest.approx(2.2)
