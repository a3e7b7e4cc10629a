"""Log-probabilities of many continuations, with as little computation as possible.

Requests that differ only in their last token are one row. Rows with a common prefix (the examples
before a question, the four endings of a story) share it: its keys and values are computed once, for
several prefixes of nearly one length at a time. Logits are computed only where needed, some
positions at a time, so that a large vocabulary takes little memory.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from quantkit.errors import HardwareError, ScoreError
from quantkit.model.shards import to_host
from quantkit.scoring.distribution import Distribution

TOKENS_PER_BATCH = {"cuda": 32768, "cpu": 512}
ENOUGH_TOKENS = {"cuda": 8192, "cpu": 512}
"""A batch of that many is as efficient as a larger one: it takes in no much shorter rows."""
MOST_PADDING = 0.05
"""Of a row, in batches that have enough tokens."""
CACHED_BYTES = {"cuda": 4 << 30, "cpu": 512 << 20}
"""Most memory for a batch's keys and values, including those of a shared prefix."""
LOGITS_BYTES = {"cuda": 1 << 30, "cpu": 512 << 20}
MIN_SHARED = {"cuda": 32, "cpu": 8}
"""Shorter prefixes are computed again: sharing has a cost, on a GPU that of another few kernels."""


@dataclass(frozen=True)
class Observation:
    """What was computed at some scored positions."""

    hidden: torch.Tensor
    """The output layer's inputs [positions, width]."""
    predicted: Distribution
    """The output layer's outputs."""
    log_probabilities: torch.Tensor
    """Log-probabilities of the requested tokens."""
    places: torch.Tensor
    """Counted over the tokens of all continuations, in the order of the requests; on the CPU."""


Watcher = Callable[[Observation], None]


@dataclass(frozen=True)
class Request:
    """How likely is `continuation` after `context`?"""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """The log-probability of a continuation, and whether greedy decoding would produce it."""

    log_probability: float
    greedy: bool


@dataclass
class _Row:
    """Tokens to run, and the requests that its last positions answer."""

    tokens: tuple[int, ...]
    asked: list[int] = field(default_factory=list)
    n_scored: int = 0
    prefix: int = 0
    """Which of the prefixes that are computed together it begins with."""


_Run = tuple[tuple[int, ...], list[_Row]]
"""A prefix, and the rows that share it."""


@dataclass(frozen=True)
class _Shared:
    """Prefixes of one length."""

    length: int
    """0 where rows share nothing."""
    n: int
    cache: Any
    """Their keys and values."""

    @property
    def bytes_per_token(self) -> float:
        layers = self.cache.layers
        size = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        return float(size / (self.n * self.length))

    def of(self, rows: Sequence[_Row]) -> Any:
        """Keys and values for a batch of rows."""
        if not self.length:
            return None
        if self.n == 1:
            cache = copy.deepcopy(self.cache)
            cache.batch_repeat_interleave(len(rows))
            return cache
        cache = copy.copy(self.cache)
        cache.layers = [copy.copy(layer) for layer in self.cache.layers]
        wanted = torch.tensor([row.prefix for row in rows])
        for layer in cache.layers:
            layer.batch_select_indices(sent(wanted, layer.keys.device))
        return cache


class Answerer:
    """Answers requests with a causal language model of transformers."""

    def __init__(self, model: Any, max_length: int, max_rows: int | None = None) -> None:
        self._model = model
        self._decoder = model.get_decoder()
        self._max_length = max_length
        self._max_rows = max_rows
        self.device = next(model.parameters()).device
        self._tokens_per_batch = TOKENS_PER_BATCH[self.device.type]
        self.vocabulary = int(model.get_output_embeddings().weight.shape[0])

    @torch.no_grad()
    def answers(
        self, requests: Sequence[Request], watcher: Watcher | None = None
    ) -> Iterator[list[tuple[int, Answer]]]:
        """Indices of requests and their answers, by batch, in the fastest order.

        A watcher sees every scored position.
        """
        starts = [0]
        for request in requests:
            starts.append(starts[-1] + len(request.continuation))
        kind = self.device.type
        runs = _runs(_rows(requests, self._max_length), MIN_SHARED[kind])
        several = kind == "cpu" and self._selects  # one prefix keeps a GPU busy
        for together in _bundles(runs, ENOUGH_TOKENS[kind] if several else 0):
            yield from self._run(together, requests, starts, watcher)

    @cached_property
    def _selects(self) -> bool:
        """Whether rows of a batch can take the keys and values of different prefixes."""
        from transformers import DynamicCache
        from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

        layers = DynamicCache(config=self._model.config).layers
        known = (DynamicLayer, DynamicSlidingWindowLayer)
        return bool(layers) and all(type(layer) in known for layer in layers)

    def _run(
        self,
        together: list[_Run],
        requests: Sequence[Request],
        starts: list[int],
        watcher: Watcher | None,
    ) -> Iterator[list[tuple[int, Answer]]]:
        try:
            shared = self._shared([prefix for prefix, _ in together])
        except torch.OutOfMemoryError as error:
            if len(together) == 1:
                raise _too_long(len(together[0][0])) from error
            torch.cuda.empty_cache()
            half = len(together) // 2
            for part in (together[:half], together[half:]):
                yield from self._run(part, requests, starts, watcher)
            return
        rows = []
        for place, (_, own) in enumerate(together):
            for row in own:
                row.prefix = place
            rows += own
        waiting = sorted(rows, key=lambda row: (len(row.tokens), row.tokens))
        pending: _Pending | None = None
        while waiting:
            size = self._fitting(shared, waiting)
            try:
                fresh = self._batch(shared, waiting[-size:], requests, starts, watcher)
            except torch.OutOfMemoryError as error:
                if size == 1:
                    raise _too_long(len(waiting[-1].tokens)) from error
                self._tokens_per_batch = max(1, self._tokens_per_batch // 2)
                torch.cuda.empty_cache()
                continue
            del waiting[-size:]
            if pending is not None:  # while the device is busy with the next
                yield self._answers_of(pending, requests)
            pending = fresh
        if pending is not None:
            yield self._answers_of(pending, requests)

    def _fitting(self, shared: _Shared, waiting: list[_Row]) -> int:
        """How many of the longest rows fit into a batch."""
        longest = len(waiting[-1].tokens)
        size = min(len(waiting), self._tokens_per_batch // max(1, longest - shared.length))
        if shared.length:
            per_row = int(shared.bytes_per_token * longest)
            size = min(size, CACHED_BYTES[self.device.type] // per_row)
        else:
            least = (1 - MOST_PADDING) * longest
            n_alike = len(waiting) - bisect_left(waiting, least, key=lambda row: len(row.tokens))
            size = min(size, max(n_alike, ENOUGH_TOKENS[self.device.type] // longest))
        return max(1, min(size, self._max_rows or size))

    def _shared(self, prefixes: Sequence[tuple[int, ...]]) -> _Shared:
        """The beginnings of prefixes, as long as the shortest."""
        from transformers import DynamicCache

        length = min(map(len, prefixes))
        if not length:
            return _Shared(0, 1, None)
        cache = DynamicCache(config=self._model.config)
        ids = torch.tensor([prefix[:length] for prefix in prefixes], device=self.device)
        self._decoder(input_ids=ids, past_key_values=cache, use_cache=True)
        return _Shared(length, len(prefixes), cache)

    def _batch(
        self,
        shared: _Shared,
        rows: list[_Row],
        requests: Sequence[Request],
        starts: list[int],
        watcher: Watcher | None,
    ) -> "_Pending":
        n_prefix = shared.length
        width = max(len(row.tokens) for row in rows) - n_prefix
        # Padding comes last, where causal attention from real tokens does not see it.
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        for place, row in enumerate(rows):
            ids[place, : len(row.tokens) - n_prefix] = torch.tensor(row.tokens[n_prefix:])
        cache = shared.of(rows)
        hidden = self._decoder(
            input_ids=sent(ids, self.device), past_key_values=cache, use_cache=cache is not None
        ).last_hidden_state
        flat = hidden.reshape(-1, hidden.shape[-1])
        scored = _scored(rows, n_prefix, width, requests, starts)
        values, best = self._score(flat, scored, watcher)
        return _Pending.start(rows, values.double(), best)

    def _answers_of(
        self, batch: "_Pending", requests: Sequence[Request]
    ) -> list[tuple[int, Answer]]:
        values, best = batch.wait()
        if not values.isfinite().all():
            raise ScoreError(
                f"the model's outputs are not finite{self._culprit(batch.rows[0])}; the checkpoint "
                "is damaged, or overflows in this type"
            )
        done, at = [], 0
        for row in batch.rows:
            for index in row.asked:
                stop = at + len(requests[index].continuation)
                total = float(values[at:stop].sum())
                done.append((index, Answer(total, bool(best[at:stop].all()))))
                at = stop
        return done

    def _score(
        self, hidden: torch.Tensor, scored: "_Scored", watcher: Watcher | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of every target, and whether it is the likeliest token."""
        rows = max(1, LOGITS_BYTES[self.device.type] // (4 * self.vocabulary))
        values, best = [], []
        where, targets = sent(scored.where, self.device), sent(scored.targets, self.device)
        for start in range(0, len(where), rows):
            part = slice(start, start + rows)
            read = hidden[where[part]]
            predicted = Distribution(self.logits(read))
            values.append(predicted.log_probabilities(targets[part, None])[:, 0])
            best.append(predicted.likeliest == targets[part])
            if watcher is not None:
                watcher(Observation(read, predicted, values[-1], scored.places[part]))
        return torch.cat(values), torch.cat(best)

    def _culprit(self, row: _Row) -> str:
        """The first position that is not finite, if it can be found."""
        found: list[str] = []

        def look(name: str, module: torch.nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, torch.Tensor) and not first.isfinite().all():
                found.append(name)

        handles = [
            module.register_forward_hook(partial(look, name))
            for name, module in self._model.named_modules()
            if name and not any(module.children())
        ]
        try:
            self._decoder(input_ids=torch.tensor([row.tokens], device=self.device))
        finally:
            for handle in handles:
                handle.remove()
        return f" from {found[0]} on" if found else ""

    def logits(self, hidden: torch.Tensor, head: torch.nn.Module | None = None) -> torch.Tensor:
        """Logits by the family's own code, through another output layer if one is given."""
        from transformers.modeling_outputs import MoeModelOutputWithPast

        # With an extra field, which MoE models look for.
        ready = MoeModelOutputWithPast(last_hidden_state=hidden[None])
        own = self._model.get_output_embeddings()
        self._decoder.forward = lambda *arguments, **more: ready
        if head is not None:
            self._model.set_output_embeddings(head)
        try:
            output = self._model(input_ids=hidden.new_zeros(1, 1, dtype=torch.long))
        finally:
            del self._decoder.forward
            if head is not None:
                self._model.set_output_embeddings(own)
        logits: torch.Tensor = output.logits[0]
        return logits


@dataclass(frozen=True)
class _Pending:
    """A batch that the device may still be working on."""

    rows: list[_Row]
    values: torch.Tensor
    """Log-probability of every requested token, row by row."""
    best: torch.Tensor
    copied: torch.cuda.Event | None
    """After the copies to the host."""

    @classmethod
    def start(cls, rows: list[_Row], values: torch.Tensor, best: torch.Tensor) -> "_Pending":
        """Copy results to the host without waiting for them, or for batches that follow."""
        copies = to_host(values, wait=False), to_host(best, wait=False)
        copied = torch.cuda.current_stream().record_event() if values.is_cuda else None
        return cls(rows, *copies, copied)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.copied is not None:
            self.copied.synchronize()
        return self.values, self.best


@dataclass(frozen=True)
class _Scored:
    where: torch.Tensor
    """Flattened positions of a batch that predict a requested token."""
    targets: torch.Tensor
    places: torch.Tensor


def _scored(
    rows: list[_Row],
    n_prefix: int,
    width: int,
    requests: Sequence[Request],
    starts: list[int],
) -> _Scored:
    where, targets, places = [], [], []
    for place, row in enumerate(rows):
        end = place * width + len(row.tokens) - n_prefix
        for index in row.asked:
            continuation = requests[index].continuation
            where.append(np.arange(end - len(continuation), end))
            targets.append(np.array(continuation))
            places.append(np.arange(starts[index], starts[index + 1]))
    joined = (torch.from_numpy(np.concatenate(parts)) for parts in (where, targets, places))
    return _Scored(*joined)


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host's tensor on the device, which the host does not wait for."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def truncated(request: Request, max_length: int) -> Request:
    """What is really computed: only the end of a context that fits into a window counts."""
    if len(request.continuation) > max_length or not request.continuation:
        raise ScoreError(
            f"a continuation of {len(request.continuation)} tokens does not fit into windows "
            f"of {max_length}; use a longer --max-length"
        )
    too_many = len(request.context) + len(request.continuation) - 1 - max_length
    if too_many <= 0:
        return request
    return Request(request.context[too_many:], request.continuation)


def _rows(requests: Sequence[Request], max_length: int) -> list[_Row]:
    """Requests with the same tokens up to the last one are answered together."""
    rows: dict[tuple[int, ...], _Row] = {}
    for index, request in enumerate(requests):
        kept = truncated(request, max_length)
        # Most continuations are one token: then the context is used directly, not copied.
        tokens = kept.context + kept.continuation[:-1]
        row = rows.setdefault(tokens, _Row(tokens))
        row.asked.append(index)
        row.n_scored = max(row.n_scored, len(request.continuation))
    return list(rows.values())


def _runs(rows: list[_Row], least: int) -> Iterator[_Run]:
    """Rows in parts that share a prefix of at least some tokens; all others make the last part."""
    alone: list[_Row] = []
    ordered = sorted(rows, key=lambda row: row.tokens)
    start = 0
    while start < len(ordered):
        length, stop = _free(ordered[start]), start + 1
        while stop < len(ordered):
            common = min(length, _free(ordered[stop]), _common(ordered[stop - 1], ordered[stop]))
            # A little shorter is fine: questions of one kind begin alike. Much shorter is another
            # kind.
            if common < least or (stop > start + 1 and common < 0.75 * length):
                break
            length, stop = common, stop + 1
        if stop > start + 1:
            yield ordered[start].tokens[:length], ordered[start:stop]
        else:
            alone.append(ordered[start])
        start = stop
    if alone:
        yield (), alone


def _bundles(runs: Iterable[_Run], most_tokens: int) -> Iterator[list[_Run]]:
    """Runs whose prefixes are computed together: of nearly one length, and not too many tokens."""
    waiting = sorted(runs, key=lambda run: len(run[0]))
    while waiting:
        longest = len(waiting[-1][0])
        alike = bisect_left(waiting, (1 - MOST_PADDING) * longest, key=lambda run: len(run[0]))
        first = max(alike, len(waiting) - max(1, most_tokens // max(1, longest)))
        yield waiting[first:]
        del waiting[first:]


def _too_long(n_tokens: int) -> HardwareError:
    return HardwareError(
        f"one sequence of {n_tokens} tokens does not fit into the memory of the GPU; "
        "use a shorter --max-length"
    )


def _free(row: _Row) -> int:
    """Tokens before the first scored position."""
    return len(row.tokens) - row.n_scored


def _common(one: _Row, other: _Row) -> int:
    """Length of the common prefix; by bisection, since comparing slices is fast."""
    low, high = 0, min(len(one.tokens), len(other.tokens))
    while low < high:
        middle = (low + high + 1) // 2
        if one.tokens[low:middle] == other.tokens[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
