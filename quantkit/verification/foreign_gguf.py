"""Checks of a GGUF file made by other tools: by its own header, and by llama.cpp's requirements."""

from pathlib import Path

import torch

from quantkit import grid
from quantkit.dispatch import llamacpp
from quantkit.errors import QuantkitError
from quantkit.export.foreign_gguf import ForeignGGUF
from quantkit.gguf.reader import read_file
from quantkit.model.source import ModelSource
from quantkit.progress import Progress, Silent
from quantkit.verification.checkpoint import Verification
from quantkit.verification.foreign import dear

MAX_OTHER = 0.5
"""Relative error outside linear layers: norms, and embeddings in any ggml type."""


def is_file(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder with nothing else that could be served."""
    return bool(llamacpp.files_of(path)) and not (path / "quantkit.json").is_file()


@torch.no_grad()
def verify(
    path: Path,
    source: ModelSource | None = None,
    progress: Progress | None = None,
    read_weights: bool = True,
) -> Verification:
    """Check header, architecture, tokenizer and completeness; then that every number is finite, and
    close to the source's where that is given.
    """
    progress = progress or Silent()
    result = Verification(path)
    found = [one for one in llamacpp.findings(path) if one.is_fault]
    for file in llamacpp.files_of(path):
        try:
            held = read_file(file)
        except QuantkitError as error:
            result.record("header", [str(error)])
            continue
        maker = held.metadata.get("general.quantized_by") or "an unnamed quantiser"
        kinds = sorted({entry.kind.name for entry in held.tensors.values()})
        result.record(f"header ({', '.join(kinds)}, by {maker})", [])
        if not read_weights:
            continue
        progress.start(f"verify {file.name}", sum(e.n_bytes for e in held.tensors.values()))
        faults = []
        for name, entry in held.tensors.items():
            try:
                if not held.dequantized(name).isfinite().all():
                    faults.append(f"{name} holds NaN or infinity")
            except QuantkitError as error:
                faults.append(str(error))
            progress.advance(entry.n_bytes)
        progress.finish()
        result.record("weights (finite)", faults)
    problems = [f"{one.layer}: {one.words}" for one in found if one.rule.id != "gguf-header"]
    result.record("llama.cpp", problems)
    if source is None:
        result.left_out.append("comparison with the source: give it with --source")
    elif read_weights and not result.faults:
        for file in llamacpp.files_of(path):
            _against(file, source, result, progress)
    return result


def _against(file: Path, source: ModelSource, result: Verification, progress: Progress) -> None:
    """Each layer's error compared with what its type costs, and with layers of the same type."""
    try:
        foreign = ForeignGGUF.open(file, source)
    except QuantkitError as error:
        result.record("source", [str(error)])
        return
    result.record("source", [])
    errors: dict[str, float] = {}
    faults: list[str] = []
    progress.start(f"compare {file.name}", foreign.size_bytes)
    for name, tensor in foreign.tensors.items():
        off = grid.relative_error(source.tensors[name].read(), foreign.read(name))
        module = name.removesuffix(".weight")
        if module in foreign.layers:
            errors[module] = off
        elif not off <= MAX_OTHER:
            faults.append(f"{name} is {off:.3f} off its source")
        progress.advance(tensor.size_bytes)
    progress.finish()
    result.record("weights against the source", [*faults, *dear(errors, foreign)])
    result.worst = sorted(errors.items(), key=lambda item: -item[1])[:5]
