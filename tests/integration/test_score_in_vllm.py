"""`score --backend vllm`: the engine is started, held against the folder, asked, and ended."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_completions import MAX_LENGTH

import quantkit
from quantkit.cli.main import main
from quantkit.errors import EngineError
from quantkit.model.source import ModelSource
from quantkit.scoring import server_identity
from quantkit.scoring.connected_model import determining
from quantkit.scoring.options import ScoreOptions

PYTHON = """#!{python}
print({answer!r})
"""
SERVER = """#!{python}
import os, sys
sys.path.insert(0, {tests!r})
from quantkit.model import lean_import
lean_import.load()
import torch
from fake_completions import Fake
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.scoring import loading

words = sys.argv[1:]
open({seen!r}, "w").write(str(os.getpid()))
open({seen!r} + ".words", "w").write(" ".join(words))
source = ModelSource.open(words[1])
model = loading.load(source, torch.device("cpu"))
port = int(words[words.index("--port") + 1])
fake = Fake(model, load_tokenizer(source.folder), port)
fake.cards[0]["id"] = words[words.index("--served-model-name") + 1]
fake.start(version="0.26.0")
fake.serve_forever(0.05)
"""


@pytest.fixture
def engine(tmp_path):
    """An environment whose vLLM answers from the real model; `pid` says that it was started."""
    folder = tmp_path / "env"
    folder.mkdir()
    tests, seen = str(Path(__file__).parents[1]), str(folder / "pid")
    answer = '[true, {"vllm": "0.26.0"}]'
    for name, text in (
        ("python", PYTHON.format(python=sys.executable, answer=answer)),
        ("vllm", SERVER.format(python=sys.executable, tests=tests, seen=seen)),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def test_a_model_is_scored_in_vllm_that_is_started_and_ended(
    engine, short_demo, tmp_path, monkeypatch
):
    monkeypatch.setattr(server_identity, "N_PROMPTS", (8, 16))  # enough, and sooner
    how = {"tasks": ["python_docs"], "limit": 1, "max_length": MAX_LENGTH, "device": "cpu"}
    how["cache"] = tmp_path / "cache"
    folder = str(short_demo.folder)
    (here,) = quantkit.score(folder, **how)
    flags = ["--dtype", "float32", "--max-model-len", "64"]
    (there,) = quantkit.score(
        folder, **how, backend="vllm", python=engine / "python", engine_args=flags
    )
    assert (engine / "pid.words").read_text().split()[-4:] == flags
    ours, theirs = (e.card.scores["python_docs/perplexity"] for e in (here, there))
    assert theirs.value == pytest.approx(ours.value, rel=1e-5)
    assert there.card.served.version == "0.26.0"
    assert there.card.device.startswith("served at http://127.0.0.1:")
    with pytest.raises(ProcessLookupError):
        os.kill(int((engine / "pid").read_text()), 0)


def test_an_engine_that_dies_says_why(engine, short_demo, tmp_path, monkeypatch):
    """As it does out of memory: some requests are answered, then nothing listens any more."""
    server = (engine / "vllm").read_text()
    (engine / "vllm").write_text(
        server.replace(
            "fake.serve_forever(0.05)",
            """
answer = fake.answer
def dies(body):
    if len(fake.bodies) > 1:
        print("RuntimeError: the worker met an illegal instruction", flush=True)
        os._exit(1)
    return answer(body)
fake.answer = dies
fake.serve_forever(0.05)
""",
        )
    )
    monkeypatch.setattr(server_identity, "N_PROMPTS", (8, 16))
    monkeypatch.setattr("quantkit.scoring.endpoint.BACKOFF_S", 0.01)
    how = {"tasks": ["python_docs"], "limit": 1, "max_length": MAX_LENGTH, "device": "cpu"}
    how |= {"cache": tmp_path / "cache", "backend": "vllm", "python": engine / "python"}
    with pytest.raises(EngineError, match=r"(?s)vLLM stopped while .* resumes.*illegal instruct"):
        quantkit.score(str(short_demo.folder), **how)


def test_an_engine_that_is_started_again_resumes(engine, short_demo, tmp_path, monkeypatch):
    """At another address, later, with the same flags."""
    server = (
        (engine / "vllm")
        .read_text()
        .replace('fake.start(version="0.26.0")', 'fake.start(os.getpid(), version="0.26.0")')
    )
    told = "lambda body: dies() if len(fake.bodies) > LAST else answer(body)"
    dying = server.replace(
        "fake.serve_forever(0.05)",
        f"""
answer = fake.answer
def dies():
    print("RuntimeError: out of memory", flush=True)
    os._exit(1)
fake.answer = {told}
fake.serve_forever(0.05)
""",
    )
    monkeypatch.setattr(server_identity, "N_PROMPTS", (8, 16))
    monkeypatch.setattr("quantkit.scoring.endpoint.BACKOFF_S", 0.01)
    monkeypatch.setattr("quantkit.scoring.endpoint.REQUEST_TOKENS", 64)  # a window a request
    how = {"tasks": ["python_docs"], "limit": 3, "max_length": MAX_LENGTH, "device": "cpu"}
    how |= {"cache": tmp_path / "cache", "backend": "vllm", "python": engine / "python"}
    (engine / "vllm").write_text(dying.replace("LAST", "35"))
    with pytest.raises(EngineError, match="resumes"):
        quantkit.score(str(short_demo.folder), **how)
    (engine / "vllm").write_text(server)
    (found,) = quantkit.score(str(short_demo.folder), **how)
    assert 0 < found.card.cached["python_docs"] < 1


def test_answers_are_those_of_a_version_with_its_flags():
    facts = {"url": "a", "model": "m", "root": "", "max_model_len": "64", "version": "1"}
    facts |= {"started": "1", "flags": "blocks=5"}
    later = facts | {"url": "b", "started": "2", "flags": "blocks=6"}
    ours = ScoreOptions((), server="x", is_started=True)
    assert determining(facts, ours) == determining(later, ours)
    assert determining(facts | {"version": "2"}, ours) != determining(facts, ours)
    other = replace(ours, engine_args=("--dtype", "float32"))
    assert determining(facts, other) != determining(facts, ours)
    theirs = ScoreOptions((), server="x")  # one that somebody else may have started anew
    assert determining(facts, theirs) != determining(later, theirs)


def test_what_is_missing_is_said_before_anything_is_loaded(engine, short_demo, tmp_path, capsys):
    asked = ["score", str(short_demo.folder), "--tasks", "python_docs"]
    with pytest.raises(EngineError, match="no Python at"):
        quantkit.score(str(short_demo.folder), tasks=["x"], backend="vllm", python=tmp_path / "no")
    assert main([*asked, "--python", str(engine / "python")]) == 2
    assert "--backend vllm" in capsys.readouterr().err
    assert main([*asked, "--backend", "vllm", "--server", "http://127.0.0.1:1"]) == 2
    assert "leave out --server" in capsys.readouterr().err
    assert main([*asked, "--engine-args", "--dtype float32"]) == 2
    assert "--engine-args are vLLM's flags: add --backend vllm" in capsys.readouterr().err
    assert main([*asked, "--backend", "vllm", "--engine-args", "'--dtype"]) == 2
    assert "no closing quotation" in capsys.readouterr().err
    assert not (engine / "pid").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    "QUANTKIT_VLLM" not in os.environ, reason="QUANTKIT_VLLM names no Python that has vLLM"
)
def test_real_vllm_is_scored_and_leaves_nothing_behind(tmp_path):
    folder = str(shutil.copytree(ModelSource.open("demo").folder, tmp_path / "model"))
    how = {"tasks": ["python_docs"], "limit": 2, "max_length": 1000, "cache": tmp_path / "cache"}
    (here,) = quantkit.score(folder, **how)
    engine = {"backend": "vllm", "python": os.environ["QUANTKIT_VLLM"]}
    (there,) = quantkit.score(folder, **how, **engine, engine_args=["--max-model-len", "1002"])
    ours, theirs = (e.card.scores["python_docs/perplexity"] for e in (here, there))
    assert theirs.n == ours.n
    assert theirs.value == pytest.approx(ours.value, rel=0.01)
    commands = [command_line(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert not [command for command in commands if folder.encode() in command]
    assert not [command for command in commands if command.startswith(b"VLLM::")]


def command_line(path):
    """Empty for a zombie, and for a process that ends meanwhile."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
