"""Generates many answers at once, token by token, with a KV cache.

Models whose layers all use full attention are handled by `decoding`, where rows leave and join.
This module is for all others, such as those with sliding windows or states: a batch is padded on
the left, or holds prompts of one length only, and rows only leave it. Greedy answers are those of
transformers' `generate`; sampled ones depend on the seed and the prompt alone, not on the batch.

Ends of answers are looked for only every few tokens. What was generated beyond an end is cut off.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from quantkit.errors import HardwareError, ScoreError
from quantkit.scoring import decoding, sampling
from quantkit.scoring.decoding import CHECK_EVERY, MOST_ROWS, PREFILL_TOKENS, Decoder
from quantkit.scoring.rules import Rules
from quantkit.scoring.sampling import Choice


@dataclass
class _Batch:
    """Answers that are being generated; every field is by row."""

    places: list[int]
    cache: Any
    mask: torch.Tensor
    """Which columns of the cache belong to a row [rows, length]."""
    positions: torch.Tensor
    """Position of the next token [rows]."""
    logits: torch.Tensor
    """Logits of the next token [rows, vocabulary]."""
    written: torch.Tensor
    count: int = 0
    """How many tokens of `written` count."""

    def __len__(self) -> int:
        return len(self.places)


class Generator:
    """Generates answers with a causal language model of transformers."""

    def __init__(self, model: Any, max_rows: int | None = None) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        kind = self._device.type
        self._max_rows = max_rows or MOST_ROWS[kind]
        self._tokens_per_batch = PREFILL_TOKENS[kind]
        layers = DynamicCache(config=model.config).layers
        known = (DynamicLayer, DynamicSlidingWindowLayer)
        self._pads = bool(layers) and all(type(layer) in known for layer in layers)
        """Whether left padding is masked; states of linear attention would include it."""
        self._takes_positions = _takes(model, "position_ids")

    @cached_property
    def decoder(self) -> Decoder | None:
        """The faster decoder, where it works."""
        if not decoding.works_for(self._model):
            return None
        return Decoder(self._model, self._max_rows)

    @torch.no_grad()
    def answers(
        self,
        prompts: Sequence[tuple[int, ...]],
        rules: Rules,
        text_of: Callable[[Sequence[int]], str],
    ) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
        """Indices of prompts and the tokens of their answers, as they end.

        An answer may continue beyond a stop text, where the caller cuts it.
        """
        if not all(prompts):
            raise ScoreError("a prompt has no tokens")
        if self.decoder is not None:
            yield from self.decoder.answers(prompts, rules, text_of)
            return
        choose = Choice(prompts, rules, self._device)
        # The longest come first: what follows fits where they did.
        waiting = sorted(range(len(prompts)), key=lambda place: (len(prompts[place]), place))
        batch: _Batch | None = None
        while batch or waiting:
            batch = batch or self._next(waiting, prompts, rules)
            for _ in range(min(CHECK_EVERY, rules.max_new - batch.count)):
                counts = [batch.count] * len(batch)
                self._step(batch, choose(batch.logits, batch.places, batch.written, counts))
            tokens = batch.written[:, : batch.count].tolist()
            done = [
                (row, answer)
                for row in range(len(batch))
                if (answer := sampling.ended(tokens[row], rules, text_of)) is not None
            ]
            if done:
                yield [(batch.places[row], answer) for row, answer in done]
                left = sorted(set(range(len(batch))) - {row for row, _ in done})
                batch = _kept(batch, left) if left else None

    def _next(self, waiting: list[int], prompts: Sequence[tuple[int, ...]], rules: Rules) -> _Batch:
        """A batch of the longest waiting prompts, as many as fit."""
        longest = len(prompts[waiting[-1]])
        while True:
            n = min(len(waiting), self._max_rows, self._tokens_per_batch // longest)
            n = max(1, n)
            if not self._pads:  # only prompts of one length
                same = (p for p in reversed(waiting) if len(prompts[p]) == longest)
                n = min(n, sum(1 for _ in same))
            try:
                batch = self._prefill([waiting[-1 - i] for i in range(n)], prompts, rules)
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                if n == 1:
                    raise HardwareError(
                        f"a prompt of {longest} tokens with an answer of {rules.max_new} does not "
                        "fit into the memory of the GPU; use a shorter --max-length"
                    ) from error
                self._tokens_per_batch = max(1, self._tokens_per_batch // 2)
                continue
            del waiting[len(waiting) - n :]
            return batch

    def _prefill(
        self, places: list[int], prompts: Sequence[tuple[int, ...]], rules: Rules
    ) -> _Batch:
        own = [prompts[place] for place in places]
        width, rows = max(map(len, own)), len(own)
        ids = torch.zeros(rows, width, dtype=torch.long)
        mask = torch.ones(rows, width, dtype=torch.bool)
        for row, tokens in enumerate(own):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, : width - len(tokens)] = False
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        mask = mask.to(self._device)
        cache = DynamicCache(config=self._model.config)
        logits = self._run(ids.to(self._device), mask, positions.to(self._device), cache)
        lengths = torch.tensor([len(prompts[place]) for place in places], device=self._device)
        written = torch.zeros(rows, rules.max_new, dtype=torch.long, device=self._device)
        return _Batch(places, cache, mask, lengths, logits, written)

    def _run(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        more = {"position_ids": positions} if self._takes_positions else {}
        if self._pads:
            more["attention_mask"] = mask.long()
        output = self._model(
            input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **more
        )
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _step(self, batch: _Batch, tokens: torch.Tensor) -> None:
        """Append one token to every row, and compute the next logits."""
        batch.written[:, batch.count] = tokens
        batch.count += 1
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch), 1)], 1)
        batch.logits = self._run(tokens[:, None], batch.mask, batch.positions[:, None], batch.cache)
        batch.positions = batch.positions + 1


def _kept(batch: _Batch, rows: list[int]) -> _Batch:
    """Only these rows of a batch."""
    where = torch.tensor(rows, device=batch.mask.device)
    for layer in batch.cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.batch_select_indices(where)
        else:
            layer.reorder_cache(where)
    return _Batch(
        [batch.places[row] for row in rows],
        batch.cache,
        batch.mask[where],
        batch.positions[where],
        batch.logits[where],
        batch.written[where],
        batch.count,
    )


def _takes(model: Any, name: str) -> bool:
    import inspect

    return name in inspect.signature(model.forward).parameters
