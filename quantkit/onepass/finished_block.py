"""A block that a recipe has quantised, on its way to disk, journal and screen."""

import time
from collections.abc import Mapping

import torch

from quantkit import formats
from quantkit.errors import MethodError
from quantkit.export.folder import FolderWriter
from quantkit.export.manifest import Layer
from quantkit.model.blocks import Decoder
from quantkit.onepass.delivery import Parcel
from quantkit.onepass.journal import Journal
from quantkit.onepass.result import BlockResult
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress
from quantkit.storage import gib


class FinishedBlock:
    """A block that a recipe has quantised, on its way to disk and journal."""

    def __init__(
        self,
        index: int,
        decoder: Decoder,
        state: Mapping[str, torch.Tensor],
        plan: Plan,
        result: BlockResult,
    ) -> None:
        self.plan, self.index = plan, index
        stored = {name: decoder.stored(index, name) for name in state}
        modules = {name: decoder.module(index, name) for name in result.linears}
        self.linears = {
            modules[name]: (linear.damping, linear.fallback, tuple(linear.held_out or ()))
            for name, linear in result.linears.items()
        }
        tensors: dict[str, torch.Tensor] = {}
        scales = {f"{stored[n]}.folded": scale for n, scale in result.folded.items()}
        for name, linear in result.linears.items():
            tensors |= formats.pack(
                modules[name], linear.quantized, plan.recipe, linear.input_scale
            )
            if linear.in_scale is not None:
                scales[f"{modules[name]}.in_scale"] = linear.in_scale
            if linear.out_scale is not None:
                scales[f"{modules[name]}.out_scale"] = linear.out_scale
        tensors |= result.kv_scales
        done = {f"{name}.weight" for name in result.linears}
        for name, tensor in state.items():
            own = stored[name]
            # Parameters made of several tensors are copied from these; those of another block are
            # not ours.
            if own is not None and own in plan.names and name not in done:
                tensors[own] = result.changed.get(name, tensor)
        self.tensors = Parcel(tensors)
        self.scales = Parcel({n: scale.float() for n, scale in scales.items()})
        errors = [x for r in result.linears.values() for x in (r.relative_error, r.output_error)]
        judged = [x for r in result.linears.values() for x in (r.held_out or {}).values()]
        self.errors = Parcel({"": torch.stack(errors + judged)})

    def deliver(self, writer: FolderWriter, journal: Journal, status: "Status") -> None:
        """Write the tensors, then the journal. Runs in the background."""
        layers = self._layers()
        tensors = self.tensors.opened()
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.flush()
        journal.record(self.index, layers, self.scales.opened(), list(tensors))
        status.update(self.plan, self.index, layers)

    def _layers(self) -> dict[str, Layer]:
        errors = self.errors.opened()[""].tolist()
        layers: dict[str, Layer] = {}
        judged = iter(errors[2 * len(self.linears) :])
        for place, (name, (damping, fallback, ways)) in enumerate(self.linears.items()):
            relative, output = errors[2 * place : 2 * place + 2]
            if not max(relative, output) < float("inf"):
                raise MethodError(f"{self.plan.recipe.method} gave non-finite values for {name}")
            layers[name] = Layer(
                relative_error=relative,
                output_error=output,
                damping=damping,
                fallback=fallback,
                held_out={way: next(judged) for way in ways} or None,
            )
        return layers


class Status:
    """Progress for the user: speed, memory, and the layer with the largest error."""

    def __init__(self, progress: Progress, n_tokens: int, device: torch.device) -> None:
        self._progress = progress
        self._n_tokens = n_tokens
        self._device = device
        self._started = time.monotonic()
        self._worst: tuple[float, str] = (0.0, "")
        self._first: int | None = None

    def update(self, plan: Plan, index: int, layers: Mapping[str, Layer]) -> None:
        """A recipe has finished a block."""
        for name, layer in layers.items():
            assert layer.output_error is not None
            self._worst = max(self._worst, (layer.output_error, f"{name}, {plan.recipe.name}"))
            self._progress.detail(
                f"{plan.recipe.name}: {name} output error {layer.output_error:.2e}"
            )
        if self._first is None:
            self._first = index
        n_blocks = index - self._first + 1
        speed = self._n_tokens * n_blocks / (time.monotonic() - self._started)
        words = [f"{speed:,.0f} tokens/s per block"]
        if self._device.type == "cuda":
            words.append(f"GPU {gib(torch.cuda.max_memory_allocated(self._device))}")
        words.append(f"worst output error {self._worst[0]:.1e} ({self._worst[1]})")
        self._progress.status(", ".join(words))
