"""The decoder blocks of a model, one at a time: record their arguments, load, run, free.

The skeleton has no weights. Masks, position embeddings and the like differ from block to block in
some families, so nothing is guessed: the model itself is run once with every block replaced by a
recorder, and what it passes to each block is kept.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch

from quantkit.errors import SourceError
from quantkit.model import experts
from quantkit.model.architecture import find_blocks, skeleton, text_part
from quantkit.model.links import Links
from quantkit.model.shards import StoredTensor
from quantkit.model.source import ModelSource

MOST_OUTPUTS = 3
"""Of a block: its hidden states, and what a later block wants to know."""


class _Stop(Exception):
    """All blocks have been reached."""


class _StandIn(torch.nn.Module):
    """Stands for a block; models ask their blocks for things such as the kind of attention."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_block", block)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_block"), name)


class _Carried:
    """Stands for something that a block returns beside the hidden states."""

    def __init__(self, place: int) -> None:
        self.place = place


class _Recorder(_StandIn):
    """Keeps what a block is called with, and hands the hidden states on."""

    def __init__(self, block: torch.nn.Module, last: bool, n_outputs: int | None) -> None:
        super().__init__(block)
        self.last, self.n_outputs = last, n_outputs
        self.hidden: torch.Tensor | None = None
        self.arguments: dict[str, Any] = {}

    def forward(self, *values: Any, **named: Any) -> Any:
        hidden, arguments = _by_name(object.__getattribute__(self, "_block"), values, named)
        self.hidden, self.arguments = hidden, arguments
        if self.last:
            raise _Stop
        if self.n_outputs is None:
            return hidden
        return hidden, *(_Carried(place) for place in range(1, self.n_outputs))


def _by_name(
    block: torch.nn.Module, values: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The hidden states of a call, and its other arguments by the names that the block has."""
    names = list(inspect.signature(block.forward).parameters)
    arguments = dict(zip(names, values, strict=False)) | named
    return arguments.pop(names[0]), arguments


class _Given(_StandIn):
    """Gives what the blocks are known to make."""

    def __init__(self, block: torch.nn.Module, hidden: torch.Tensor, n_outputs: int | None) -> None:
        super().__init__(block)
        self.hidden = hidden
        self.n_outputs = n_outputs

    def forward(self, *values: Any, **named: Any) -> Any:
        if self.n_outputs is None:
            return self.hidden
        return self.hidden, *[None] * (self.n_outputs - 1)


@dataclass
class Call:
    """What a block is called with beside the hidden states."""

    common: dict[str, Any]
    """The same for every sample: recorded for one, they broadcast."""
    varying: dict[str, list[Any]] = field(default_factory=dict)
    """By batch, in host memory: what differs from sample to sample, such as the tokens' ids."""
    first: dict[str, Any] = field(default_factory=dict)
    """The same for the first batch of all ranks."""
    carried: dict[str, int] = field(default_factory=dict)
    """What the block before returned beside the hidden states, by its place there."""
    shared: tuple[str, ...] = ()
    """Mappings that blocks write into and later ones read from."""
    repeated: dict[str, Any] = field(default_factory=dict)
    """Which common ones the model repeats for each sample: some blocks join them with others."""

    @property
    def is_plain(self) -> bool:
        """Whether arguments are the same for all samples, whatever came before."""
        return not (self.varying or self.carried or self.shared)

    def of_batch(self, place: int, n_samples: int, device: torch.device) -> dict[str, Any]:
        """Of one batch, without what comes from other blocks."""
        varying = {name: _moved(found[place], device) for name, found in self.varying.items()}
        return self._common(n_samples) | varying

    def of_first(self, n_samples: int, device: torch.device) -> dict[str, Any]:
        """Of the first samples."""
        varying = {n: _moved(found[:n_samples], device) for n, found in self.first.items()}
        return self._common(n_samples) | varying

    def _common(self, n_samples: int) -> dict[str, Any]:
        repeated = {n: _repeated(self.common[n], f, n_samples) for n, f in self.repeated.items()}
        return self.common | repeated


def _repeated(value: Any, flags: Any, n_samples: int) -> Any:
    """A value, or its parts, for so many samples, where the flags say so; no memory is copied."""
    if isinstance(flags, list):
        return type(value)(_repeated(v, f, n_samples) for v, f in zip(value, flags, strict=True))
    return value.expand(n_samples, *value.shape[1:]) if flags else value


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


@dataclass
class Decoder:
    """A model's skeleton and its list of blocks."""

    source: ModelSource
    model: Any
    blocks: torch.nn.ModuleList
    prefix: str
    """The blocks' name in the model, such as `model.layers`."""
    device: torch.device
    dtype: torch.dtype
    _side: torch.cuda.Stream | None = None
    links: Links = field(default_factory=lambda: Links({}, {}, {}, ()))
    """What the model's parameters are in the source's files."""
    parameters: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Those that the source has, by their names in the model."""
    _n_outputs: int | None = None
    """How many things this family's blocks return; None where it is the states alone."""

    @classmethod
    def open(cls, source: ModelSource, device: torch.device) -> "Decoder":
        """Build the skeleton and find its blocks. bf16 on a GPU, float32 on a CPU."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = skeleton(source.folder, source.trust_remote_code, dtype)
        links = Links.of(model, {name: tensor.shape for name, tensor in source.tensors.items()})
        experts.separate(model, source.folder)
        experts.stack(model, dict(links.stacked))
        prefix, blocks = find_blocks(model)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        found = links.tensors(source.tensors, shapes)
        for name, owner in (getattr(model, "all_tied_weights_keys", None) or {}).items():
            if name not in found and owner in found:
                found[name] = found[owner]
        return cls(source, model, blocks, prefix, device, dtype, links=links, parameters=found)

    def name(self, index: int) -> str:
        """A block's full name."""
        return f"{self.prefix}.{index}"

    def tensors(self, index: int) -> Mapping[str, StoredTensor]:
        """The stored parameters of a block, by their names within it."""
        start = f"{self.name(index)}."
        return {name: self.parameters[start + name] for name in self.blocks[index].state_dict()}

    def stored(self, index: int, name: str) -> str | None:
        """What files call a parameter of a block; None where they hold it in another form."""
        return self.links.stored.get(f"{self.name(index)}.{name}")

    def module(self, index: int, name: str) -> str:
        """What files call a module of a block."""
        return self.links.module(f"{self.name(index)}.{name}")

    @cached_property
    def written(self) -> frozenset[str]:
        """Stored names of all parameters within blocks that are one tensor each."""
        start = f"{self.prefix}."
        return frozenset(s for n, s in self.links.stored.items() if n.startswith(start))

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """A block's parameters on the device, as they are stored."""
        pinned = self.device.type == "cuda"
        return {
            name: stored.read(pinned).to(self.device, non_blocking=True)
            for name, stored in self.tensors(index).items()
        }

    def read_ahead(
        self, check: Callable[[StoredTensor, torch.Tensor], None]
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Every block's place and parameters, each checked; the next is read meanwhile."""

        def read(index: int) -> dict[str, torch.Tensor]:
            with self._aside():
                state = self.read(index)
                for name, stored in self.tensors(index).items():
                    check(stored, state[name])
            return state

        n_blocks = len(self.blocks)
        with ThreadPoolExecutor(1) as pool:
            ahead = pool.submit(read, 0)
            for index in range(n_blocks):
                state = ahead.result()
                if index + 1 < n_blocks:
                    ahead = pool.submit(read, index + 1)
                if self.device.type == "cuda":
                    for tensor in state.values():
                        tensor.record_stream(torch.cuda.current_stream(self.device))
                yield index, state
                del state

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is within runs beside the main stream, and is done at the end."""
        if self.device.type != "cuda":
            yield
            return
        if self._side is None:  # always the same: each stream has a pool of memory of its own
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side), torch.no_grad():
            yield
        self._side.synchronize()

    @contextmanager
    def loaded(self, index: int, state: Mapping[str, torch.Tensor]) -> Iterator[torch.nn.Module]:
        """A block with these parameters in the type that is computed in; it forgets them after."""
        block = self.blocks[index]
        cast = {name: self._cast(name, tensor) for name, tensor in state.items()}
        block.load_state_dict(cast, strict=True, assign=True)
        block.to(self.device)
        try:
            yield block
        finally:
            # Buffers that no file holds, such as rotary frequencies, stay.
            empty = {name: tensor.to("meta") for name, tensor in block.state_dict().items()}
            block.load_state_dict(empty, strict=True, assign=True)

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """In the type that is computed in, but for whole numbers and what the family says."""
        if not tensor.is_floating_point():
            return tensor
        wide = getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()
        is_wide = any(part in f".{name}" for part in wide)
        return tensor.to(torch.float32 if is_wide else self.dtype)

    @torch.no_grad()
    def start(
        self, tokens: torch.Tensor, batch_size: int, beginning: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], list[Call]]:
        """Hidden states before the first block, by batch, and every block's other arguments.

        `beginning` are the first samples of all ranks, where these are not the first of `tokens`.
        """
        base = self.model.get_submodule(self.prefix.rpartition(".")[0])
        blocks = list(self.blocks)
        inside, start = f"{self.prefix}.", self.prefix.rpartition(".")[0]
        known = set(self.model.state_dict())
        outside = {
            name: self._cast(name, stored.read().to(self.device))
            for name, stored in self.parameters.items()
            if name.startswith(f"{start}." if start else "")
            and not name.startswith(inside)
            and name in known
            and not name.startswith("lm_head")
        }
        try:
            self.model.load_state_dict(outside, strict=False, assign=True)
            for module in base.children():
                if module is not self.blocks:
                    module.to(self.device)
            _, one = self._recorded(base, tokens[:1])
            recording = _Recording(one)
            hidden = []
            for batch in torch.split(tokens, batch_size):
                first, arguments = self._recorded(base, batch)
                hidden.append(first)
                recording.add(arguments)
            if beginning is not None and not torch.equal(beginning, tokens[: len(beginning)]):
                recording.begin(self._recorded(base, beginning)[1])
        finally:
            for index, block in enumerate(blocks):
                self.blocks[index] = block
            # Embeddings have done their work; the blocks need the room.
            empty = {name: tensor.to("meta") for name, tensor in outside.items()}
            self.model.load_state_dict(empty, strict=False, assign=True)
        return hidden, recording.calls()

    def _recorded(
        self, base: torch.nn.Module, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """Hidden states before the first block, and every block's arguments, for these tokens.

        How many things the model takes from a block shows when it is given too few or too many.
        """
        blocks = list(self.blocks)
        tries = [self._n_outputs] if self._n_outputs else [None, *range(1, MOST_OUTPUTS + 1)]
        for n_outputs in tries:
            last = len(blocks) - 1
            recorders = [_Recorder(b, i == last, n_outputs) for i, b in enumerate(blocks)]
            for index, recorder in enumerate(recorders):
                self.blocks[index] = recorder
            try:
                base(input_ids=tokens.to(self.device), use_cache=False)
            except _Stop:
                self._n_outputs = n_outputs
                first = recorders[0].hidden
                assert first is not None
                return first, [recorder.arguments for recorder in recorders]
            except (ValueError, TypeError, AttributeError, IndexError) as error:
                problem = error
            finally:
                for index, block in enumerate(blocks):
                    self.blocks[index] = block
        raise SourceError(
            f"{type(self.model).__name__} cannot be calibrated: it calls its decoder blocks in a "
            f"way that quantkit cannot record ({problem}); recipes that need no data work"
        ) from problem

    @torch.no_grad()
    def losses(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of every token but each sample's first, from the last states."""
        found = []
        with self.head() as logits_of:
            for sample in range(len(tokens)):
                states, ids = hidden[sample : sample + 1], tokens[sample : sample + 1]
                logits = logits_of(states, ids)[:-1]
                targets = ids[0, 1:].to(self.device)
                found.append(torch.nn.functional.cross_entropy(logits, targets, reduction="none"))
        return torch.cat(found)

    @contextmanager
    def head(
        self, changed: Mapping[str, torch.Tensor] | None = None
    ) -> Iterator[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
        """What turns the last states and tokens of one sample into logits [tokens, vocabulary].

        `changed` has other values of some parameters outside the blocks.
        The model itself does it, with blocks that give what is known, so that final norms, caps
        and scales of logits are the family's own.
        """
        blocks = list(self.blocks)
        prefix, _ = text_part(self.model)
        head = self.model.get_output_embeddings()
        head_names = [n for n, m in self.model.named_modules() if m is head]
        starts = tuple(f"{n}." for n in (prefix, *head_names) if n)
        outside = {
            name: self._cast(name, stored.read().to(self.device))
            for name, stored in self.parameters.items()
            if name.startswith(starts) and not name.startswith(f"{self.prefix}.")
        }
        for name, value in (changed or {}).items():
            outside[name] = self._cast(name, value.to(self.device))

        def logits(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            for index, block in enumerate(blocks):
                self.blocks[index] = _Given(block, states, self._n_outputs)
            made = self.model(input_ids=ids.to(self.device), use_cache=False).logits
            return cast("torch.Tensor", made[0].float())

        try:
            self.model.load_state_dict(outside, strict=False, assign=True)
            self.model.tie_weights()
            self.model.get_output_embeddings().to(self.device)
            yield logits
        finally:
            for index, block in enumerate(blocks):
                self.blocks[index] = block
            empty = {name: tensor.to("meta") for name, tensor in outside.items()}
            self.model.load_state_dict(empty, strict=False, assign=True)

    def run(
        self, block: torch.nn.Module, hidden: torch.Tensor, arguments: Mapping[str, Any]
    ) -> torch.Tensor:
        """A block's output."""
        return self.run_all(block, hidden, arguments)[0]

    def run_all(
        self, block: torch.nn.Module, hidden: torch.Tensor, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """A block's output, and what it returns beside it."""
        result = block(hidden, **arguments)
        if not isinstance(result, tuple):
            return result, ()
        if self._n_outputs is None:
            self._n_outputs = 1
        return result[0], result[1:]


class _Recording:
    """Compares what blocks were called with for one sample, and for every batch."""

    def __init__(self, one: list[dict[str, Any]]) -> None:
        self._one = one
        self._batches: list[list[dict[str, Any]]] = []
        self._first: list[dict[str, Any]] | None = None
        self._same: dict[tuple[int, int], bool] = {}
        self._kept: dict[int, Any] = {}
        self._alive: list[Any] = []
        self._repeated: list[dict[str, Any]] | None = None

    def add(self, arguments: list[dict[str, Any]]) -> None:
        """The arguments of a batch: what differs from those of one sample is kept."""
        self._alive = [arguments]  # so that no identity is used twice meanwhile
        self._same.clear()
        self._kept.clear()
        self._batches.append(self._differing(arguments))
        if self._repeated is None:
            self._repeated = [
                {n: f for n, v in here.items() if n in one and (f := _flags(one[n], v))}
                for one, here in zip(self._one, arguments, strict=True)
            ]

    def begin(self, arguments: list[dict[str, Any]]) -> None:
        """The same for the first samples of all ranks."""
        self._same.clear()
        self._kept.clear()
        self._first = self._differing(arguments)

    def calls(self) -> list[Call]:
        """By block."""
        calls = []
        for place, one in enumerate(self._one):
            batches = [batch[place] for batch in self._batches]
            names = {name for batch in batches for name in batch}
            first = (self._first or self._batches[0])[place] if self._batches else {}
            carried = {n: v.place for n, v in one.items() if isinstance(v, _Carried)}
            shared = tuple(n for n, v in one.items() if isinstance(v, MutableMapping) and not v)
            apart = {*carried, *shared}
            calls.append(
                Call(
                    {n: v for n, v in one.items() if n not in apart},
                    {n: [batch.get(n, one[n]) for batch in batches] for n in names - apart},
                    {n: v for n, v in first.items() if n not in apart},
                    carried,
                    shared,
                    self._repeated[place] if self._repeated else {},
                )
            )
        return calls

    def _differing(self, arguments: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for one, here in zip(self._one, arguments, strict=True):
            other = {n: v for n, v in here.items() if n in one and not self._is_same(one[n], v)}
            found.append({n: self._on_host(v) for n, v in other.items()})
        return found

    def _on_host(self, value: Any) -> Any:
        if id(value) not in self._kept:
            self._kept[id(value)] = value.cpu() if isinstance(value, torch.Tensor) else value
        return self._kept[id(value)]

    def _is_same(self, one: Any, here: Any) -> bool:
        """Whether the value for one sample, broadcast, is that of a batch."""
        key = id(one), id(here)
        if key not in self._same:
            self._same[key] = _broadcasts(one, here)
        return self._same[key]


def _flags(one: Any, here: Any) -> Any:
    """Whether a batch has more of a value than one sample; for parts of a tuple, a list of it."""
    if isinstance(one, torch.Tensor) and isinstance(here, torch.Tensor):
        return one.dim() == here.dim() > 0 and one.shape[0] == 1 < here.shape[0]
    if type(one) in (tuple, list) and type(here) is type(one) and len(one) == len(here):
        flags = [_flags(*pair) for pair in zip(one, here, strict=True)]
        return flags if any(flags) else False
    return False


def _broadcasts(one: Any, here: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(here, torch.Tensor):
        if one.dim() != here.dim():
            return False
        try:
            return torch.equal(one.expand_as(here), here)
        except RuntimeError:
            return False
    if isinstance(one, tuple | list) and isinstance(here, tuple | list):
        return len(one) == len(here) and all(map(_broadcasts, one, here))
    return True
