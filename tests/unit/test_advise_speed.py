"""The roofline: arithmetic that can be checked by hand, properties, and known crossovers."""

from dataclasses import replace

import pytest
from configs import LLAMA_8B
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.advise import efficiency, formats, gpus, shape, speed, work
from quantkit.advise.efficiency import Efficiency
from quantkit.advise.speed import Case, Load, estimate, prefill_seconds, step_seconds
from quantkit.recipe import load

IDEAL = Efficiency(1, 1, 1, 0, 0, 1, 0)
LLAMA = shape.from_config(LLAMA_8B, "8B")
NAMES = ("fp8-dynamic", "int8-w8a8", "gptq-w8a16", "awq-gptq-w4a16", "gguf-q4_k_m", "gguf-bf16")
FORMATS = {name: formats.of(load(name)) for name in NAMES} | {"as it is": formats.of(None)}
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


def case(name, gpu=PLAIN, count=1):
    return Case(LLAMA, WORKS[name], FORMATS[name], gpu, count)


def test_a_step_reads_weights_once_and_every_cache():
    weights = 2 * (LINEARS + HEAD + NORMS)  # the table of embeddings is looked up
    assert step_seconds(case("as it is"), 1, 1000, IDEAL) == pytest.approx(
        (weights + 1000 * A_TOKEN) / 1e12
    )
    assert step_seconds(case("as it is"), 3, 1000, IDEAL) == pytest.approx(
        (weights + 3 * 1000 * A_TOKEN) / 1e12
    )


def test_a_prompt_multiplies_with_every_weight_and_attends_to_what_came_before():
    products = 2 * (LINEARS + HEAD) * 4096
    attention = 4 * 32 * 4096 * 4096**2 / 2
    expected = (products + attention) / 100e12
    assert prefill_seconds(case("as it is"), 4096, IDEAL) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "rate"), [("fp8-dynamic", 200), ("int8-w8a8", 300)])
def test_8_bit_formats_compute_at_their_own_rate_but_for_head_and_attention(name, rate):
    own, head = 2 * LINEARS * 4096 / (rate * 1e12), 2 * HEAD * 4096 / 100e12
    attention = 4 * 32 * 4096 * 4096**2 / 2 / 100e12
    assert prefill_seconds(case(name), 4096, IDEAL) == pytest.approx(own + head + attention)


@pytest.mark.parametrize("name", ["fp8-dynamic", "awq-gptq-w4a16", "gptq-w8a16", "gguf-q4_k_m"])
def test_weight_only_formats_compute_in_16_bits(name):
    ampere = replace(PLAIN, compute_capability="8.6")  # where FP8 is emulated
    ours = prefill_seconds(case(name, ampere), 8192, IDEAL)
    assert ours == pytest.approx(prefill_seconds(case("as it is", ampere), 8192, IDEAL))
    assert case(name, ampere).is_unpacked


def test_several_gpus_share_a_step_and_talk_twice_a_layer():
    read = 2 * (LINEARS + HEAD + NORMS) / 1e12
    talk = 2 * 32 * (2 * 3 / 4 * 4096 * 2 / 100e9)  # a ring of four, one way of the link
    found = step_seconds(case("as it is", count=4), 1, 1, IDEAL)
    assert found == pytest.approx(read / 4 + A_TOKEN / 4 / 1e12 + talk)


def test_gpus_of_llama_cpp_take_turns():
    one, two = (step_seconds(case("gguf-q4_k_m", count=n), 1, 512, IDEAL) for n in (1, 2))
    assert one == two


def test_links_fall_back_to_pcie():
    assert speed.link_gb_s(GPUS["H100 SXM"]) == (450.0, False)
    one_way, is_pcie = speed.link_gb_s(GPUS["L40S"])
    assert is_pcie
    assert one_way == pytest.approx(31.5, abs=0.1)
    assert speed.link_gb_s(replace(PLAIN, link_gb_s=None))[1]


@given(st.integers(1, 60), st.integers(1, 60))
@settings(max_examples=25, deadline=None)
def test_a_prompt_attends_to_its_window_and_to_nothing_later(prompt, window):
    config = LLAMA_8B | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    windowed = shape.from_config(config | {"sliding_window": window}, "windowed")
    form = FORMATS["as it is"]
    counted = 32 * sum(min(i, window) for i in range(1, prompt + 1))
    found = Case(windowed, WORKS["as it is"], form, PLAIN).prompt_pairs(prompt)
    # A token attends to itself, which the integral leaves half out.
    assert found == pytest.approx(counted - 32 * min(prompt, window) / 2)


def test_a_window_limits_what_is_read():
    config = LLAMA_8B | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    windowed = shape.from_config(config | {"sliding_window": 1024}, "windowed")
    form = FORMATS["as it is"]
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
    assert parts.flops(parts.plain) == 2 * (10 + 40 / 4)


def test_a_tied_table_is_read_as_the_last_layer():
    tied = shape.from_config(LLAMA_8B | {"tie_word_embeddings": True}, "tied")
    for name in ("as it is", "gguf-q4_k_m"):
        found = work.of(tied, FORMATS[name])
        assert found.read.dense == found.stored_bytes
        assert found.plain.dense == LINEARS + HEAD


any_case = {
    "name": st.sampled_from(sorted(FORMATS)),
    "gpu": st.sampled_from(sorted(GPUS)),
    "count": st.sampled_from([1, 2, 8]),
    "users": st.integers(1, 300),
    "context": st.integers(2, 100_000),
}


@settings(max_examples=80, deadline=None)
@given(**any_case)
def test_ranges_are_in_order(name, gpu, count, users, context):
    found = estimate(case(name, GPUS[gpu], count), Load(context, max(1, context // 4), users))
    for span in filter(None, (found.first_token, found.step, found.answer, found.total)):
        assert 0 <= span.low <= span.typical <= span.high
    assert found.total.typical <= users * found.each.typical * (1 + 1e-9)


@settings(max_examples=80, deadline=None)
@given(**any_case, more=st.floats(1.0, 10.0))
def test_a_better_gpu_is_never_slower(name, gpu, count, users, context, more):
    load_, before = Load(context, max(1, context // 4), users), GPUS[gpu]
    faster = replace(before, bandwidth_gb_s=before.bandwidth_gb_s * more)
    if before.fp16_tflops:
        stronger = replace(before, fp16_tflops=before.fp16_tflops * more)
        assert_no_slower(case(name, stronger, count), case(name, before, count), load_)
    assert_no_slower(case(name, faster, count), case(name, before, count), load_)


@settings(max_examples=60, deadline=None)
@given(**any_case, more=st.integers(1, 500))
def test_more_users_and_longer_contexts_never_speed_a_step_up(
    name, gpu, count, users, context, more
):
    model = case(name, GPUS[gpu], count)
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


@pytest.mark.parametrize("gpu", ["L4", "L40S", "RTX 4090", "H100 SXM", "H200 SXM"])
def test_4_bits_win_at_small_batches_and_fp8_at_large_ones(gpu):
    for users in (1, 4, 8):
        assert typical("awq-gptq-w4a16", gpu, users) < typical("fp8-dynamic", gpu, users)
        assert typical("fp8-dynamic", gpu, users) < typical("as it is", gpu, users)
    for users in (256, 512):
        assert typical("fp8-dynamic", gpu, users) < typical("awq-gptq-w4a16", gpu, users)


@pytest.mark.parametrize("gpu", ["T4", "A10", "RTX 3090", "A100 SXM 80GB"])
def test_before_fp8_it_is_int8_that_wins_at_large_batches(gpu):
    assert typical("awq-gptq-w4a16", gpu, 1) < typical("int8-w8a8", gpu, 1)
    for other in ("awq-gptq-w4a16", "fp8-dynamic"):
        assert typical("int8-w8a8", gpu, 256) < typical(other, gpu, 256)
        assert prompt("int8-w8a8", gpu, 8192) < prompt(other, gpu, 8192)


@pytest.mark.parametrize("gpu", ["L4", "L40S", "RTX 4090", "H100 SXM", "B200"])
def test_8_bits_win_long_prompts_and_weight_only_gains_nothing_there(gpu):
    assert prompt("fp8-dynamic", gpu, 8192) < 0.8 * prompt("awq-gptq-w4a16", gpu, 8192)
    assert prompt("awq-gptq-w4a16", gpu, 8192) >= prompt("as it is", gpu, 8192)


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
    # Published: 28, 43, 68 and 75 tokens a second of an 18.3 GB file; the cap is in the middle.
    slow = case("gguf-q4_k_m", GPUS["H200 SXM"])
    free = case("gguf-q4_k_m", replace(GPUS["H200 SXM"], compute_capability="8.9"))
    end = efficiency.LLAMA_CPP[efficiency.TYPICAL]
    assert step_seconds(slow, 1, 64, end) > 1.5 * step_seconds(free, 1, 64, end)
    # Users of llama.cpp wait for each other beyond a few.
    four, eight = (step_seconds(slow, n, 64, end) for n in (4, 8))
    assert eight == pytest.approx(2 * four)


def test_checking_several_tokens_reads_weights_and_cache_once():
    weights = 2 * (LINEARS + HEAD + NORMS)
    several = speed.pass_seconds(case("as it is"), 1, 5, 1000, IDEAL)
    assert several == pytest.approx((weights + 1000 * A_TOKEN) / 1e12)
    # At many users the products count, and each token more costs as much as the first.
    many = [speed.pass_seconds(case("as it is"), 4096, n, 1, IDEAL) for n in (1, 2)]
    assert many[1] > 1.9 * many[0]
