"""Tokenises lm-eval's questions, in a small part of the time.

lm-eval encodes every context once for each of its continuations, few-shot examples included, one
text after another. Here a line is encoded once, on all cores, while the model computes on the
previous questions. Where a tokenizer does not allow lines to be encoded separately, whole texts
are.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, groupby, islice, product
from typing import Any

from quantkit.scoring.answering import Request

AT_ONCE = 8192
"""Most requests that are tokenised together."""
LINE_END = re.compile(r"(?<=\S\n)(?=\S)")
"""Only a single line break between visible characters: how several are tokenised depends on what
follows.
"""
CROSSING = re.compile(r"\n\S|Ċ[^ĊĠĉč]")
"""In a vocabulary of text, or of bytes that are written as letters."""
PIECES = ("word", "Ärger", "in two", "7", "1234", "?", ").", "好", "🙂", "e\u0301", "'s", "<", "_")
"""Characters that may surround a line break, one of each kind that tokenizers distinguish."""
ENDS = ("\n", "\n\n", " \n", "\n ", "\n\t", "\r\n")


def batches(requests: Sequence[Any]) -> Iterator[list[Any]]:
    """Requests of one task, some thousands at a time."""
    for _, same in groupby(requests, key=lambda request: request.task_name):
        while part := list(islice(same, AT_ONCE)):
            yield part


class Encoder:
    """Texts to tokens, as a model of lm-eval encodes them."""

    def __init__(self, lm: Any) -> None:
        self._lm = lm
        self._choice = {} if lm.add_bos_token is None else {"add_special_tokens": lm.add_bos_token}
        self._beginning = lm.tokenizer.decode(lm.prefix_token_id)
        self._by_line = self._lines_stand_alone()

    def requests(self, parts: Iterable[Sequence[Any]]) -> Iterator[list[Request]]:
        """The tokens of each part, computed while the previous one is processed."""
        with ThreadPoolExecutor(1) as ahead:
            waiting = None
            for part in parts:
                following = ahead.submit(self._pairs, [request.args for request in part])
                if waiting is not None:
                    yield waiting.result()
                waiting = following
            if waiting is not None:
                yield waiting.result()

    def texts(self, texts: Sequence[str]) -> list[list[int]]:
        """The result of lm-eval's `tok_encode` for each."""
        if any(text.startswith(self._beginning) for text in texts):
            return [self._lm.tok_encode(text) for text in texts]  # then it adds no second one
        if not self._by_line:
            return self._encode(texts, **self._choice)
        before, after = self._around()
        return [[*before, *ids, *after] for ids in self._lines(texts)]

    def _lines(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts, line by line, each distinct line once."""
        split = [LINE_END.split(text) for text in texts]
        known = sorted(set(chain.from_iterable(split)))
        ids = dict(zip(known, self._encode(known, add_special_tokens=False), strict=True))
        return [list(chain.from_iterable(ids[line] for line in lines)) for lines in split]

    def _encode(self, texts: Sequence[str], **choice: Any) -> list[list[int]]:
        if not texts:
            return []
        made = self._lm.tokenizer(
            list(texts), return_attention_mask=False, return_token_type_ids=False, **choice
        )
        ids: list[list[int]] = made["input_ids"]
        return ids

    def _around(self) -> tuple[list[int], list[int]]:
        """Special tokens before and after every text."""
        (plain,) = self._encode(["a"], add_special_tokens=False)
        (whole,) = self._encode(["a"], **self._choice)
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
        raise AssertionError("special tokens change what they surround")

    def _lines_stand_alone(self) -> bool:
        """Whether the end of a line also ends a token, whatever surrounds it.

        It does when no token of the vocabulary contains a line break and something after it, and
        when examples of all kinds agree: tokenizers may also prepend something to every text.
        """
        tokenizer = self._lm.tokenizer
        if not tokenizer.is_fast:
            return False
        if any(CROSSING.search(token) for token in tokenizer.get_vocab()):
            return False
        texts = [a + end + b for a, end, b in product(PIECES, ENDS, PIECES)]
        return self._lines(texts) == self._encode(texts, add_special_tokens=False)

    def _pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Request]:
        split = [_spaces_moved(context, continuation) for context, continuation in pairs]
        needed = {text for context, more in split if context for text in (context, context + more)}
        ordered = sorted(needed)
        made = map(tuple, self.texts(ordered))
        found = dict(zip(ordered, made, strict=True))
        return [
            Request(found[context], found[context + more][len(found[context]) :])
            if context
            else self._without_context(more)
            for context, more in split
        ]

    def _without_context(self, continuation: str) -> Request:
        ids = self._lm.tok_encode(continuation, add_special_tokens=False)
        if ids[0] == self._lm.prefix_token_id:
            return Request(tuple(ids[:1]), tuple(ids[1:]))
        return Request((self._lm.prefix_token_id,), tuple(ids))


def _spaces_moved(context: str, continuation: str) -> tuple[str, str]:
    """Spaces at the end of a context belong to the word that follows."""
    if not context:
        return context, continuation
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation


def n_before_text(ids: Sequence[int], tokenizer: Any) -> int:
    """Tokens that a tokenizer prepends to a text, such as BOS: predicting them says nothing.

    lm-eval predicts a text's first token from BOS, so one that begins with BOS itself is predicted
    from a second one.
    """
    names = ("bos_token_id", "eos_token_id", "cls_token_id")
    marks = {getattr(tokenizer, name, None) for name in names}
    return next((at for at, token in enumerate(ids) if token not in marks), len(ids))
