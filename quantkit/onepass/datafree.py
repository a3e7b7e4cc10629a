"""Data-free quantisation: every tensor is read once and serves all recipes.

Tensors stream through a few worker threads, so reading, computing and writing overlap. Peak memory
is bounded by the largest tensors in flight, not by the model's size.
"""

import os
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace

import torch

from quantkit import formats, grid, methods, numbers, threads
from quantkit.errors import MethodError, SourceError
from quantkit.export.folder import FolderWriter
from quantkit.export.manifest import Layer
from quantkit.methods.contract import Linears, Rounding
from quantkit.model.shards import DTYPES, StoredTensor, as_bytes
from quantkit.model.source import ModelSource
from quantkit.onepass.clock import Clock
from quantkit.plan import checkpoint as planning
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress

COPY_CHUNK_BYTES = 64 << 20
GPU_WORKERS = 8
MAX_CPU_WORKERS = 8
CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Weights rounded at a time: enough for a CPU's cache, and enough to keep a GPU busy while several
tensors in flight take little of its memory.
"""


def quantize_tensors(
    source: ModelSource,
    plans: Sequence[Plan],
    writers: Sequence[FolderWriter],
    device: torch.device,
    progress: Progress,
    clock: Clock,
) -> list[dict[str, Layer]]:
    """Fill every writer from one read of the source; returns what happened to each layer."""
    cores = os.cpu_count() or 1
    n_workers = GPU_WORKERS if device.type == "cuda" else min(MAX_CPU_WORKERS, cores)
    worker = _Worker(source, plans, writers, device, progress, clock, n_workers)
    names = {spec.name for plan in plans for spec in plan.specs} | {
        weight.name for plan in plans for weight in plan.quantized.values()
    }
    wanted = [t for t in source.tensors.values() if t.name in names]
    wanted.sort(key=lambda t: (t.file, t.start))
    progress.start("quantize", sum(t.size_bytes for t in wanted))
    with threads.workers(n_workers) as pool:
        futures: list[Future[None]] = [pool.submit(worker.process, t) for t in wanted]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    progress.finish()
    return worker.layers


def quantize_some(
    source: ModelSource,
    plans: Sequence[Plan],
    writers: Sequence[FolderWriter],
    device: torch.device,
    progress: Progress,
    names: Collection[str],
    clock: Clock,
) -> list[dict[str, Layer]]:
    """The same for a few tensors that a pass over the blocks does not reach."""
    worker = _Worker(source, plans, writers, device, progress, clock)
    for name in sorted(names):
        worker.process(source.tensors[name])
    return worker.layers


class _Worker:
    """Processes one tensor at a time; many threads share it."""

    def __init__(
        self,
        source: ModelSource,
        plans: Sequence[Plan],
        writers: Sequence[FolderWriter],
        device: torch.device,
        progress: Progress,
        clock: Clock,
        n_workers: int = 1,
    ) -> None:
        self.clock, self.part = clock, 1 / n_workers
        self.folder = source.folder
        self.tensors = source.tensors
        self.device = device
        self.progress = progress
        self.layers: list[dict[str, Layer]] = [{} for _ in plans]
        self._largest: dict[str, torch.Tensor] = {}
        self._jobs = [
            (
                plan,
                writer,
                {weight.name: module for module, weight in plan.quantized.items()},
            )
            for plan, writer in zip(plans, writers, strict=True)
        ]

    @torch.no_grad()
    def process(self, tensor: StoredTensor) -> None:
        if any(tensor.name in modules for _, _, modules in self._jobs):
            self._quantize(tensor)
        else:
            copy_tensor(tensor, [writer for _, writer, _ in self._jobs], self.progress)

    def _quantize(self, tensor: StoredTensor) -> None:
        stored = tensor.read(pinned=self.device.type == "cuda")
        weight = stored.to(self.device, non_blocking=True)
        require_finite(tensor, weight)
        for layers, (plan, writer, modules) in zip(self.layers, self._jobs, strict=True):
            module = modules.get(tensor.name)
            with self.clock.of(plan.recipe.name, self.part):
                if module is None:
                    writer.write_bytes(tensor.name, as_bytes(stored))
                else:
                    layers[module] = self._make(plan, module, weight, writer)
        self.progress.advance(tensor.size_bytes)

    def _make(self, plan: Plan, module: str, weight: torch.Tensor, writer: FolderWriter) -> Layer:
        """Round one layer for one recipe, and write it."""
        recipe = plan.recipe.part(module)
        linears = Linears(
            weight,
            weight.dtype,
            recipe.weights,
            recipe.options,
            scale_dtype=formats.scale_dtype(recipe),
            largest=self._shared_range(plan, module, weight),
            activations=recipe.input_activations,
        )
        rounding = methods.find(recipe.method).rounding
        quantized, error = quantize_by_rows(rounding, linears)
        if not error < float("inf"):
            raise MethodError(f"{plan.recipe.method} gave non-finite values for {module}")
        self.progress.detail(f"{plan.recipe.name}: {module} off by {error:.5f}")
        for name, part in formats.pack(module, quantized, plan.recipe).items():
            writer.write(name, part)
        return Layer(relative_error=error)

    def _shared_range(self, plan: Plan, module: str, weight: torch.Tensor) -> torch.Tensor | None:
        """The largest magnitude of all layers that share a scale; None where tiles are smaller.

        vLLM fuses them, and would otherwise round all but one of them a second time. The first
        worker to need a range computes it, so a sibling is read twice at most.
        """
        scheme = plan.recipe.part(module).weights
        if scheme.strategy == "tensor":
            names = planning.fused_with(module, plan.quantized)
        elif numbers.of(scheme).has_global_scale:
            names = planning.sharing(module, plan.quantized)
        else:
            return None
        ranges = []
        for name in names:
            stored = plan.quantized[name].name
            if stored not in self._largest:
                sibling = weight
                if name != module:
                    sibling = self.tensors[stored].read()
                    require_finite(self.tensors[stored], sibling)
                self._largest[stored] = sibling.abs().amax().to(weight.device, weight.dtype)
            ranges.append(self._largest[stored].to(weight.dtype))
        return torch.stack(ranges).amax()


def copy_tensor(tensor: StoredTensor, writers: Sequence[FolderWriter], progress: Progress) -> None:
    """Copy a tensor unchanged, in chunks, after checking for NaN and infinity."""
    for offset in range(0, tensor.size_bytes, COPY_CHUNK_BYTES):
        chunk = torch.empty(min(COPY_CHUNK_BYTES, tensor.size_bytes - offset), dtype=torch.uint8)
        tensor.read_into(as_bytes(chunk), offset)
        require_finite(tensor, chunk.view(DTYPES[tensor.dtype]))
        for writer in writers:
            writer.write_bytes(tensor.name, as_bytes(chunk), offset)
        progress.advance(len(chunk))


def require_finite(tensor: StoredTensor, values: torch.Tensor) -> None:
    """Stop at NaN or infinity, in one pass without a mask as large as the tensor."""
    if not values.is_floating_point() or not values.numel():
        return
    if not torch.stack(values.aminmax()).isfinite().all():
        raise SourceError(
            f"{tensor.name} in {tensor.file} holds NaN or infinity; "
            "the source is damaged; download it again"
        )


def quantize_by_rows(rounding: Rounding, linears: Linears) -> tuple[grid.QuantizedWeight, float]:
    """A quantised weight, and the norm of its change relative to its norm.

    Rows are independent of each other unless the tensor shares one scale, so only some are
    processed at a time: on a CPU three times as fast as whole tensors, and with less memory
    everywhere.
    """
    weight, scheme = linears.weight, linears.scheme
    height = scheme.block_structure[0] if scheme.block_structure else 1
    step = weight.shape[0]
    if scheme.strategy != "tensor":
        at_a_time = CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cuda"])
        step = max(1, at_a_time // (height * weight.shape[1])) * height
    parts = []
    change = torch.zeros((), device=weight.device)
    size = torch.zeros((), device=weight.device)
    for rows in torch.split(weight, step):
        part = rounding.round(replace(linears, weight=rows)).quantized
        wide = rows.float()
        change += torch.linalg.vector_norm(grid.dequantize(part, scheme).sub_(wide)).square()
        size += torch.linalg.vector_norm(wide).square()
        parts.append(part)
    error = (change / size.clamp(min=1e-30)).sqrt().item()
    if len(parts) == 1:
        return parts[0], error
    zero_points = [part.zero_point for part in parts if part.zero_point is not None]
    joined = grid.QuantizedWeight(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(zero_points) if zero_points else None,
        parts[0].global_scale,
    )
    return joined, error
