"""Tokens of questions are those of lm-eval's own code, whatever the tokenizer."""

import types

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.models.huggingface import HFLM
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from quantkit.model.source import ModelSource
from quantkit.scoring import tokens
from quantkit.scoring.tokens import Encoder

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITTERS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama-3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES]),
    "a space in front": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "none": BYTES,
}
TRAINING = ["def f(x):\n    return x\n\nWhat? (A) 12\nB. no\n" * 20, "a\nb\nab\nba\n" * 50]


def lm_with(splitter, first=False):
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TRAINING, trainer)
    if first:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    lm = types.SimpleNamespace(
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>"),
        add_bos_token=None,
        prefix_token_id=0,
        backend="causal",
    )
    lm.tok_encode = types.MethodType(HFLM.tok_encode, lm)
    return lm


MODELS = {
    (name, first): lm_with(splitter, first)
    for name, splitter in SPLITTERS.items()
    for first in (False, True)
}


@pytest.mark.parametrize("first", [False, True])
def test_lines_are_encoded_alone_only_where_that_is_the_same(first):
    found = {name: Encoder(MODELS[name, first])._by_line for name in SPLITTERS}
    # Without a splitter, tokens such as "\nb" were learnt from the training text.
    assert found == {"gpt-2": True, "llama-3": True, "a space in front": False, "none": False}


PIECE = st.sampled_from(
    ["a", "b", " ", "\n", "\n\n", "?", "12", "\t", "é", "好", ".\n", "\r\n", "<s>"]
)
TEXT = st.lists(PIECE, min_size=1, max_size=30).map("".join)


@pytest.mark.parametrize("key", MODELS, ids=str)
@settings(max_examples=12, deadline=None)
@given(context=TEXT.filter(str.strip), continuations=st.lists(TEXT, min_size=1, max_size=4))
def test_tokens_are_those_of_lm_eval(key, context, continuations):
    lm = MODELS[key]
    requests = [
        types.SimpleNamespace(task_name="task", args=(context, more)) for more in continuations
    ]
    (found,) = Encoder(lm).requests([requests])
    for request, more in zip(found, continuations, strict=True):
        expected = HFLM._encode_pair(lm, context, more)
        assert (list(request.context), list(request.continuation)) == expected


def test_the_demo_model_is_encoded_by_line():
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ModelSource.open("demo").folder)
    lm = types.SimpleNamespace(tokenizer=tokenizer, add_bos_token=None, prefix_token_id=0)
    assert Encoder(lm)._by_line


def test_batches_hold_one_task_each(monkeypatch):
    monkeypatch.setattr(tokens, "AT_ONCE", 2)
    asked = [types.SimpleNamespace(task_name=name) for name in "aaabbc"]
    assert [[r.task_name for r in part] for part in tokens.batches(asked)] == [
        ["a", "a"],
        ["a"],
        ["b", "b"],
        ["c"],
    ]
