"""Everything in a checkpoint's folder besides its weights: the source's own, and nothing else.

Engines take the tokenizer, the chat template and the generation settings from these files, so a
swapped one changes what a model says while every weight is right. Hashes in the manifest only catch
accidents: whoever changes a file can change its hash.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError
from quantkit.export import verified
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.folder import MIXED_FILES, OWN_FILES, SCALES_FILE
from quantkit.export.manifest import FILE
from quantkit.gguf import imatrix
from quantkit.model.description import README
from quantkit.model.source import INDEX, SIDE_FILES, ModelSource, read_config, side_files
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.parsing import parse_json

RUNNABLE = (
    *("*.py", "*.pyc", "*.so", "*.sh", "*.dll", "*.exe", "*.pkl", "*.pickle"),
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.joblib"),
)
"""Files that run code when loaded, such as pickles."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
GENERATION = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def faults(checkpoint: Checkpoint, source: ModelSource | None) -> Iterator[str]:
    """Files that are not the source's, or do not belong in the folder."""
    folder = checkpoint.folder
    weights = {tensor.file.name for tensor in _tensors(checkpoint)}
    own = {FILE, README, SCALES_FILE, verified.FILE, imatrix.FILE, *MIXED_FILES, *weights}
    if not checkpoint.is_gguf:
        own |= {"config.json", INDEX}
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            yield f"{path.name} is a link; a checkpoint must contain its files"
        elif not path.is_file():
            yield f"{path.name} is a folder, which does not belong to the checkpoint"
    there = {path.name for path in folder.iterdir() if path.is_file()} - own
    if source is not None:
        but = (INDEX,) if checkpoint.is_gguf else OWN_FILES
        yield from _differences(folder, there, source, but)
    else:
        yield from _strange(folder, there)


def _tensors(checkpoint: Checkpoint) -> list[Any]:
    if checkpoint.is_gguf:
        return [_File(checkpoint.gguf.path)]
    return list(checkpoint.tensors.values())


class _File:
    def __init__(self, file: Path) -> None:
        self.file = file


def _differences(
    folder: Path, there: set[str], source: ModelSource, but: tuple[str, ...]
) -> Iterator[str]:
    expected = {path.name: path for path in side_files(source.folder) if path.name not in but}
    for name in sorted(expected.keys() - there):
        yield f"{name} is missing; the source has it"
    for name in sorted(there):
        if name not in expected:
            yield f"{name} does not belong to the checkpoint: the source has no such file"
        elif (folder / name).read_bytes() != expected[name].read_bytes():
            yield f"{name} is not the source's"


def _strange(folder: Path, there: set[str]) -> Iterator[str]:
    """Without the source: files that no model folder needs, or that run code."""
    has_config = (folder / "config.json").is_file()  # GGUF files made from GGUF files have none
    needs_code = has_config and bool(read_config(folder).get("auto_map"))
    for name in sorted(there):
        path = Path(name)
        if any(path.match(pattern) for pattern in RUNNABLE) and not (
            needs_code and path.suffix == ".py"
        ):
            yield f"{name} can run code when it is loaded, and does not belong to the checkpoint"
        elif not any(path.match(pattern) for pattern in SIDE_FILES):
            yield f"{name} does not belong to the checkpoint"
        elif (folder / name).stat().st_mode & 0o111 and path.suffix != ".py":
            yield f"{name} is marked as a program"


def tokenizer_faults(folder: Path, trust_remote_code: bool) -> Iterator[str]:
    """Whether the tokenizer loads and its tokens have rows in the embedding."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        return
    n_rows = read_config(folder).get("vocab_size")
    if type(n_rows) is not int:
        return  # a family that keeps its sizes elsewhere
    try:
        tokenizer = load_tokenizer(folder, trust_remote_code)
        highest = max(tokenizer.get_vocab().values(), default=-1)
    except QuantkitError as error:
        yield str(error)
        return
    if highest < 0:
        yield f"the tokenizer of {folder} has no tokens"
    elif highest >= n_rows:
        yield f"the tokenizer has tokens up to {highest}, the model's embedding {n_rows} rows"
    yield from _generation_faults(folder, n_rows)


def _generation_faults(folder: Path, n_rows: int) -> Iterator[str]:
    path = folder / GENERATION
    if not path.is_file():
        return
    try:
        data = parse_json(path.read_bytes(), finite=False)
    except (OSError, ValueError) as error:
        yield f"{GENERATION} cannot be read: {error}"
        return
    if not isinstance(data, dict):
        yield f"{GENERATION} is not a JSON object"
        return
    for key in TOKEN_IDS:
        found = data.get(key)
        for token in found if isinstance(found, list) else [found]:
            if token is not None and not (type(token) is int and -1 <= token < n_rows):
                yield f"{GENERATION} has {key} {str(token)[:40]!r}, which the model does not have"
