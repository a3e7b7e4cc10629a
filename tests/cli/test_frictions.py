"""What newcomers stumbled over: each is one sentence that names the thing and what to do."""

import json
import os
import random
import shlex
import shutil
from pathlib import Path

import pytest
from gate_reports import report as made_report

from quantkit import metrics
from quantkit.cli.main import build_app
from quantkit.errors import ScoreError
from quantkit.page.scale import UNKNOWN
from quantkit.resources import DEMO_MODEL
from quantkit.scoring import harness


def damaged(folder: Path, tmp_path: Path) -> Path:
    copy = shutil.copytree(folder, tmp_path / "damaged")
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    return copy


def one_error(result, code=3):
    assert result.code == code
    assert result.stderr.count("quantkit: ") == 1
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def test_a_sweep_without_its_data_fails_before_its_first_step_and_once(run_cli, tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("models: [demo]\nrecipes: [fp8-dynamic, rtn-w4a16]\ntasks: [wikitext]\n")
    message = one_error(run_cli(["sweep", "run", file, "-o", tmp_path / "runs"]))
    assert message.count("wikitext_document_level") == 1
    assert "--data DIR" in message
    assert not (tmp_path / "runs").exists()


def test_a_sweep_whose_set_has_no_data_says_so_once(run_cli, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "sweep.yaml"
    file.write_text(
        "models: [demo]\nrecipes: [awq-w4a16]\ncalibration: [general]\ntasks: [python_docs]\n"
    )
    message = one_error(run_cli(["sweep", "run", file, "-o", tmp_path / "runs"]))
    assert message.count("HF_HUB_OFFLINE is set") == 1
    assert "databricks/databricks-dolly-15k" in message
    assert "openai/gsm8k" in message
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["compare", "score"])
def test_a_damaged_checkpoint_is_noticed_before_its_source_is_scored(
    run_cli, demo_made, tmp_path, command
):
    folder = damaged(demo_made / "fp8-dynamic", tmp_path)
    asked = [command, "demo", folder, "--tasks", "python_quiz", "--limit", "2"]
    result = run_cli([*asked, "-o", tmp_path / "scores"])
    assert f"{folder} is damaged: model.safetensors has" in one_error(result)
    assert "score demo" not in result.stderr
    assert list(tmp_path.glob("scores/**/*.json")) == []


def test_weights_that_changed_are_noticed_before_another_model_is_scored(
    run_cli, demo_made, tmp_path, monkeypatch
):
    """Of the same size: only their time and their hash differ."""
    folder = shutil.copytree(demo_made / "fp8-dynamic", tmp_path / "changed")
    monkeypatch.setattr(harness, "evaluate", lambda *_: pytest.fail("a model was scored"))
    with (folder / "model.safetensors").open("rb+") as weights:
        weights.seek(-1, os.SEEK_END)
        last = weights.read(1)
        weights.seek(-1, os.SEEK_END)
        weights.write(bytes([last[0] ^ 1]))
    message = one_error(run_cli(["score", "demo", folder, "--tasks", "python_docs"]))
    assert "model.safetensors was changed after it was written" in message


def test_a_copy_with_other_times_is_scored(run_cli, demo_made, tmp_path, monkeypatch):
    folder = shutil.copytree(demo_made / "fp8-dynamic", tmp_path / "copied")
    os.utime(folder / "model.safetensors")

    def evaluate(target, *_):
        raise ScoreError(f"{target.label} is scored")

    monkeypatch.setattr(harness, "evaluate", evaluate)
    message = one_error(run_cli(["score", "demo", folder, "--tasks", "python_docs"]))
    assert message == "quantkit: demo is scored"


@pytest.mark.parametrize("command", [["serve", "--dry-run", "--gpu", "L4"], ["card"]])
def test_a_damaged_checkpoint_is_noticed_by_its_size(run_cli, demo_made, tmp_path, command):
    folder = damaged(demo_made / "fp8-dynamic", tmp_path)
    message = one_error(run_cli([command[0], folder, *command[1:]]))
    assert f"{folder} is damaged: model.safetensors has" in message
    assert "quantkit verify" in message
    (folder / "model.safetensors").unlink()
    assert "model.safetensors is missing" in one_error(run_cli([command[0], folder, *command[1:]]))


def test_advice_on_bad_rows_names_a_command_that_has_the_option(run_cli, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "some words"}\n{"text": broken\n')
    out = tmp_path / "out"
    result = run_cli(["quantize", "demo", "-r", "gptq-w4a16", "--calibration", rows, "-o", out])
    assert "`quantkit calibrate build --skip-bad` leaves it out" in one_error(result)
    options = {name for p in _parameters("calibrate", "build") for name in p.opts}
    assert "--skip-bad" in options


def _parameters(*names: str):
    import typer

    command = typer.main.get_command(build_app())
    for name in names:
        command = command.commands[name]
    return command.params


@pytest.mark.parametrize("place", ["/proc/out", "file/out"])
def test_an_output_that_cannot_be_written_says_so(run_cli, tmp_path, place, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    result = run_cli(["quantize", "demo", "-r", "fp8-dynamic", "-o", place])
    message = one_error(result)
    assert place in message
    assert "write" in message or "cannot be a folder" in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantize", "demoo", "-r", "fp8-dynamic"], "Did you mean demo?"),
        (["recommend", "demoo", "--gpu", "L4"], "Did you mean demo?"),
        (["recommend", "8B,70B", "--gpu", "L4"], "Separate several models by spaces: 8B 70B"),
        (["recommend", "Qwen/Qwen3-8B,70B", "--gpu", "L4"], "by spaces: Qwen/Qwen3-8B 70B"),
        (["recommend", "8", "--gpu", "L4"], "Did you mean 8B?"),
        (["recommend", "8B", "--gpu", "L5"], "Did you mean L4?"),
        (["recipes", "show", "fp8"], "Did you mean fp8-block, fp8-dynamic, fp8-static or fp8-tens"),
        (["recommend", "8B", "--gpu", "Mac"], "M3 Max"),
        (["recommend", "8B", "--gpu", "M3"], "Did you mean M3 Max or M3 Ultra?"),
        (["recommend", "8B", "--gpu", "apple"], "M4 Pro"),
        (["quantize", "demo", "-r", "Q5_K_S"], "Did you mean gguf-q5_k_s?"),
        (["quantize", "demo", "-r", "int4"], "awq-gptq-w4a16"),
        (["quantize", "demo", "-r", "fp8-dynamic,rtn-w4a16"], "-r fp8-dynamic -r rtn-w4a16"),
    ],
)
def test_near_matches(run_cli, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code = 2 if "," in arguments[-1] else 3
    assert words in one_error(run_cli(arguments), code)


@pytest.mark.parametrize("command", ["verify", "card", "serve", "quantize"])
def test_a_folder_that_is_not_there_is_looked_for_beside(run_cli, demo_made, command):
    recipe = ["-r", "rtn-w4a16"] if command == "quantize" else []
    message = one_error(run_cli([command, demo_made / "fp8-dynamik", *recipe]))
    assert f"Did you mean {demo_made / 'fp8-dynamic'}?" in message
    message = one_error(run_cli([command, demo_made / "nothing-like-it", *recipe]))
    assert "Did you mean" not in message


@pytest.mark.parametrize("command", ["verify", "serve", "quantize"])
def test_the_parent_of_checkpoints_names_them(run_cli, demo_made, tmp_path, command):
    parent = tmp_path / "out"
    shutil.copytree(demo_made / "fp8-dynamic", parent / "fp8-dynamic")
    recipe = ["-r", "rtn-w4a16"] if command == "quantize" else []
    assert "those within are fp8-dynamic" in one_error(run_cli([command, parent, *recipe]))


def test_a_recipe_or_a_gpu_without_its_option_gets_it(run_cli):
    result = run_cli(["quantize", "demo", "fp8-dynamic", "-o", "out"])
    assert result.code == 2
    assert "-r fp8-dynamic" in result.stderr
    assert "needs -r" not in run_cli(["quantize", "demo", "nothing", "-o", "out"]).stderr
    assert "--gpu L4" in one_error(run_cli(["recommend", "8B", "L4"]), 2)
    assert "--gpu 'RTX 4090'" in one_error(run_cli(["recommend", "RTX 4090", "--gpu", "L4"]), 2)


def test_a_path_that_does_not_exist_is_called_one(run_cli, tmp_path):
    asked = ["quantize", "demo", "-r", "awq-w4a16", "--calibration", "sets/ours", "-o", tmp_path]
    message = one_error(run_cli(asked))
    assert "sets/ours" in message
    assert "no file or folder" in message


def test_data_that_is_not_there_is_looked_for_beside(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets" / "ours").mkdir(parents=True)
    (tmp_path / "traffic.jsonl").write_text("")
    asked = ["quantize", "demo", "-r", "awq-w4a16", "-o", "out", "--calibration"]
    assert "Did you mean sets/ours?" in one_error(run_cli([*asked, "sets/our"]))
    build = ["calibrate", "build", "--model", "demo", "-o", "set", "--from"]
    assert "Did you mean traffic.jsonl?" in one_error(run_cli([*build, "traffik.jsonl"]))


def test_json_gets_the_advice_of_json(run_cli, tmp_path, demo_made):
    file = tmp_path / "report.json"
    file.write_text("[]")
    message = one_error(run_cli(["gate", file]))
    assert "a JSON object" in message
    assert "key: value" not in message
    folder = shutil.copytree(demo_made / "fp8-dynamic", tmp_path / "copy")
    (folder / "quantkit.json").write_text("[]")
    message = one_error(run_cli(["verify", folder]))
    assert "quantkit.json is damaged: it must be a JSON object" in message


def test_a_policy_in_json_gets_the_advice_of_json(run_cli, tmp_path):
    report, policy = tmp_path / "report.json", tmp_path / "policy.json"
    report.write_text(json.dumps(made_report(("x", "gptq-w4a16", 0.7, 2.0)).to_json()))
    policy.write_text('{"rules": [')
    assert f"{policy} is not valid JSON" in one_error(run_cli(["gate", report, "--policy", policy]))
    yaml = policy.rename(tmp_path / "policy.yaml")
    assert f"{yaml} is not valid YAML" in one_error(run_cli(["gate", report, "--policy", yaml]))


def test_a_report_that_is_empty_or_missing_says_so(run_cli, tmp_path):
    file = tmp_path / "report.json"
    assert "`quantkit report`" in one_error(run_cli(["gate", file]))
    file.write_text("\n")
    assert f"{file} is not valid JSON: it is empty" in one_error(run_cli(["gate", file]))


def test_verify_names_the_missing_tensor_the_unit_and_a_verdict(run_cli, demo_made, tmp_path):
    from safetensors.torch import load_file, save_file

    sound = run_cli(["verify", demo_made / "fp8-dynamic"])
    assert sound.stdout.rstrip().endswith("verdict: sound")
    assert "largest rounding errors, relative to the norm of the weights:" in sound.stdout
    folder = shutil.copytree(demo_made / "fp8-dynamic", tmp_path / "copy")
    tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
    lost = next(name for name in sorted(tensors) if name.endswith("weight_scale"))
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    result = run_cli(["verify", folder])
    assert result.code == 1
    assert f"wrong     tensors: {lost} is missing" in " ".join(result.stdout.split("\n"))
    assert "has 3 faults" in result.stderr
    assert result.stdout.rstrip().endswith("verdict: wrong")
    both = run_cli(["verify", folder, demo_made / "fp8-dynamic"])
    assert both.code == 1
    assert both.stdout.rstrip().endswith("verdict: wrong (1 of 2 checkpoints)")


class Hub:
    """What `push` asks of a hub, by the real client's own signatures."""

    def __init__(self):
        import inspect

        from huggingface_hub import HfApi

        self.calls, self.fails, self.private = [], 0, None
        self.signatures = {
            name: inspect.signature(getattr(HfApi, name))
            for name in ("create_repo", "model_info", "upload_folder")
        }

    def create_repo(self, *words, **more):
        bound = self._note("create_repo", words, more)
        if self.private is None:  # else it is there already, and stays as it is
            self.private = bound["private"]
        return f"https://hub.test/{words[0]}"

    def model_info(self, *words, **more):
        from huggingface_hub.hf_api import ModelInfo

        self._note("model_info", words, more)
        return ModelInfo(id=words[0], private=self.private)

    def upload_folder(self, *words, **more):
        from huggingface_hub.utils import filter_repo_objects

        bound = self._note("upload_folder", words, more)
        folder = Path(bound["folder_path"])
        there = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
        self.seen = set(filter_repo_objects(there, allow_patterns=bound["allow_patterns"]))
        if self.fails:
            self.fails -= 1
            raise ConnectionError("the line went dead")

    def _note(self, name, words, more):
        bound = self.signatures[name].bind(self, *words, **more).arguments
        self.calls.append((name, bound))
        return bound


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub

    found = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: found)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return found


def test_push_verifies_then_uploads_privately_with_the_card(run_cli, demo_made, hub):
    folder = demo_made / "fp8-dynamic"
    result = run_cli(["push", folder, "org/name", "--json", "-q"])
    assert result.code == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["repo"], told["private"]) == ("org/name", True)
    assert [name for name, _ in hub.calls] == ["create_repo", "model_info", "upload_folder"]
    assert hub.calls[0][1]["private"] is True
    assert hub.calls[0][1]["exist_ok"] is True
    assert hub.seen == {path.name for path in folder.iterdir()}
    assert "README.md" in hub.seen


def test_push_resumes_and_can_be_public(run_cli, demo_made, hub):
    hub.fails = 1
    command = ["push", demo_made / "gguf-q8_0", "org/name", "--public", "-q"]
    assert "run the same command again to resume" in one_error(run_cli(command))
    again = run_cli(command)
    assert again.code == 0
    assert ", public: " in again.stdout
    assert hub.calls[0][1]["private"] is False


@pytest.mark.parametrize("error", ["httpx", "xet"])
def test_push_without_a_connection_is_one_sentence(run_cli, demo_made, hub, monkeypatch, error):
    from huggingface_hub.errors import HfHubHTTPError

    library = HfHubHTTPError.__mro__[1]  # whichever HTTP library the client uses
    raised = library("Name or service not known") if error == "httpx" else RuntimeError("no route")

    def fail(*words, **more):
        raise raised

    monkeypatch.setattr(hub, "create_repo" if error == "httpx" else "upload_folder", fail)
    message = one_error(run_cli(["push", demo_made / "fp8-dynamic", "org/name", "-q"]))
    assert "cannot upload to org/name" in message
    assert str(raised) in message


def test_push_says_that_a_repository_which_exists_is_public(run_cli, demo_made, hub):
    hub.private = False
    result = run_cli(["push", demo_made / "fp8-dynamic", "org/name"])
    assert result.code == 0, result.stderr
    assert ", which is public" in result.stderr
    assert ", public: " in result.stdout


def test_push_refuses_what_is_damaged_misnamed_or_offline(
    run_cli, demo_made, tmp_path, hub, monkeypatch
):
    folder = damaged(demo_made / "fp8-dynamic", tmp_path)
    assert "is damaged" in one_error(run_cli(["push", folder, "org/name"]))
    assert "ORG/NAME" in one_error(run_cli(["push", demo_made / "fp8-dynamic", "name"]), 2)
    changed = shutil.copytree(demo_made / "fp8-dynamic", tmp_path / "changed")
    weights = bytearray((changed / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (changed / "model.safetensors").write_bytes(weights)
    assert "failed verification" in one_error(run_cli(["push", changed, "org/name", "-q"]))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in one_error(run_cli(["push", demo_made / "fp8-dynamic", "org/name"]))
    assert hub.calls == []


def test_rows_just_longer_than_a_sample_are_named(run_cli, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rng = random.Random(0)
    # Of some 60 tokens each: the demo's tokenizer has each of these words as one or two.
    words = [
        "the",
        "list",
        "holds",
        "a",
        "value",
        "that",
        "is",
        "returned",
        "when",
        "the",
        "function",
        "ends",
    ]
    texts = [" ".join(rng.choice(words) for _ in range(48)) for _ in range(60)]
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build = ["calibrate", "build", "--from", rows, "--model", "demo", "--samples", "8"]
    found = run_cli([*build, "--length", "56", "-o", tmp_path / "a"])
    assert found.code == 0, found.stderr
    note = " ".join(found.stderr.split())
    assert "rows are just longer than a sample of 56 tokens" in note
    assert "--length 63" in note
    longer = run_cli([*build, "--length", "160", "-o", tmp_path / "b"])
    assert "just longer" not in longer.stderr


def test_an_importance_matrix_is_not_taken_for_the_model(run_cli, demo_made, tmp_path):
    import torch

    from quantkit.bench import engines
    from quantkit.gguf.imatrix import ImportanceMatrix

    folder = shutil.copytree(demo_made / "gguf-q8_0", tmp_path / "made")
    (model,) = folder.glob("*.gguf")
    later = model.rename(folder / "qwen-Q8_0.gguf")  # sorted after imatrix.gguf
    name = "blk.0.ffn_up.weight"
    matrix = ImportanceMatrix({name: torch.rand(1, 256)}, {name: torch.tensor([512])}, ("a.txt",))
    matrix.write(folder / "imatrix.gguf")
    assert engines.gguf_file(folder) == later
    result = run_cli(["verify", folder, "--for", "llama.cpp"])
    assert "imatrix.gguf" not in result.stdout + result.stderr
    assert "verdict: loads" in result.stdout


def test_recipes_are_listed_with_and_without_the_word(run_cli):
    listed = run_cli(["recipes", "list"])
    assert listed.code == 0
    assert listed.stdout == run_cli(["recipes"]).stdout
    assert json.loads(run_cli(["recipes", "list", "--json"]).stdout)


def test_gpus_may_be_given_one_by_one_or_with_commas(run_cli):
    apart = run_cli(["recommend", "8B", "--gpu", "L4", "--gpu", "L40S"])
    assert apart.code == 0
    assert apart.stdout == run_cli(["recommend", "8B", "--gpu", "L4,L40S"]).stdout
    assert all(name in apart.stdout for name in ("L4", "L40S"))


def test_several_models_on_several_gpus_are_a_usage_error(run_cli):
    result = run_cli(["recommend", "8B", "70B", "--gpu", "L4,L40S"])
    assert result.code == 2
    assert "one GPU only" in result.stderr


def test_models_that_do_not_fit_have_no_table_and_no_legend(run_cli):
    result = run_cli(["recommend", "8B", "32B", "--gpu", "L4", "--users", "64"])
    assert result.code == 1
    assert "no format fits for any of them" in result.stdout.splitlines()[0]
    assert "is the choice" not in result.stdout
    assert "fewer users: 1 at the same time" in result.stdout


def test_assumed_sizes_stand_together_and_names_are_aligned(run_cli):
    lines = run_cli(["recommend", "8B", "32B", "--gpu", "L4"]).stdout.splitlines()
    assumed = lines.index("Assumed")
    assert [line.split()[1] for line in lines[assumed + 1 : assumed + 3]] == ["8B", "32B"]
    chosen = [line for line in lines if line.startswith((" 8B ", " 32B "))]
    assert len({len(line) - len(line[4:].lstrip()) for line in chosen}) == 1


def test_without_a_bandwidth_there_are_no_empty_columns(run_cli):
    unknown = run_cli(["recommend", "8B", "--memory", "9GiB"]).stdout
    assert "first" not in unknown
    assert "tokens/s" not in unknown
    known = run_cli(["recommend", "8B", "--memory", "9GiB", "--bandwidth", "300GB/s"]).stdout
    assert "first: time to the first token" in known


def test_a_set_that_ships_is_not_called_a_missing_folder(run_cli):
    message = one_error(run_cli(["calibrate", "inspect", "general"]))
    assert "calibrate build general --model" in message
    assert "no folder" not in message


def test_avoided_text_that_cannot_be_read_is_told_with_advice_for_sets(
    run_cli, tmp_path, monkeypatch
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    build = ["calibrate", "build", "--model", "demo", "-o", tmp_path / "set"]
    text = tmp_path / "text.txt"
    text.write_text("Some words of a document. " * 400)
    for what in (["general"], ["--from", text, "--avoid", "wikitext"]):
        message = one_error(run_cli([*build, *what]))
        assert "needs the text of wikitext" in message
        assert "--avoid python_docs,python_quiz" in message
        assert "the set python-docs" in message
        assert "tasks python_docs" not in message


def test_a_short_log_is_told_the_option_that_works(run_cli, tmp_path):
    log = tmp_path / "log.jsonl"
    words = [f"word{n}" for n in range(200)]
    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(words, k=400))} for _ in range(12)]
    log.write_text("\n".join(map(json.dumps, rows)))
    build = ["calibrate", "build", "--model", "demo", "--from", log, "--length", "256"]
    message = one_error(run_cli([*build, "-o", tmp_path / "set"]))
    (asked,) = message.split("--samples ")[1:]
    n = asked.partition(",")[0]
    made = run_cli([*build, "--samples", n, "-o", tmp_path / "set"])
    assert made.code == 0, made.stderr


def test_quantize_without_a_choice_names_every_way_to_make_one(run_cli):
    message = one_error(run_cli(["quantize", "demo"]), 2)
    for option in ("--recipe", "--fit", "--bits", "--size"):
        assert option in message


def test_a_short_sweep_is_not_counted_in_thousandths_of_an_hour(run_cli, tmp_path):
    file = tmp_path / "sweep.yaml"
    file.write_text("models: [demo]\nrecipes: [rtn-w4a16]\ntasks: [python_docs]\ndevice: cpu\n")
    plan = run_cli(["sweep", "run", file, "-o", tmp_path / "runs", "--dry-run"]).stdout
    (last,) = [line for line in plan.splitlines() if "to do:" in line]
    assert "hours" not in last
    assert last.split("about ")[1].split()[1] in ("s", "min")


@pytest.mark.parametrize("command", ["run", "score", "sweep"])
def test_data_of_a_task_is_only_sought_where_the_option_exists(
    run_cli, tmp_path, monkeypatch, command
):
    """`run` and `sweep` have no --data: the advice names commands that do."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "sweep.yaml"
    file.write_text("models: [demo]\nrecipes: [fp8-dynamic]\ntasks: [wikitext]\n")
    asked = {
        "run": ["run", "demo", "-r", "fp8-dynamic", "--tasks", "wikitext"],
        "score": ["score", "demo", "--tasks", "wikitext"],
        "sweep": ["sweep", "run", file],
    }
    message = one_error(run_cli([*asked[command], "-o", tmp_path / "out"]))
    assert "--data DIR" in message
    for name in ("score", "compare"):
        assert name in message.partition("--data DIR")[0].rpartition("; ")[2]
        assert "--data" in run_cli([name, "--help"]).stdout


def test_scores_have_the_units_of_the_report(run_cli, tmp_path):
    asked = ["score", "demo", "--tasks", "python_quiz", "--limit", "4", "-o", tmp_path / "scores"]
    result = run_cli(asked)
    assert result.code == 0, result.stderr
    found = json.loads((tmp_path / "scores" / "source.json").read_text())
    share = found["scores"]["python_quiz/acc"]["value"]
    (row,) = [line for line in result.stdout.splitlines() if " python_quiz/acc " in line]
    assert metrics.shown("python_quiz/acc", share) in row.split()


def test_errors_of_layers_are_explained(run_cli, tmp_path):
    asked = ["quantize", "demo", "-r", "gptq-w4a16", "--calibration", "python-docs"]
    result = run_cli([*asked, "--samples", "4", "--length", "16", "-o", tmp_path / "out"])
    assert result.code == 0, result.stderr
    _, _, after = result.stdout.partition("worst layers")
    for term in ("output error:", "damping:"):
        assert term in after


def test_a_source_model_is_not_verified_but_a_checkpoint_is_asked_for(run_cli):
    for name in ("demo", DEMO_MODEL):
        message = one_error(run_cli(["verify", name]))
        assert f"{name} is not quantised" in message
        assert f"quantkit quantize {name} -r fp8-dynamic -o out" in message


def test_an_unknown_first_token_is_the_same_sign_on_terminal_and_page(run_cli, tmp_path):
    asked = ["recommend", "8B", "--memory", "9GiB", "--bandwidth", "300GB/s"]
    printed = run_cli(asked).stdout
    row = next(line.split() for line in printed.splitlines() if line.startswith(" gguf-q4_k_m"))
    assert row[3] == UNKNOWN
    run_cli([*asked, "--html", tmp_path / "page.html"])
    assert f">{UNKNOWN}</td>" in (tmp_path / "page.html").read_text()


def test_a_finished_report_is_replaced_only_with_force_and_then_completely(
    run_cli, demo_made, tmp_path
):
    out, scores = tmp_path / "report", tmp_path / "report" / "scores"
    asked = ["--tasks", "python_quiz", "-o", out]
    both = ["compare", "demo", demo_made / "fp8-dynamic", demo_made / "gguf-q8_0", *asked]
    assert run_cli([*both, "--limit", "4"]).code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again = ["compare", "demo", demo_made / "fp8-dynamic", "--limit", "2", *asked]
    message = one_error(run_cli(again))
    assert str(out / "report.json") in message
    assert "--force" in message
    assert "another --out" in message
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert run_cli([*again, "--force"]).code == 0
    names = {"source.json", "fp8-dynamic.json"}
    names |= {"source.answers.parquet", "fp8-dynamic.answers.parquet"}
    assert {path.name for path in scores.iterdir()} == names
    (candidate,) = json.loads((out / "report.json").read_text())["candidates"]
    assert candidate["name"] == "fp8-dynamic"


def test_scores_of_others_do_not_stay_beside_a_new_report(run_cli, demo_made, tmp_path):
    """An interrupted comparison leaves scores without a report."""
    out, asked = tmp_path / "report", ["--tasks", "python_quiz", "--limit", "2"]
    left = ["score", demo_made / "gguf-q8_0", *asked, "-o", out / "scores"]
    assert run_cli(left).code == 0
    call = ["compare", "demo", demo_made / "fp8-dynamic", *asked, "-o", out]
    message = one_error(run_cli(call))
    assert f"{out / 'scores'} has scores of gguf-q8_0" in message
    assert "--force" in message
    assert (out / "scores" / "gguf-q8_0.json").is_file()
    assert not (out / "report.json").exists()


def test_a_dry_run_of_a_budget_names_the_command_to_run_first(run_cli, tmp_path):
    given = ["--samples", "4", "--length", "16", "--formats", "int4-int8"]
    call = ["quantize", "demo", "--bits", "5", "--dry-run", *given, "-o", tmp_path / "out"]
    message = one_error(run_cli(call), code=2)
    words = shlex.split(message.split("`")[1])
    assert words[:3] == ["quantkit", "sensitivity", "demo"]
    assert words[3:5] == ["--calibration", "python-docs"]
    for option, value in zip(given[::2], given[1::2], strict=True):
        assert words[words.index(option) + 1] == value
    table = tmp_path / "table"
    made = run_cli([*words[1:-1], table])
    assert made.code == 0, made.stderr
    assert f"--sensitivity {words[-1]}" in message
    assert run_cli([*call, "--sensitivity", table]).code == 0
