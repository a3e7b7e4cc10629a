"""One answer: it follows from the figures, respects constraints, and remedies really help."""

import json
import re
import shlex
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit import resources
from quantkit.advise import (
    document,
    formats,
    measurements,
    not_considered,
    offload,
    page,
    parallel,
    quality,
    shape,
    words,
)
from quantkit.advise.candidates import evaluate, merit
from quantkit.advise.quality import Quality
from quantkit.advise.question import OBJECTIVES, Catalogue, Limits, Measurements, Question
from quantkit.advise.ranking import HANDICAP, TIE
from quantkit.advise.recommendation import recommend
from quantkit.advise.speed import Span, Speed
from quantkit.advise.split import Split
from quantkit.errors import AdviceError
from quantkit.hardware import gpus
from quantkit.page.scale import UNKNOWN
from quantkit.recipe import load

CATALOGUES = {size: Catalogue(shape.of(size)) for size in ("1B", "8B", "70B")}
NAMES = [gpu.name for gpu in gpus.load()]


def ask(model="8B", **more):
    return Question(CATALOGUES[model], **more)


def answer(gpu, model="8B", **more):
    return recommend(ask(model, **more), gpus.find(gpu))


def named(found):
    return {candidate.format.name: candidate for candidate in found.candidates}


@pytest.mark.parametrize(
    ("gpu", "question", "expected"),
    [
        ("RTX 4090", {}, "awq-gptq-w4a16"),
        ("L40S", {}, "awq-gptq-w4a16"),
        ("H200", {}, "fp8-dynamic"),
        ("H100 SXM", {"objective": "throughput", "users": 64}, "fp8-dynamic+kv-fp8"),
        ("A100 SXM 80GB", {"objective": "throughput", "users": 64}, "int8-w8a8+kv-fp8"),
        ("H100 SXM", {"objective": "quality"}, "unquantised"),
        ("RTX 4090", {"min_quality": 0.995, "objective": "memory"}, "gguf-q5_k_m"),
        ("M2 Ultra", {"objective": "quality"}, "gguf-bf16"),
        ("CPU 2 x DDR5-5600", {"min_quality": 0.99}, "gguf-q4_k_m"),
    ],
)
def test_answers_that_practitioners_know(gpu, question, expected):
    assert answer(gpu, **question).chosen.format.name == expected


def test_experts_that_are_served_as_published_alone_are_not_offered_otherwise():
    found = recommend(Question(Catalogue(shape.of("gpt-oss-120b"))), gpus.find("H100 SXM"))
    assert found.chosen is None
    assert "MXFP4" in named(found)["gptq-w4a16"].problem
    first = found.remedies[0]
    assert (first.change, first.format) == ("vllm serve openai/gpt-oss-120b", "mxfp4")
    assert "60.8 GiB" in first.says
    small = recommend(Question(Catalogue(shape.of("gpt-oss-120b"))), gpus.find("L40S"))
    assert not any(one.format == "mxfp4" for one in small.remedies)


@pytest.mark.parametrize("gpu", ["CPU 2 x DDR5-5600", "M3 Max", "MI300X"])
def test_a_file_that_keeps_published_experts_is_offered_where_no_gpu_serves_them(gpu):
    found = named(recommend(Question(Catalogue(shape.of("gpt-oss-20b"))), gpus.find(gpu)))
    kept = found["gguf-mxfp4_moe"]
    assert kept.serves
    assert kept.quality.recovery == found["gguf-q8_0"].quality.recovery
    assert kept.quality.basis.startswith("experts as published, the rest as gguf-q8_0")
    assert not found["gptq-w4a16"].serves


def test_no_other_model_is_rounded_to_it_unasked(tmp_path):
    assert "gguf-mxfp4_moe" not in named(answer("M3 Max"))
    of_experts = Question(Catalogue(shape.of("30B-A3B")))
    assert "gguf-mxfp4_moe" not in named(recommend(of_experts, gpus.find("M3 Max")))
    # A folder in 16 bits may hold experts that were tuned since they were published.
    tuned = {**shape.of("gpt-oss-20b").config, "architectures": ["GptOssForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(tuned))
    own = Question(Catalogue(shape.of(str(tmp_path / "config.json"))))
    assert "gguf-mxfp4_moe" not in named(recommend(own, gpus.find("M3 Max")))


def test_formats_that_a_gpu_only_emulates_come_after_those_it_has():
    mixture = Catalogue(shape.of("8x7B"))
    for gpu, expected in (("A100 SXM 80GB", "gptq-w4a16"), ("B200", "nvfp4")):
        found = recommend(Question(mixture, users=32, context=2048), gpus.find(gpu))
        assert found.chosen.format.base == expected, gpu
    found = recommend(Question(mixture, users=32), gpus.find("A100 SXM 80GB"))
    assert found.chosen.support.how == "native"


@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from(sorted(CATALOGUES)),
    gpu=st.sampled_from(NAMES),
    count=st.sampled_from([1, 2, 8]),
    context=st.integers(2, 60_000),
    users=st.one_of(st.none(), st.integers(1, 200)),
    objective=st.sampled_from(OBJECTIVES),
    floor=st.sampled_from([0.8, 0.97, 0.99, 1.0]),
)
def test_the_choice_serves_and_is_near_the_best(
    model, gpu, count, context, users, objective, floor
):
    question = ask(
        model, context=context, users=users, count=count, objective=objective, min_quality=floor
    )
    found = recommend(question, gpus.find(gpu), in_depth=False)
    serving = [c for c in evaluate(question, gpus.find(gpu)) if c.serves]
    if found.chosen is None:
        assert not serving
        assert found.reason
        return
    assert found.chosen in serving
    assert found.chosen.quality.recovery >= floor
    assert found.chosen.fit.users >= (users or 1)
    best = min(merit(c, objective) for c in serving)
    if objective == "quality":
        assert found.chosen.quality.recovery == max(c.quality.recovery for c in serving)
    else:
        assert merit(found.chosen, objective) <= best * (1 + TIE) * HANDICAP
    if found.runner_up is not None:
        assert found.runner_up.format.base != found.chosen.format.base


@settings(max_examples=25, deadline=None)
@given(
    model=st.sampled_from(sorted(CATALOGUES)),
    gpu=st.sampled_from(NAMES),
    context=st.integers(512, 100_000),
    users=st.integers(1, 500),
    more=st.integers(1, 40),
)
def test_more_memory_never_takes_a_format_away(model, gpu, context, users, more):
    device, question = gpus.find(gpu), ask(model, context=context, users=users)
    larger = replace(device, memory_bytes=device.usable_bytes + device.driver_bytes + (more << 30))
    for before, after in zip(evaluate(question, device), evaluate(question, larger), strict=True):
        assert after.serves or not before.serves


CHANGED = {
    "--min-quality": ("min_quality", float), "--context": ("context", int),
    "--users": ("users", int), "--count": ("count", int),
}  # fmt: skip


def _option(remedy):
    return "model" if "as the model" in remedy.change else remedy.change.split()[0]


@pytest.mark.parametrize(
    ("gpu", "model", "question"),
    [
        ("RTX 4090", "70B", {}),
        ("RTX 4090", "8B", {"users": 500, "context": 16384}),
        ("RTX 4060", "8B", {"context": 32768}),
        ("T4", "8B", {"min_quality": 0.999, "users": 8}),
        ("RTX 3090", "70B", {"count": 2, "users": 4, "context": 32768}),
        ("M1 Max", "70B", {"users": 40}),
        ("V100 PCIe 16GB", "70B", {"count": 2}),
    ],
)
def test_every_remedy_helps_and_the_cheapest_comes_first(gpu, model, question):
    found = answer(gpu, model, **question)
    assert found.chosen is None
    assert found.remedies
    order = ["--min-quality", "--context", "--users", "--host-memory", "--count", "--gpu", "model"]
    options = [_option(remedy) for remedy in found.remedies]
    assert options == sorted(options, key=order.index)
    for remedy in found.remedies:
        option, value = shlex.split(remedy.change)[:2]
        device, changed = gpus.find(gpu), found.question
        if option == "--gpu":
            device = gpus.find(value)
        elif option == "--host-memory":
            size = gpus.printed_bytes(value)
            changed = changed.but(host=replace(offload.usual_host(device), memory_bytes=size))
        elif _option(remedy) == "model":
            smaller = Catalogue(shape.of(option))
            assert smaller.shape.n_parameters < changed.catalogue.shape.n_parameters
            changed = changed.but(catalogue=smaller)
        else:
            name, kind = CHANGED[option]
            changed = changed.but(**{name: kind(value)})
        serving = {c.format.name for c in evaluate(changed, device) if c.serves}
        assert remedy.format in serving


def test_fp8_serves_dense_models_on_cpus_but_no_experts():
    cpu = gpus.find("CPU 12 x DDR5-4800")
    for model, lacks in (("8B", ""), ("30B-A3B", "support")):
        question = Question(Catalogue(shape.of(model)), context=2048)
        found = named(recommend(question, cpu, in_depth=False))["fp8-dynamic"]
        assert found.lacks == lacks
        assert ("experts" in found.problem) == bool(lacks)


def test_the_longest_context_is_the_longest():
    found = answer("RTX 4090", users=40, context=16384)
    way = next(r for r in found.remedies if r.change.startswith("--context"))
    tokens = int(way.change.split()[1])
    longer = evaluate(found.question.but(context=tokens + 256), found.gpu)
    assert not any(c.serves for c in longer)


@pytest.mark.parametrize(
    ("gpu", "question"),
    [
        ("H100 SXM", {"objective": "throughput", "users": 64}),
        ("L4", {"count": 4, "users": 16}),  # splits tried once are compared for other objectives
        ("A10G", {"objective": "memory", "count": 2}),
    ],
)
def test_other_questions_have_other_answers(gpu, question):
    found = answer(gpu, **question)
    assert found.changes
    for change in found.changes:
        option, _, rest = change.removeprefix("with ").partition(": ")
        name, value = option.split()
        key, kind = CHANGED.get(name, ("objective", str))
        again = recommend(found.question.but(**{key: kind(value)}), found.gpu, in_depth=False)
        if again.chosen is None:
            assert rest == "no format fits"
            continue
        figure = words.figure(again.chosen, again.question.objective)
        assert rest == f"{again.chosen.format.name}, {figure}"
        assert again.chosen.format.name != found.chosen.format.name


@pytest.mark.parametrize(
    ("gpu", "min_quality", "signs"),
    [("H100 SXM", 0.97, [1]), ("H100 SXM", 0.99, [-1]), ("L40S", 0.99, [1, -1])],
)
def test_the_least_other_quality_that_changes_the_answer_is_named(gpu, min_quality, signs):
    """Also where another option has the same answer, as a shorter context on an H100."""
    found = answer(gpu, min_quality=min_quality)
    stated = [float(c.split()[2].rstrip(":")) for c in found.changes if "--min-quality" in c]
    assert [1 if value > min_quality else -1 for value in stated] == signs
    for value, sign in zip(stated, signs, strict=True):
        there, before = (
            recommend(found.question.but(min_quality=q), found.gpu, in_depth=False).best
            for q in (value, value - 0.001 * sign)
        )
        assert there != found.best == before


def test_without_users_throughput_counts_on_all_that_fit():
    found = answer("L40S", objective="throughput")
    assert found.chosen.load.users == min(256, found.chosen.fit.users) > 8
    assert answer("L40S").chosen.load.users == 1


def test_a_million_tokens_cost_what_the_hours_cost():
    found = answer("L40S", objective="throughput", users=16, count=2, gpu_hour=1.5)
    rate = found.chosen.speed.total
    assert found.chosen.cost.typical == pytest.approx(2 * 1.5 / 3600 / rate.typical * 1e6)
    assert found.chosen.cost.low == pytest.approx(2 * 1.5 / 3600 / rate.high * 1e6)
    assert answer("L40S").chosen.cost is None


def test_what_was_measured_replaces_estimates():
    fast = Speed.measured(first_token=0.01, step=1e-6, total=9.0, answer=1000)
    assert fast.answer == Span(0.011, 0.011, 0.011)
    bad = Quality(0.5, False, "accuracy on a quiz", "report.json")
    good = replace(bad, recovery=0.99)
    known = {"awq-gptq-w4a16": bad, "gptq-w8a16": good}
    known_load = ask().load(1)
    seen = Measurements("RTX 4090", 1, known_load, {"gptq-w8a16": fast})
    found = answer("RTX 4090", measured=seen, qualities=known)
    assert found.chosen.format.name == "gptq-w8a16"
    assert found.chosen.speed is fast
    assert named(found)["awq-gptq-w4a16"].lacks == "quality"
    assert found.chosen.quality is good


@dataclass(frozen=True)
class Bench:
    """As `quantkit bench` tells it."""

    model: str = "fp8-dynamic"
    gpu: str | None = "NVIDIA L40S"
    n_gpus: int = 1
    sharing: tuple[int, int, bool] | None = None
    concurrency: int | None = 8
    prompt_tokens: int | None = 6000
    output_tokens: int | None = 2048
    output_tokens_per_s: float = 321.0
    ttft_s: float | None = 0.5
    tpot_s: float | None = 0.02
    weight_bytes: int | None = None
    n_failed: int = 0


def test_a_bench_counts_under_the_load_in_question_only():
    question, gpu = ask(users=8), gpus.find("L40S")
    known = measurements.speeds([Bench()], question, gpu)
    question = question.but(measured=known)
    found = recommend(question, gpu)
    told = named(found)["fp8-dynamic"].speed
    assert (told.is_measured, told.total.typical) == (True, 321.0)
    assert told.answer.typical == pytest.approx(0.5 + 2048 * 0.02)
    others = (
        Bench(model="my own"), Bench(gpu="NVIDIA L4"), Bench(gpu=None), Bench(n_gpus=2),
        Bench(concurrency=1), Bench(prompt_tokens=128), Bench(output_tokens=None),
        Bench(ttft_s=None), Bench(n_failed=1),
    )  # fmt: skip
    assert measurements.speeds(others, question, gpu).speeds == {}
    # Nor is it taken for other users, contexts and GPUs, by which answers are compared.
    for changed, where in (
        (question.but(users=16), gpu),
        (question.but(context=4096), gpu),
        (question, gpus.find("H100 SXM")),
    ):
        assert not any(c.speed and c.speed.is_measured for c in evaluate(changed, where))


@pytest.mark.parametrize(
    ("sharing", "split"),
    [
        (None, Split(2)),
        ((2, 1, False), Split(2)),
        ((1, 2, False), Split(1, 2)),
    ],
)
def test_a_bench_counts_for_the_way_in_which_gpus_shared_the_model(sharing, split):
    question, gpu = ask(users=8, count=2), gpus.find("L40S")
    # Slower than any estimate, and the answer all the same: an estimate is not a measurement.
    seen = Bench(n_gpus=2, sharing=sharing, tpot_s=9.0, output_tokens_per_s=1.0)
    known = measurements.speeds([seen], question, gpu)
    found = next(
        c for c in evaluate(question.but(measured=known), gpu) if c.format.name == seen.model
    )
    assert found.split == split
    assert found.speed.is_measured
    assert found.others
    assert not any(other.speed.is_measured for other in found.others)


def test_several_copies_of_a_model_are_no_way_to_share_it():
    question, gpu = ask(users=8, count=2), gpus.find("L40S")
    copies = Bench(n_gpus=2, sharing=(1, 1, False))
    assert measurements.speeds([copies], question, gpu).speeds == {}


def test_of_several_settings_the_fastest_counts():
    seen = [Bench(output_tokens_per_s=n) for n in (100.0, 300.0, 200.0)]
    known = measurements.speeds(seen, ask(users=8), gpus.find("L40S"))
    assert known.speeds["fp8-dynamic"].total.typical == 300.0


def test_a_bench_of_another_model_is_refused():
    question, gpu = ask(users=8), gpus.find("L40S")
    own = parallel.bytes_per_gpu(question.catalogue.shape, load("fp8-dynamic"), 1)
    assert measurements.speeds([Bench(weight_bytes=own)], question, gpu).speeds
    with pytest.raises(AdviceError, match="another model"):
        measurements.speeds([Bench(weight_bytes=own // 4)], question, gpu)


def test_a_bench_needs_a_number_of_users_for_throughput():
    with pytest.raises(AdviceError, match="--users"):
        measurements.speeds([Bench()], ask(objective="throughput"), gpus.find("L40S"))


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan"), float("inf")])
def test_prices_that_are_none(price):
    with pytest.raises(AdviceError, match="price"):
        ask(gpu_hour=price)


def test_what_a_report_covers_comes_before_what_is_only_published():
    known = {"fp8-dynamic": Quality(0.985, False, "accuracy on a quiz", "report.json")}
    found = answer("H100 SXM", qualities=known)
    serving = [c for c in found.candidates if c.serves]
    priors = [c.quality.is_prior for c in serving]
    assert priors == sorted(priors)
    assert found.chosen.format.name == "fp8-dynamic"
    assert "does not cover come last" in " ".join(found.notes)
    # Where nothing proven serves, what is published has to do.
    assert answer("RTX 4060", qualities=known).chosen.quality.is_prior


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"objective": "speed"}, "'speed'.*latency"),
        ({"users": 0}, "users.* 1"),
        ({"count": 0}, "GPUs.* 1"),
        ({"context": 200_000}, "131,072.*200,000"),
        ({"context": 100, "answer": 101}, "does not fit into a context"),
        ({"min_quality": 1.01}, "at most 1"),
        ({"min_quality": 0.0}, "above 0"),
        ({"gpu_hour": 0.0}, "above 0"),
    ],
)
def test_questions_that_contradict_themselves_are_refused(question, words):
    with pytest.raises(AdviceError, match=words):
        ask(**question)


def test_macs_do_not_share_a_model_and_keep_a_quarter_of_their_memory():
    assert answer("M2 Ultra", count=2).chosen is None
    fit = answer("M2 Ultra").chosen.fit
    assert fit.usable_bytes == int(gpus.find("M2 Ultra").usable_bytes * 0.75)
    assert "75% of the memory" in " ".join(answer("M2 Ultra").notes)


def test_every_listed_gpu_gets_an_answer_or_a_reason():
    for size in ("1B", "70B"):
        for gpu in gpus.load():
            found = recommend(ask(size), gpu, in_depth=False)
            assert found.reason
            assert len(found.candidates) == len(CATALOGUES[size].formats)
            assert (found.chosen is None) == all(c.problem for c in found.candidates)


def test_a_model_that_no_gguf_file_can_hold_still_gets_an_answer(monkeypatch):
    config = dict(CATALOGUES["1B"].shape.config) | {
        "model_type": "granite", "architectures": ["GraniteForCausalLM"],
    }  # fmt: skip
    catalogue = Catalogue(shape.from_config(config, "granite"))
    files = [f for f in catalogue.formats if f.engine == "llama.cpp"]
    monkeypatch.setattr(catalogue, "_works", {f.name: "no such family" for f in files})
    found = recommend(Question(catalogue), gpus.find("L4"))
    assert found.chosen.format.engine == "vllm"
    assert {c.problem for c in found.candidates if c.format in files} == {"no such family"}


def test_pages_tell_the_answer_and_can_be_filtered():
    one = page.render([answer("L40S", users=40, count=2, context=16384, gpu_hour=1.0)])
    for text in ("8B on 2 x L40S", "fp8-dynamic+kv-fp8", "per million tokens", "roofline"):
        assert text in one
    typed = {"Make it": "quantkit quantize MODEL -r 'a&b'"}
    assert "quantkit quantize MODEL -r &#39;a&amp;b&#39;" in page.render([answer("L40S")], typed)
    none = page.render([answer("RTX 4090", "70B")])
    assert "What would help" in none
    assert "2 x RTX 4090" in none
    several = ("L4", "H100 SXM", "RTX 2060")
    many = page.render([answer(name) for name in several])
    assert many.count('type="search"') == 2
    for name in several:
        assert name in many
    assert "No format fits this load on RTX 2060" in many


def overview(found):
    """The drawing for a phone, and its values by GPU and format."""
    section = page.render(found).split('<h2 id="overview">')[1].split("</section>")[0]
    drawn = section.split('<div class="narrow">')[1].split("</svg>")[0]
    cells = re.findall(r"<title>([^<]+), ([^<,]+): ([^<]+)</title>", drawn)
    return section, drawn, {frozenset(pair): value for *pair, value in cells}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_overview_shows_the_figure_of_the_objective(objective):
    found = [answer(name, objective=objective) for name in ("L4", "H100 SXM")]
    section, _, cells = overview(found)
    assert words.meaning(found[0].question) in section.lower().replace("gib", "GiB")
    for one in found:
        base = one.chosen.format.base
        alike = [c for c in one.candidates if c.format.base == base and c.serves]
        best = min(alike, key=lambda c: merit(c, objective))
        if objective == "quality":
            best = max(alike, key=lambda c: c.quality.recovery)
        shown = float(cells[frozenset((one.gpu.name, base))].replace(",", ""))
        assert shown == pytest.approx(words.value(best, objective), rel=1e-3)


def test_the_overview_has_no_empty_rows_and_names_everything_on_a_phone():
    served = [one for one in map(answer, NAMES) if one.chosen is not None]
    _, drawn, cells = overview(served)
    known = {name for pair, value in cells.items() if value != UNKNOWN for name in pair}
    assert known == {name for pair in cells for name in pair}
    assert known >= {one.gpu.name for one in served}
    for name in known:
        assert f">{name}</text>" in drawn


def test_a_page_of_several_models_names_them_and_whose_each_note_is():
    found = [answer("L4", "1B"), answer("L4", "8B", context=4096)]
    text = page.render(found)
    assert "2 models on L4" in text
    assert "kinds of GPU" not in text
    notes = words.notes_by_model(found)
    assert [note for note in notes if note.startswith("1B: Each user has a context of 8,192")]
    assert [note for note in notes if note.startswith("8B: Each user has a context of 4,096")]
    assert [note for note in notes if note.startswith("8B is only a size")]
    assert [note for note in notes if note.startswith("Memory is exact")]
    assert words.notes_by_model(found[:1]) == list(found[0].notes)


def test_names_cannot_become_markup():
    hostile = "<script>alert(1)</script>"
    config = CATALOGUES["1B"].shape.config
    found = recommend(Question(Catalogue(shape.from_config(config, hostile))), gpus.find("L4"))
    assert hostile not in page.render([found])
    assert "&lt;script&gt;alert" in page.render([found])


def test_the_document_holds_every_figure():
    found = answer("L40S", users=4)
    data = document.to_json([found])
    assert data["schema"] == 1
    assert data["model"]["assumed"].startswith("taken to be like Llama-3.1-8B")
    told = data["answers"][0]
    assert told["format"] == found.chosen.format.name == told["candidates"][0]["format"]
    first = told["candidates"][0]
    assert first["memory"]["weight_bytes"] == found.chosen.fit.weight_bytes
    span = first["speed"]["tokens_per_second_each"]
    assert span["low"] < span["typical"] < span["high"]
    assert data["question"]["prompt"] + data["question"]["answer"] == 8192


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0634, "0.06"), (0.996, "1.0"), (1.25, "1.2"), (9.97, "10"), (10.4, "10"), (99.6, "100"),
        (100, "100"), (12345, "12,000"), (995_000, "1,000,000"),
    ],
)  # fmt: skip
def test_numbers_have_two_digits_that_matter(value, shown):
    assert words.number(value) == shown


@pytest.mark.parametrize(("count", "is_said"), [(8, False), (16, True)])
def test_more_gpus_than_a_machine_has_are_taken_for_one(count, is_said):
    notes = recommend(ask(count=count), gpus.find("H100 SXM")).notes
    assert any("one machine" in note for note in notes) == is_said


@pytest.mark.parametrize("model", ["8B", "Qwen3-30B-A3B"])
def test_recipes_that_are_never_considered_are_named_with_a_reason(model):
    catalogue = CATALOGUES.get(model) or Catalogue(shape.of(model))
    found = recommend(Question(catalogue), gpus.find("H100 SXM"))
    named = not_considered.recipes(catalogue)
    told = [name for names in named.values() for name in names]
    considered = {c.format.base for c in found.candidates} - {"unquantised"}
    assert sorted([*told, *considered]) == sorted(resources.names("recipes"))
    assert {"nvfp4-a16", "best-w4a16"} <= {*named[not_considered.NO_GAIN]}
    assert "w4afp8" in named[not_considered.NO_FIGURE]
    known = {one for prior in quality.priors() for one in prior.formats}
    for name in named[not_considered.NO_FIGURE]:
        assert formats.of(load(name)).quality_class not in known
    shown = page.render([found]).split('<h2 id="formats-left-out">')[1].split("</section>")[0]
    for name in told:
        assert name in shown
    assert document.to_json([found])["answers"][0]["not_considered"] == named


def test_a_recipe_without_gain_is_no_smaller_than_one_that_is_considered():
    catalogue = CATALOGUES["1B"]
    sizes = {f.base: catalogue.work(f).stored_bytes for f in catalogue.formats}
    for name in not_considered.recipes(catalogue)[not_considered.NO_GAIN]:
        one = formats.of(load(name))
        twins = [
            f.base
            for f in catalogue.formats
            if not_considered._kind(f) == not_considered._kind(one)
        ]
        assert catalogue.work(one).stored_bytes >= 0.98 * min(sizes[twin] for twin in twins), name


@pytest.mark.parametrize(
    ("gpu", "model", "question"),
    [
        ("L40S", "70B", {"users": 256, "count": 2}),
        ("H100 SXM", "70B", {"users": 256, "count": 2, "objective": "throughput"}),
        ("MI300X", "70B", {"users": 1000, "count": 2}),
    ],
)
def test_fewer_users_are_as_many_as_the_reason_and_the_list_have_room_for(gpu, model, question):
    found = answer(gpu, model, **question)
    (way,) = [remedy for remedy in found.remedies if remedy.change.startswith("--users")]
    users = int(way.change.split()[1])
    assert named(found)[way.format].room == users
    assert f"room for {users} of" in found.reason
    assert recommend(found.question.but(users=users), found.gpu, in_depth=False).chosen


def test_fewer_users_are_so_few_that_answers_are_in_time():
    limits = Limits(tpot=0.02)
    found = answer("H100 SXM", "70B", users=64, count=2, limits=limits)
    (way,) = [remedy for remedy in found.remedies if remedy.change.startswith("--users")]
    users = int(way.change.split()[1])
    assert users < 64
    more, few = (
        recommend(found.question.but(users=n), found.gpu, in_depth=False).chosen
        for n in (users + 1, users)
    )
    assert more is None
    assert few is not None


def test_formats_that_lose_by_the_room_for_caches_say_so():
    found = answer("H100 SXM", "70B", objective="throughput")
    most, second = found.chosen.load.users, found.runner_up.load.users
    assert second < most
    assert f"cache room for {second} users, not {most}" in found.runner_up_reason
    better = next(c for c in found.candidates if f"; {c.format.name} keeps more" in found.reason)
    assert better.quality.recovery > found.chosen.quality.recovery
    assert f"cache room for only {better.load.users} users" in found.reason
    given = answer("H100 SXM", "70B", objective="throughput", users=4)
    assert "cache room" not in given.reason + given.runner_up_reason
