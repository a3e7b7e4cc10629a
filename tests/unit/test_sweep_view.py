"""What `quantkit sweep report` prints under each model's table."""

import pytest
from gate_reports import report

from quantkit.cli import sweep_view
from quantkit.gating.judge import judge
from quantkit.gating.policy import Policy
from quantkit.sweep.overview import ModelReport, Overview


@pytest.fixture
def printed(capsys):
    def show(policy=None, **counts):
        document = report(
            ("small", "gptq-w4a16", 0.69, 2.02), ("large", "rtn-w8a16", 0.68, 2.2, 8), **counts
        )
        gate = None
        if policy:
            gate = judge(document, Policy.model_validate({"rules": [policy]})).to_json()
        overview = Overview((ModelReport("org/model", document, gate, {}),), (), ())
        sweep_view.show_overview(overview, "runs", as_json=False)
        return document, capsys.readouterr().out

    return show


def test_a_star_is_explained_below_the_table_that_has_it(printed):
    document, text = printed()
    best = [entry.name for entry in document.candidates if entry.pareto]
    starred = [line.split()[0] for line in text.splitlines() if line.split()[1:2] == ["*"]]
    assert best
    assert starred == best
    (meaning,) = [line for line in text.splitlines() if line.startswith("* ")]
    assert all(word in meaning for word in ("smaller", "better"))


def test_the_gate_of_a_model_is_named_with_its_outcome(printed):
    _, text = printed({"perplexity": {"max_increase_pct": 5}})
    (line,) = [line for line in text.splitlines() if line.startswith("gate of org/model")]
    assert "fail" in line
    assert "undecided" not in line
    assert "gate of" not in printed()[1]


def test_undecided_checks_are_counted(printed):
    _, text = printed({"quiz": {"max_drop": 1, "confidence": 0.95}}, n=40)
    (line,) = [line for line in text.splitlines() if line.startswith("gate of org/model")]
    assert "2 of 2" in line
    assert "undecided" in line
