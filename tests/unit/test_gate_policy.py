"""Policies of a gate: what a file may say, and that all its problems are told at once."""

from itertools import product
from typing import get_args

import pytest

from quantkit.errors import PolicyError
from quantkit.gating import policy
from quantkit.gating.classes import SIZES
from quantkit.report.evidence import FLOOR


def load(tmp_path, text):
    path = tmp_path / "gate.yaml"
    path.write_text(text)
    return policy.load(path)


def refused(tmp_path, text):
    with pytest.raises(PolicyError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_a_whole_policy(tmp_path):
    found = load(
        tmp_path,
        """
rules:
  - recipes: ["gptq-*", awq-w4a16]
    class: 4-bit
    perplexity: {max_increase_pct: 2}
    mmlu: {max_drop: 1.0, confidence: 0.95}
cannot_tell: ask
missing: error
unjudged: warn
against:
  - perplexity: {max_increase_pct: 0.5}
""",
    )
    rule = found.rules[0]
    assert (rule.recipes, rule.bits) == (["gptq-*", "awq-w4a16"], "4-bit")
    assert list(rule.limits["mmlu"].bounds) == [policy.Bound("max_drop", 1.0, 0.95)]
    assert (found.cannot_tell, found.missing, found.unjudged) == ("ask", "error", "warn")
    assert found.against[0].recipes == ["*"]


def test_the_strictest_is_the_default(tmp_path):
    found = load(tmp_path, "rules: [{kl_mean: {max: 1}}]")
    assert (found.cannot_tell, found.missing, found.unjudged) == ("fail", "fail", "error")


def test_all_problems_at_once(tmp_path):
    message = refused(
        tmp_path,
        """
rules:
  - recipe: ["*"]
    kl_mean: {max: 1}
  - kl_mean: {maxx: 1, max: 2}
  - clas: 8-bit
    kl_mean: {max: 1}
  - class: 5-bit
    kl_mean: {max: 1}
  - mmlu: {max_drop: .nan}
  - mmlu: {max_drop: -1}
  - mmlu: {}
  - mmlu: {max: yes}
  - mmlu: {max: "2"}
  - mmlu: {max_drop: 1, confidence: 95}
  - recipes: []
    mmlu: {max_drop: 1}
  - kl_mean: 0.05
  - class: 4-bit
canot_tell: fail
missing: pass
""",
    )
    for words in (
        "gate.yaml is not a valid policy:\n",
        "rules #1: recipe: neither a metric with its limits nor a key; did you mean recipes?",
        "rules #2.kl_mean.maxx: unknown key; did you mean max?",
        "rules #3: clas: neither a metric with its limits nor a key; did you mean class?",
        "rules #4.class: must be 8-bit, 4-bit or below, not '5-bit'; 5 bits are in the class 4-bit",
        "rules #5.mmlu.max_drop: must be a finite number, not nan",
        "rules #6.mmlu.max_drop: must be 0 or more, not -1",
        "rules #7.mmlu: no limit is given; choose from: max, min,",
        "rules #8.mmlu.max: must be a number, not true",
        "rules #9.mmlu.max: must be a number, not '2'",
        "rules #10.mmlu.confidence: must be below 1, not 95",
        "rules #11.recipes: must be a list of at least one, not []",
        "rules #12: kl_mean: neither a metric with its limits",
        "rules #13: a rule needs a metric",
        "canot_tell: unknown key; did you mean cannot_tell?",
        "missing: must be fail or error, not 'pass'",
    ):
        assert words in message, words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not a policy: it has no `rules:`"),
        ("[]", "is not a policy"),
        ("rules: [", "is not valid YAML at line"),
        ("a: \x00", "is not valid YAML"),
        ("rules: []", "a policy needs rules"),
        ("cannot_tell: fail", "a policy needs rules"),
        ("rules: [5]", "rules #1: a rule is a list of"),
        ("rules: [{5: {max: 1}}]", "5: neither a metric"),
        (
            "rules:\n  - kl_mean: {max: 1}\n    kl_mean: {max: 9}",
            "kl_mean appears twice, again in line 3",
        ),
        ("rules: [{kl_mean: {max: 1, max: 9}}]", "max appears twice"),
        ("rules: [{size: 8B, mmlu: {max_drop: 1}}]", "rules #1.size: must be under-1B, 1B-4B,"),
        ("rules: [{kl_mean: {max: 1}}]\nevidence: {document: 2}", "did you mean documents?"),
        ("rules: [{kl_mean: {max: 1}}]\nevidence: {tokens: -2}", "evidence.tokens: must be 0 or"),
        ("against: [{kl_mean: {max: 1}}]", "against #1.kl_mean: max needs no earlier report"),
        ("rules: !!python/object/apply:os.getcwd []", "is not valid YAML"),
    ],
)
def test_what_is_no_policy(tmp_path, text, words):
    assert words in refused(tmp_path, text)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(PolicyError, match=r"cannot read .*none\.yaml: No such file"):
        policy.load(tmp_path / "none.yaml")


def test_names_in_messages_are_one_line(tmp_path):
    message = refused(tmp_path, 'rules: [{"a\\n::error::b": 1}]')
    assert "\n::error" not in message
    assert "a\\n::error::b" in message


def test_shipped_policies_cover_every_class_and_agree():
    parts = [policy.load(path) for path in sorted(policy.SHIPPED.glob("*.yaml"))]
    # Too little evidence is neither a pass nor a failure: exit code 3.
    assert {p.cannot_tell for p in parts} == {"ask"}
    assert {p.evidence.floor for p in parts} == {FLOOR}
    assert {p.missing for p in parts} == {"fail"}
    assert {p.unjudged for p in parts} == {"error"}
    rules = policy.default().rules
    judging = [r for r in rules if "perplexity" in r.limits]
    assert {(r.bits, r.size) for r in judging} == set(product(get_args(policy.Class), SIZES))
    assert len(judging) == len(get_args(policy.Class)) * len(SIZES)
    assert get_args(policy.Size) == tuple(SIZES)
    assert all(r.recipes == ["*"] for r in policy.default().rules)
    assert policy.default().against == []
    assert policy.default(with_earlier=True).against
    # Perplexity catches what is broken, so a report without one is not judged by them.
    assert all(not r.limits["perplexity"].if_scored for r in judging)
    # Nothing that was scored is judged by a point estimate.
    for rule in judging:
        assert {limit.confidence for limit in rule.limits.values()} == {0.95}


def test_shipped_policies_say_why():
    shipped = list(policy.SHIPPED.glob("*.yaml"))
    assert shipped
    for path in shipped:
        assert path.read_text().startswith("# "), path
