"""llama.cpp's loader applied to the header of a GGUF file."""

import re
from collections.abc import Iterator
from pathlib import Path

from quantkit.dispatch.rules import Finding, finding
from quantkit.errors import QuantkitError
from quantkit.storage import gguf_files

REMOVED = {4, 5, 31, 32, 33, 36, 37, 38}
"""Type numbers that ggml no longer reads (ggml/include/ggml.h)."""
BLOCK = re.compile(r"blk\.(\d+)\.")


def files_of(path: Path) -> list[Path]:
    """The GGUF files of a folder, or the file itself; the first part of split ones."""
    if path.suffix == ".gguf":
        return [path]
    files = gguf_files(path) if path.is_dir() else []
    return [one for one in files if not re.search(r"-0*[2-9]\d*-of-\d+\.gguf$", one.name)]


def findings(path: Path) -> Iterator[Finding]:
    """What keeps llama.cpp from loading a file, or makes it generate nonsense."""
    files = [one for one in files_of(path) if not one.name.startswith("mmproj")]
    if not files:
        yield finding("not-gguf", path.name, "it has no .gguf file")
        return
    from gguf.constants import MODEL_ARCH_NAMES

    from quantkit.gguf.reader import read_file

    for file in files:
        try:
            held = read_file(file)
        except QuantkitError as error:
            number = re.search(r"type (\d+)", str(error))
            is_removed = number is not None and int(number[1]) in REMOVED
            yield finding("gguf-type" if is_removed else "gguf-header", file.name, str(error))
            continue
        metadata = held.metadata
        architecture = str(metadata.get("general.architecture", ""))
        if architecture not in MODEL_ARCH_NAMES.values():
            words = f"'{architecture}' is not an architecture of llama.cpp"
            yield finding("gguf-architecture", file.name, words)
        model = metadata.get("tokenizer.ggml.model")
        if model is None:
            yield finding("gguf-tokenizer", file.name, "tokenizer.ggml.model is missing")
        elif model == "gpt2" and "tokenizer.ggml.pre" not in metadata:
            yield finding("gguf-pre-tokenizer", file.name, "tokenizer.ggml.pre is missing")
        parts = int(_number(metadata.get("split.count"), 1))
        n_blocks = int(_number(metadata.get(f"{architecture}.block_count"), 0))
        if parts > 1:
            held_parts = len(list(file.parent.glob(f"*-of-{parts:05d}.gguf")))
            if held_parts < parts:
                words = f"{held_parts} of {parts} parts are here"
                yield finding("gguf-tensors", file.name, words)
            continue
        stored = {int(match[1]) for name in held.tensors if (match := BLOCK.match(name))}
        if gone := sorted(set(range(n_blocks)) - stored):
            yield finding("gguf-tensors", f"blk.{gone[0]}", f"block {gone[0]} has no tensors")
        if "token_embd.weight" not in held.tensors:
            yield finding("gguf-tensors", "token_embd.weight", "it is missing")


def _number(value: object, default: int) -> int:
    return int(value) if isinstance(value, int | float) else default
