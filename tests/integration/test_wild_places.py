"""Checkpoints of other tools wherever they lie: GGUF files, the hub's cache, behind a gate."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from foreign import changed, disowned
from tiny import READABLE, save_llama

import quantkit
from quantkit.bench.model import Model
from quantkit.model.source import read_tensors

PROBE = """
import sys
from quantkit import errors, opening
for name in sys.argv[1:]:
    try:
        print(opening.find(name, None, False).declared.words)
    except errors.SourceError as error:
        print("SourceError:", error)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "model"
    return save_llama(folder, **READABLE | {"hidden_size": 256, "head_dim": 64})


@pytest.fixture(scope="module")
def theirs(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("theirs")
    (made,) = quantkit.quantize(model, ["rtn-w4a16"], out=out / "ours", device="cpu")
    return disowned(made.folder, out / "w4a16")


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("gguf")
    (made,) = quantkit.quantize(model, ["gguf-q4_0"], out=out, device="cpu")
    place = out / "somebody" / "model-q4_0.gguf"
    place.parent.mkdir()
    shutil.copyfile(made.gguf.path, place)
    return place


def test_a_gguf_file_of_anybody_is_verified(file, run_cli):
    for path in (file, file.parent):
        result = run_cli(["verify", path])
        assert result.code == 0, result.stderr
        assert "Q4_0" in result.stdout
        assert result.stdout.splitlines()[-1] == "verdict: sound"
        predicted = run_cli(["verify", path, "--for", "llama.cpp"])
        assert predicted.code == 0, predicted.stderr
        assert predicted.stdout.splitlines()[-1] == "verdict: loads"


def test_damaged_gguf_files_are_named(file, tmp_path, run_cli):
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:-4096])
    other = tmp_path / "other.gguf"
    other.write_bytes(whole.replace(b"llama", b"lluma"))
    for path, rule in ((cut, "gguf-header"), (other, "gguf-architecture")):
        assert run_cli(["verify", path]).code == 1
        found = run_cli(["verify", path, "--for", "llama.cpp", "--json"])
        assert found.code == 1
        assert rule in {one["rule"] for one in json.loads(found.stdout)["findings"]}


def from_hub(names, tmp_path, **environment):
    """What a process says of hub ids where snapshots lie in the hub's own cache layout."""
    known = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub")}
    known.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *names],
        env=known | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_hub_id_in_the_cache_and_a_hub_out_of_reach(theirs, tmp_path):
    snapshot = tmp_path / "hub/models--org--model/snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.copytree(theirs, snapshot)
    reference = snapshot.parents[1] / "refs/main"
    reference.parent.mkdir()
    reference.write_text("a" * 40)
    told = from_hub(["org/other", "org/model"], tmp_path, HF_HUB_OFFLINE="1")
    assert told.startswith("SourceError: org/other")
    assert told.splitlines()[-1] == "compressed-tensors: W4A16 g128"
    unreachable = from_hub(["org/other"], tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable.startswith("SourceError")


@pytest.fixture
def repository(file, tmp_path, monkeypatch):
    """Repositories of GGUF files in the hub's cache, one with two of them."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for name, kinds in (("one", ["Q4_0"]), ("two", ["Q4_0", "Q8_0"])):
        snapshot = tmp_path / f"hub/models--org--{name}-GGUF/snapshots" / ("b" * 40)
        snapshot.mkdir(parents=True)
        for kind in kinds:
            shutil.copyfile(file, snapshot / f"model-{kind}.gguf")
        reference = snapshot.parents[1] / "refs/main"
        reference.parent.mkdir()
        reference.write_text("b" * 40)
    return tmp_path


def test_gguf_files_of_a_hub_are_named_by_repository_and_kind(repository, model, run_cli):
    asked = ["--tasks", "python_docs", "--limit", "1", "--device", "cpu", "-o", repository / "out"]
    for name in ("org/two-GGUF:Q4_0", "org/two-GGUF:q4_0", "org/one-GGUF"):
        scored = run_cli(["score", name, "--source", model, *asked])
        assert scored.code == 0, scored.stderr
        assert "model-Q4_0" in scored.stdout
    plain = ["convert", "org/two-GGUF:Q4_0", "--to", "bf16", "-o", repository / "plain"]
    assert run_cli(plain).code == 0
    made = ["quantize", "org/two-GGUF:Q4_0", "-r", "rtn-w4a16", "-o", repository / "made"]
    assert run_cli([*made, "--requantize", "--device", "cpu"]).code == 0


def test_verify_and_bench_take_hub_ids(repository, theirs, run_cli, monkeypatch):
    snapshot = repository / "hub/models--org--w4a16/snapshots" / ("c" * 40)
    shutil.copytree(theirs, snapshot)
    reference = snapshot.parents[1] / "refs/main"
    reference.parent.mkdir()
    reference.write_text("c" * 40)
    for name, asked in (
        ("org/w4a16", []),
        ("org/w4a16", ["--for", "vllm"]),
        ("org/two-GGUF:Q4_0", []),
        ("org/one-GGUF:q4", ["--for", "llama.cpp"]),
    ):
        found = run_cli(["verify", name, *asked])
        assert found.code == 0, found.stderr
        assert found.stdout.splitlines()[-1] in ("verdict: sound", "verdict: loads")
    missing = run_cli(["verify", "org/none"])
    assert missing.code == 3
    assert "org/none is neither a folder here nor in the hub cache" in missing.stderr
    assert Model.of(Path("org/w4a16")).name == "w4a16"
    assert Model.of(Path("org/two-GGUF:Q4_0")).name == "model-Q4_0"
    served = run_cli(["serve", "org/w4a16", "--gpu", "H200", "--dry-run", "--json"])
    assert served.code == 0, served.stderr
    assert str(snapshot) in served.stdout
    assert "w4a16" in json.loads(served.stdout)["command"]
    # A path below a folder that is there is misspelt, and asks no hub.
    monkeypatch.chdir(repository)
    typo = run_cli(["verify", "hub/nothing"])
    assert typo.code == 3
    assert "hub cache" not in typo.stderr


def test_what_a_hub_does_not_have_is_one_sentence(repository, model, run_cli):
    for name, words in (
        ("org/two-GGUF:Q6_K", "has no GGUF file with Q6_K in the name; it has: model-Q4_0.gguf"),
        ("org/two-GGUF:model", "has several GGUF files with model in the name"),
        ("org/two-GGUF", "it has no config.json; a GGUF file in a hub is named as org/repo:Q4_K_M"),
        ("org/none-GGUF:Q4_0", "org/none-GGUF is neither a folder here nor in the hub cache"),
    ):
        found = run_cli(["score", name, "--source", model, "--tasks", "python_docs"])
        assert found.code == 3, found.stdout
        assert words in found.stderr
        assert len(found.stderr.splitlines()) == 1


def test_pickles_and_code_are_refused(theirs, tmp_path, run_cli):
    pickled = tmp_path / "pickled"
    shutil.copytree(theirs, pickled)
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    found = run_cli(["verify", pickled, "--for", "vllm", "--json"])
    assert found.code == 1
    assert "pickled weights only" in json.loads(found.stdout)["findings"][0]["what"]
    refused = run_cli(["verify", pickled])
    assert refused.code != 0
    assert "pickled weights only" in refused.stdout
    code = tmp_path / "code"
    shutil.copytree(theirs, code)
    config = json.loads((code / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "mine.Config"}}
    (code / "config.json").write_text(json.dumps(config))
    (code / "mine.py").write_text("raise SystemExit('run')")
    refused = run_cli(["verify", code])
    assert refused.code == 3
    assert "--trust-remote-code" in refused.stderr
    # Headers are judged without running anything of the model's.
    assert run_cli(["verify", code, "--for", "vllm"]).code == 0


def test_a_gate_knows_the_folder_that_was_scored(model, theirs, tmp_path, run_cli):
    asked = ["--tasks", "python_docs", "--limit", "1", "--device", "cpu"]
    run_cli(["compare", model, theirs, *asked, "-o", tmp_path / "out"])
    report = next((tmp_path / "out").glob("*.json"))
    policy = tmp_path / "policy.yaml"
    policy.write_text("rules:\n  - perplexity: {max_increase_pct: 500}\n")
    gate = ["gate", report, "--policy", policy, "--checkpoint"]
    passed = run_cli([*gate, theirs])
    assert passed.code == 0, passed.stderr
    assert "as scored" in passed.stdout
    name = "model.layers.0.mlp.down_proj.weight_scale"
    scale = read_tensors(theirs)[name].read()
    spoilt = changed(theirs, tmp_path / "w4a16", **{name: scale * 2})
    failed = run_cli([*gate, spoilt])
    assert failed.code == 1
    assert "was changed after it was scored" in failed.stdout + failed.stderr


def test_the_card_of_a_hub_id_goes_into_a_folder_here(repository, theirs, run_cli, monkeypatch):
    snapshot = repository / "hub/models--org--w4a16/snapshots" / ("d" * 40)
    shutil.copytree(theirs, snapshot)
    (snapshot / "README.md").write_text("What its maker wrote.\n")
    reference = snapshot.parents[1] / "refs/main"
    reference.parent.mkdir()
    reference.write_text("d" * 40)
    here = repository / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    found = run_cli(["card", "org/w4a16", "org/two-GGUF:Q4_0"])
    assert found.code == 0, found.stderr
    assert found.stdout.splitlines() == [
        "w4a16/README.md written", "two-GGUF/README.md written"
    ]  # fmt: skip
    card = (here / "w4a16/README.md").read_text()
    assert "# w4a16" in card
    assert "What its maker wrote." in card
    assert (snapshot / "README.md").read_text() == "What its maker wrote.\n"
    assert "Q4_0" in (here / "two-GGUF/README.md").read_text()
    again = run_cli(["card", "org/w4a16"])
    assert again.stdout == "w4a16/README.md is up to date\n"
    missing = run_cli(["card", "org/none"])
    assert missing.code == 3
    assert "org/none is neither a folder here nor in the hub cache" in missing.stderr
    assert len(missing.stderr.splitlines()) == 1
