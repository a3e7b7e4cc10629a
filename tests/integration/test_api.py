"""The examples of docs/api.md run as they are written, one after another."""

import re
from pathlib import Path

import pytest

import quantkit as qk
from quantkit.scoring import suites
from quantkit.scoring.options import Chat

pytestmark = pytest.mark.usefixtures("demo_is_short")

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def test_examples_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S):
        exec(compile(code, str(PAGE), "exec"), names)
    found = capsys.readouterr()
    assert "Did you mean gptq-w4a16" in found.out
    assert names["checkpoints"][0].folder == Path("out/gptq-w4a16")
    assert names["checked"].ok
    assert names["predicted"].ok
    assert Path("out/rtn-w4a16-g32").is_dir()
    assert names["updates"][-1].done == names["updates"][-1].total > 0
    assert names["same"].manifest.source.name == str(qk_demo())
    assert names["answer"].best
    assert "Writing model shards" not in found.err
    assert not names["verdict"].passed  # three documents are too few to judge by
    assert {path.name for path in Path("report").iterdir()} == {
        "report.json",
        "report.md",
        "report.html",
    }
    assert names["converted"].manifest.format == "gptq"


def test_every_exported_name_has_an_example():
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
    assert set(re.findall(r"\bqk\.(\w+)", code)) == set(qk.__all__)


def qk_demo():
    from quantkit import resources

    return resources.DEMO_MODEL


def test_functions_print_nothing(tmp_path, capfd):
    made = qk.quantize("demo", "rtn-w4a16", out=tmp_path)
    qk.verify(made[0].folder)
    qk.recommend("8B", gpu="H100")
    found = capfd.readouterr()
    assert (found.out, found.err) == ("", "")


def test_model_in_memory_needs_a_tokenizer(tmp_path):
    from tiny import SIZES
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    with pytest.raises(qk.errors.SourceError, match="tokenizer="):
        qk.quantize(model, "rtn-w8a16", out=tmp_path)
    with pytest.raises(qk.errors.SourceError, match="is not a model"):
        qk.quantize(3.5, "rtn-w8a16", out=tmp_path)


def test_scoring_takes_what_the_command_takes(monkeypatch):
    """Options of `quantkit score` that change answers reach the call under the same names."""
    from quantkit import api

    asked = []
    monkeypatch.setattr(api, "_done", lambda call, _: asked.append(call) or call)
    monkeypatch.setattr("quantkit.calls.score.Scoring.evaluations", [], raising=False)
    qk.score(
        "demo",
        tasks="damage",
        until=0.01,
        judge="json",
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        system_instruction="Be brief.",
        allow_code=True,
    )
    (call,) = asked
    assert call.until == 0.01
    assert call.asked.judge == "json"
    assert call.asked.chat == Chat(template=True, multiturn=True, system="Be brief.")
    assert call.asked.allow_code
    assert "humaneval" in suites.expanded(call.asked.tasks)


def test_calls_that_contradict_themselves(tmp_path):
    with pytest.raises(qk.errors.UsageError, match="serves one model"):
        qk.score(["demo", "demo"], tasks="python_docs", server="http://127.0.0.1:1")
    with pytest.raises(qk.errors.UsageError, match="GGUF"):
        qk.quantize("demo", "gguf-q8_0", out=tmp_path, format="gptq")
    with pytest.raises(qk.errors.UnknownName, match="gguf-q4_k_m"):
        qk.quantize("demo", "gguf-q4_k_n", out=tmp_path)
