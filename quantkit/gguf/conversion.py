"""Convert a source's tensors to a finished GGUF file.

Each worker reads, quantises and writes one tensor at a time, so peak memory is bounded by the
largest tensors in flight, not by the model's size.
"""

import math
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, wait
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, Keys, LlamaFileType

from quantkit import grid, threads
from quantkit.errors import MethodError, SourceError
from quantkit.gguf import blocks, values
from quantkit.gguf.general import general
from quantkit.gguf.layout import Layout
from quantkit.gguf.mixture import FILE_TYPES
from quantkit.gguf.plan import GGUFPlan, layer_of
from quantkit.gguf.tensors import GGUFTensor
from quantkit.gguf.vocabulary import vocabulary
from quantkit.gguf.writer import GGUFFile, Value
from quantkit.model.source import ModelSource
from quantkit.progress import Progress
from quantkit.recipe import GGUFRecipe

GPU_WORKERS = 4
MAX_CPU_WORKERS = 8
MIXED = "mixed-"
"""Prefix of recipes whose types were chosen for a size budget."""
PHI_3 = re.compile("phi-?3", re.IGNORECASE)
PHI_3_TOKENS = {"</s>", "<unk>", "<s>", "<|endoftext|>"}
"""llama.cpp takes any model with such a name for one that has these tokens, and does not load it
without them.
"""


def file_name(model: str, plan: GGUFPlan) -> str:
    """The conventional file name: the model's name and the file type, or the name of a custom
    mixture.
    """
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", model).strip("-.") or "model"
    if plan.recipe.name.startswith(MIXED):
        return f"{safe}-{plan.recipe.name}.gguf"
    return f"{safe}-{plan.recipe.gguf}.gguf"


def metadata(layout: Layout, recipe: GGUFRecipe, source: ModelSource) -> dict[str, Value]:
    """All of the file's metadata: the model, its architecture and its vocabulary."""
    found = {
        **general(layout, source, LlamaFileType(FILE_TYPES[recipe.gguf])),
        **layout.metadata,
        **vocabulary(source, layout.n_vocabulary),
    }
    tokens = found[Keys.Tokenizer.LIST]
    if isinstance(tokens, list) and not set(tokens) >= PHI_3_TOKENS:
        found[Keys.General.NAME] = PHI_3.sub("phi_3", str(found[Keys.General.NAME]))
    return found


def write(
    plan: GGUFPlan,
    path: Path,
    metadata: Mapping[str, Value],
    importance: Mapping[str, torch.Tensor],
    device: torch.device,
    progress: Progress,
    solved: Mapping[str, Callable[[], torch.Tensor]] | None = None,
) -> tuple[dict[str, float], str]:
    """Write a file; returns the relative error of every quantised layer and the file's hash.

    `importance` holds the mean squares of the inputs by the tensor's name in the file.
    """
    tensors = plan.layout.tensors
    kinds = [(t.name, t.shape, plan.kinds[t.name]) for t in tensors]
    file = GGUFFile(path, metadata, kinds)
    errors: dict[str, float] = {}

    def convert(tensor: GGUFTensor) -> None:
        if solved and tensor.name in solved:
            file.write(tensor.name, solved[tensor.name]())
            progress.advance(math.prod(tensor.shape))
            return
        error = _convert(tensor, plan, file, importance.get(tensor.name), device)
        if error is not None:
            errors[layer_of(tensor)] = error
            progress.detail(f"{plan.recipe.name}: {tensor.name} off by {error:.5f}")
        progress.advance(math.prod(tensor.shape))

    progress.start(f"write {plan.recipe.name}", plan.n_parameters, "weights")
    cores = os.cpu_count() or 1
    n_workers = GPU_WORKERS if device.type == "cuda" else min(MAX_CPU_WORKERS, cores)
    try:
        with threads.workers(n_workers) as pool:
            try:
                done, _ = wait([pool.submit(convert, t) for t in tensors], None, FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    except BaseException:
        file.abandon()
        raise
    progress.finish()
    return errors, file.close()


@torch.no_grad()
def _convert(
    tensor: GGUFTensor,
    plan: GGUFPlan,
    file: GGUFFile,
    importance: torch.Tensor | None,
    device: torch.device,
) -> float | None:
    kind = plan.kinds[tensor.name]
    weight = plan.layout.build(tensor.name, device)
    # One pass, without allocating a mask as large as the tensor.
    if not torch.stack(weight.aminmax()).isfinite().all():
        raise SourceError(f"{tensor.name} has NaN or infinity; download the source again")
    weight = weight.reshape(-1, weight.shape[-1])
    data = _blocks(weight, kind, importance)
    file.write(tensor.name, data)
    if kind in values.FLOATS:
        return None
    error = grid.relative_error(weight, values.dequantize(data, kind))
    if not error < float("inf"):
        raise MethodError(f"{kind.name} gave non-finite values for {tensor.parts[0]}")
    return error


def _blocks(
    weight: torch.Tensor, kind: GGMLQuantizationType, importance: torch.Tensor | None
) -> torch.Tensor:
    """The bytes of a weight; stacked experts are quantised one by one, each with its own
    importance.
    """
    if importance is None or importance.numel() == weight.shape[1]:
        return blocks.quantize(weight, kind, None if importance is None else importance.flatten())
    rows = importance.reshape(-1, weight.shape[1])
    experts = weight.view(len(rows), -1, weight.shape[1])
    parts = [blocks.quantize(w, kind, row) for w, row in zip(experts, rows, strict=True)]
    return torch.cat(parts)
