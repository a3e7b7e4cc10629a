"""Writes many answers at once, token by token, with the keys and values of what is already there.

Batching is continuous: rows whose answer has ended leave the batch, and waiting prompts take their
places, so that one long answer holds nobody up. Rows of unlike length are padded between what all
prompts begin with, which is computed once, and their own tokens. Greedy answers are those of
transformers' `generate`; sampled ones depend on the seed and the prompt alone, not on the batch.

Ends of answers are looked for every few tokens only. What was written beyond an end is cut off, and
the device never waits for the host in between.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from quantkit.errors import HardwareError, ScoreError
from quantkit.scoring.rules import Rules, keys_of

CHECK_EVERY = 8
"""Tokens between two looks for ends of answers."""
GROWTH = 128
"""Tokens by which a cache grows at a time."""
MIN_SHARED = 32
"""Shorter beginnings are computed again for every row."""
PREFILL_TOKENS = {"cuda": 65536, "cpu": 1024}
CACHED_BYTES = {"cpu": 512 << 20}
"""Most that keys and values of all rows take; on a GPU half of what is free."""
MOST_ROWS = {"cuda": 2048, "cpu": 32}
REFILL = 0.75
"""Waiting prompts join when no more than this share of the rows is still being written."""


class _RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values with room for more, so that a further token does not copy all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: torch.Tensor
        self.values: torch.Tensor
        self._room: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if not self._room or end > self._room[0].shape[-2]:
            self._room = [
                new.new_empty(*new.shape[:-2], end + GROWTH, new.shape[-1])
                for new in (key_states, value_states)
            ]
            if length:
                self._room[0][..., :length, :] = self.keys
                self._room[1][..., :length, :] = self.values
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[..., length:end, :] = new
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        return self.keys, self.values

    def hold(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """These instead of what was there."""
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True
        self.keys, self.values, self._room = keys, values, []


@dataclass
class _Batch:
    """Answers that are being written; row by row in all that it holds."""

    places: list[int]
    cache: Any
    mask: torch.Tensor
    """Which columns of the cache are a row's own [rows, length]."""
    positions: torch.Tensor
    """Of the next token [rows]."""
    logits: torch.Tensor
    """Of the next token [rows, vocabulary]."""
    written: torch.Tensor
    counts: list[int]
    """How many tokens of `written` count."""

    def __len__(self) -> int:
        return len(self.places)


class Generator:
    """A causal language model of transformers that writes answers."""

    def __init__(self, model: Any, max_rows: int | None = None) -> None:
        self._model = model
        self._device = next(model.parameters()).device
        kind = self._device.type
        self._max_rows = max_rows or MOST_ROWS[kind]
        self._prefill_tokens = PREFILL_TOKENS[kind]
        layers = DynamicCache(config=model.config).layers
        self._joins = bool(layers) and all(type(layer) is DynamicLayer for layer in layers)
        """Whether rows of unlike length can share a cache, and others can join them."""
        sliding = (DynamicLayer, DynamicSlidingWindowLayer)
        self._pads = bool(layers) and all(type(layer) in sliding for layer in layers)
        """Whether padding on the left is masked; states of linear attention run through it."""
        self._takes_positions = _takes(model, "position_ids")
        self._bytes_per_token = 0.0

    @torch.no_grad()
    def answers(
        self,
        prompts: Sequence[tuple[int, ...]],
        rules: Rules,
        text_of: Callable[[Sequence[int]], str],
    ) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
        """Places of prompts and the tokens of their answers, as they end.

        An answer may go on beyond a stop text, where the caller cuts it.
        """
        if not all(prompts):
            raise ScoreError("a prompt without tokens cannot be answered")
        shared = _shared(prompts) if self._joins else 0
        prefix = self._prefix(prompts[0][:shared]) if shared else None
        choose = _Choice(prompts, rules, self._device)
        # The longest come first: what follows fits where they did.
        waiting = sorted(range(len(prompts)), key=lambda place: (len(prompts[place]), place))
        batch: _Batch | None = None
        while batch or waiting:
            if waiting and (batch is None or self._joins):
                batch = self._filled(batch, waiting, prompts, shared, prefix, rules)
            assert batch is not None
            for _ in range(CHECK_EVERY):
                self._step(batch, choose(batch))
            done = [
                (row, answer)
                for row in range(len(batch))
                if (answer := _ended(batch, row, rules, text_of)) is not None
            ]
            if done:
                yield [(batch.places[row], answer) for row, answer in done]
                left = sorted(set(range(len(batch))) - {row for row, _ in done})
                batch = _kept(batch, left) if left else None

    def _prefix(self, tokens: tuple[int, ...]) -> Any:
        cache = self._new_cache()
        self._model(
            input_ids=torch.tensor([tokens], device=self._device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return cache

    def _new_cache(self) -> Any:
        cache = DynamicCache(config=self._model.config)
        if self._joins:
            cache.layers = [_RoomyLayer() for _ in cache.layers]
        return cache

    def _filled(
        self,
        batch: _Batch | None,
        waiting: list[int],
        prompts: Sequence[tuple[int, ...]],
        shared: int,
        prefix: Any,
        rules: Rules,
    ) -> _Batch:
        """The batch with as many waiting prompts as fit."""
        while waiting:
            longest = len(prompts[waiting[-1]])
            most = self._fitting(longest + rules.max_new)
            here = len(batch) if batch is not None else 0
            if here and here > REFILL * most:
                break
            n = min(len(waiting), most - here, self._prefill_tokens // max(1, longest - shared))
            n = max(1, n)
            if not self._pads:  # only prompts of one length
                same = (p for p in reversed(waiting) if len(prompts[p]) == longest)
                n = min(n, sum(1 for _ in same))
            try:
                fresh = self._prefill(
                    [waiting[-1 - i] for i in range(n)], prompts, shared, prefix, rules
                )
                merged = fresh if batch is None else _joined(batch, fresh, shared)
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                if n > 1:
                    self._prefill_tokens = max(1, self._prefill_tokens // 2)
                    continue
                if batch is not None:
                    break
                raise HardwareError(
                    f"a prompt of {longest} tokens with an answer of {rules.max_new} does not fit "
                    "into the memory of the GPU; use a shorter --max-length"
                ) from error
            batch = merged
            del waiting[len(waiting) - n :]
            if not self._joins:
                break
        assert batch is not None
        return batch

    def _fitting(self, length: int) -> int:
        """Rows of this many tokens that fit; before the first row, few enough for any model."""
        if not self._bytes_per_token:
            return min(self._max_rows, 8)
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            room = free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            budget = room // 2
        else:
            budget = CACHED_BYTES[self._device.type]
        return max(1, min(self._max_rows, int(budget / (self._bytes_per_token * length))))

    def _prefill(
        self,
        places: list[int],
        prompts: Sequence[tuple[int, ...]],
        shared: int,
        prefix: Any,
        rules: Rules,
    ) -> _Batch:
        own = [prompts[place][shared:] for place in places]
        width, rows = max(map(len, own)), len(own)
        ids = torch.zeros(rows, width, dtype=torch.long)
        mask = torch.ones(rows, shared + width, dtype=torch.bool)
        for row, tokens in enumerate(own):
            ids[row, width - len(tokens) :] = torch.tensor(tokens)
            mask[row, shared : shared + width - len(tokens)] = False
        positions = (mask.long().cumsum(1) - 1)[:, shared:].clamp(min=0)
        mask = mask.to(self._device)
        cache = self._new_cache()
        if prefix is not None:
            for new, old in zip(cache.layers, prefix.layers, strict=True):
                new.hold(old.keys.repeat(rows, 1, 1, 1), old.values.repeat(rows, 1, 1, 1))
        logits = self._run(ids.to(self._device), mask, positions.to(self._device), cache)
        if not self._bytes_per_token and self._joins:
            taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
            self._bytes_per_token = taken / (rows * (shared + width))
        lengths = torch.tensor([len(prompts[place]) for place in places], device=self._device)
        written = torch.zeros(
            rows, rules.max_new + CHECK_EVERY, dtype=torch.long, device=self._device
        )
        return _Batch(places, cache, mask, lengths, logits, written, [0] * rows)

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
        """Write one token to every row, and find out what may follow."""
        at = torch.tensor(batch.counts, device=self._device)[:, None]
        batch.written.scatter_(1, at, tokens[:, None])
        batch.counts = [count + 1 for count in batch.counts]
        batch.mask = torch.cat([batch.mask, batch.mask.new_ones(len(batch), 1)], 1)
        batch.logits = self._run(tokens[:, None], batch.mask, batch.positions[:, None], batch.cache)
        batch.positions = batch.positions + 1


class _Choice:
    """The next token of every row."""

    def __init__(
        self, prompts: Sequence[tuple[int, ...]], rules: Rules, device: torch.device
    ) -> None:
        from transformers import (
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self._prompts, self._device = prompts, device
        self._penalty: Any = None
        if rules.repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(rules.repetition_penalty)
        self._warpers: list[Any] = []
        self._sources: dict[int, torch.Generator] | None = None
        if rules.temperature:
            self._warpers.append(TemperatureLogitsWarper(rules.temperature))
            if rules.top_k:
                self._warpers.append(TopKLogitsWarper(rules.top_k))
            if rules.top_p is not None and rules.top_p < 1:
                self._warpers.append(TopPLogitsWarper(rules.top_p))
            self._sources = {
                place: torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
                for place, key in enumerate(keys_of(prompts, rules))
            }

    def __call__(self, batch: _Batch) -> torch.Tensor:
        logits = batch.logits
        if self._penalty is not None:
            logits = self._penalized(batch)
        if self._sources is None:
            return logits.argmax(-1)
        for warper in self._warpers:
            logits = warper(None, logits)
        # One random number for each row: the token where the running sum of probabilities is.
        drawn = torch.tensor(
            [torch.rand(1, generator=self._sources[place]).item() for place in batch.places],
            device=self._device,
        )
        sums = logits.softmax(-1).cumsum(-1)
        at = torch.searchsorted(sums, (drawn * sums[:, -1])[:, None], right=True)[:, 0]
        return at.clamp(max=logits.shape[-1] - 1)

    def _penalized(self, batch: _Batch) -> torch.Tensor:
        rows = []
        for row, place in enumerate(batch.places):
            prompt = torch.tensor(self._prompts[place], device=self._device)
            seen = torch.cat([prompt, batch.written[row, : batch.counts[row]]])
            rows.append(self._penalty(seen[None], batch.logits[row : row + 1].clone()))
        return torch.cat(rows)


def _ended(
    batch: _Batch, row: int, rules: Rules, text_of: Callable[[Sequence[int]], str]
) -> tuple[int, ...] | None:
    """The tokens of an answer, if it has come to its end."""
    tokens = batch.written[row, : min(batch.counts[row], rules.max_new)].tolist()
    for place, token in enumerate(tokens):
        if token in rules.ends:
            return tuple(tokens[: place + 1])
    if len(tokens) == rules.max_new:
        return tuple(tokens)
    text = text_of(tokens) if rules.stops else ""
    return tuple(tokens) if any(stop in text for stop in rules.stops) else None


def _kept(batch: _Batch, rows: list[int]) -> _Batch:
    """Only these rows of a batch."""
    where = torch.tensor(rows, device=batch.mask.device)
    for layer in batch.cache.layers:
        if isinstance(layer, _RoomyLayer):
            layer.hold(layer.keys[where], layer.values[where])
        elif isinstance(layer, DynamicLayer):
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
        [batch.counts[row] for row in rows],
    )


def _joined(one: _Batch, other: _Batch, shared: int) -> _Batch:
    """Both in one, the shorter padded behind what all prompts begin with."""
    length = max(one.mask.shape[1], other.mask.shape[1])
    by = [length - batch.mask.shape[1] for batch in (one, other)]
    masks = [_widened(batch.mask, shared, n, 1) for batch, n in zip((one, other), by, strict=True)]
    for mine, theirs in zip(one.cache.layers, other.cache.layers, strict=True):
        mine.hold(
            *(
                torch.cat([_widened(a, shared, by[0], -2), _widened(b, shared, by[1], -2)])
                for a, b in ((mine.keys, theirs.keys), (mine.values, theirs.values))
            )
        )
    return _Batch(
        one.places + other.places,
        one.cache,
        torch.cat(masks),
        torch.cat([one.positions, other.positions]),
        torch.cat([one.logits, other.logits]),
        torch.cat([one.written, other.written]),
        one.counts + other.counts,
    )


def _widened(values: torch.Tensor, at: int, by: int, dim: int) -> torch.Tensor:
    """With zeros at a place."""
    if not by:
        return values
    shape = list(values.shape)
    shape[dim] = by
    before, after = torch.split(values, [at, values.shape[dim] - at], dim)
    return torch.cat([before, values.new_zeros(shape), after], dim)


def _shared(prompts: Sequence[tuple[int, ...]]) -> int:
    """Tokens that all prompts begin with; each keeps one of its own."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)
    most = min(map(len, prompts)) - 1
    same = next((i for i in range(min(most, len(first))) if first[i] != last[i]), most)
    return same if same >= MIN_SHARED else 0


def _takes(model: Any, name: str) -> bool:
    import inspect

    return name in inspect.signature(model.forward).parameters
