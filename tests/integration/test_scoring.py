"""Scoring as people run it: from a folder of data, again, interrupted, compared."""

import json
import random
import shutil

import pytest
import torch
from notes import Notes

from quantkit import resources
from quantkit.errors import CheckpointError, ScoreError
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.onepass.run import quantize
from quantkit.progress import Silent
from quantkit.recipe import Recipe
from quantkit.report.comparison import Report
from quantkit.scoring import answering, lmeval, loading
from quantkit.scoring.answering import Answerer
from quantkit.scoring.evaluation import read_all
from quantkit.scoring.harness import evaluate, sizes_of
from quantkit.scoring.options import ScoreOptions
from quantkit.scoring.sample_size import score_until

N_QUESTIONS = 24
TASK = "mmlu_anatomy"
WORDS = [
    "list",
    "dict",
    "tuple",
    "string",
    "integer",
    "float",
    "bytes",
    "module",
    "class",
    "method",
    "import",
    "return",
]


def write_questions(folder, n_questions=N_QUESTIONS, seed=0):
    """A folder like a hub's, with one subject of MMLU in it, and questions of our own."""
    rng = random.Random(seed)
    place = folder / "cais" / "mmlu"
    (place / "anatomy").mkdir(parents=True, exist_ok=True)
    splits = {"test": n_questions, "validation": 4, "dev": 5}
    lines = ["---", "configs:", "- config_name: anatomy", "  data_files:"]
    for split, n in splits.items():
        lines += [f"  - split: {split}", f"    path: anatomy/{split}.jsonl"]
        rows = []
        for _ in range(n):
            choices = rng.sample(WORDS, 4)
            question = f"Which word follows {' '.join(rng.choices(WORDS, k=6))}?"
            row = {"question": question, "subject": "anatomy", "choices": choices}
            rows.append(json.dumps(row | {"answer": rng.randrange(4)}))
        (place / "anatomy" / f"{split}.jsonl").write_text("\n".join(rows) + "\n")
    (place / "README.md").write_text("\n".join([*lines, "---", ""]))
    return folder


@pytest.fixture
def data(tmp_path):
    return write_questions(tmp_path / "hub")


@pytest.fixture
def counted(monkeypatch):
    """How many requests a model was really asked."""
    asked = []
    answers = Answerer.answers

    def counting(self, requests, watcher=None):
        for batch in answers(self, requests, watcher):
            asked.append(len(batch))
            yield batch

    monkeypatch.setattr(Answerer, "answers", counting)
    return asked


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    (made,) = quantize(
        ModelSource.open("demo"), [Recipe.load("rtn-w4a16")], tmp_path_factory.mktemp("out"), "cpu"
    )
    return made


def ask(data, tmp_path, target=None, **more):
    progress = more.pop("progress", None)
    asked = ScoreOptions((TASK,), num_fewshot=2, data=data, cache=tmp_path / "cache", **more)
    return evaluate(target or ModelSource.open("demo"), asked, "cpu", progress)


def test_nothing_is_answered_twice(data, tmp_path, counted):
    told = Notes()
    first = ask(data, tmp_path, progress=told)
    assert told.notes == []
    assert sum(counted) == 4 * N_QUESTIONS
    assert first.card.scores[f"{TASK}/acc"].n == N_QUESTIONS
    counted.clear()
    second = ask(data, tmp_path, progress=told)
    assert told.notes == [f"demo: all answers come from the cache {tmp_path / 'cache'}"]
    assert sum(counted) == 0
    assert second.card.scores == first.card.scores
    assert second.outcomes == first.outcomes


def test_changed_data_is_asked_again(data, tmp_path, counted):
    before = ask(data, tmp_path)
    counted.clear()
    write_questions(data, seed=1)
    after = ask(data, tmp_path)
    assert sum(counted) == 4 * N_QUESTIONS
    assert [o.doc_hash for o in after.outcomes] != [o.doc_hash for o in before.outcomes]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"max_length": 32}, {"max_length": 512}),
        ({"max_length": 512}, {"max_length": 32}),
        ({"num_fewshot": 0}, {"num_fewshot": 2}),
        ({"num_fewshot": 2, "seed": 0}, {"num_fewshot": 2, "seed": 1}),
    ],
    ids=["longer", "shorter", "few-shot", "other examples"],
)
def test_other_settings_are_computed_again(data, tmp_path, first, second):
    """What is kept never answers for what another setting would compute."""

    def scored(cache, **settings):
        asked = ScoreOptions((TASK,), limit=10, data=data, cache=tmp_path / cache, **settings)
        return evaluate(ModelSource.open("demo"), asked, "cpu")

    before = scored("shared", **first)
    after, fresh = scored("shared", **second), scored("alone", **second)
    assert after.outcomes == fresh.outcomes
    assert after.card.scores == fresh.card.scores
    assert before.outcomes != after.outcomes or "seed" in second


def asked_of(folder, device, instances, **more):
    """Log-probabilities by a model that keeps answers in a folder, and how many it kept."""
    from quantkit.scoring.model import EvaluatedModel, How

    with lmeval.quiet():
        lm = EvaluatedModel(
            ModelSource.open("demo"), torch.device(device), How(64), folder, Silent(), False
        )
    try:
        return lm.loglikelihood(instances), lm.cache_hits
    finally:
        lm.close()


def test_chat_template_and_precision_are_part_of_the_key(tmp_path, monkeypatch):
    from lm_eval.api.instance import Instance

    def instance(context):
        return Instance("loglikelihood", {}, (context, " list"), 0, metadata=("task", 0, 1))

    plain = [instance("What holds many things?")]
    chat = [instance("<|user|>What holds many things?<|assistant|>")]
    (one,), kept = asked_of(tmp_path, "cpu", plain)
    assert kept == ""
    (again,), kept = asked_of(tmp_path, "cpu", plain)
    assert again == one
    assert "all answers" in kept
    (other,), kept = asked_of(tmp_path, "cpu", chat)
    assert kept == ""
    assert other != one
    monkeypatch.setattr(loading, "compute_dtype", lambda device: torch.float64)
    (finer,), kept = asked_of(tmp_path, "cpu", plain)
    assert kept == ""
    assert finer != one


@pytest.mark.parametrize("max_length", [64, 1024])
def test_windows_are_part_of_the_key(tmp_path, max_length):
    def scored(cache, length):
        asked = ScoreOptions(("python_docs",), limit=1, max_length=length, cache=tmp_path / cache)
        return evaluate(ModelSource.open("demo"), asked, "cpu").card.scores

    scored("shared", 256)
    assert scored("shared", max_length) == scored("alone", max_length)


def test_only_text_is_counted_where_the_tokenizer_adds_a_beginning(tmp_path):
    """Predicting BOS after BOS is part of lm-eval's sums, and none of ours."""
    folder = tmp_path / "model"
    shutil.copytree(resources.DEMO_MODEL, folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    beginning = "<|endoftext|>"
    described["post_processor"]["single"].insert(
        0, {"SpecialToken": {"id": beginning, "type_id": 0}}
    )
    described["post_processor"]["special_tokens"] = {
        beginning: {"id": beginning, "ids": [0], "tokens": [beginning]}
    }
    (folder / "tokenizer.json").write_text(json.dumps(described))
    asked = ScoreOptions(("python_docs",), limit=3, cache=tmp_path / "cache")
    plain = evaluate(ModelSource.open("demo"), asked, "cpu")
    marked = evaluate(ModelSource.open(str(folder)), asked, "cpu")
    own = "python_docs/perplexity"
    assert marked.card.scores[own].n == plain.card.scores[own].n
    model = loading.load(ModelSource.open("demo"), torch.device("cpu"))
    tokenizer = load_tokenizer(folder)
    task = lmeval.load(["python_docs"], None)["tasks"]["python_docs"]
    n_checked = 0
    for outcome in marked.outcomes:
        ids = tokenizer(task.doc_to_target(task.eval_docs[outcome.doc_id]))["input_ids"]
        assert ids[0] == 0
        assert outcome.weight == len(ids) - 1
        if len(ids) <= 1024:  # one window
            with torch.no_grad():
                logits = model(torch.tensor([[0, *ids[:-1]]])).logits[0].log_softmax(-1)
            values = logits.gather(1, torch.tensor(ids)[:, None])[1:, 0]
            assert outcome.value == pytest.approx(-values.sum().item(), rel=1e-4)
            n_checked += 1
    assert n_checked
    assert marked.card.scores["python_docs/kl_mean"].n == marked.card.scores[own].n


def test_an_interrupted_run_goes_on(data, tmp_path, counted, monkeypatch):
    monkeypatch.setitem(answering.TOKENS_PER_BATCH, "cpu", 200)
    batch, calls = Answerer._batch, []

    def stopping(self, *arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return batch(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Answerer, "_batch", stopping)
        with pytest.raises(KeyboardInterrupt):
            ask(data, tmp_path)
    done = sum(counted)
    assert 0 < done < 4 * N_QUESTIONS
    counted.clear()
    ask(data, tmp_path)
    assert sum(counted) == 4 * N_QUESTIONS - done


def test_candidates_are_compared_answer_by_answer(data, tmp_path, rounded):
    source, candidate = ask(data, tmp_path), ask(data, tmp_path, rounded)
    for evaluation in (source, candidate):
        evaluation.write(tmp_path / "scores")
    report = Report.of(read_all([tmp_path / "scores"]))
    (finding,) = [f for f in report.findings["rtn-w4a16"] if f.score == f"{TASK}/acc"]
    right = [
        {o.doc_id: o.value for o in e.outcomes if o.metric == "acc"} for e in (source, candidate)
    ]
    assert finding.change.lost == sum(right[0][i] > right[1][i] for i in right[0])
    assert finding.change.gained == sum(right[0][i] < right[1][i] for i in right[0])
    assert "95% interval" in finding.words
    entry = report.to_json()["candidates"][0]["comparisons"][0]
    assert entry["verdict"] == report.findings["rtn-w4a16"][0].words


def test_other_questions_are_not_compared(data, tmp_path, rounded):
    source = ask(data, tmp_path)
    write_questions(data, seed=2)
    candidate = ask(data, tmp_path, rounded)
    with pytest.raises(ScoreError, match="the documents of mmlu_anatomy"):
        Report.of([source, candidate])


def test_questions_are_asked_until_it_is_certain(data, tmp_path, rounded, monkeypatch):
    monkeypatch.setattr("quantkit.scoring.sample_size.FIRST_ROUND", 8)
    targets = [ModelSource.open("demo"), rounded]
    told = []

    def run(asked):
        return [evaluate(target, asked, "cpu") for target in targets]

    asked = ScoreOptions((TASK,), num_fewshot=0, data=data, cache=tmp_path / "cache")
    assert sizes_of(targets[0], asked) == {TASK: N_QUESTIONS}
    easy = score_until(run, asked, sizes_of(targets[0], asked), 0.45, told.append)
    assert easy.half_width <= 0.45
    assert easy.n_questions < N_QUESTIONS
    hard = score_until(run, asked, sizes_of(targets[0], asked), 0.001, told.append)
    assert hard.n_questions == N_QUESTIONS
    assert hard.half_width > 0.001
    assert hard.needed > N_QUESTIONS
    assert told[-1].startswith(f"{N_QUESTIONS} questions")


def test_a_changed_checkpoint_is_not_scored(tmp_path, data):
    (made,) = quantize(
        ModelSource.open("demo"), [Recipe.load("fp8-dynamic")], tmp_path / "out", "cpu"
    )
    path = made.folder / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="quantkit verify"):
        ask(data, tmp_path, made)


def test_data_that_is_not_there_is_said(tmp_path):
    with pytest.raises(ScoreError, match="is not a folder"):
        ask(tmp_path / "nowhere", tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ScoreError, match="cannot be reached"):
        ask(tmp_path / "empty", tmp_path)


def test_divergence_is_told_with_texts(tmp_path, rounded):
    asked = ScoreOptions(("python_docs",), limit=2, cache=tmp_path / "cache")
    alone = evaluate(rounded, asked, "cpu")
    assert "python_docs/kl_mean" not in alone.card.scores
    source = evaluate(ModelSource.open("demo"), asked, "cpu")
    again = evaluate(rounded, asked, "cpu")
    scores = again.card.scores
    assert 0 < scores["python_docs/kl_median"].value < scores["python_docs/kl_p99"].value
    assert 0.005 < scores["python_docs/kl_mean"].value < 0.5
    assert 0.5 < scores["python_docs/top1_agreement"].value < 0.99
    assert source.card.scores["python_docs/kl_mean"].value == 0
    assert scores["python_docs/perplexity"] == alone.card.scores["python_docs/perplexity"]
