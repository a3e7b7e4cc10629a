"""The decoder blocks of a model, one at a time: record their arguments, load, run, free.

The skeleton has no weights. Masks, position embeddings and the like differ from block to block in
some families, so nothing is guessed: the model itself is run once with every block replaced by a
recorder, and what it passes to each block is kept.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.errors import SourceError
from quantkit.model import experts
from quantkit.model.architecture import skeleton
from quantkit.model.shards import StoredTensor
from quantkit.model.source import ModelSource


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


class _Recorder(_StandIn):
    """Keeps what a block is called with, and hands the hidden states on."""

    def __init__(self, block: torch.nn.Module, last: bool) -> None:
        super().__init__(block)
        self.last = last
        self.hidden: torch.Tensor | None = None
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        self.hidden, self.arguments = hidden_states, arguments
        if self.last:
            raise _Stop
        return hidden_states


class _Given(_StandIn):
    """Gives what the blocks are known to make."""

    def __init__(self, block: torch.nn.Module, hidden: torch.Tensor, in_tuple: bool) -> None:
        super().__init__(block)
        self.hidden = hidden
        self.in_tuple = in_tuple

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> Any:
        return (self.hidden,) if self.in_tuple else self.hidden


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
    _in_tuples: bool = False
    """Whether this family's blocks give their states in a tuple."""

    @classmethod
    def open(cls, source: ModelSource, device: torch.device) -> "Decoder":
        """Build the skeleton and find its blocks. bf16 on a GPU, float32 on a CPU."""
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        model = skeleton(source.folder, source.trust_remote_code, dtype)
        experts.separate(model, source.folder)
        n_blocks = model.config.num_hidden_layers
        lists = [
            (name, module)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.ModuleList) and len(module) == n_blocks
        ]
        if len(lists) != 1:
            raise SourceError(
                f"{type(model).__name__} is not supported: its decoder blocks cannot be told apart"
            )
        return cls(source, model, lists[0][1], lists[0][0], device, dtype)

    def name(self, index: int) -> str:
        """A block's full name."""
        return f"{self.prefix}.{index}"

    def tensors(self, index: int) -> Mapping[str, StoredTensor]:
        """The stored parameters of a block, by their names within it."""
        start = f"{self.name(index)}."
        return {
            name.removeprefix(start): self.source.tensors[name]
            for name in (start + key for key in self.blocks[index].state_dict())
        }

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
        cast = {name: tensor.to(self.dtype) for name, tensor in state.items()}
        block.load_state_dict(cast, strict=True, assign=True)
        block.to(self.device)
        try:
            yield block
        finally:
            block.to("meta")

    @torch.no_grad()
    def start(
        self, tokens: torch.Tensor, batch_size: int
    ) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """Hidden states before the first block, by batch, and every block's other arguments."""
        base = self.model.get_submodule(self.prefix.rpartition(".")[0])
        blocks = list(self.blocks)
        recorders = [_Recorder(b, last=i == len(blocks) - 1) for i, b in enumerate(blocks)]
        outside = {
            name: self.source.tensors[name].read().to(self.device).to(self.dtype)
            for name in self.model.state_dict()
            if name in self.source.tensors
            and not name.startswith(f"{self.prefix}.")
            and not name.startswith("lm_head")
        }
        for index, recorder in enumerate(recorders):
            self.blocks[index] = recorder
        try:
            self.model.load_state_dict(outside, strict=False, assign=True)
            for module in base.children():
                if module is not self.blocks:
                    module.to(self.device)
            hidden = []
            for batch in torch.split(tokens, batch_size):
                try:
                    base(input_ids=batch.to(self.device), use_cache=False)
                except _Stop:
                    first = recorders[0].hidden
                    assert first is not None
                    hidden.append(first)
            # Arguments for one sample serve any batch: they broadcast.
            with_one = tokens[:1].to(self.device)
            with suppress(_Stop):
                base(input_ids=with_one, use_cache=False)
        finally:
            for index, block in enumerate(blocks):
                self.blocks[index] = block
            # Embeddings have done their work; the blocks need the room.
            empty = {name: tensor.to("meta") for name, tensor in outside.items()}
            self.model.load_state_dict(empty, strict=False, assign=True)
        return hidden, [recorder.arguments for recorder in recorders]

    @torch.no_grad()
    def losses(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of every token but each sample's first, from the last states.

        The model itself does it, with blocks that give what is known, so that final norms, caps
        and scales of logits are the family's own.
        """
        blocks = list(self.blocks)
        outside = {
            name: self.source.tensors[name].read().to(self.device).to(self.dtype)
            for name in self.model.state_dict()
            if name in self.source.tensors and not name.startswith(f"{self.prefix}.")
        }
        found = []
        try:
            self.model.load_state_dict(outside, strict=False, assign=True)
            self.model.tie_weights()
            self.model.get_output_embeddings().to(self.device)
            tokens = tokens.to(self.device)
            for sample in range(len(tokens)):
                states, ids = hidden[sample : sample + 1], tokens[sample : sample + 1]
                for index, block in enumerate(blocks):
                    self.blocks[index] = _Given(block, states, self._in_tuples)
                logits = self.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
                found.append(
                    torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
                )
        finally:
            for index, block in enumerate(blocks):
                self.blocks[index] = block
            empty = {name: tensor.to("meta") for name, tensor in outside.items()}
            self.model.load_state_dict(empty, strict=False, assign=True)
        return torch.cat(found)

    def run(
        self, block: torch.nn.Module, hidden: torch.Tensor, arguments: Mapping[str, Any]
    ) -> torch.Tensor:
        """A block's output."""
        result = block(hidden, **arguments)
        self._in_tuples = isinstance(result, tuple)
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return output
