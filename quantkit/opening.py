"""Open what callers pass as a model: a folder, hub id, `demo`, checkpoint or model in memory."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeAlias

from quantkit.errors import SourceError
from quantkit.export import foreign_gguf
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.foreign import ForeignCheckpoint, is_source, no_source
from quantkit.export.foreign_gguf import ForeignGGUF
from quantkit.export.manifest import is_checkpoint
from quantkit.formats import declared
from quantkit.gguf.source import open_model
from quantkit.model.config import method_of
from quantkit.model.source import ModelSource, locate, read_config
from quantkit.model.tokenizer import load as load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedModel

Model: TypeAlias = "str | Path | ModelSource | PreTrainedModel"


def find(
    name: str,
    revision: str | None,
    trust_remote_code: bool,
    original: ModelSource | None = None,
) -> ModelSource | Checkpoint:
    """A checkpoint (ours or another tool's) or else a source, by folder, GGUF file, hub id or
    `demo`.

    `original` describes GGUF files from other tools, which have no config.
    """
    if is_checkpoint(Path(name)):
        return Checkpoint.open(Path(name))
    file, folder = foreign_gguf.file_of(name), None
    if file is None:
        folder = locate(name, revision)
        file = foreign_gguf.file_of(folder)  # a one-file repository in the hub's cache
    if file is not None:
        if original is None:
            raise SourceError(
                f"{name} has no config and tokenizer that transformers reads: give the model that "
                "it was made from as well (--source MODEL)"
            )
        return ForeignGGUF.open(file, original)
    assert folder is not None
    config = read_config(folder)
    if method_of(config):
        declared.of(config, str(folder))  # refuses unsupported kinds before it looks at tensors
    model = ModelSource.open(name, revision, trust_remote_code, requantize=True)
    return model if model.quantized_by is None else ForeignCheckpoint.of(model)


def find_all(
    names: "Sequence[str]",
    revision: str | None,
    trust_remote_code: bool,
    source: ModelSource | None = None,
) -> "list[ModelSource | Checkpoint]":
    """All models in order; foreign GGUF files are described by `source`, or the one source among
    them.
    """
    others = {
        name: find(name, revision, trust_remote_code)
        for name in names
        if foreign_gguf.file_of(name) is None
    }
    original = source or _only_source(list(others.values()))
    return [
        others[name] if name in others else find(name, None, trust_remote_code, original)
        for name in names
    ]


def _only_source(targets: "Sequence[ModelSource | Checkpoint]") -> ModelSource | None:
    """The only source model in a list that otherwise holds checkpoints, if there is one."""
    plain = [t for t in targets if is_source(t)]
    found = plain[0] if len(plain) == 1 else None
    return found if isinstance(found, ModelSource) else None


def paired(
    targets: "Sequence[ModelSource | Checkpoint]", source: ModelSource | None = None
) -> "list[ModelSource | Checkpoint]":
    """The same, with foreign checkpoints paired with `source`, or the one source among them."""
    original = source or _only_source(targets)
    if original is None:
        return list(targets)
    return [
        t.compared_with(original) if isinstance(t, ForeignCheckpoint) and t.original is None else t
        for t in targets
    ]


def comparable(
    targets: "Sequence[ModelSource | Checkpoint]",
    source: "ModelSource | Checkpoint | None" = None,
) -> "list[ModelSource | Checkpoint]":
    """What a report is scored from: one source first, then its checkpoints. Checked before any
    work.
    """
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
    """A source on disk; a model in memory is first written to a temporary folder."""
    if isinstance(model, ModelSource):
        yield model
    elif isinstance(model, str | Path):
        yield open_model(str(model), revision, trust_remote_code, requantize=requantize)
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
def scorables(
    models: "Sequence[Model | Checkpoint]",
    tokenizer: Any,
    revision: str | None,
    trust_remote_code: bool,
    source: ModelSource | None = None,
) -> "Iterator[list[ModelSource | Checkpoint]]":
    """Everything that can be scored, however it was passed, in the same order."""
    found: dict[int, ModelSource | Checkpoint] = {}
    with ExitStack() as stack:
        # Foreign files last: the source among the models describes them.
        for n in sorted(range(len(models)), key=lambda n: _is_foreign_file(models[n])):
            model = models[n]
            if isinstance(model, Checkpoint):
                found[n] = model
            elif isinstance(model, str | Path):
                original = source or _only_source(list(found.values()))
                found[n] = find(str(model), revision, trust_remote_code, original)
            else:
                held = opened(model, tokenizer, revision, trust_remote_code)
                found[n] = stack.enter_context(held)
        yield [found[n] for n in range(len(models))]


def _is_foreign_file(model: object) -> bool:
    return isinstance(model, str | Path) and foreign_gguf.file_of(model) is not None
