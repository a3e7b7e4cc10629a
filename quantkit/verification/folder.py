"""Verifies a folder: ours by its manifest, others by their config."""

from pathlib import Path

from quantkit.export.manifest import is_checkpoint
from quantkit.model.config import method_of
from quantkit.model.source import ModelSource, read_config
from quantkit.progress import Progress
from quantkit.verification import checkpoint, foreign, foreign_gguf
from quantkit.verification.checkpoint import Verification


def verify(
    path: Path,
    source: ModelSource | None = None,
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    read_weights: bool = True,
) -> Verification:
    """Check a checkpoint folder, whoever made it."""
    if not is_checkpoint(path) and foreign_gguf.is_file(path):
        return foreign_gguf.verify(path, source, progress, read_weights)
    if is_foreign(path):
        return foreign.verify(path, source, progress, trust_remote_code, read_weights)
    return checkpoint.verify(path, source, progress, trust_remote_code, read_weights)


def is_foreign(path: Path) -> bool:
    """Whether a folder is a quantised model without a quantkit manifest."""
    if is_checkpoint(path) or not (path / "config.json").is_file():
        return False
    return method_of(read_config(path)) is not None
