"""Generates many answers at once in a static cache: rows have their own lengths, without padding.

Keys and values of all rows are in one array per layer. A prompt that joins is written into a free
row; when an answer ends, the last row takes its place. So a step is always the same few hundred
kernels over the first rows, and on a GPU they run as one CUDA graph per number of rows: without it,
launching them takes longer than running them. The likeliest token is chosen inside the graph, and
the host looks for ends of answers while the device already generates the next tokens.

For transformers models whose layers all use full attention; `works_for` tries it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from quantkit.errors import HardwareError
from quantkit.scoring import sampling
from quantkit.scoring.rows import RowLayer, Rows, Unsupported, attending
from quantkit.scoring.rules import Rules
from quantkit.scoring.sampling import Choice

CHECK_EVERY = 8
"""Tokens between two checks for ends of answers."""
PREFILL_TOKENS = {"cuda": 65536, "cpu": 1024}
CACHED_BYTES = {"cpu": 512 << 20}
"""Most memory for the keys and values of all rows ..."""
CACHED_SHARE = 0.7
"""... on a GPU, as a share of free memory."""
MOST_ROWS = {"cuda": 2048, "cpu": 32}
REFILL = 0.75
"""Waiting prompts join when no more than this share of the rows is still being generated."""
ALIKE = 2
"""Prompts and answers of different length share rows of the longest's length, up to this factor."""
TOLERANCE = {torch.float32: 1e-3}
"""How far logits may be from the model's own, relative to the largest; in 16 bits a twentieth."""
N_TRIED = 32
"""Tokens of the text on which they are compared."""


@dataclass
class _Snapshot:
    """What was generated at some point, on its way to the host."""

    places: list[int]
    counts: list[int]
    written: torch.Tensor
    arrived: Any

    def rows(self) -> list[list[int]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return [row[:n] for row, n in zip(self.written.tolist(), self.counts, strict=True)]


@dataclass(frozen=True)
class _Group:
    """Prompts of similar length, and what they share."""

    prompts: Sequence[tuple[int, ...]]
    """All prompts; indices refer to this list."""
    waiting: list[int]
    """Those that are not being answered yet, the longest last."""
    shared: int
    """The group's common prefix ..."""
    prefix: Any
    """... and their keys and values."""


class Decoder:
    """Generates answers with a causal language model of transformers in a static cache."""

    def __init__(self, model: Any, max_rows: int | None = None, graphs: bool = True) -> None:
        self._model, self._decoder = model, model.get_decoder()
        self._device = next(model.parameters()).device
        kind = self._device.type
        self._max_rows = max_rows or MOST_ROWS[kind]
        self._prefill_tokens = PREFILL_TOKENS[kind]
        configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
        self._configs = list(configs.values())
        self._graphs = graphs and kind == "cuda"
        self._shapes: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def works(self) -> bool:
        """Whether it predicts what the model predicts without it."""
        tried = tuple(number % 29 + 1 for number in range(N_TRIED))
        ids = torch.tensor([tried], device=self._device)
        expected = self._model(input_ids=ids).logits[0, -1].float()
        batch = self._batch(1, N_TRIED + 1, Rules(1))
        try:
            batch.join([0], _Group([tried], [0], 0, None))
            found = batch.forward(1)[0].float()
        except (Unsupported, RuntimeError, TypeError, ValueError):
            return False
        apart = float((found - expected).abs().max())
        most = TOLERANCE.get(self._model.dtype, 0.05) * float(expected.abs().max())
        return math.isfinite(apart) and apart <= most

    @torch.no_grad()
    def answers(
        self,
        prompts: Sequence[tuple[int, ...]],
        rules: Rules,
        text_of: Callable[[Sequence[int]], str],
    ) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
        """Indices of prompts and the tokens of their answers, as they end."""
        choose = Choice(prompts, rules, self._device)
        # The longest come first: if they do not fit, it shows at once, and the time left is not too
        # low.
        waiting = sorted(range(len(prompts)), key=lambda place: (len(prompts[place]), place))
        while waiting:
            longest = len(prompts[waiting[-1]]) + rules.max_new
            first = next(
                i
                for i, p in enumerate(waiting)
                if ALIKE * (len(prompts[p]) + rules.max_new) >= longest
            )
            group, waiting = waiting[first:], waiting[:first]
            yield from self._written(group, prompts, rules, text_of, choose)

    def _written(
        self,
        waiting: list[int],
        prompts: Sequence[tuple[int, ...]],
        rules: Rules,
        text_of: Callable[[Sequence[int]], str],
        choose: Choice,
    ) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
        """All of a group of prompts of similar length, the last of them first."""
        # The last token of a prompt is fed as the first step, and is not shared.
        shared = sampling.shared([prompts[place] for place in waiting], own=2)
        prefix = self._prefix(prompts[waiting[0]][:shared]) if shared else None
        group = _Group(prompts, waiting, shared, prefix)
        longest = len(prompts[waiting[-1]])
        batch = self._batch(len(waiting), longest + rules.max_new, rules)
        try:
            yield from self._finished(batch, group, text_of, choose)
        finally:
            batch.close()

    def _finished(
        self,
        batch: "_Batch",
        group: _Group,
        text_of: Callable[[Sequence[int]], str],
        choose: Choice,
    ) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
        on_cpu = self._device.type == "cpu"
        before: _Snapshot | None = None
        open_places = set(group.waiting)
        while open_places:
            self._fill(batch, group)
            batch.write(CHECK_EVERY, choose)
            fresh = batch.snapshot()
            # While the device continues, the host looks at the previous snapshot.
            looked = [before, fresh] if on_cpu or batch.is_full else [before]
            before = None if on_cpu else fresh
            for snapshot in filter(None, looked):
                done = [
                    (place, answer)
                    for place, tokens in zip(snapshot.places, snapshot.rows(), strict=True)
                    if place in open_places
                    and (answer := sampling.ended(tokens, batch.rules, text_of)) is not None
                ]
                if done:
                    open_places -= {place for place, _ in done}
                    batch.remove({place for place, _ in done})
                    yield done

    def _prefix(self, tokens: tuple[int, ...]) -> Any:
        cache = DynamicCache(config=self._model.config)
        ids = torch.tensor([tokens], device=self._device)
        self._decoder(input_ids=ids, past_key_values=cache, use_cache=True)
        return cache

    def _fill(self, batch: "_Batch", group: _Group) -> None:
        """Let waiting prompts join, as many as there are free rows."""
        waiting = group.waiting
        if batch.places and len(batch.places) > REFILL * batch.n_rows:
            return
        while waiting and len(batch.places) < batch.n_rows:
            longest = len(group.prompts[waiting[-1]])
            n = min(len(waiting), batch.n_rows - len(batch.places))
            n = max(1, min(n, self._prefill_tokens // max(1, longest - group.shared)))
            try:
                batch.join([waiting[-1 - i] for i in range(n)], group)
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                if n == 1:
                    raise HardwareError(
                        f"a prompt of {longest} tokens does not fit into the memory of the GPU; "
                        "use a shorter --max-length"
                    ) from error
                self._prefill_tokens = max(1, self._prefill_tokens // 2)
                continue
            del waiting[len(waiting) - n :]

    def _batch(self, n_wanted: int, length: int, rules: Rules) -> "_Batch":
        """A batch of as many rows as fit, for this many prompts and tokens per row."""
        if not self._shapes:
            cache = self._prefix((1,))
            self._shapes = [(layer.keys, layer.values) for layer in cache.layers]
        per_token = sum(keys.nbytes + values.nbytes for keys, values in self._shapes)
        if self._device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self._device)
            room = free + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            budget = int(CACHED_SHARE * room)
        else:
            budget = CACHED_BYTES[self._device.type]
        n_rows = max(1, min(self._max_rows, n_wanted, budget // (per_token * length)))
        while True:
            try:
                layers = [
                    RowLayer(
                        *(one.new_zeros(n_rows, one.shape[1], length, one.shape[3]) for one in pair)
                    )
                    for pair in self._shapes
                ]
                break
            except torch.OutOfMemoryError as error:
                torch.cuda.empty_cache()
                if n_rows == 1:
                    raise HardwareError(
                        f"keys and values of {length} tokens do not fit into the memory of the "
                        "GPU; use a shorter --max-length"
                    ) from error
                n_rows = (n_rows + 1) // 2
        return _Batch(self, Rows(layers), rules)


class _Batch:
    """Answers that are being generated: the first rows of a cache."""

    def __init__(self, decoder: Decoder, rows: Rows, rules: Rules) -> None:
        self._of, self._rows, self.rules = decoder, rows, rules
        device = rows.positions.device
        self.n_rows = len(rows.positions)
        self.places: list[int] = []
        """The prompts that the first rows answer."""
        self._counts: list[int] = []
        self._lengths: list[int] = []
        self._tokens = torch.zeros(self.n_rows, dtype=torch.long, device=device)
        self._n_written = torch.zeros(self.n_rows, dtype=torch.long, device=device)
        # One extra column, for rows that are full and wait for the others.
        self._written = torch.zeros(self.n_rows, rules.max_new + 1, dtype=torch.long, device=device)
        # A row without an answer counts as full.
        self._n_written.fill_(rules.max_new)
        self._graphs: dict[int, Any] = {}
        self._pool: Any = None

    @property
    def is_full(self) -> bool:
        """Whether nothing more can be generated."""
        return all(count >= self.rules.max_new for count in self._counts)

    def close(self) -> None:
        """Free the memory now: cache and layers reference each other, and would wait for the
        collector.
        """
        self._graphs.clear()
        for layer in self._rows.layers:
            layer.keys = layer.values = None

    def join(self, places: list[int], group: _Group) -> None:
        """Prefill free rows with prompts, all but their last tokens."""
        prompts = [group.prompts[place] for place in places]
        shared, prefix = group.shared, group.prefix
        first, n = len(self.places), len(places)
        device = self._tokens.device
        own = [prompt[shared:-1] for prompt in prompts]
        width = max(map(len, own))
        if width:
            cache = DynamicCache(config=self._of._model.config)
            if prefix is not None:
                for new, old in zip(cache.layers, prefix.layers, strict=True):
                    new.update(old.keys.repeat(n, 1, 1, 1), old.values.repeat(n, 1, 1, 1))
            # Padding comes last, where causal attention from real tokens does not see it.
            ids = _on(device, [[*tokens, *[0] * (width - len(tokens))] for tokens in own])
            self._of._decoder(input_ids=ids, past_key_values=cache, use_cache=True)
            for mine, new in zip(self._rows.layers, cache.layers, strict=True):
                mine.keys[first : first + n, :, : shared + width] = new.keys
                mine.values[first : first + n, :, : shared + width] = new.values
        rows = slice(first, first + n)
        lengths = [len(prompt) for prompt in prompts]
        self._rows.positions[rows] = _on(device, lengths) - 1
        self._tokens[rows] = _on(device, [prompt[-1] for prompt in prompts])
        self._n_written[rows] = 0
        self.places += places
        self._counts += [0] * n
        self._lengths += lengths

    def remove(self, places: set[int]) -> None:
        """Free these rows; the last rows move into the gaps."""
        gone = [row for row, place in enumerate(self.places) if place in places]
        left = len(self.places) - len(gone)
        movers = [row for row in range(left, len(self.places)) if self.places[row] not in places]
        gaps = [row for row in gone if row < left]
        device = self._tokens.device
        if gaps:
            to, at = _on(device, gaps), _on(device, movers)
            # No further than anything was written.
            end = max(self._lengths[row] + self._counts[row] for row in movers)
            for layer in self._rows.layers:
                layer.keys[to, :, :end] = layer.keys[at, :, :end]
                layer.values[to, :, :end] = layer.values[at, :, :end]
            for tensor in (self._rows.positions, self._tokens, self._n_written, self._written):
                tensor[to] = tensor[at]
            for gap, mover in zip(gaps, movers, strict=True):
                for listed in (self.places, self._counts, self._lengths):
                    listed[gap] = listed[mover]
        self._n_written[left:] = self.rules.max_new
        self._rows.positions[left:] = 0
        for kept in (self.places, self._counts, self._lengths):
            del kept[left:]

    def write(self, n_steps: int, choose: Choice) -> None:
        """Generate some more tokens in every row that is not full."""
        for _ in range(n_steps):
            if choose.is_plain:
                self._step()
            else:
                n = len(self.places)
                logits = self.forward(n)
                self._put(choose(logits, self.places, self._written, self._counts))
            most = self.rules.max_new
            self._counts = [min(count + 1, most) for count in self._counts]

    def snapshot(self) -> _Snapshot:
        """What has been generated so far; on a GPU the copy to the host is asynchronous."""
        written = self._written[: len(self.places)]
        arrived = None
        if written.is_cuda:
            pinned = torch.empty(written.shape, dtype=written.dtype, pin_memory=True)
            written = pinned.copy_(written, non_blocking=True)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        return _Snapshot(list(self.places), list(self._counts), written, arrived)

    def forward(self, n: int) -> torch.Tensor:
        """Logits of the next tokens of the first rows."""
        rows = self._rows
        rows.n = n
        rows.longest = rows.layers[0].keys.shape[2]
        if not rows.positions.is_cuda:
            pairs = zip(self._lengths, self._counts, strict=True)
            rows.longest = max(length + count for length, count in pairs)
        with attending(self._of._configs, rows):
            output = self._of._model(
                input_ids=self._tokens[:n, None],
                position_ids=rows.positions[:n, None],
                past_key_values=rows,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _put(self, chosen: torch.Tensor) -> None:
        """Write tokens into rows; full ones stay unchanged."""
        n = len(chosen)
        counts, positions = self._n_written[:n], self._rows.positions[:n]
        goes_on = (counts < self.rules.max_new).long()
        self._written[:n].scatter_(1, counts[:, None], chosen[:, None])
        self._tokens[:n] = chosen
        counts += goes_on
        positions += goes_on

    def _step(self) -> None:
        """The likeliest tokens."""
        n = len(self.places)
        if not self._of._graphs:
            self._put(self.forward(n).argmax(-1))
            return
        n = next((size for size in _sizes(self.n_rows) if size >= n), self.n_rows)
        if n not in self._graphs:
            # The first time without a graph: what is loaded or compiled on first use cannot be
            # captured.
            self._graphs[n] = None
            self._put(self.forward(n).argmax(-1))
            return
        graph = self._graphs[n]
        if graph is None:
            try:
                graph = self._graphs[n] = self._recorded(n)
            except RuntimeError:  # a model that synchronises in between
                self._of._graphs = False
                torch.cuda.synchronize()
                self._step()
                return
        graph.replay()

    def _recorded(self, n: int) -> Any:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._put(self.forward(n).argmax(-1))
        self._pool = self._pool or graph.pool()
        return graph


def _sizes(most: int) -> list[int]:
    """Row counts that get their own graph; few, since capturing takes the time of a few steps.

    Below 64 rows all take about the same time: that of reading the weights.
    """
    sizes, size = [16, 64], 128
    while size < most:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [*(size for size in sizes if size < most), most]


def _on(device: torch.device, values: Sequence[Any]) -> torch.Tensor:
    """Numbers on a device, copied asynchronously."""
    made = torch.tensor(values)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def works_for(model: Any) -> bool:
    """Whether all layers of a model use full attention, through a replaceable attention
    function.
    """
    layers = DynamicCache(config=model.config).layers
    return (
        bool(layers)
        and all(type(layer) is DynamicLayer for layer in layers)
        and bool(getattr(model, "_supports_attention_backend", False))
        and model.config._attn_implementation == "sdpa"
        and Decoder(model, 1, graphs=False).works()
    )
