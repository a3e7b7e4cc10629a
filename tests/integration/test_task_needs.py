"""What tasks need is named in one sentence, before a model is loaded."""

import json
import re
from dataclasses import replace
from importlib import metadata

import pytest

from quantkit.errors import MissingDependency, QuantkitError, ScoreError
from quantkit.model.source import ModelSource
from quantkit.scoring import loading, task_needs
from quantkit.scoring.harness import evaluate
from quantkit.scoring.options import ScoreOptions

HELPERS = {
    "plain": "import no_such_package.part",
    "wrapped": """
try:
    import wonderwords_no_more
except ImportError as error:
    raise ImportError("Please install it.\\nSee the manual.") from error
""",
    "unnamed": 'raise ImportError("cannot import name x")',
    "known": 'raise ModuleNotFoundError("no langdetect", name="langdetect")',
    "nltk": 'import nltk\nnltk.download("no_such_data", quiet=True)',
    "broken": "assert False, 'version 4.9 is too old.'",
}


@pytest.fixture
def define(tmp_path):
    """Write a task whose code begins with some lines."""

    def write(name, helper="", rows=1, more=""):
        (tmp_path / "code.py").write_text(f"{helper}\ndef text(doc):\n    return 'One'\n")
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps({"a": "1"}) + "\n" for _ in range(rows)))
        (tmp_path / f"{name}.yaml").write_text(
            f"""
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: !function code.text
doc_to_target: a
generation_kwargs: {{until: ["\\n"], max_gen_toks: 1}}
metadata: {{version: 1}}
{more}
"""
        )
        return ScoreOptions((str(tmp_path / f"{name}.yaml"),), cache=tmp_path / "cache")

    return write


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("plain", MissingDependency, r"needs the package no_such_package; .*install no_such_pack"),
        ("wrapped", MissingDependency, r"needs the package wonderwords_no_more; install it: pip"),
        ("unnamed", MissingDependency, r"a package \(cannot import name x\)"),
        (
            "known",
            MissingDependency,
            r"langdetect; install it: pip install .*\[tasks\]'",
        ),
        ("nltk", ScoreError, r"needs NLTK's no_such_data, .*nltk\.downloader no_such_data.*--data"),
        ("broken", ScoreError, r"cannot load the task broken: version 4\.9 is too old; check"),
    ],
)
def test_what_a_task_lacks_is_named_before_a_model_is_loaded(
    name, kind, words, define, monkeypatch
):
    monkeypatch.setattr(loading, "load", lambda *more: pytest.fail("a model is loaded"))
    with pytest.raises(kind, match=words) as raised:
        evaluate(ModelSource.open("demo"), define(name, HELPERS[name]), "cpu")
    assert "\n" not in str(raised.value)


def test_a_task_of_two_names_is_asked_once(define, tmp_path):
    asked = define("alone")
    (tmp_path / "both.yaml").write_text("group: both\ntask: [alone]\n")
    asked = replace(asked, tasks=(*asked.tasks, str(tmp_path / "both.yaml")))
    with pytest.raises(ScoreError, match=r"asks for alone twice, once in both; leave one out"):
        evaluate(ModelSource.open("demo"), asked, "cpu")


def test_data_of_another_shape_is_named(define, tmp_path):
    """A folder of data that lacks the part of the dataset that the task reads."""
    asked = define("parted")
    task = tmp_path / "parted.yaml"
    lines = task.read_text().replace("dataset_path: json", "dataset_path: team/sums")
    task.write_text(lines.replace("dataset_kwargs", "dataset_name: main\ndataset_kwargs", 1))
    (tmp_path / "team" / "sums").mkdir(parents=True)
    (tmp_path / "team" / "sums" / "test.jsonl").write_text('{"a": "1"}\n')
    with pytest.raises(ScoreError, match=r"cannot load the task parted: .*main"):
        evaluate(ModelSource.open("demo"), replace(asked, data=tmp_path), "cpu")


def test_a_folder_s_code_is_not_run_to_measure_documents(tmp_path):
    """lm-eval would load the tokenizer with permission for any code."""
    from transformers import AutoTokenizer

    source = ModelSource.open("demo")
    wanted, told = task_needs.Tokenizer.of(source.folder), {"tokenizer": ""}
    with task_needs.measured_by(wanted, told):
        assert not told["tokenizer"].startswith("/")
        found = AutoTokenizer.from_pretrained(told["tokenizer"], trust_remote_code=True)
        assert found("One")["input_ids"] == wanted.load()("One")["input_ids"]
        assert AutoTokenizer.from_pretrained(source.folder)("One") == found("One")
    assert told == {"tokenizer": ""}
    with pytest.raises((OSError, QuantkitError)):
        AutoTokenizer.from_pretrained(wanted.name)


def test_the_extra_names_what_lm_evals_tasks_import():
    imported = {"antlr4-python3-runtime": "antlr4"}
    wanted = set()
    for line in metadata.requires("lm_eval"):
        if found := re.match(r"([\w-]+).*extra == .(ifeval|math|ruler).$", line):
            wanted.add(imported.get(found[1], found[1]))
    assert wanted
    assert wanted <= task_needs.EXTRA
