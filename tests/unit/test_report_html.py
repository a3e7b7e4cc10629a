"""The report as a page: complete, the same for the same scores, and safe with any name."""

import random
import re
from pathlib import Path

import pytest
from gate_reports import report

from quantkit import metrics
from quantkit.report import html, markdown, pictures
from quantkit.report.comparison import Report
from quantkit.report.document import Document
from quantkit.report.document import read as read_document
from quantkit.scoring.answers import Outcome
from quantkit.scoring.evaluation import Evaluation, read_all
from quantkit.scoring.scorecard import LayerError, Provenance

PUBLISHED = Path(__file__).parents[2] / "reports" / "smollm2-135m"
HOSTILE = '<script>alert(1)<script>"><img src=x onerror=alert(2)>{{7*7}}'


@pytest.fixture(scope="module")
def cards():
    return [evaluation.card for evaluation in read_all([PUBLISHED / "scores"])]


def answers(rate, seed):
    rng = random.Random(seed)
    return [
        Outcome("mmlu_law", i, f"{i:x}", "acc", float(rng.random() < rate), 1.0, 0.25)
        for i in range(200)
    ]


def named(card, name):
    made = Provenance(
        method="gptq",
        recipe_digest="r",
        engine="native",
        disk_bytes=1,
        seconds=1,
        peak_host_bytes=1,
        peak_device_bytes=None,
        device=name,
        calibration=name,
        layers={f"model.layers.{i}.{name}": LayerError(weight=0.1, output=0.2) for i in range(3)},
    )
    return card.model_copy(update={"name": name, "format": name, "device": name, "made": made})


def test_a_chart_says_how_many_candidates_it_leaves_out():
    document = Document.model_validate_json((PUBLISHED / "report.json").read_bytes())
    assert "candidates are drawn" not in html.render(document, "0")
    more = [e.model_copy(update={"name": f"{e.name} again"}) for e in document.candidates]
    larger = document.model_copy(update={"candidates": [*document.candidates, *more]})
    assert "6 of 12 candidates are drawn" in html.render(larger, "0")


def test_the_caption_of_the_chart_names_its_bars_and_the_better_direction():
    document = Document.model_validate_json((PUBLISHED / "report.json").read_bytes())
    (drawing,) = pictures.against_size(document)
    assert "95%" in drawing
    assert "Lower is better" in drawing
    assert "both smaller and better" in drawing


def test_a_chart_of_accuracy_has_the_points_of_the_table():
    document = report(("one", "gptq-w4a16", 0.6875, 2.0))
    document = document.model_copy(update={"headline": "quiz/acc"})
    (drawing,) = pictures.against_size(document)
    assert "points" in drawing
    assert "Higher is better" in drawing
    assert metrics.points(document.candidates[0].comparison("quiz/acc").difference) in drawing


def test_broken_candidates_do_not_squeeze_the_others_in_the_chart():
    """44 recipes, some of which lose several times as much as the others."""
    many = read_document(PUBLISHED.parent / "smollm2-135m-damage" / "report.json")
    figures = html.render(many, "0").split("<figure")[1:]
    figure = next(one for one in figures if "Size and what it costs" in one)
    drawing, numbers = figure.split("<details", 1)
    assert "Off the chart: " in drawing
    assert "gptq-w2a16 (" in drawing  # named in the note, not drawn
    assert "gptq-w2a16:" not in drawing
    assert "int8-w8a8:" in drawing
    assert "gptq-w2a16" in numbers
    few = read_document(PUBLISHED / "report.json")
    assert "Off the chart" not in html.render(few, "0")


def test_published_report_is_what_its_json_says():
    document = Document.model_validate_json((PUBLISHED / "report.json").read_bytes())
    page = (PUBLISHED / "report.html").read_text()
    assert "Q4_1" in page
    assert "Q4\\_1" in (PUBLISHED / "report.md").read_text()
    for entry in document.candidates:
        assert entry.name in page
        assert entry.made is not None
        assert entry.comparison("wikitext/perplexity") is not None
    assert document.recommended.name == "int8-w8a8"


def test_same_scores_same_page(cards):
    document = Report.compare(cards).document
    again = Document.model_validate_json(document.model_dump_json(by_alias=True))
    assert html.render(document, "1") == html.render(again, "1")


def test_names_are_text_and_nothing_else(cards):
    spoilt = [named(c, f"{HOSTILE}{i}") if c.recipe else c for i, c in enumerate(cards)]
    groups = {"mmlu": ["mmlu_law"], HOSTILE: ["mmlu_law"]}
    evaluations = [
        Evaluation(card.model_copy(update={"groups": groups}), answers(0.6, i))
        for i, card in enumerate(spoilt)
    ]
    page = html.render(Report.of(evaluations, (HOSTILE,)).document, "1")
    assert "<script>alert" not in page
    assert "<img" not in page
    assert "{{7*7}}" in page  # shown, not computed
    assert len(re.findall(r"<script\b", page)) == 1


def test_many_candidates_stay_readable(cards):
    source = next(card for card in cards if card.recipe is None)
    other = next(card for card in cards if card.recipe)
    many = [named(other, f"candidate-{i}") for i in range(200)]
    report = Report.compare([source, *many])
    assert html.render(report.document, "1").count("<tr") > 200
    assert markdown.render(report).count("\n") <= markdown.MOST_LINES


def test_each_model_counts_once(cards):
    newer = [card.model_copy(update={"created": "2099-01-01"}) for card in cards]
    report = Report.of([Evaluation(card, []) for card in (*cards, *newer)])
    assert len(report.candidates) == len(cards) - 1
    assert report.baseline.created == "2099-01-01"


def test_one_figure_has_one_interval_everywhere(published):
    """What the main table, the evidence and the panel of damage say of a change is the same."""
    page = html.render(published, "0")
    shown = {}
    for entry in published.candidates:
        for found in entry.comparisons:
            if found.score != published.headline or found.low is None:
                continue
            said = re.search(r"95% interval ([^:]+):", found.verdict)
            shown[entry.name] = said[1]
    assert len(shown) == len(published.candidates)
    for interval in shown.values():
        assert page.count(interval) >= 2


def test_every_metric_has_its_own_label_at_the_head_of_a_column(published):
    page = html.render(published, "0")
    assert ">Top-1<" in page  # in two lines, the second small: the table is wide
    assert ">agreement<" in page
    for name in (published.headline, published.accuracy):
        metric = metrics.of(name)
        assert f">{metric.heading}<" in page
        assert f">{metric.name.capitalize()}<" not in page or metric.name == metric.label


def test_changes_of_accuracy_are_marked_as_points(published):
    page = html.render(published, "0")
    notes = re.findall(r"<span>Change</span><small>([^<]*)<", page)
    assert ["points" in note for note in notes] == [False, True]
    assert all("95%" in note for note in notes)


@pytest.fixture(scope="module")
def published():
    return read_document(PUBLISHED / "report.json")


def test_errors_of_weights_are_in_percent_and_not_mixed_with_those_of_outputs(published):
    page = html.render(published, "0")
    rows = re.findall(r"<tr>(?:(?!</tr>).)*</tr>", page, re.S)
    cells = [re.findall(r">([^<>]+)</t[dh]>", row) for row in rows]
    kinds = {row[-1]: row[-2] for row in cells if row and row[-1] in ("weight", "output")}
    assert set(kinds) == {"weight", "output"}
    assert kinds["weight"].endswith("%")
    assert "e-" in kinds["output"]
