"""Suites and lm-eval's own generative tasks, as a user names them; data written for the tests."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import READABLE, save_llama

from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.scoring import lmeval, loading, rules
from quantkit.scoring.generation import Generator
from quantkit.scoring.harness import evaluate
from quantkit.scoring.options import Chat, ScoreOptions
from quantkit.scoring.rules import Rules
from quantkit.scoring.task_needs import Tokenizer, seeded

pytestmark = pytest.mark.usefixtures("demo_is_short")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder like a hub's, with datasets of a few rows under their real names."""
    folder = tmp_path_factory.mktemp("hub")

    def write(place, rows):
        path = folder / f"{place}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def sums(numbers):
        return [
            {"question": f"What is {n} + {n}?", "answer": f"Twice.\n#### {2 * n}"} for n in numbers
        ]

    def configure(place, name, *splits):
        files = [{"split": split, "path": f"{name}/{split}.jsonl"} for split in splits]
        told = json.dumps({"configs": [{"config_name": name, "data_files": files}]})
        (folder / place / "README.md").write_text(f"---\n{told}\n---\n")

    write("openai/gsm8k/main/train", sums(range(8)))
    write("openai/gsm8k/main/test", sums(range(10, 13)))
    configure("openai/gsm8k", "main", "train", "test")
    program = {
        "task_id": "a/0",
        "prompt": "def one():\n    return 1\n\n\nassert one() == 1\nimport os  #",
        "canonical_solution": "",
        "test": "def check(f):\n    assert f() == 1\n",
        "entry_point": "one",
    }
    write("openai/openai_humaneval/test", [program])
    tests = ["assert f() == 1", "assert f() < 2", "assert f() > 0"]
    rows = [{"task_id": 11, "text": "Return 1.", "code": "", "test_list": tests}]
    write("google-research-datasets/mbpp/full/test", rows)
    configure("google-research-datasets/mbpp", "full", "test")
    write("google/IFEval/train", [instructed(*row) for row in INSTRUCTIONS])
    worked = [
        {"problem": f"What is ${n}+{n}$?", "solution": f"Twice: $\\boxed{{{2 * n}}}$."}
        for n in range(2)
    ]
    write("HuggingFaceH4/MATH-500/test", worked)
    write("baber/paul_graham_essays/train", [{"text": "Lists hold things in order. " * 400}])
    punkt = folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    punkt.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "ortho_context.tab", "sent_starters.txt"):
        (punkt / name).write_text("")  # a splitter without exceptions
    return folder


INSTRUCTIONS = (
    ("length_constraints:number_words", {"relation": "less than", "num_words": 100_000}),
    ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 5000}),
    (
        "change_case:capital_word_frequency",
        {"capital_relation": "at least", "capital_frequency": 9999},
    ),
    ("startend:quotation", {}),
)
"""IFEval's own checks and their settings; a model that writes anything passes the first two."""
FIELDS = ("relation", "num_words", "num_sentences", "capital_relation", "capital_frequency")


def instructed(check, settings):
    """A row of IFEval: the hub's table has a column for every setting of any check."""
    kwargs = [dict.fromkeys(FIELDS) | settings]
    return {"key": 1, "prompt": f"{check}.", "instruction_id_list": [check], "kwargs": kwargs}


@pytest.fixture
def answers(monkeypatch):
    """What models wrote, by their class, and what they were asked."""
    found, usual = {}, lmeval.run

    def run(lm, loaded, *more):
        results = usual(lm, loaded, *more)
        samples = [s for name in sorted(results["samples"]) for s in results["samples"][name]]
        found[type(lm).__name__] = [(s["arguments"][0][0], s["resps"]) for s in samples]
        return results

    monkeypatch.setattr(lmeval, "run", run)
    return found


@pytest.mark.slow
def test_lm_evals_own_tasks_are_scored_by_name(hub, tmp_path):
    tasks = ("gsm8k", "humaneval", "mbpp")
    asked = ScoreOptions(tasks, data=hub, cache=tmp_path, allow_code=True, max_length=2048)
    scores = evaluate(ModelSource.open("demo"), asked, "cpu").card.scores
    assert scores["gsm8k/exact_match"].n == 3
    assert "humaneval/pass@1" in scores
    assert scores["mbpp/pass_at_1"].value == 0


@pytest.fixture
def small(tmp_path):
    """A model with a long window that answers in moments."""
    sizes = READABLE | {"max_position_embeddings": 4200}
    return ModelSource.open(str(save_llama(tmp_path / "small", dtype="float32", **sizes)))


def test_instructions_and_maths_are_judged_by_lm_evals_own_code(hub, tmp_path, small, monkeypatch):
    """Its checks of instructions need NLTK's data, which lies beside the other data."""
    for package in ("langdetect", "immutabledict", "math_verify", "antlr4"):
        pytest.importorskip(package)
    of_task = rules.of_task
    short = lambda *given: replace(of_task(*given), max_new=64)  # noqa: E731
    monkeypatch.setattr(rules, "of_task", short)  # both would have it write over a thousand tokens
    asked = ScoreOptions(("ifeval", "minerva_math500"), data=hub, cache=tmp_path / "cache")
    found = evaluate(small, asked, "cpu")
    scores = found.card.scores
    assert scores["ifeval/prompt_level_strict_acc"].value == 0.5
    followed = [o.value for o in found.outcomes if o.metric == "prompt_level_strict_acc"]
    assert followed == [1, 1, 0, 0]
    for metric in ("exact_match", "math_verify"):
        assert scores[f"minerva_math500/{metric}"].n == 2
        assert scores[f"minerva_math500/{metric}"].value == 0  # a model of random numbers


@pytest.mark.slow
def test_needles_of_ruler_are_measured_with_the_models_tokenizer(hub, tmp_path, small):
    """The documents are those that lm-eval's own command makes, whatever was drawn before."""
    pytest.importorskip("wonderwords")
    import random

    from lm_eval.tasks.ruler.niah_utils import niah_single_1

    asked = ScoreOptions(
        ("niah_single_2", "niah_single_1"), data=hub, cache=tmp_path / "cache", limit=2
    )
    random.seed(5)
    before = random.getstate()
    scores = evaluate(small, asked, "cpu").card.scores
    assert random.getstate() == before
    for task in asked.tasks:
        assert scores[f"{task}/4096"].n == 2
    tokenizer = Tokenizer.of(small.folder)
    ours = lmeval.load(asked.tasks, hub, tokenizer=tokenizer)["tasks"]["niah_single_1"].eval_docs
    lengths = [len(load_tokenizer(small.folder)(doc["input"])["input_ids"]) for doc in ours]
    assert 3700 < min(lengths) <= max(lengths) <= 4096 - 128
    with seeded():
        theirs = niah_single_1(tokenizer=str(small.folder))["test"]
    assert ours["input"] == theirs["input"]


def test_conversations_are_put_as_lm_eval_puts_them(hub, tmp_path, answers):
    from lm_eval.models.huggingface import HFLM

    source = ModelSource.open("demo")
    chat = Chat(template=True, multiturn=True, system="Be brief.")
    asked = ScoreOptions(("gsm8k",), data=hub, num_fewshot=2, cache=tmp_path, chat=chat, limit=1)
    evaluate(source, asked, "cpu")
    with lmeval.quiet():
        theirs = HFLM(pretrained=str(source.folder), device="cpu", dtype="float32")
        lmeval.run(theirs, lmeval.load(["gsm8k"], hub, 2, 0), 1, None, chat)
    assert answers["EvaluatedModel"] == answers["HFLM"]
    prompt = answers["HFLM"][0][0]
    assert prompt.startswith("<|user|>\nBe brief.")
    assert prompt.count("<|user|>\nQuestion: What is ") == 3
    assert prompt.count("<|assistant|>\nTwice.") == 2
    assert prompt.endswith("<|assistant|>\n")


def test_quick_damage_needs_no_hub_and_shows_what_breaks_first(tmp_path, monkeypatch, run_cli):
    """Through the commands: quantise, score, report, gate."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    out, scores = tmp_path / "out", tmp_path / "scores"
    assert run_cli(["quantize", "demo", "-r", "rtn-w4a16", "-o", out, "-q"]).code == 0
    command = ["score", "demo", out / "rtn-w4a16", "--tasks", "damage-quick", "--limit", 2, "-q"]
    assert run_cli([*command, "-o", scores]).code == 0
    assert run_cli(["report", scores, "-o", tmp_path / "report"]).code == 0
    document = json.loads((tmp_path / "report" / "report.json").read_text())
    (candidate,) = document["candidates"]
    for name in ("first_difference", "same_answers", "top1_agreement", "kl_mean"):
        assert f"python_answers/{name}" in candidate["scores"]
    assert "breaks first" in (tmp_path / "report" / "report.html").read_text()
    for limit, code in ((0, 0), (65, 1)):
        policy = tmp_path / f"policy-{limit}.yaml"
        policy.write_text(f"rules:\n  - first_difference: {{min: {limit}}}\n")
        gated = run_cli(["gate", tmp_path / "report" / "report.json", "--policy", policy])
        assert gated.code == code, gated.stderr


def test_demo_is_asked_what_it_has(tmp_path, monkeypatch, run_cli):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert run_cli(["score", "demo", "--limit", 2, "-q", "-o", tmp_path / "scores"]).code == 0
    (file,) = (tmp_path / "scores").glob("*.json")
    scores = json.loads(file.read_text())["scores"]
    tasks = {name.partition("/")[0] for name in scores}
    assert tasks == {"python_docs", "python_quiz", "python_answers"}


@pytest.mark.slow
@pytest.mark.skipif("QUANTKIT_SMOLLM2" not in os.environ, reason="QUANTKIT_SMOLLM2 names no folder")
@torch.no_grad()
def test_answers_of_smollm2_are_those_of_transformers():
    """Token for token in float32, with rows that leave a batch and others that join it."""
    source = ModelSource.open(str(Path(os.environ["QUANTKIT_SMOLLM2"])))
    model, tokenizer = (
        loading.load(source, torch.device("cpu"), dtype=torch.float32),
        load_tokenizer(source.folder),
    )
    texts = ["Question: What is 7 + 5?\nAnswer:", "def fibonacci(n):", "The capital of France is"]
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in texts]
    rules = Rules(24, ends=(tokenizer("\n")["input_ids"][-1],))
    generator = Generator(model, max_rows=2)
    assert generator.decoder is not None
    found = {}
    for batch in generator.answers(prompts, rules, str):
        found.update(batch)
    for place, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=list(rules.ends),
            pad_token_id=0,
        )
        assert found[place] == tuple(made[0, len(prompt) :].tolist())
