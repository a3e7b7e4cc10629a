"""Notes on a report's checkpoints from other tools, which none of our recipes produces."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from quantkit.advise import quality
from quantkit.hardware import support
from quantkit.hardware.gpus import GPU
from quantkit.storage import gib

if TYPE_CHECKING:
    from quantkit.report.document import Document


def notes(document: "Document", path: str, gpus: Sequence[GPU]) -> Iterator[str]:
    """One sentence per checkpoint: what it is, its recovery, and how the GPUs run it."""
    for entry in document.candidates:
        made = entry.made
        if made is None or made.by_others is None:
            continue
        found = quality.measured(document, entry, path)
        kept = f"keeps {found.recovery:.1%} ({found.basis})" if found else "has no quality data"
        on_gpus = []
        for gpu in gpus if made.runs_as else ():
            engine = "llama.cpp" if made.runs_as == "gguf" else "vllm"
            how = support.runs(gpu, str(made.runs_as), engine)
            on_gpus.append(f"; {gpu.name}: {how.how} ({how.reason})")
        yield (
            f"{entry.name}, in the report, was made by another tool ({made.by_others}), so it is "
            f"not ranked: it has {gib(entry.size_bytes)} and {kept}{''.join(on_gpus)}."
        )
