"""Random questions: room, flags, totals, costs and commands of an answer say the same."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.advise import candidates, document
from quantkit.advise.offload import Host
from quantkit.advise.question import OBJECTIVES, Limits
from quantkit.advise.speed import least_first_token
from quantkit.errors import QuantkitError
from quantkit.hardware import gpus
from quantkit.serving.questions import Drafting, Query, answer

GPUS = [gpu.name for gpu in gpus.load()]
SMALL_DRAFTS = {
    "8B": "1B", "70B": "8B", "32B": None, "14B": None, "3B": "1B", "1B": None,
    "30B-A3B": None, "8x7B": None,
}  # fmt: skip
MIXTURES = ("30B-A3B", "8x7B")
GIB = 1 << 30


@st.composite
def questions(draw):
    model = draw(st.sampled_from(list(SMALL_DRAFTS)))
    context = draw(st.sampled_from([512, 2048, 8192, 32768, 131072]))
    drafting = None
    if draw(st.booleans()) and draw(st.booleans()):
        text = SMALL_DRAFTS[model] or "ngram"
        drafting = Drafting(text, draw(st.sampled_from(["0.4", "0.7", "0.9", None])))
    seconds = st.sampled_from([None, None, 0.02, 0.2, 2.0, 20.0])
    host = draw(st.sampled_from([None, None, Host(89.6, 64 * GIB), Host(300.0, 512 * GIB)]))
    return Query(
        models=(model,),
        gpus=(gpus.find(draw(st.sampled_from(GPUS))),),
        count=draw(st.sampled_from([1, 1, 1, 2, 3, 4, 8])),
        context=context,
        users=draw(st.sampled_from([None, 1, 4, 32, 200])),
        objective=draw(st.sampled_from(OBJECTIVES)),
        gpu_hour=draw(st.sampled_from([None, 1.0, 3.5])),
        profile=draw(st.sampled_from([None, "chat", "batch", "mixed"])),
        limits=Limits(draw(seconds), draw(seconds)),
        shared_prefix=draw(st.sampled_from([0, 0, 100, context // 2])),
        drafting=drafting,
        host=host,
        in_depth=draw(st.integers(0, 9)) == 0,
    )


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(questions())
def test_nothing_in_an_answer_contradicts_another_part_of_it(asked):
    found = answer(asked)
    (one,) = found.found
    told = json.loads(json.dumps(document.to_json(found.found, notes=found.notes)))
    for candidate in one.candidates:
        _check_candidate(candidate, asked)
        _check_bounds(candidate, one.question)
    serving = [c for c in one.candidates if c.serves]
    assert (one.chosen is None) == (not serving)
    assert told["answers"][0]["format"] == one.best
    if one.chosen is None:
        assert found.plan is None
        assert found.make == ()
        assert all(c.problem and c.lacks for c in one.candidates)
        assert not asked.in_depth or one.remedies or "no engine" in one.reason
        return
    assert one.chosen is serving[0]
    _check_plan(found.plan, one.chosen, asked)
    recipe = one.chosen.format.recipe
    if recipe is None:
        assert found.make == ()
        assert found.plan.target.path.startswith(("meta-llama/", "Qwen/", "MODEL"))
        return
    assert found.plan.target.path.startswith(f"out/{recipe.name}")
    if asked.models[0] in MIXTURES:  # which are no model's name, so that none can be quantised
        assert found.make == ()
        return
    assert found.make[found.make.index("-r") + 1] == recipe.name == one.best
    assert found.make[-1] == "out"


def _check_candidate(one, asked):
    users = one.load.users
    if one.fit is not None:
        fit = one.fit
        assert sum(fit.parts.values()) == fit.weight_bytes
        if fit.fits:
            held = fit.weight_bytes + fit.overhead_bytes + fit.shared_bytes
            assert held + fit.users * fit.user_bytes <= fit.usable_bytes
            assert fit.users >= (asked.users or 1)
            assert one.split.n_gpus <= one.count
    if one.speed is None:
        assert one.problem
        return
    speed = one.speed
    spans = [speed.step, speed.answer, speed.total, speed.each, speed.first_token]
    for span in filter(None, spans):
        assert 0 < span.low <= span.typical <= span.high
    assert speed.total.typical <= users * speed.each.typical * 1.001
    if speed.first_token is not None:
        whole = speed.first_token.typical + one.load.answer * speed.step.typical
        assert abs(whole / speed.answer.typical - 1) < 0.3 + 1 / one.load.answer
    if one.costs is not None:
        per = one.costs.answer.typical + (
            one.costs.prompt.typical * one.load.prompt / one.load.answer
        )
        assert abs(per / one.cost.typical - 1) < (0.05 if one.split.pipeline == 1 else 0.8)
    if one.serves:
        limits = asked.limits
        assert limits.tpot is None or speed.step.typical <= limits.tpot
        assert limits.ttft is None or speed.first_token.typical <= limits.ttft
        assert one.quality.recovery >= 0.97
    assert (speed.drafted > 0) == bool(
        asked.drafting and asked.drafting.acceptance and one.size.offload is None
    )


def _check_bounds(one, question):
    """What is left out early, for being too large or too slow, is never what would serve."""
    catalogue = question.catalogue
    if one.fit is not None and one.fit.fits:
        stored, least = catalogue.work(one.format).stored_bytes, one.format.least_bits
        assert catalogue.shape.n_parameters * least // 8 <= stored
        assert candidates.may_fit(question, one.gpu, one.format, stored)
    if one.speed is not None and one.speed.first_token is not None:
        bound = least_first_token(catalogue.plain(one.gpu), one.count, one.load)
        assert 0 < bound <= one.speed.first_token.typical


def _check_plan(plan, chosen, asked):
    fit, size = chosen.fit, chosen.size
    assert plan.size.fit is fit
    if plan.engine == "vllm":
        assert plan.value("--max-model-len") == str(asked.context)
        assert int(plan.value("--tensor-parallel-size") or 1) == chosen.split.tensor
        assert int(plan.value("--pipeline-parallel-size") or 1) == chosen.split.pipeline
        assert (plan.value("--kv-cache-dtype") == "fp8") == chosen.format.has_fp8_cache
        sequences = int(plan.value("--max-num-seqs"))
        if size.profile.name == "chat":
            assert min(asked.users or 1, 256) <= sequences <= max(1, fit.users)
        assert int(plan.value("--max-num-batched-tokens")) >= sequences
        config = plan.value("--speculative-config")
        assert (config is not None) == (asked.drafting is not None)
        if config and chosen.speed.drafted:
            assert json.loads(config)["num_speculative_tokens"] == chosen.speed.drafted
        return
    slots = int(plan.value("--parallel"))
    assert int(plan.value("--ctx-size")) == slots * asked.context
    assert slots <= fit.users
    layers = int(plan.value("--n-gpu-layers"))
    if size.offload is not None:
        assert int(plan.value("--n-cpu-moe") or 0) == size.offload.n_cpu_moe
        assert (layers == 999) == (size.offload.n_cpu_moe > 0)
        assert layers == 999 or layers == size.offload.on_gpu + 1 <= size.offload.n_layers
        assert fit.host_bytes <= asked.host.memory_bytes
    else:
        assert layers == (0 if chosen.gpu.vendor == "cpu" else 999)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 1 << 21), st.integers(1, 400), st.sampled_from(["1B", "8B"]))
def test_questions_are_answered_or_refused_in_a_sentence(context, users, model):
    asked = Query(
        (model,), (gpus.find("L40S"),), context=context, users=users, in_depth=False,
        shared_prefix=context // 3,
    )  # fmt: skip
    said = ""
    try:
        said = answer(asked).found[0].reason
    except QuantkitError as error:
        said = str(error)
    assert 20 < len(said) < 400
    assert "\n" not in said
