"""One table of metrics: what a row says is what scores, reports, gates and cards show."""

import re
from pathlib import Path

import pytest
from gate_reports import card
from lm_eval.api import metrics as of_lm_eval
from lm_eval.api.registry import HIGHER_IS_BETTER_REGISTRY

from quantkit import metrics
from quantkit.export.card_facts import Figure, Scored
from quantkit.export.card_scores import scores as card_scores
from quantkit.gating import figures
from quantkit.gating.judge import judge
from quantkit.gating.policy import Policy
from quantkit.gating.verdict import Answer
from quantkit.metrics import ANSWERS, SHARE, Metric
from quantkit.report import card as report_card
from quantkit.report import html, markdown, table
from quantkit.report.comparison import Report
from quantkit.scoring.answers import Outcome
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.scorecard import Score

PACKAGE = Path(metrics.__file__).parent


def test_directions_are_lm_evals_own():
    assert of_lm_eval  # which fills the registry
    known = [name for name in metrics.METRICS if name in HIGHER_IS_BETTER_REGISTRY]
    assert len(known) >= 7
    for name in known:
        assert metrics.of(name).more_is_better == HIGHER_IS_BETTER_REGISTRY[name], name


def test_labels_are_told_apart():
    labels = [metric.label for metric in metrics.METRICS.values()]
    assert len(set(labels)) == len(labels)


def test_names_of_metrics_stand_in_one_file():
    pattern = re.compile(r"""["'/](kl_\w+|top1_agreement|acc_norm|exact_match|perplexity)["']""")
    for path in PACKAGE.rglob("*.py"):
        if path.name != "metrics.py" and "tasks" not in path.parts:
            assert not pattern.search(path.read_text()), path


def test_a_metric_of_lm_eval_that_is_not_here_keeps_its_name():
    assert metrics.of("squad/f1") == Metric("f1", "f1")


@pytest.fixture
def toy(monkeypatch):
    """One row more."""
    monkeypatch.setitem(
        metrics.METRICS,
        "solved",
        Metric("solved", "solved", SHARE, True, counts="questions", paired=ANSWERS),
    )
    monkeypatch.setitem(
        metrics.METRICS,
        "drift",
        Metric("drift", "drift from source", "nats", counts="positions", against_source=True),
    )


def evaluation(name, recipe, right):
    more = {
        "quiz/solved": Score(value=right, stderr=0.02, n=400, higher_is_better=True),
        "wiki/drift": Score(value=0.25, stderr=0.01, n=12000),
    }
    one = card(name, recipe)
    answers = [
        Outcome("quiz", i, f"q{i}", "solved", float(i < right * 400), 1.0) for i in range(400)
    ]
    return Evaluation(one.model_copy(update={"scores": one.scores | more}), answers)


def test_a_row_is_all_that_a_metric_needs(toy):
    found = Report.of([evaluation("src", None, 0.9), evaluation("one", "gptq-w4a16", 0.6)])
    (finding,) = found.findings["one"]
    assert finding.score == "quiz/solved"
    assert finding.change.difference == pytest.approx(-0.3)
    assert finding.adjusted_p < 0.01
    # The report: a column for the distance, a verdict for the answers.
    assert table.titles(found)[-1] == "drift from source"
    assert table.rows(found)[1][-1] == "0.2500"
    assert "drift from source" in markdown.render(found)
    page = html.render(found.document, "1.0")
    assert metrics.of("drift").heading in page
    assert found.recommended is None
    assert "quiz/solved" in found.recommendation.reason
    # The gate: by its own name, by its task's, in points.
    policy = Policy.model_validate({"rules": [{"solved": {"max_drop": 5, "confidence": 0.95}}]})
    (check,) = judge(found.document, policy).checks
    assert check.answer is Answer.FAIL
    assert "points" in check.reason
    (figure,) = figures.find(found.document, "drift")
    assert not figure.more_is_better
    # The card: in percent, and no distance of the source from itself.
    document = found.document
    scored = report_card._of_entry(document.candidates[0], document.baseline, None)
    assert "60.0% (56.1 to 63.9)" in card_scores([scored])
    assert next(f for f in scored.figures if f.metric == "drift").source is None


def test_shares_are_shown_in_percent_on_cards():
    run = Scored((Figure("t", "top1_agreement", 0.875, None, 10, True),), None, None, 8, "x", "y")
    assert "87.5%" in card_scores([run])
