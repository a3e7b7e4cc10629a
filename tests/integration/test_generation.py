"""Answers that are written token by token: the same as transformers and lm-eval write."""

import copy
import json

import pytest
import torch

from quantkit.errors import DataError, ScoreError
from quantkit.export.checkpoint import Checkpoint
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.onepass.run import quantize
from quantkit.recipe import load
from quantkit.scoring import decoding, following, generation, lmeval, loading
from quantkit.scoring.generation import Generator
from quantkit.scoring.harness import evaluate
from quantkit.scoring.llamacpp import LlamaCpp
from quantkit.scoring.options import ScoreOptions
from quantkit.scoring.rules import Rules

pytestmark = pytest.mark.usefixtures("demo_is_short")

TEXT = "Return a new list containing all items from the iterable in ascending order. A custom key "


@pytest.fixture(scope="module")
def demo():
    source = ModelSource.open("demo")
    return loading.load(source, torch.device("cpu")), load_tokenizer(source.folder)


def written(generator, prompts, rules, tokenizer):
    found = {}
    for batch in generator.answers(prompts, rules, tokenizer.decode if tokenizer else str):
        found |= dict(batch)
    assert sorted(found) == list(range(len(prompts)))
    return [found[place] for place in range(len(prompts))]


def reference(model, prompt, rules):
    """transformers' own, one prompt at a time."""
    ids = torch.tensor([prompt])
    more = {} if rules.repetition_penalty == 1 else {"repetition_penalty": rules.repetition_penalty}
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=rules.max_new,
        do_sample=False,
        eos_token_id=list(rules.ends) or None,
        pad_token_id=0,
        **more,
    )
    return tuple(made[0, len(prompt) :].tolist())


@pytest.mark.parametrize("beginning", ["", TEXT * 3], ids=["apart", "shared"])
@pytest.mark.parametrize("decodes", [True, False], ids=["static", "padded"])
def test_greedy_answers_are_those_of_transformers(demo, beginning, decodes, monkeypatch):
    """Of unlike lengths, in a batch that some leave and others join."""
    model, tokenizer = demo
    if not decodes:
        monkeypatch.setattr(decoding, "works_for", lambda model: False)
    assert (Generator(model).decoder is not None) == decodes
    texts = ["The", "def sort(values):", TEXT, TEXT * 2, "class Error(", "import os\n", "If ", "x"]
    prompts = [tuple(tokenizer(beginning + text)["input_ids"]) for text in texts]
    newline = tokenizer("\n")["input_ids"][-1]
    rules = Rules(24, ends=(0, newline))
    found = written(Generator(model, max_rows=3), prompts, rules, tokenizer)
    assert found == [reference(model, prompt, rules) for prompt in prompts]
    assert len({len(answer) for answer in found}) > 1  # some ended early


def test_repetition_penalty_is_that_of_transformers(demo):
    model, tokenizer = demo
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in (TEXT, "def sort(")]
    rules = Rules(16, repetition_penalty=1.3)
    found = written(Generator(model), prompts, rules, tokenizer)
    assert found == [reference(model, prompt, rules) for prompt in prompts]
    assert found != written(Generator(model), prompts, Rules(16), tokenizer)


def test_sampled_answers_do_not_depend_on_the_batch(demo):
    model, tokenizer = demo
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in (TEXT, "def sort(", "The", TEXT)]
    rules = Rules(12, temperature=1.0, top_p=0.9, seed=7)
    together = written(Generator(model), prompts, rules, tokenizer)
    assert together == written(Generator(model, max_rows=1), prompts, rules, tokenizer)
    assert together[0] != together[3]  # a prompt that comes again is answered anew
    other = Rules(12, temperature=1.0, top_p=0.9, seed=8)
    assert together != written(Generator(model), prompts, other, tokenizer)


def tiny(family, **more):
    import transformers

    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    config = getattr(transformers, f"{family}Config")(**settings | more)
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


HYBRID = {
    "num_experts": 2, "head_dim": 16, "num_experts_per_tok": 1, "num_hidden_layers": 4,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "more", "pads"),
    [
        ("Mistral", {"sliding_window": 8}, True),
        ("Gemma2", {"sliding_window": 8, "head_dim": 16}, True),
        ("Qwen3Next", HYBRID, False),
    ],
)
def test_other_caches(family, more, pads):
    """Sliding windows take padding and no newcomers; linear attention takes neither."""
    model = tiny(family, **more)
    generator = Generator(model)
    assert (generator.decoder, generator._pads) == (None, pads)
    rng = torch.Generator().manual_seed(1)
    prompts = [
        tuple(torch.randint(1, 64, (n,), generator=rng).tolist()) for n in (5, 12, 12, 20, 3)
    ]
    rules = Rules(12)
    found = written(generator, prompts, rules, None)
    assert found == [reference(model, prompt, rules) for prompt in prompts]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of definitions as a team might write them: sums, and a text to be continued."""
    folder = tmp_path_factory.mktemp("my_tasks")
    rows = [{"q": f"{TEXT}{i} + {i} =", "a": str(2 * i)} for i in range(6)]
    rows.append({"q": TEXT * 40, "a": "no"})  # longer than the window
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "sums.yaml").write_text(
        f"""
task: my_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "sums.jsonl"}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: a
generation_kwargs: {{until: ["\\n\\n", "."], max_gen_toks: 20, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""
    )
    return folder


def test_answers_are_those_of_lm_eval(tasks, tmp_path):
    from lm_eval.models.huggingface import HFLM

    source = ModelSource.open("demo")
    answers = {}
    seen = lmeval.run

    def watched(lm, loaded, *more):
        results = seen(lm, loaded, *more)
        answers[type(lm).__name__] = [s["resps"] for s in results["samples"]["my_sums"]]
        return results

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmeval, "run", watched)
        asked = ScoreOptions((str(tasks),), cache=tmp_path)
        card = evaluate(source, asked, "cpu").card
        again = evaluate(source, asked, "cpu").card
    assert card.scores["my_sums/exact_match"].n == 7
    assert again.cached == {"my_sums": 1.0}
    with lmeval.quiet():
        theirs = HFLM(pretrained=str(source.folder), device="cpu", batch_size=4, dtype="float32")
        loaded = lmeval.load([str(tasks)], None)
        expected = seen(theirs, loaded, None, None)["samples"]["my_sums"]
    assert answers["EvaluatedModel"] == [sample["resps"] for sample in expected]
    assert any(text for ((text,),) in answers["EvaluatedModel"])


def test_answers_of_llama_cpp_are_ours(tasks, tmp_path):
    """The same file in llama.cpp and here; 32 bits leave rounding no say."""
    pytest.importorskip("xllamacpp")
    (made,) = quantize(ModelSource.open("demo"), [load("gguf-f32")], tmp_path / "out", "cpu")
    found = {}
    for backend in ("transformers", "llama.cpp"):
        seen = lmeval.run
        with pytest.MonkeyPatch.context() as patch:

            def watched(lm, loaded, *more, seen=seen, backend=backend):
                results = seen(lm, loaded, *more)
                found[backend] = [s["resps"] for s in results["samples"]["my_sums"]]
                return results

            patch.setattr(lmeval, "run", watched)
            asked = ScoreOptions((str(tasks),), limit=4, cache=tmp_path / "cache", backend=backend)
            evaluate(made, asked, "cpu")
    assert found["llama.cpp"] == found["transformers"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda answer: "gone", "refuses .* tokens: gone"),
        (lambda answer: answer | {"choices": [{"text": 5}]}, "unknown form.* kept"),
        (
            lambda answer: {
                "choices": [{"text": "a", "finish_reason": "length"}],
                "usage": {"completion_tokens": 3},
            },
            "after 3 tokens of 20",
        ),
        (RuntimeError("no memory"), "stopped: no memory; its answers are kept"),
    ],
    ids=["garbage", "form", "short", "dies"],
)
def test_faults_of_llama_cpp_lose_nothing(tasks, tmp_path, demo_made, monkeypatch, fault, words):
    """Real llama.cpp up to its third answer."""
    pytest.importorskip("xllamacpp")
    made = Checkpoint.open(demo_made / "gguf-q8_0")
    asked = ScoreOptions((str(tasks),), limit=5, cache=tmp_path, backend="llama.cpp")
    answer, n_asked = LlamaCpp._answer, []

    class Faulty:
        def __init__(self, server):
            self.server = server

        def handle_completions(self, body):
            n_asked.append(body)
            found = self.server.handle_completions(body)
            if len(n_asked) != 3:
                return found
            if isinstance(fault, Exception):
                raise fault
            return fault(found)

    def faulty(self, body):
        if not isinstance(self._server, Faulty):
            self._server = Faulty(self._server)
        return answer(self, body)

    monkeypatch.setattr(LlamaCpp, "_answer", faulty)
    with pytest.raises(ScoreError, match=words):
        evaluate(made, asked, "cpu")
    assert len(n_asked) == 3
    card = evaluate(made, asked, "cpu").card
    assert len(n_asked) == 3 + 3  # two of five are not asked again
    assert card.cached == {"my_sums": 2 / 5}


def test_a_stopped_run_goes_on_at_the_first_open_answer(tasks, tmp_path):
    source = ModelSource.open("demo")
    asked = ScoreOptions((str(tasks),), cache=tmp_path)
    forward, steps = decoding._Batch.forward, []

    def dies(self, n):
        if len(steps) >= 40:
            raise KeyboardInterrupt
        steps.append(n)
        return forward(self, n)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generation, "MOST_ROWS", {"cpu": 2})
        patch.setattr(decoding._Batch, "forward", dies)
        with pytest.raises(KeyboardInterrupt):
            evaluate(source, asked, "cpu")
    card = evaluate(source, asked, "cpu").card
    assert 0 < card.cached["my_sums"] < 1
    fresh = evaluate(source, ScoreOptions((str(tasks),), cache=tmp_path / "other"), "cpu").card
    assert card.scores == fresh.scores


def test_settings_that_are_not_supported_are_named(demo, tasks, tmp_path):
    definition = (tasks / "sums.yaml").read_text()
    (tmp_path / "beams.yaml").write_text(
        definition.replace("my_sums", "my_beams").replace("do_sample: false", "typical_p: 0.3")
    )
    with pytest.raises(ScoreError, match=r"my_beams .*typical_p"):
        evaluate(
            ModelSource.open("demo"), ScoreOptions((str(tmp_path),), cache=tmp_path / "c"), "cpu"
        )
    with pytest.raises(ScoreError, match="nowhere/: there is no such"):
        evaluate(ModelSource.open("demo"), ScoreOptions(("nowhere/",)), "cpu")


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    recipes = [load("rtn-w8a16"), load("rtn-w4a16")]
    return quantize(ModelSource.open("demo"), recipes, tmp_path_factory.mktemp("out"), "cpu")


@torch.no_grad()
def test_following_is_what_the_models_would_have_written(rounded, tmp_path, demo):
    """Against brute force: where does each model's own greedy choice first differ?"""
    model, tokenizer = demo
    prompts = tmp_path / "traffic.jsonl"
    texts = ["The", "def sort(values):", TEXT]
    prompts.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following.of_file, "__defaults__", (16, None))
        asked = ScoreOptions((), prompts=prompts, cache=tmp_path / "cache")
        with pytest.raises(ScoreError, match="score the source first"):
            evaluate(rounded[0], asked, "cpu")
        cards = [evaluate(one, asked, "cpu").card for one in (ModelSource.open("demo"), *rounded)]
    assert cards[0].scores["traffic/same_answers"].value == 1
    assert cards[0].scores["traffic/kl_mean"].value == 0
    encoded = [tuple(tokenizer(text)["input_ids"]) for text in texts]
    answers = [reference(model, prompt, Rules(16, ends=(0,))) for prompt in encoded]
    for target, card in zip(rounded, cards[1:], strict=True):
        candidate = loading.load(target, torch.device("cpu"))
        firsts = []
        for prompt, answer in zip(encoded, answers, strict=True):
            logits = candidate(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
            differs = (logits.argmax(-1) != torch.tensor(answer)).nonzero()
            firsts.append(int(differs[0]) if len(differs) else len(answer))
        expected = sum(firsts) / len(firsts)
        assert card.scores["traffic/first_difference"].value == pytest.approx(expected)
        assert card.scores["traffic/first_difference"].n == len(texts)


def test_prompts_that_are_not_there(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        evaluate(ModelSource.open("demo"), ScoreOptions((), prompts=tmp_path / "none.txt"), "cpu")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty\.txt"):
        following.of_file(tmp_path / "empty.txt")


def test_conversations_go_through_the_chat_template(tmp_path, demo):
    _, tokenizer = demo
    chats = tmp_path / "chats.jsonl"
    said = [{"role": "user", "content": "Hello?"}, {"role": "assistant", "content": "Yes."}]
    chats.write_text(json.dumps({"messages": said}))
    asked = following.of_file(chats)
    assert asked.rows == (said[:1],)  # the source gives its own answer
    expected = tokenizer.apply_chat_template(said[:1], add_generation_prompt=True, tokenize=False)
    (ids,) = asked.encoded(tokenizer)
    assert tokenizer.decode(ids) == expected
    without = copy.deepcopy(tokenizer)
    without.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        asked.encoded(without)


def test_answers_to_prompts_are_judged(rounded, tmp_path, demo):
    """Both models' own answers, paired."""
    from quantkit.scoring import findings

    model, tokenizer = demo
    texts = ["The", "def sort(values):", TEXT]
    encoded = [tuple(tokenizer(text)["input_ids"]) for text in texts]
    answers = [reference(model, prompt, Rules(16, ends=(0,))) for prompt in encoded]
    rows = [
        {"text": text, "reference": tokenizer.decode(tokens, skip_special_tokens=True)}
        for text, tokens in zip(texts, answers, strict=True)
    ]
    rows[0]["reference"] = "something else"
    rows.append({"text": "The", "regex": "."})
    prompts = tmp_path / "traffic.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following.of_file, "__defaults__", (16, None))
        asked = ScoreOptions((), prompts=prompts, cache=tmp_path / "cache")
        source, *others = [evaluate(m, asked, "cpu") for m in (ModelSource.open("demo"), *rounded)]
    assert source.card.scores["traffic/exact_match"].value == pytest.approx(2 / 3)
    assert source.card.scores["traffic/regex_match"].n == 1
    compared = findings.compare(
        source.outcomes, {e.card.name: e.outcomes for e in others}, source.card.groups
    )
    for found in compared.values():
        assert {"traffic/exact_match", "traffic/perplexity"} <= {finding.score for finding in found}


def test_written_answers_are_asked_for_until_it_is_certain(tmp_path, rounded, monkeypatch):
    """Beside chosen ones: both metrics have to be narrow enough."""
    from quantkit.scoring import sample_size
    from quantkit.scoring.harness import sizes_of

    rows = [{"q": f"{i} +", "a": "="} for i in range(40)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sums.yaml").write_text(
        f"""
task: short_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "sums.jsonl"}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: a
generation_kwargs: {{until: ["\\n"], max_gen_toks: 1, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1}}
"""
    )
    monkeypatch.setattr(sample_size, "FIRST_ROUND", 8)
    told = []
    targets = [ModelSource.open("demo"), rounded[0]]
    asked = ScoreOptions((str(tmp_path / "sums.yaml"),), cache=tmp_path / "cache")
    found = sample_size.score_until(
        lambda asked: [evaluate(target, asked, "cpu") for target in targets],
        asked,
        sizes_of(targets[0], asked),
        0.15,
        told.append,
    )
    assert found.half_width <= 0.15
    assert 8 < found.n_questions < 40
    assert len(told) > 1


def test_needles_are_where_they_are_said_to_be():
    from quantkit.scoring.suites import is_own
    from quantkit.scoring.tasks.python_needle import needles

    assert is_own("needle_4k")
    rows = needles.questions(3400)
    assert len(rows) == 50
    for row in rows:
        assert row["text"].count(row["answer"]) == 1
        at = row["text"].index(row["answer"]) / len(row["text"])
        assert row["depth"] - 0.05 <= at < row["depth"] + 0.25
        assert row["text"].endswith("as the text above says, is")
    assert rows == needles.questions(3400)
