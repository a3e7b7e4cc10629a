"""The model card of another tool's checkpoint: what its own files say, and what was measured.

It is inserted into the existing README.md between the same marks as ours, and leaves hand-written
text alone. For a GGUF file it is written beside the file.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError
from quantkit.export import card_facts, foreign_gguf
from quantkit.export.card import compose, renew
from quantkit.export.card_facts import Scored
from quantkit.export.card_markup import fenced, plain, table
from quantkit.export.card_scores import scores
from quantkit.export.foreign import ForeignCheckpoint
from quantkit.export.manifest import Described, describe_file, describe_folder
from quantkit.formats.declared import Declared
from quantkit.hardware import support
from quantkit.model.description import README
from quantkit.model.source import ModelSource, read_config
from quantkit.nearby import similar
from quantkit.storage import gib


@dataclass(frozen=True)
class Foreign:
    """A checkpoint without a manifest, as its card describes it."""

    path: Path
    """Its folder, or its GGUF file."""
    name: str
    digest: str
    declared: Declared
    size_bytes: int
    n_weights: int
    described: Described

    @property
    def folder(self) -> Path:
        """Folder of the card."""
        return self.path if self.path.is_dir() else self.path.parent

    @property
    def is_file(self) -> bool:
        return not self.path.is_dir()

    @classmethod
    def open(cls, path: Path, name: str | None = None) -> "Foreign":
        """What a folder or a GGUF file says about itself, under its folder's name or another one;
        refused if it is not quantised.
        """
        if (file := foreign_gguf.file_of(path)) is not None:
            return cls._of_file(file)
        if not path.is_dir():
            raise CheckpointError(
                f"there is no folder {path}; give a checkpoint folder or a GGUF file{similar(path)}"
            )
        model = ModelSource.open(str(path), requantize=True)
        if model.quantized_by is None:
            raise CheckpointError(
                f"{path} is not quantised; name a quantised checkpoint to write a card for"
            )
        made = ForeignCheckpoint.of(model)
        n_weights = sum(tensor.n_elements for tensor in made.tensors.values())
        description = describe_folder(path, read_config(path))
        return cls(
            path,
            name or made.label,
            made.digest,
            made.declared,
            made.size_bytes,
            n_weights,
            description,
        )

    @classmethod
    def _of_file(cls, path: Path) -> "Foreign":
        from math import prod

        from quantkit.gguf.reader import read_file

        file = read_file(path)
        entries = file.tensors.values()
        return cls(
            path,
            path.stem,
            foreign_gguf.digest_of(file),
            foreign_gguf.declared_of(file),
            sum(entry.n_bytes for entry in entries),
            sum(prod(entry.shape) for entry in entries),
            describe_file(file.metadata),
        )


def refresh(of: Foreign, scored: Sequence[Scored] = (), out: Path | None = None) -> bool:
    """Update the card, beside the checkpoint or in `out`; returns whether anything changed."""
    where = (out or of.folder) / README
    keys, body = _metadata(of, scored), _body(of, scored)
    return renew(of.folder, out or of.folder, lambda old: compose(old, keys, body, where))


def _metadata(of: Foreign, scored: Sequence[Scored]) -> dict[str, Any]:
    """Keys derived from the files; hand-written keys are left alone."""
    keys: dict[str, Any] = {
        "library_name": "gguf" if of.is_file else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantized", of.declared.method],
        "model-index": card_facts.index(of.name, scored) if scored else None,
    }
    return {key: value for key, value in keys.items() if value is not None}


def _body(of: Foreign, scored: Sequence[Scored]) -> str:
    sections = [
        f"# {plain(of.name)}",
        _what(of),
        f"## Size\n\n{_size(of)}",
        f"## Scores\n\n{scores(scored)}",
        f"## Serving\n\n{_serving(of)}",
        f"## Checking\n\n{_checking(of)}",
        f"## Limits\n\n{_limits(of, scored)}",
    ]
    return "\n\n".join(sections)


def _what(of: Foreign) -> str:
    maker = of.declared.maker
    by = f"by {plain(maker)}" if maker else "by a tool that its files do not name"
    where = "header" if of.is_file else "config"
    return (
        f"Quantised {by}, not by quantkit. What its own {where} declares: "
        f"{plain(of.declared.words)}. No file says "
        "which model it was made from, how it was calibrated, or what each layer lost."
    )


def _size(of: Foreign) -> str:
    bits = 8 * of.size_bytes / of.n_weights
    row = [f"{of.size_bytes:,}", gib(of.size_bytes), f"{bits:.2f}"]
    return (
        f"{table(['bytes of tensors', '', 'bits per weight'], [row])}\n\n"
        f"{of.n_weights:,} weights, embeddings included."
    )


def _serving(of: Foreign) -> str:
    if of.is_file:
        command = fenced("bash", f"llama-server -m {shlex.quote(of.path.name)}")
        return f"With llama.cpp, in this folder:\n\n{command}"
    flags = " --kv-cache-dtype fp8" if of.declared.kv_cache else ""
    served = f"vllm serve . --served-model-name {shlex.quote(of.name)}{flags}"
    return f"With vLLM, in this folder:\n\n{fenced('bash', served)}"


def _checking(of: Foreign) -> str:
    what, engine = (shlex.quote(of.path.name), "llama.cpp") if of.is_file else (".", "vllm")
    lines = [f"quantkit verify {what} --source MODEL", f"quantkit verify {what} --for {engine}"]
    return (
        f"{fenced('bash', chr(10).join(lines))}\n\n"
        "compare tensors with what is declared and weights with the model, and predict whether the "
        f"engine loads it. Fingerprint of what was scored: `{of.digest[:16]}`."
    )


def _limits(of: Foreign, scored: Sequence[Scored]) -> str:
    tasks = list(dict.fromkeys(task for run in scored for task in run.tasks))
    measured = (
        f"Measured: {plain(', '.join(tasks))}. Nothing else was: not long contexts, other "
        "languages, tool use, safety or speed."
        if tasks
        else "Quality was not measured; score it on your own task before you rely on it."
    )
    formats = dict.fromkeys(part.runs_as for part in of.declared.parts)
    runs = [f"Runs on: {support.where(name)}." for name in formats if name in support.FORMATS]
    stated = of.described.license
    licence = ", ".join([stated] if isinstance(stated, str) else stated or [])
    terms = f"Licence, as its files state it: {plain(licence)}." if licence else (
        "Its files state no licence; the terms of the model that it was made from hold."
    )  # fmt: skip
    return "\n".join(f"- {line}" for line in (measured, *runs, terms))
