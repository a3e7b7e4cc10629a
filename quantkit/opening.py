"""What callers give as a model: a folder, a hub id, `demo`, a checkpoint, or a model in memory."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from quantkit.errors import SourceError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.foreign import ForeignCheckpoint, is_source, no_source
from quantkit.export.manifest import is_checkpoint
from quantkit.formats import declared
from quantkit.model.dequantized import method_of
from quantkit.model.source import ModelSource, locate, read_config
from quantkit.model.tokenizer import load as load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

Model: TypeAlias = "str | Path | ModelSource | PreTrainedModel"


def find(name: str, revision: str | None, trust_remote_code: bool) -> ModelSource | Checkpoint:
    """A checkpoint of ours or of others, else a source, by folder, hub id or `demo`."""
    if is_checkpoint(Path(name)):
        return Checkpoint.open(Path(name))
    folder = locate(name, revision)
    config = read_config(folder)
    if method_of(config):
        declared.of(config, str(folder))  # refuses what nobody reads before tensors are looked at
    model = ModelSource.open(name, revision, trust_remote_code, requantize=True)
    return model if model.quantized_by is None else ForeignCheckpoint.of(model)


def paired(
    targets: "Sequence[ModelSource | Checkpoint]", source: ModelSource | None = None
) -> "list[ModelSource | Checkpoint]":
    """The same, with checkpoints of others held against `source`, or the one source among them."""
    plain = [t for t in targets if is_source(t)]
    original = source or (plain[0] if len(plain) == 1 else None)
    if not isinstance(original, ModelSource):
        return list(targets)
    return [
        t.compared_with(original) if isinstance(t, ForeignCheckpoint) and t.original is None else t
        for t in targets
    ]


def comparable(
    targets: "Sequence[ModelSource | Checkpoint]",
    source: "ModelSource | Checkpoint | None" = None,
) -> "list[ModelSource | Checkpoint]":
    """What is scored for a report: one source first, then its checkpoints. Refused before work."""
    every = [*([source] if source is not None else []), *targets]
    sources = {t.digest: t for t in every if is_source(t)}
    if len(sources) != 1:
        found = ", ".join(t.label for t in sources.values()) or "none"
        raise no_source(found)
    (original,) = sources.values()
    return paired([original, *(t for t in targets if not is_source(t))])


@contextmanager
def opened(
    model: "Model",
    tokenizer: Any,
    revision: str | None,
    trust_remote_code: bool,
    requantize: bool = False,
) -> "Iterator[ModelSource]":
    """A source on disk; a model in memory is written to a temporary folder first."""
    if isinstance(model, ModelSource):
        yield model
    elif isinstance(model, str | Path):
        yield ModelSource.open(str(model), revision, trust_remote_code, requantize=requantize)
    else:
        with TemporaryDirectory(prefix="quantkit-") as folder:
            _save(model, tokenizer, Path(folder))
            source = ModelSource.open(folder, None, trust_remote_code)
            name = str(getattr(model, "name_or_path", "") or "in-memory")
            yield replace(source, name=name, is_temporary=True)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    if not hasattr(model, "save_pretrained"):
        raise SourceError(
            f"a {type(model).__name__} is not a model: give a folder, a hub id, `demo` or a "
            "transformers model"
        )
    name = getattr(model, "name_or_path", "")
    if tokenizer is None:
        if not name or not Path(name).is_dir():
            raise SourceError(
                "a model in memory needs its tokenizer: give tokenizer=, or load the model from a "
                "folder that has one"
            )
        tokenizer = load_tokenizer(Path(name))
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def scorable(
    model: "Model | Checkpoint", tokenizer: Any, revision: str | None, trust_remote_code: bool
) -> "Iterator[ModelSource | Checkpoint]":
    """What can be scored, whichever way it is given."""
    if isinstance(model, Checkpoint):
        yield model
    elif isinstance(model, str | Path):
        yield find(str(model), revision, trust_remote_code)
    else:
        with opened(model, tokenizer, revision, trust_remote_code) as source:
            yield source
