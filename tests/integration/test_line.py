"""The whole line on the demo model: real methods, real lm-eval, real files."""

import json
import math
import platform
import re
from dataclasses import replace

import pytest

from quantkit import pipeline, resources
from quantkit.cli.main import main
from quantkit.errors import ScoreError, UnknownName
from quantkit.export.checkpoint import Checkpoint
from quantkit.methods import awq
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import Run
from quantkit.recipe import Recipe, load
from quantkit.report import markdown, table
from quantkit.report.comparison import Report
from quantkit.scoring import following
from quantkit.scoring.evaluation import read_all
from quantkit.scoring.harness import score
from quantkit.scoring.options import ScoreOptions
from quantkit.scoring.scorecard import Scorecard
from quantkit.scoring.suites import DEMO

pytest_plugins = ["browser"]
ENTRY = {"name", "recipe", "format", "size_bytes", "bits_per_weight", "scores"}
SCORE = {"value", "stderr", "n", "higher_is_better"}

CLOSE = 1e-6 if platform.machine() in ("x86_64", "AMD64") else 5e-6
"""Of sums over other batches; elsewhere matrix products of other shapes differ by more."""


FEW = {"python_docs": [1, 6, 9, 12], "python_quiz": list(range(12))}
"""Short documents and few questions: they show nearly what all show, in a thirtieth of the time."""
OTHERS = ("awq-w4a16", "fp8-static", "gguf-q8_0", "rtn-w8a16")
"""Recipes of the demo that are close to another one, and left to the slow tier."""


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.slow)])
def samples(request):
    """What models are asked: all of both tasks is for the slow tier."""
    return FEW if request.param == "few" else None


@pytest.fixture(scope="module")
def demo(samples, tmp_path_factory):
    """`quantkit demo`, once for all tests here."""
    out, whole = tmp_path_factory.mktemp("demo"), pipeline.run

    def short(source, recipes, asked, out, device, choice, run):
        asked, choice = replace(asked, samples=samples), replace(choice, n_samples=8)
        recipes = [recipe for recipe in recipes if recipe.name not in OTHERS]
        return whole(source, recipes, asked, out, device, choice, run)

    with pytest.MonkeyPatch.context() as patch:
        if samples is not None:
            patch.setattr(pipeline, "run", short)
            patch.setattr(following, "N_OWN", 4)
            patch.setattr(awq, "EXPONENTS", 5)  # a coarser search in a quarter of the time
        assert main(["demo", "-o", str(out), "-q"]) == 0
    return out


@pytest.fixture(scope="module")
def report(demo):
    return json.loads((demo / "report.json").read_text())


def change(report, name: str) -> float:
    metric = "python_docs/perplexity"
    candidate = next(c for c in report["candidates"] if c["name"] == name)
    return candidate["scores"][metric]["value"] / report["baseline"]["scores"][metric]["value"] - 1


def test_report_keeps_its_contract(report, samples):
    assert report["schema"] == 2
    for entry in (report["baseline"], *report["candidates"]):
        assert set(entry) >= ENTRY
        for key, value in entry["scores"].items():
            assert key.startswith(("python_docs/", "python_quiz/", "python_answers/"))
            assert set(value) == SCORE
            assert math.isfinite(value["value"])
    assert report["baseline"]["recipe"] is None
    assert report["baseline"]["bits_per_weight"] == 16
    names = [c["recipe"] for c in report["candidates"]]
    shown = {name for name in resources.names("recipes") if load(name).demo}
    assert set(OTHERS) < shown
    assert set(names) == (shown if samples is None else shown - set(OTHERS))
    assert len(names) == len(set(names))


@pytest.mark.parametrize("width", [390, 1440])
def test_the_page_opens_in_a_browser(browser, demo, report, width):
    browser.show((demo / "report.html").read_text(), width)
    assert browser.complaints() == []
    assert browser.requests() == []
    assert not browser.is_too_wide()
    table = browser.find("table")
    rows = table.find_elements("css selector", "tbody tr")
    assert len(rows) == len(report["candidates"]) + 1
    # Its 400 questions or fewer rule out no drop of a point.
    assert report["recommended"]["name"] is None
    assert "is recommended." in browser.find("header").text
    assert len(browser.all("figure")) >= 6


def test_the_page_sorts_and_searches(browser, demo, report):
    browser.show((demo / "report.html").read_text())
    table = browser.find("table")
    names = lambda: [  # noqa: E731
        row.find_element("css selector", "th").text
        for row in table.find_elements("css selector", "tbody tr")
        if row.is_displayed()
    ]
    sizes = {c["name"]: c["size_bytes"] for c in report["candidates"]}
    table.find_elements("css selector", "thead button")[2].click()
    by_size = [name for name in names() if name in sizes]
    assert by_size == sorted(by_size, key=lambda name: sizes[name])
    browser.find("input").send_keys("gguf")
    assert names()
    assert all("gguf" in name for name in names())


def test_demo_shows_what_quantisation_costs(report, samples):
    better = 0.6 if samples is None else 0.8  # of few documents and samples less is certain
    eight = ("fp8-dynamic", "fp8-static", "int8-w8a8", "rtn-w8a16")
    four = ("gptq-w4a16", "awq-w4a16", "awq-gptq-w4a16")
    left_out = () if samples is None else OTHERS
    for name in (one for one in eight if one not in left_out):
        assert abs(change(report, name)) <= 0.01, name
    assert change(report, "rtn-w4a16") >= 0.03
    for name in (one for one in four if one not in left_out):
        assert change(report, name) <= better * change(report, "rtn-w4a16"), name
    values = [c["scores"]["python_docs/perplexity"]["value"] for c in report["candidates"]]
    assert values == sorted(values)


def test_the_source_knows_answers_and_checkpoints_keep_them(report, samples):
    source = report["baseline"]["scores"]["python_quiz/acc"]
    assert source["n"] == (400 if samples is None else 12)
    assert source["value"] >= 0.45
    assert 0 < source["stderr"] < (0.03 if samples is None else 0.16)
    for candidate in report["candidates"]:
        accuracy = candidate["scores"]["python_quiz/acc"]["value"]
        assert accuracy >= source["value"] - 3 * source["stderr"], candidate["name"]


def test_sizes_are_those_on_disk(demo, report):
    for candidate in report["candidates"]:
        checkpoint = Checkpoint.open(demo / candidate["name"])
        sizes = (
            [entry.n_bytes for entry in checkpoint.gguf.tensors.values()]
            if checkpoint.is_gguf
            else [tensor.size_bytes for tensor in checkpoint.tensors.values()]
        )
        assert sum(sizes) == candidate["size_bytes"]


def test_markdown_has_a_row_for_every_model(demo, report):
    text = (demo / "report.md").read_text()
    first, _, _ = text[text.index("| ") :].partition("\n\n")
    rows = [line for line in first.splitlines() if line.startswith("| ")]
    assert len(rows) == 3 + len(report["candidates"])
    assert "## Where it breaks first" in text
    assert "| demo (source) | 11.0 MiB | 100.0% | 16.00 |" in text
    accuracy = report["baseline"]["scores"]["python_quiz/acc"]
    assert f"| {accuracy['value']:.1%} |" in text
    assert f"{accuracy['n']} questions with a standard error of" in text


@pytest.mark.parametrize("width", [80, 200])
def test_table_fits_the_terminal(demo, run_cli, monkeypatch, width):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    shown = run_cli(["report", demo / "scores"]).stdout
    assert "…" not in shown
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in shown.splitlines()]
    row = next(line for line in lines if line[:1] == ["rtn-w4a16"])  # verdicts come after it
    assert row[-1].endswith("%")
    assert row[-2].startswith("+")


def test_table_has_no_column_for_an_accuracy_that_was_not_measured(demo):
    cards = [
        card.model_copy(
            update={"scores": {k: v for k, v in card.scores.items() if "quiz" not in k}}
        )
        for card in (e.card for e in read_all([demo / "scores"]))
    ]
    report = Report.compare(cards)
    assert not any(title.endswith("/acc") for title in table.titles(report))
    assert "questions" not in markdown.render(report)


def test_a_second_run_takes_up_what_is_finished(demo, samples):
    notes = []

    class Listener:
        def start(self, label, total, unit="bytes"):
            assert "verify" in label, f"{label} was done again"

        def advance(self, amount): ...

        def finish(self): ...

        def note(self, text):
            notes.append(text)

        def detail(self, text): ...

    recipes = [Recipe.load("fp8-dynamic"), Recipe.load("rtn-w4a16")]
    outcome = pipeline.run(
        ModelSource.open("demo"),
        recipes,
        ScoreOptions(DEMO, samples=samples),
        demo,
        run=Run(Listener()),
    )
    assert len(outcome.report.candidates) == 2
    assert sum("already finished" in note for note in notes) == 2
    assert sum("scored before" in note for note in notes) == 3


def test_scores_are_those_of_lm_eval_itself():
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from quantkit.resources import DEMO_MODEL
    from quantkit.scoring.suites import OWN_TASKS

    # Of the documents one is short and one longer than the model's context.
    asked = {"python_docs": [1, 18], "python_quiz": [0, 1, 2]}
    model = HFLM(pretrained=str(DEMO_MODEL), dtype="float32", device="cpu", batch_size=2)
    theirs = lm_eval.simple_evaluate(
        model=model,
        tasks=list(asked),
        samples=asked,
        task_manager=TaskManager(include_path=str(OWN_TASKS), include_defaults=False),
        bootstrap_iters=0,
    )
    ours = score(
        ModelSource.open("demo"),
        list(asked),
        samples=asked,
        batch_size=2,
        device="cpu",
    )
    metrics = {
        "python_docs": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
        "python_quiz": ("acc", "acc_norm"),
    }
    for task, names in metrics.items():
        for metric in names:
            expected = theirs["results"][task][f"{metric},none"]
            # Sums in float64 where lm-eval has float32, over other batches.
            assert ours.scores[f"{task}/{metric}"].value == pytest.approx(expected, rel=CLOSE)


def test_unknown_task_is_refused_with_near_matches():
    with pytest.raises(UnknownName, match="python_docs"):
        score(ModelSource.open("demo"), ["python_dcos"], device="cpu")


def test_perplexity_per_token_is_plain_arithmetic(demo, samples):
    card = Scorecard.read(demo / "scores" / "source.json")
    per_byte = card.scores["python_docs/bits_per_byte"].value
    from quantkit.calibration.reading import python_text

    read = python_text.heldout()
    if samples is not None:
        read = [read[place] for place in samples["python_docs"]]
    n_bytes = sum(len(d.text.encode()) for d in read)
    perplexity = card.scores["python_docs/perplexity"]
    assert perplexity.value == pytest.approx(2 ** (per_byte * n_bytes / perplexity.n), rel=1e-9)
    # Of four documents less is certain.
    assert 0 < perplexity.stderr < perplexity.value / (5 if samples is None else 3)


def test_what_is_not_comparable_is_refused(demo):
    cards = [e.card for e in read_all([demo / "scores"])]
    with pytest.raises(ScoreError, match="one source model"):
        Report.compare([card for card in cards if card.recipe])
    other = cards[0].model_copy(
        update={"settings": cards[0].settings.model_copy(update={"limit": 2})}
    )
    with pytest.raises(ScoreError, match="limit: 2 against none"):
        Report.compare([other, *cards[1:]])
    stranger = cards[0].model_copy(update={"source_fingerprint": "0"})
    with pytest.raises(ScoreError, match="was not made from"):
        Report.compare([stranger, *cards[1:]])
    with pytest.raises(ScoreError, match="two of the scored models"):
        Report.compare([cards[0], *cards])


def test_a_hostile_name_stays_text(demo):
    cards = [e.card for e in read_all([demo / "scores"])]
    evil = cards[0].model_copy(update={"name": "<script>alert(1) | x `y` # z"})  # a file's name
    text = markdown.render(Report.compare([evil, *cards[1:]]))
    assert "<script>" not in text
    assert " | x `y`" not in text
    assert "&lt;script" in text


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": 1}'])
def test_broken_score_files_are_named(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ScoreError, match=r"broken\.json"):
        Scorecard.read(path)
