"""The GitHub Action and docs/ci.md: every command line in them is one that quantkit understands."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from quantkit.gating import policy
from quantkit.gating.policy import Policy

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
PAGE = (ROOT / "docs" / "ci.md").read_text()
FENCES = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.S | re.M)
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
INPUTS = {
    "model": "org/model",
    "recipes": "awq-gptq-w4a16, fp8-dynamic",
    "calibration": "general",
    "tasks": "wikitext,mmlu",
    "policy": "gate.yaml",
    "against": "old.json",
    "out": "out",
    "extra": "--limit 20  --device cpu",
    "version": "0.1.0",
    "token": "t",
}


def parsed(arguments):
    """What quantkit understands of a command line, without doing it; an error if it does not."""
    from typer.main import get_command

    from quantkit.cli.main import app

    group = get_command(app)
    name, *rest = arguments
    command = group.commands[name]
    return command.make_context(name, rest).params


def lines_of(text):
    joined = text.replace("\\\n", " ")
    found = (line.strip().removeprefix("- ").strip() for line in joined.splitlines())
    return [shlex.split(line)[1:] for line in found if line.startswith("quantkit ")]


COMMANDS = [line for _, text in FENCES for line in lines_of(text)]


def test_the_page_has_commands():
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_commands_of_the_page_are_understood(arguments):
    assert parsed(arguments)


@pytest.mark.parametrize("arguments", [["gate"], ["gate", "r.json", "--polcy", "x"], ["gat", "r"]])
def test_a_wrong_command_would_be_noticed(arguments):
    with pytest.raises(Exception, match=r"report|--polcy|gat"):
        parsed(arguments)


def test_words_in_the_text_are_commands_too():
    from typer.main import get_command

    from quantkit.cli.main import app

    found = re.findall(r"`quantkit (\w+)((?: --[\w-]+)*)", PAGE)
    assert any(options for _, options in found)
    for name, options in found:
        known = {o for p in get_command(app).commands[name].params for o in p.opts}
        assert set(options.split()) <= known | {"--help"}


def test_policies_of_the_page_are_valid():
    found = [yaml.safe_load(text) for kind, text in FENCES if kind == "yaml"]
    policies = [data for data in found if "rules" in data]
    assert len(policies) == 2
    for data in policies:
        assert Policy.model_validate(data)


def test_the_table_of_default_limits_is_what_ships():
    rules = policy.default().rules
    for rule in (rule for rule in rules if rule.size is not None):
        limits = rule.limits
        drop = limits["accuracy"].max_drop
        row = [
            rule.bits,
            rule.size,
            f"+{limits['perplexity'].max_increase_pct:g}%",
            f"{limits['kl_mean'].max:g}",
            f"{limits['top1_agreement'].min:.0%}",
            f"{drop:g} point{'s' * (drop != 1)}",
        ]
        assert f"| {' | '.join(row)} |\n" in PAGE
    sizes = {r.bits: r.limits["size_ratio"].max for r in rules if "size_ratio" in r.limits}
    assert f"at most {sizes['4-bit']:.0%} of its source's size" in PAGE
    assert f"fewer bits at most {sizes['below']:.0%}" in PAGE
    floor = policy.default().evidence.model_dump()
    assert f"evidence: {{{', '.join(f'{key}: {n}' for key, n in floor.items())}}}" in PAGE
    (rule,) = policy.default(with_earlier=True).against
    assert (
        f"perplexity +{rule.limits['perplexity'].max_increase_pct:g}%, "
        f"KL mean +{rule.limits['kl_mean'].max_increase_pct:g}%, "
        f"size +{rule.limits['size_ratio'].max_increase_pct:g}%" in PAGE
    )


def test_the_example_workflow_gives_the_action_inputs_that_it_has():
    (workflow,) = [yaml.safe_load(t) for kind, t in FENCES if kind == "yaml" and "jobs:" in t]
    steps = workflow["jobs"]["gate"]["steps"]
    (ours,) = [step for step in steps if "/quantkit@" in step["uses"]]
    assert set(ours["with"]) <= set(ACTION["inputs"])
    required = {name for name, item in ACTION["inputs"].items() if item.get("required")}
    assert required <= set(ours["with"])


def test_the_action_has_the_inputs_that_were_promised():
    promised = {"model", "recipes", "calibration", "tasks", "policy", "against", "out", "extra"}
    assert promised <= set(ACTION["inputs"])
    assert ACTION["runs"]["using"] == "composite"
    assert all(step["shell"] == "bash" for step in STEPS.values())


def test_no_input_is_pasted_into_a_script():
    assert any(step["env"] for step in STEPS.values())
    for step in STEPS.values():
        assert "${{" not in step["run"]
        for value in step["env"].values():
            assert re.fullmatch(r"\$\{\{ [\w.]+ \}\}", value)


@pytest.fixture
def perform(tmp_path):
    """Run one step of the action with programs that only note how they were called."""
    calls, programs = tmp_path / "calls", tmp_path / "bin"
    programs.mkdir()
    (tmp_path / "work").mkdir()
    note = (
        'import json, os, sys\nopen(os.environ["CALLS"], "a").write(json.dumps(sys.argv) + "\\n")\n'
    )

    def run(name, inputs=None, answers=None, code=0):
        for program in ("quantkit", "gh"):
            answer = (answers or {}).get(program, "")
            path = programs / program
            path.write_text(
                f"#!/usr/bin/env python3\n{note}"
                f"if 'graphql' in sys.argv: print({answer!r})\nsys.exit({code})\n"
            )
            path.chmod(0o755)
        step, given = STEPS[name], INPUTS | (inputs or {})
        others = {"github.repository": "org/repo", "github.event.pull_request.number": "7"}
        environment = {
            key: others.get(place, given.get(place.removeprefix("inputs."), ""))
            for key, value in step["env"].items()
            for place in [value.removeprefix("${{ ").removesuffix(" }}")]
        }
        calls.write_text("")
        done = subprocess.run(
            ["bash", "-c", step["run"]],
            cwd=tmp_path / "work",
            env={
                "PATH": f"{programs}:{os.environ['PATH']}",
                "CALLS": str(calls),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        noted = [json.loads(line)[1:] for line in calls.read_text().splitlines()]
        return done, noted

    return run


@pytest.mark.parametrize(
    ("version", "installed"), [("", "/actions/quantkit"), ("0.1.0", "quantkit-llm==0.1.0")]
)
def test_the_action_installs_itself_or_the_release_that_is_named(tmp_path, version, installed):
    """There is no release yet, so that without a version the action's own checkout is installed."""
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/bash\nmkdir -p $3/bin\n"
        f"printf '#!/bin/bash\\necho \"$@\" > {tmp_path}/pip\\n' > $3/bin/pip\n"
        "chmod +x $3/bin/pip\n"
    )
    fake.chmod(0o755)
    step = STEPS["Install quantkit"]
    assert step["env"]["HERE"] == "${{ github.action_path }}"
    done = subprocess.run(
        ["bash", "-c", step["run"]],
        env={
            "PATH": f"{fake.parent}:/usr/bin:/bin",
            "RUNNER_TEMP": str(tmp_path),
            "GITHUB_PATH": str(tmp_path / "path"),
            "VERSION": version,
            "HERE": "/actions/quantkit",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "pip").read_text().split() == ["install", "--quiet", installed]


def test_pages_do_not_promise_a_release():
    for page in ("README.md", "docs/tutorial.md", "docs/ci.md", "docs/scaling.md", "docs/tasks.md"):
        assert not re.search(r"pip install [^`\n]*quantkit-llm(?! @)", (ROOT / page).read_text())


def test_the_action_runs_what_quantkit_understands(perform):
    done, (arguments,) = perform("Quantise, score and report")
    assert done.returncode == 0, done.stderr
    found = parsed(arguments)
    assert found["model"] == "org/model"
    assert list(found["recipe"]) == ["awq-gptq-w4a16", "fp8-dynamic"]
    assert (found["calibration"], found["tasks"]) == ("general", "wikitext,mmlu")
    assert (found["limit"], found["device"], str(found["out"])) == (20, "cpu", "out")


def test_inputs_are_words_not_programs(perform, tmp_path):
    evil = '$(touch evil) `touch evil`; touch evil "x'
    done, (arguments,) = perform(
        "Quantise, score and report",
        {"model": evil, "tasks": evil, "calibration": "", "extra": "", "recipes": "a*,b"},
    )
    assert done.returncode == 0, done.stderr
    assert arguments[-1] == evil
    assert "--calibration" not in arguments
    assert arguments[1:5] == ["--recipe", "a*", "--recipe", "b"]
    assert not list(tmp_path.rglob("evil"))


def test_the_action_gates_the_folders_that_it_made(perform, tmp_path):
    folder = tmp_path / "work" / "out" / "fp8-dynamic"
    folder.mkdir(parents=True)
    (folder / "quantkit.json").touch()
    done, (arguments,) = perform("Gate")
    assert done.returncode == 0, done.stderr
    found = parsed(arguments)
    assert str(found["report"]) == "out/report.json"
    assert [str(path) for path in found["checkpoint"]] == ["out/fp8-dynamic"]
    assert (str(found["policy"]), str(found["against"])) == ("gate.yaml", "old.json")
    _, (arguments,) = perform("Gate", {"policy": "", "against": "", "recipes": "x"})
    found = parsed(arguments)
    assert (found["policy"], found["against"]) == (None, None)


@pytest.mark.parametrize("code", [1, 3])
def test_the_gate_decides_how_the_step_ends(perform, code):
    assert perform("Gate", code=code)[0].returncode == code


def test_one_comment_is_made_and_then_updated(perform, tmp_path):
    name = "Comment on the pull request"
    assert perform(name)[1] == []  # there is nothing to tell
    out = tmp_path / "work" / "out"
    out.mkdir()
    (out / "gate.md").write_text("## quantkit gate: pass\n")
    done, (_, made) = perform(name)
    assert done.returncode == 0, done.stderr
    assert made[:5] == ["api", "--silent", "--method", "POST", "repos/org/repo/issues/7/comments"]
    done, (_, made) = perform(name, answers={"gh": "123"})
    assert made[3:5] == ["PATCH", "repos/org/repo/issues/comments/123"]
    text = Path(made[-1].removeprefix("body=@")).read_text()
    assert text == "<!-- quantkit-gate -->\n## quantkit gate: pass\n"


def test_a_token_that_may_not_write_fails_no_build(perform, tmp_path):
    out = tmp_path / "work" / "out"
    out.mkdir()
    (out / "gate.md").touch()
    done, _ = perform("Comment on the pull request", code=1)
    assert done.returncode == 0
    assert "::warning" in done.stdout
