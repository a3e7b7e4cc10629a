"""What the names of suites stand for."""

from quantkit.calls.score import Models, ScoreOptions, Scoring
from quantkit.scoring import suites


def test_damage_covers_what_breaks_first_and_code_where_it_may_run():
    plain = ScoreOptions.of(["damage"], ["demo"])
    assert suites.expanded(plain.tasks) == (
        "gsm8k",
        "ifeval",
        "mmlu",
        "wikitext",
        "needle_1k",
        "needle_4k",
        "python_answers",
    )
    allowed = ScoreOptions.of(["damage", "mbpp"], ["demo"], allow_code=True)
    assert set(suites.expanded(allowed.tasks)) == {
        *suites.expanded(plain.tasks),
        "humaneval",
        "mbpp",
    }


def test_code_that_is_left_out_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("quantkit.calls.validation.tasks", lambda *more: None)
    for asked, n in (
        (ScoreOptions(("damage",)), 1),
        (ScoreOptions(("damage-code",)), 0),
        (ScoreOptions(("gsm8k",)), 0),
    ):
        said: list[str] = []
        Scoring(Models(["demo"]), asked).ready(said.append)
        assert len(said) == n
        assert all("--allow-code adds humaneval" in sentence for sentence in said)


def test_quick_damage_and_the_demo_need_no_hub():
    assert suites.is_own("damage-quick")
    assert suites.by_default(["demo"]) == suites.expanded(["damage-quick"])
    assert all(map(suites.is_own, suites.by_default(["demo", "out/rtn-w4a16"])))
    assert suites.by_default(["out/rtn-w4a16"]) == suites.DEFAULT
    assert not suites.is_own("damage")


def test_engines_that_only_serve_are_not_asked_to_follow_by_default():
    for more in ({"server": "http://127.0.0.1:1"}, {"backend": "vllm"}, {"backend": "llama.cpp"}):
        assert ScoreOptions.of(None, ["demo"], **more).tasks == ("python_docs", "python_quiz")
    assert "python_answers" in ScoreOptions.of(None, ["demo"], backend="transformers").tasks
    assert ScoreOptions.of(None, ["demo"], prompts="traffic.jsonl").tasks == ()
