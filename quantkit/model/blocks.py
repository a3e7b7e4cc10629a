"""The decoder blocks of a model, one at a time: record their arguments, load, run, free.

The skeleton has no weights. The model itself is run once with every block replaced by a recorder,
which keeps what the model passes to each block (`block_calls.py`).
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch

from quantkit.errors import SourceError
from quantkit.model import experts, fast_modules
from quantkit.model.block_calls import ADDED, Call, KnownOutput, Recorder, Recording, Stop
from quantkit.model.links import Links
from quantkit.model.shards import StoredTensor
from quantkit.model.skeleton import find_blocks, skeleton, text_part
from quantkit.model.source import ModelSource

SIZES_DIFFER = re.compile(r"must match|cannot be multiplied|invalid for input|shape mismatch")
"""In torch's messages about mismatched tensors."""
READERS = 2
MOST_OUTPUTS = 3
"""Maximum number of outputs of a block: its hidden states, and what later blocks need."""


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
    """The stored tensors of the model's parameters."""
    parameters: Mapping[str, StoredTensor] = field(default_factory=dict)
    """The source's parameters, by their names in the model."""
    _n_outputs: int | None = None
    """Number of outputs of this family's blocks; None where it is the states alone."""
    _batch_dim: int = 0
    """The batch dimension of blocks: in Gemma 3n after its streams. Elsewhere the first."""

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
        """A block parameter's name in files; None where they store it in another form."""
        return self.links.stored.get(f"{self.name(index)}.{name}")

    def module(self, index: int, name: str) -> str:
        """A block module's name in files."""
        return self.links.module(f"{self.name(index)}.{name}")

    @cached_property
    def written(self) -> frozenset[str]:
        """Stored names of all block parameters that are one tensor each."""
        start = f"{self.prefix}."
        return frozenset(s for n, s in self.links.stored.items() if n.startswith(start))

    def read(self, index: int) -> dict[str, torch.Tensor]:
        """A block's parameters on the device, as stored."""
        pinned = self.device.type == "cuda"
        return {
            name: stored.read(pinned).to(self.device, non_blocking=True)
            for name, stored in self.tensors(index).items()
        }

    def read_ahead(
        self, check: Callable[[StoredTensor, torch.Tensor], None]
    ) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Every block's index and parameters, each checked; the next block is read meanwhile."""

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
        """Run the body on a side stream, and finish it before leaving."""
        if self.device.type != "cuda":
            yield
            return
        if self._side is None:  # always the same one: each stream has its own memory pool
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._side), torch.no_grad():
            yield
        self._side.synchronize()

    @contextmanager
    def loaded(self, index: int, state: Mapping[str, torch.Tensor]) -> Iterator[torch.nn.Module]:
        """A block with these parameters in the compute dtype; they are released afterwards."""
        block = self.blocks[index]
        cast = {name: self._cast(name, tensor) for name, tensor in state.items()}
        block.load_state_dict(cast, strict=True, assign=True)
        block.to(self.device)
        try:
            with fast_modules.accelerated(block):
                yield block
        finally:
            # Buffers that no file holds, such as rotary frequencies, stay.
            empty = {name: tensor.to("meta") for name, tensor in block.state_dict().items()}
            block.load_state_dict(empty, strict=True, assign=True)

    def _loaded(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Parameters outside the blocks; several are read at once, as embeddings and head are
        large.
        """

        def load(name: str) -> tuple[str, torch.Tensor]:
            return name, self._cast(name, self.parameters[name].read().to(self.device))

        with ThreadPoolExecutor(READERS) as pool:
            return dict(pool.map(load, names))

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Cast to the compute dtype, except integers and the family's exceptions."""
        if not tensor.is_floating_point():
            return tensor
        wide = getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()
        is_wide = any(part in f".{name}" for part in wide)
        return tensor.to(torch.float32 if is_wide else self.dtype)

    @torch.no_grad()
    def start(
        self,
        tokens: torch.Tensor,
        batch_size: int,
        beginning: torch.Tensor | None = None,
        images: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[list[torch.Tensor], list[Call]]:
        """Hidden states before the first block, by batch, and every block's other arguments.

        `beginning` holds the first samples of all ranks, where these are not the first of `tokens`.
        `images` holds the model's image inputs per sample, which are processed one at a time.
        """
        base = self.model.get_submodule(self.prefix.rpartition(".")[0])
        blocks = list(self.blocks)
        inside, start = f"{self.prefix}.", self.prefix.rpartition(".")[0]
        known = set(self.model.state_dict())
        outside = self._loaded(
            name
            for name in self.parameters
            if (images or name.startswith(f"{start}." if start else ""))
            and not name.startswith(inside)
            and name in known
            and not name.startswith("lm_head")
        )
        try:
            self.model.load_state_dict(outside, strict=False, assign=True)
            for module in base.children():
                if module is not self.blocks:
                    module.to(self.device)
            if images:
                self._place_towers()
                batch_size, beginning = 1, None
            given = {"images": images[0]} if images else {}
            states, one = self._recorded(base, tokens[:1], **given)
            self._batch_dim = self._find_batch(base, tokens[:1], states)
            recording = Recording(one)
            hidden = []
            for place, batch in enumerate(torch.split(tokens, batch_size)):
                given = {"images": images[place]} if images else {}
                first, arguments = self._recorded(base, batch, **given)
                hidden.append(first.movedim(self._batch_dim, 0))
                recording.add(arguments)
            if beginning is not None and not torch.equal(beginning, tokens[: len(beginning)]):
                recording.begin(self._recorded(base, beginning)[1])
        finally:
            for index, block in enumerate(blocks):
                self.blocks[index] = block
            # The embeddings are no longer needed; the blocks need the memory.
            empty = {name: tensor.to("meta") for name, tensor in outside.items()}
            self.model.load_state_dict(empty, strict=False, assign=True)
        return hidden, recording.calls()

    def _place_towers(self) -> None:
        """Move the vision towers to the device, where their weights are; the head has none yet."""
        for module in self.model.modules():
            held = [*module.parameters(), *module.buffers()]
            if held and not any(tensor.is_meta for tensor in held):
                module.to(self.device)

    def _recorded(
        self,
        base: torch.nn.Module,
        tokens: torch.Tensor,
        images: Mapping[str, Any] | None = None,
    ) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """Hidden states before the first block, and every block's arguments, for these tokens.

        How many outputs the model expects from a block shows when it gets too few or too many.
        """
        blocks = list(self.blocks)
        tries = [self._n_outputs] if self._n_outputs else [None, *range(1, MOST_OUTPUTS + 1)]
        for n_outputs in tries:
            last = len(blocks) - 1
            recorders = [Recorder(b, i == last, n_outputs) for i, b in enumerate(blocks)]
            for index, recorder in enumerate(recorders):
                self.blocks[index] = recorder
            try:
                if images is None:
                    base(input_ids=tokens.to(self.device), use_cache=False)
                else:
                    self.model(
                        input_ids=tokens.to(self.device), use_cache=False, **self._taken(images)
                    )
            except Stop:
                self._n_outputs = n_outputs
                first = recorders[0].hidden
                assert first is not None
                if images is not None:
                    _note_added(recorders)
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

    def _taken(self, images: Mapping[str, Any]) -> dict[str, Any]:
        """Those of a processor's outputs that the model's forward accepts, on the device."""
        known = inspect.signature(self.model.forward).parameters
        taken = {}
        for name, value in images.items():
            if name in known and isinstance(value, torch.Tensor):
                value = value.to(self.device)
                taken[name] = value.to(self.dtype) if value.is_floating_point() else value
        return taken

    def _find_batch(self, base: torch.nn.Module, one: torch.Tensor, states: torch.Tensor) -> int:
        """The dimension that grows with the number of samples."""
        if states.dim() == 3:
            return 0
        two, _ = self._recorded(base, one.expand(2, -1))
        grown = [d for d, (n, m) in enumerate(zip(states.shape, two.shape, strict=True)) if n != m]
        return grown[0] if grown else 0

    @torch.no_grad()
    def losses(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of every token except each sample's first, from the last
        states.
        """
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
        """A function from the last states and tokens of samples to logits [tokens, vocabulary].

        `changed` replaces some parameters outside the blocks. The model itself computes them, with
        blocks that return the known states, so final norms, caps and logit scales are the family's
        own.
        """
        blocks = list(self.blocks)
        prefix, _ = text_part(self.model)
        head = self.model.get_output_embeddings()
        head_names = [n for n, m in self.model.named_modules() if m is head]
        starts = tuple(f"{n}." for n in (prefix, *head_names) if n)
        outside = self._loaded(
            name
            for name in self.parameters
            if name.startswith(starts) and not name.startswith(f"{self.prefix}.")
        )
        for name, value in (changed or {}).items():
            outside[name] = self._cast(name, value.to(self.device))

        known: list[Any] = []
        stand_ins = [KnownOutput(block, known) for block in blocks]

        def logits(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            given = states.movedim(0, self._batch_dim)
            n_others = (self._n_outputs or 1) - 1
            known[:] = [given if self._n_outputs is None else (given, *[None] * n_others)]
            for index, stand_in in enumerate(stand_ins):
                self.blocks[index] = stand_in
            try:
                with _placed(self.model, self.device):
                    made = self.model(input_ids=ids.to(self.device), use_cache=False).logits
            finally:
                known.clear()
                for index, block in enumerate(blocks):
                    self.blocks[index] = block
            return cast("torch.Tensor", made.flatten(0, 1).float())

        try:
            self.model.load_state_dict(outside, strict=False, assign=True)
            self.model.tie_weights()
            self.model.get_output_embeddings().to(self.device)
            yield logits
        finally:
            empty = {name: tensor.to("meta") for name, tensor in outside.items()}
            self.model.load_state_dict(empty, strict=False, assign=True)

    def run(
        self, block: Callable[..., Any], hidden: torch.Tensor, arguments: Mapping[str, Any]
    ) -> torch.Tensor:
        """A block's output."""
        return self.run_all(block, hidden, arguments)[0]

    def run_all(
        self, block: Callable[..., Any], hidden: torch.Tensor, arguments: Mapping[str, Any]
    ) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """A block's output, and what it returns besides."""
        added = arguments.get(ADDED)
        if ADDED in arguments:
            arguments = {name: value for name, value in arguments.items() if name != ADDED}
        if added is not None:
            hidden = hidden + added.to(hidden.dtype)
        try:
            result = block(hidden.movedim(0, self._batch_dim), **arguments)
        except RuntimeError as error:
            if type(error) is not RuntimeError or not SIZES_DIFFER.search(str(error)):
                raise
            raise SourceError(
                f"{type(self.model).__name__} cannot be calibrated: {type(block).__name__} takes "
                "an argument that grows with the samples in a way that quantkit cannot record "
                f"({' '.join(str(error).split())[:120]}); recipes that need no data work"
            ) from error
        if not isinstance(result, tuple):
            return result.movedim(self._batch_dim, 0), ()
        if self._n_outputs is None:
            self._n_outputs = 1
        return result[0].movedim(self._batch_dim, 0), result[1:]


def _note_added(recorders: list[Recorder]) -> None:
    """Keep what the model added to the states between blocks, such as image features."""
    recorders[0].arguments[ADDED] = None
    for before, after in pairwise(recorders):
        assert before.hidden is not None
        assert after.hidden is not None
        added = after.hidden - before.hidden
        after.arguments[ADDED] = added if bool(added.any()) else None


@contextmanager
def _placed(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """The model and its parts say that they are on a device, as Idefics 3 asks itself: by default
    they name that of their first parameter, which may be an unread one of a vision tower.
    """
    kinds = {type(part) for part in model.modules()}
    kinds = {kind for kind in kinds if hasattr(kind, "device") and "device" not in vars(kind)}
    for kind in kinds:
        kind.device = property(lambda _: device)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for kind in kinds:
            del kind.device  # type: ignore[attr-defined]
