"""`quantkit gate`: exit codes, files, GitHub's environment, and every input that must not pass."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gate_reports import SETTINGS, changed, report, rescored

from quantkit.gating.text import plain

PUBLISHED = Path(__file__).parents[2] / "reports" / "smollm2-135m" / "report.json"
HOSTILE = "a ::error::x|<b>]]>@all##[add-mask]y"


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch):
    """Tests of the gate may run in GitHub Actions themselves."""
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def good():
    return report(("one", "gptq-w4a16", 0.7, 2.01), ("two", "awq-w4a16", 0.7, 2.02))


@pytest.fixture
def written(tmp_path):
    """Write a report's file, and a policy's."""

    def write(document=None, policy=None, name="report.json"):
        if policy is not None:
            path = tmp_path / "gate.yaml"
            path.write_text(policy)
            return path
        path = tmp_path / name
        text = document if isinstance(document, str) else json.dumps(document.to_json())
        path.write_text(text)
        return path

    return write


def one_error(result):
    """Exit 3, with one message on stderr, which is returned."""
    assert (result.code, result.stdout) == (3, "")
    assert result.stderr.startswith("quantkit: ")
    assert "Traceback" not in result.stderr
    return result.stderr


def test_the_published_report_fails_for_what_nobody_should_ship(run_cli):
    result = run_cli(["gate", PUBLISHED])
    assert (result.code, result.stderr) == (1, "")
    lines = result.stdout.rstrip().split("\n")
    assert lines[-1] == (
        "fail: 9 of 33 checks of 6 candidates: awq-gptq-w4a16, awq-w4a16, gptq-w4a16"
    )
    assert any(re.match(r" gptq-w4a16 +perplexity +\+17.48% +≤ \+10% +fail$", x) for x in lines)
    assert any(re.match(r" int8-w8a8 +accuracy .* cannot tell$", x) for x in lines)


def test_too_little_evidence_exits_3(run_cli, written):
    thin = report(("one", "gptq-w4a16", 0.7, 2.0), n_documents=1, n_tokens=40)
    result = run_cli(["gate", written(thin)])
    assert (result.code, result.stderr) == (3, "")
    said = " ".join(result.stdout.split())
    assert "wiki/perplexity cannot be judged: it rests on 1 document and 40 tokens" in said
    assert "at least 20 documents and 5,000 tokens" in said
    assert result.stdout.rstrip().split("\n")[-1].startswith("cannot tell: 3 of 5 checks")
    assert result.stdout.count("--limit") == 1  # what to do next, once


def test_failures_say_cause_and_amount(run_cli, written):
    policy = written(policy='rules: [{perplexity: {max_increase_pct: 2}, recipes: ["*"]}]')
    result = run_cli(["gate", PUBLISHED, "--policy", policy])
    assert (result.code, result.stderr) == (1, "")
    assert (
        "fp8-dynamic     wikitext/perplexity grew by 2.50% against the source (16.972 to 17.396); "
        "at most 2% is allowed; " in result.stdout
    )
    assert result.stdout.rstrip().split("\n")[-1].startswith("fail: 5 of 6 checks of 6 candidates")


def test_asking_exits_3_and_says_how_many_questions_would_tell(run_cli, written):
    policy = written(
        policy="rules: [{mmlu_humanities: {max_drop: 1, confidence: 0.99}}]\ncannot_tell: ask"
    )
    result = run_cli(["gate", PUBLISHED, "--policy", policy])
    assert (result.code, result.stderr) == (3, "")
    assert re.search(r"about [\d,]+ questions would settle it, 4,705 were compared", result.stdout)
    assert result.stdout.rstrip().split("\n")[-1].startswith("cannot tell: ")


@pytest.mark.parametrize("columns", [80, 200])
def test_it_fits_the_screen(run_cli, monkeypatch, written, columns):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    result = run_cli(["gate", PUBLISHED, "--against", PUBLISHED])
    text = re.sub(r"\x1b\[[\d;]*m", "", result.stdout)
    assert max(map(len, text.split("\n"))) <= columns
    assert len(re.findall(r"^ \S+ +top-1 agreement ", text, re.M)) == 6
    assert "…" not in text


def test_json_is_alone_on_stdout(run_cli, written, good):
    document = changed(good, name=HOSTILE)
    result = run_cli(["gate", written(document), "--json"])
    data = json.loads(result.stdout)
    assert (result.code, result.stderr) == (0, "")
    assert (data["schema"], data["outcome"], data["exit_code"]) == (1, "pass", 0)
    assert data["checks"][0]["candidate"] == HOSTILE
    assert {"metric", "kind", "bound", "amount", "low", "high", "answer"} <= set(data["checks"][0])


def test_a_name_that_leaves_its_line_is_refused(run_cli, written, good):
    message = one_error(run_cli(["gate", written(changed(good, name="a\n::error::x\x1b[31m"))]))
    assert "candidates #1.name" in message
    assert "\x1b" not in message


def test_files(run_cli, written, tmp_path, good):
    document = rescored(changed(good, name=HOSTILE), "wiki/kl_mean", 3.0)
    junit, markdown = tmp_path / "gate.xml", tmp_path / "gate.md"
    result = run_cli(["gate", written(document), "--junit", junit, "--markdown", markdown])
    assert result.code == 1
    root = ElementTree.parse(junit).getroot()
    assert root.get("failures") == "1"
    assert plain(HOSTILE) in root.find(".//failure").get("message")
    assert markdown.read_text().startswith("## quantkit gate: fail: 1 of ")
    assert "\x1b" not in result.stdout
    assert not any(line.lstrip().startswith("::") for line in result.stdout.splitlines())


def test_files_say_so_when_nothing_could_be_judged(run_cli, written, tmp_path):
    junit, markdown = tmp_path / "gate.xml", tmp_path / "gate.md"
    junit.write_text("of an earlier, better day")
    path = written("{")
    one_error(run_cli(["gate", path, "--junit", junit, "--markdown", markdown]))
    assert ElementTree.parse(junit).getroot().get("errors") == "1"
    assert markdown.read_text().startswith("## quantkit gate: could not judge\n")


def test_a_file_that_cannot_be_written_is_no_pass(run_cli, tmp_path):
    message = one_error(run_cli(["gate", PUBLISHED, "--junit", tmp_path / "no" / "gate.xml"]))
    assert "gate.xml" in message


def test_in_github_actions(run_cli, monkeypatch, written, tmp_path, good):
    summary = tmp_path / "summary.md"
    summary.write_text("from a step before\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    document = rescored(changed(good, name=HOSTILE), "wiki/kl_mean", 3.0)
    result = run_cli(["gate", written(document)])
    assert result.code == 1
    lines = result.stdout.splitlines()
    stop = next(place for place, line in enumerate(lines) if line.startswith("::stop-commands::"))
    token = lines[stop].removeprefix("::stop-commands::")
    assert len(token) >= 32
    assert lines[-1] == f"::{token}::"
    commands = [line for line in lines[:stop] if line]
    assert [line.split()[0] for line in commands] == ["::error", "::notice"]
    assert "##[" not in "".join(line for line in lines[:stop] if not line.startswith("::"))
    text = summary.read_text()
    assert text.startswith("from a step before\n## quantkit gate: fail")


def test_json_in_github_actions_stays_json(run_cli, monkeypatch, written, good):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = run_cli(["gate", written(changed(good, name=HOSTILE)), "--json"])
    assert json.loads(result.stdout)["checks"][0]["candidate"] == HOSTILE
    assert "##[" not in result.stdout
    assert result.stderr.startswith("::notice title=quantkit gate::pass")


def test_errors_in_github_actions_are_annotated_and_command_nothing(
    run_cli, monkeypatch, written, good
):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    data = good.to_json()
    data["candidates"][0]["scores"]["\n::warning::obeyed ##[add-mask]x"] = {"value": "x"}
    result = run_cli(["gate", written(json.dumps(data))])
    assert result.code == 3
    commands = [
        line
        for line in (result.stdout + result.stderr).splitlines()
        if line.lstrip().startswith("::")
    ]
    assert len(commands) == 1
    assert commands[0].startswith("::error title=quantkit gate::")
    assert "##[" not in result.stderr


# What must not pass


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "is not a report"),
        ("{}", "is not a report: baseline: is missing"),
        ('{"schema": 3}', "has schema 3, of a newer quantkit; upgrade quantkit"),
    ],
    ids=["empty", "cut", "deep", "list", "keys", "newer"],
)
def test_files_that_are_no_report(run_cli, written, text, words):
    assert words in one_error(run_cli(["gate", written(text)]))
    assert words in one_error(run_cli(["gate", PUBLISHED, "--against", written(text)]))


def test_half_of_a_report(run_cli, written):
    text = PUBLISHED.read_text()
    for share in (0.2, 0.5, 0.99):
        one_error(run_cli(["gate", written(text[: int(share * len(text))])]))


def test_a_report_that_is_not_there(run_cli, tmp_path):
    assert "No such file" in one_error(run_cli(["gate", tmp_path / "none.json"]))
    assert "directory" in one_error(run_cli(["gate", tmp_path]))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "null", '"5"x'])
def test_numbers_that_are_none(run_cli, written, good, number):
    data = json.dumps(good.to_json())
    value = json.dumps(good.candidates[0].scores["wiki/perplexity"].value)
    assert value in data
    message = one_error(run_cli(["gate", written(data.replace(value, number))]))
    assert "report.json is not" in message


def test_reports_that_hold_nothing_to_judge(run_cli, written, good):
    empty = good.model_copy(update={"candidates": []})
    assert "no candidates" in one_error(run_cli(["gate", written(empty)]))
    twice = changed(good, 1, name="one")
    assert "are called one" in one_error(run_cli(["gate", written(twice)]))
    for place in (None, 0, 1):
        good = rescored(good, "wiki/perplexity", None, place)
    assert "no scored task gives a perplexity" in one_error(run_cli(["gate", written(good)]))


def test_a_candidate_that_lacks_a_score_fails(run_cli, written, good):
    result = run_cli(["gate", written(rescored(good, "wiki/perplexity", None))])
    assert result.code == 1
    assert "one has no wiki/perplexity" in result.stdout


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("rules: [{mmlu_stm: {max_drop: 1}}]", "unknown metric 'mmlu_stm'. Did you mean mmlu_stem"),
        ("rules: [{recipes: [gtpq-w4a16], kl_mean: {max: 1}}]", "Did you mean gptq-w4a16"),
        ("rules: [{recipes: [gptq*], kl_mean: {max: 1}}]", "no rule judges int8-w8a8"),
        ("rules: [{kl_mean: {maxx: 1}}]", "did you mean max?"),
        ("rules: [", "is not valid YAML"),
    ],
)
def test_policies_that_judge_nothing(run_cli, written, policy, words):
    path = written(policy=policy)
    assert words in one_error(run_cli(["gate", PUBLISHED, "--policy", path]))


def test_policy_that_is_not_there(run_cli, tmp_path):
    result = run_cli(["gate", PUBLISHED, "--policy", tmp_path / "none.yaml"])
    assert "cannot read" in one_error(result)


def test_against_the_last_release(run_cli, written, good):
    old = written(good, name="old.json")
    value = good.candidates[0].scores["wiki/perplexity"].value
    new = written(rescored(good, "wiki/perplexity", 1.02 * value))
    assert run_cli(["gate", new]).code == 0
    result = run_cli(["gate", new, "--against", old])
    assert result.code == 1
    assert "grew by 2.00% against the earlier report" in result.stdout
    assert run_cli(["gate", old, "--against", new]).code == 0


def test_against_another_source_or_other_settings(run_cli, written, good):
    old = written(good, name="old.json")
    assert "different sources" in one_error(run_cli(["gate", PUBLISHED, "--against", old]))
    settings = SETTINGS.model_copy(update={"limit": 10})
    entries = [e.model_copy(update={"settings": settings}) for e in good.candidates]
    baseline = good.baseline.model_copy(update={"settings": settings})
    new = written(good.model_copy(update={"baseline": baseline, "candidates": entries}))
    message = one_error(run_cli(["gate", new, "--against", old]))
    assert "different settings (limit: 10 against none)" in message


# The folder that was scored


@pytest.fixture
def made(run_cli, tiny_model, tmp_path):
    out = tmp_path / "out"
    command = ["quantize", tiny_model(), "-r", "rtn-w4a16", "-r", "rtn-w8a16", "-o", out, "-q"]
    assert run_cli(command).code == 0
    return out


def scored(good, folder):
    from quantkit.export.manifest import Manifest

    manifest = Manifest.read(folder)
    update = {"name": manifest.name, "recipe": manifest.recipe.name, "digest": manifest.digest}
    return changed(good, **update)


def test_the_checkpoint_that_was_scored(run_cli, written, good, made):
    folder = made / "rtn-w4a16"
    path = written(scored(good, folder))
    result = run_cli(["gate", path, "--checkpoint", folder])
    assert result.code == 0
    assert re.search(r" rtn-w4a16 +checkpoint +as scored +pass", result.stdout)

    # Another one, that was never scored.
    result = run_cli(["gate", path, "--checkpoint", folder, "--checkpoint", made / "rtn-w8a16"])
    assert result.code == 1
    assert f"{made / 'rtn-w8a16'} was not scored" in result.stdout

    # One that was scored, but that no rule judges.
    policy = written(policy="rules: [{recipes: [awq*], kl_mean: {max: 1}}]\nunjudged: warn")
    result = run_cli(["gate", path, "--policy", policy])
    assert result.code == 0
    result = run_cli(["gate", path, "--policy", policy, "--checkpoint", folder])
    assert result.code == 1
    assert "no rule of the policy judges rtn-w4a16" in result.stdout

    # A byte of its weights.
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    result = run_cli(["gate", path, "--checkpoint", folder])
    assert result.code == 1
    assert f"{folder} was changed after it was scored: model.safetensors" in result.stdout

    # Its manifest too.
    from quantkit.storage import sha256_of

    manifest = json.loads((folder / "quantkit.json").read_text())
    manifest["files"]["model.safetensors"]["sha256"] = sha256_of(weights)
    (folder / "quantkit.json").write_text(json.dumps(manifest))
    result = run_cli(["gate", path, "--checkpoint", folder])
    assert result.code == 1
    assert (
        f"{folder} was changed after it was scored, or made again: its digest is" in result.stdout
    )


def test_a_folder_that_is_no_checkpoint(run_cli, written, good, tmp_path):
    path = written(good)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is not a quantkit checkpoint" in one_error(
        run_cli(["gate", path, "--checkpoint", empty])
    )
    message = one_error(run_cli(["gate", path, "--checkpoint", tmp_path / "none"]))
    assert "there is no folder" in message
