"""Checks of a GGUF file that others made: by its own header, and by what llama.cpp asks of it."""

from pathlib import Path

import torch

from quantkit.dispatch import llamacpp
from quantkit.errors import QuantkitError
from quantkit.gguf.reader import read_file
from quantkit.progress import Progress, Silent
from quantkit.verification.checkpoint import Verification


def is_file(path: Path) -> bool:
    """Whether a path is a GGUF file, or a folder of nothing else that could be served."""
    return bool(llamacpp.files_of(path)) and not (path / "quantkit.json").is_file()


@torch.no_grad()
def verify(path: Path, progress: Progress | None = None, read_weights: bool = True) -> Verification:
    """Header, architecture, tokenizer and completeness; then every number must be finite."""
    progress = progress or Silent()
    result = Verification(path)
    found = [one for one in llamacpp.findings(path) if one.is_fault]
    for file in llamacpp.files_of(path):
        try:
            held = read_file(file)
        except QuantkitError as error:
            result.record("header", [str(error)])
            continue
        maker = held.metadata.get("general.quantized_by") or "a quantiser without a name"
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
    told = [f"{one.layer}: {one.words}" for one in found if one.rule.id != "gguf-header"]
    result.record("llama.cpp", told)
    result.left_out.append("comparison with the source: layers of GGUF files are named otherwise")
    return result
