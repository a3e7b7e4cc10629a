"""What formats keep: published figures that can be true, and reports of the very model."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
from configs import SMOLLM
from gate_reports import report

from quantkit.advise import document, formats, quality, shape, words
from quantkit.advise.candidates import NO_QUALITY
from quantkit.advise.question import Catalogue, Question
from quantkit.advise.recommendation import recommend
from quantkit.errors import AdviceError, ScoreError
from quantkit.hardware import gpus
from quantkit.model.source import ModelSource
from quantkit.recipe import load
from quantkit.resources import DEMO_MODEL

PUBLISHED = Path(__file__).parents[2] / "reports" / "smollm2-135m" / "report.json"


@pytest.fixture(scope="module")
def smollm():
    return shape.from_config(SMOLLM, "SmolLM2-135M")


def kept(name, model, measured=None):
    recipe = None if name == formats.UNQUANTISED else load(name)
    return quality.of(formats.of(recipe), model, measured or {})


def test_every_published_figure_has_a_source_and_can_be_true():
    assert quality.priors()
    for prior in quality.priors():
        assert prior.unverified or prior.source.startswith("https://")
        assert 0.5 < prior.recovery < 1.02
        assert prior.billions is None or 0.1 < prior.billions < 1000
        assert prior.measured


def whole(percent, questions):
    """Whether a percentage, printed to one digit, can be of a whole number of questions."""
    right = percent * questions / 100
    return abs(right - round(right)) <= 0.05 * questions / 100


def test_shares_of_questions_are_whole_numbers_of_them():
    assert not whole(68.3, 500)  # 341.5 questions, as a prior had it
    for prior in quality.priors():
        stated = [(s.questions, s.before, s.after) for s in getattr(prior, "shares", ())]
        for n, after, before in re.findall(
            r"([\d,]+) questions[^,;]*, ([\d.]+) of ([\d.]+)", prior.measured
        ):
            stated.append((int(n.replace(",", "")), float(before), float(after)))
        for questions, before, after in stated:
            assert whole(before, questions), f"{before}% of {questions}: {prior.measured}"
            assert whole(after, questions), f"{after}% of {questions}: {prior.measured}"


def test_recoveries_follow_from_the_scores_that_they_quote():
    for prior in quality.priors():
        pairs = re.findall(r"([\d.]+\d) of ([\d.]+\d)", prior.measured)
        if pairs:
            kept_of = [float(after) / float(before) for after, before in pairs]
            assert prior.recovery == pytest.approx(sum(kept_of) / len(kept_of), abs=6e-4)


def test_a_format_without_figures_is_said_to_have_none():
    unknown = formats.of(load("gguf-q5_0"))
    assert kept("gguf-q5_0", shape.of("8B")) is None
    among = (unknown, formats.of(load("gguf-q4_k_m")))
    found = recommend(Question(Catalogue(shape.of("8B"), among)), gpus.find("L40S"))
    assert found.chosen.format.name == "gguf-q4_k_m"
    left_out = next(c for c in found.candidates if not c.serves)
    assert words.lack(left_out) == (NO_QUALITY, "")
    assert document.to_json([found])["answers"][0]["candidates"][-1]["quality"] is None
    alone = recommend(Question(Catalogue(shape.of("8B"), (unknown,))), gpus.find("L40S"))
    assert alone.chosen is None
    assert "no quality data" in alone.reason


def test_something_is_known_of_every_format_that_is_considered():
    for form in formats.considered():
        found = quality.of(form, shape.of("8B"), {})
        assert found is not None
        assert found.recovery <= 1
        assert found.is_prior is (form.recipe is not None and form.name != "gguf-bf16")


def test_fewer_bits_keep_less():
    order = ("gguf-q8_0", "gguf-q6_k", "gguf-q5_k_m", "gguf-q4_k_m", "gguf-q3_k_m", "gguf-q2_k")
    found = [kept(name, shape.of("8B")).recovery for name in order]
    assert found == sorted(found, reverse=True)


def test_the_nearest_size_speaks_and_says_when_it_is_far():
    small, middle, large = (kept("gptq-w4a16", shape.of(n)) for n in ("1B", "8B", "70B"))
    assert small.recovery < middle.recovery < large.recovery
    assert "tend to lose more" in kept("gptq-w4a16", shape.of("500M")).basis
    assert "tend to lose less" in kept("gguf-q4_k_m", shape.of("70B")).basis
    assert "tend to" not in middle.basis


def test_an_fp8_cache_multiplies():
    model = shape.of("8B")
    plain, cached = kept("gptq-w8a16", model), kept("gptq-w8a16+kv-fp8", model)
    only = next(p for p in quality.priors() if p.formats == ("kv-fp8",))
    assert cached.recovery == pytest.approx(plain.recovery * only.recovery)
    assert cached.is_prior


def test_a_report_of_this_model_replaces_published_figures(smollm):
    measured = quality.from_report(PUBLISHED, smollm)
    document = json.loads(PUBLISHED.read_text())
    before = document["baseline"]["scores"]["wikitext/perplexity"]["value"]
    for entry in document["candidates"]:
        # MMLU is guessed by this model, so that only perplexity tells something.
        after = entry["scores"]["wikitext/perplexity"]["value"]
        found = kept(entry["recipe"], smollm, measured)
        assert found.recovery == pytest.approx(before / after)
        assert not found.is_prior
    assert kept("gptq-w8a16", smollm, measured).is_prior  # nobody scored that one


def test_what_is_measured_of_weights_stands_below_a_cache(smollm):
    measured = quality.from_report(PUBLISHED, smollm)
    found = kept("fp8-dynamic+kv-fp8", smollm, measured)
    assert found.recovery < measured["fp8-dynamic"].recovery
    assert found.is_prior


def test_accuracies_count_where_there_are_any(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report(("one", "gptq-w4a16", 0.63, 2.05)).to_json()))
    model = shape.of("8B")
    monkeypatch.setattr(type(model), "size_bytes", 1000)
    found = quality.from_report(path, shape.from_config(model.config, "src"))
    assert found["gptq-w4a16"].recovery == pytest.approx(0.63 / 0.7)
    assert "quiz" in found["gptq-w4a16"].basis
    assert found == quality.from_report(tmp_path, shape.from_config(model.config, "src"))


def test_too_few_questions_prove_no_quality(tmp_path, monkeypatch):
    """Then perplexity speaks, and where there is none, how little is known is said."""
    written = json.loads(json.dumps(report(("one", "gptq-w4a16", 0.7, 2.05)).to_json()))
    (entry,) = written["candidates"]
    for compared in entry["comparisons"]:
        if compared["score"] == "quiz/acc":
            compared |= {"low": -0.3, "high": 0.3}
    path, model = tmp_path / "report.json", shape.of("8B")
    monkeypatch.setattr(type(model), "size_bytes", 1000)

    def told():
        path.write_text(json.dumps(written))
        return quality.from_report(path, shape.from_config(model.config, "src"))["gptq-w4a16"]

    found = told()
    assert found.basis.startswith("wiki/perplexity")
    assert found.basis.endswith("accuracy on quiz has too few questions, +-30 points")
    assert found.recovery < 1
    for scores in (entry["scores"], written["baseline"]["scores"]):
        for key in [key for key in scores if "perplexity" in key]:
            del scores[key]
    entry["comparisons"] = [c for c in entry["comparisons"] if "perplexity" not in c["score"]]
    written["headline"] = None
    found = told()
    assert found.recovery == 1
    assert found.basis == "accuracy on quiz has too few questions, +-30 points"


def test_a_report_of_another_model_is_refused(smollm, tmp_path):
    other = shape.from_config(SMOLLM | {"num_hidden_layers": 31}, "other")
    with pytest.raises(AdviceError, match="of another model: its source SmolLM2-135M"):
        quality.from_report(PUBLISHED, other)
    twin = shape.from_config(SMOLLM, "somebody/SmolLM2-135M-Instruct")
    with pytest.raises(AdviceError, match="is a report of SmolLM2-135M, and"):
        quality.from_report(PUBLISHED, twin)
    with pytest.raises(AdviceError, match="only a size"):
        quality.from_report(PUBLISHED, shape.of("135M"))
    with pytest.raises(ScoreError, match="cannot read"):
        quality.from_report(tmp_path / "none.json", smollm)


def test_names_in_the_hub_are_told_by_their_last_part():
    for name in ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m"):
        assert quality.from_report(PUBLISHED, shape.from_config(SMOLLM, name))


def test_weights_tell_models_of_one_shape_apart(tmp_path):
    for name in ("scored", "other"):
        shutil.copytree(DEMO_MODEL, tmp_path / name)
    written = json.loads(json.dumps(report(("one", "gptq-w4a16", 0.63, 2.05)).to_json()))
    demo = shape.of(str(tmp_path / "scored"))
    digest = ModelSource.open(str(tmp_path / "scored")).digest
    written["baseline"] |= {"size_bytes": demo.size_bytes, "digest": digest}
    path = tmp_path / "report.json"
    path.write_text(json.dumps(written))
    # The name is another, the weights are those that were scored.
    assert "gptq-w4a16" in quality.from_report(path, demo)
    weights = next((tmp_path / "other").glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(AdviceError, match="is a report of another model: it is of src with digest"):
        quality.from_report(path, shape.of(str(tmp_path / "other")))


@pytest.mark.parametrize("chain", quality.MORE_BITS)
@pytest.mark.parametrize("billions", [0.1, 0.6, 1.5, 8, 14, 32, 70, 405])
def test_more_bits_of_one_kind_are_never_worse(chain, billions):
    known = [quality._prior(name, int(billions * 1e9)) for name in chain]
    kept = [found.recovery for found in known if found is not None]
    assert len(kept) >= 2
    assert kept == sorted(kept)


@pytest.mark.parametrize("billions", [0.006, 0.1, 0.6, 1.5, 3, 8, 14, 32, 70, 405])
def test_eight_bits_are_never_worse_than_four_of_another_kind(billions):
    def known(names):
        found = (quality._prior(name, int(billions * 1e9)) for name in names)
        return [one.recovery for one in found if one is not None]

    assert min(known(quality.EIGHT_BITS)) >= max(known(quality.FOUR_BITS))


def test_every_format_of_four_or_eight_bits_is_known_as_one():
    named = {*quality.EIGHT_BITS, *quality.FOUR_BITS}
    for form in formats.considered():
        if form.least_bits in (4, 8):
            assert form.quality_class in named, form.name


def test_figures_of_larger_models_are_scaled_by_one_format_that_has_both():
    small, large = (kept("gptq-w4a16", shape.of(n)) for n in ("1.5B", "8B"))
    for name in ("gguf-q4_k_m", "gptq-w8a16", "nvfp4"):
        ours, published = (kept(name, shape.of(n)) for n in ("1.5B", "8B"))
        times = math.log(small.recovery) / math.log(large.recovery)
        assert math.log(ours.recovery) == pytest.approx(times * math.log(published.recovery))
        assert "w4a16" in ours.basis
        assert ours.other_size
        assert not published.other_size
    assert not small.other_size


def test_a_prior_of_another_size_is_marked_as_such():
    found = recommend(Question(Catalogue(shape.of("1.5B"))), gpus.find("L40S"))
    told = {c.format.name: words.quality_kept(c) for c in found.candidates}
    assert told["gguf-q4_k_m"].startswith("~~0.9")
    assert told["awq-gptq-w4a16"].startswith("~0.9")
    assert told["unquantised"] == "1.000"
    assert any("~~" in note for note in found.notes)
