"""Text bundled with Python: language topics, docstrings and sources of its library.

It feeds the demo: calibration and training read the split `train`, scoring reads `heldout`. Nothing
is stored; the documents come from the running interpreter. A topic or a top-level module is
assigned to a split by a hash of its name, so the split is the same for every Python.
"""

import ast
import hashlib
import os
import sysconfig
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

Kind = Literal["topic", "docstrings", "source"]
Split = Literal["train", "heldout"]

# Not documentation-like, generated, or missing from many installations.
SKIPPED = frozenset({"encodings", "pydoc_data", "site-packages", "__phello__", "__pycache__"})
# Present in some Pythons only: usable for training, but the demo's own texts must not vary.
OPTIONAL = frozenset({"distutils", "ensurepip", "idlelib", "lib2to3", "test", "turtledemo"})
BODIES = ("body", "handlers", "orelse", "finalbody", "cases")
"""Fields of a statement that hold others, in order."""
HELDOUT_SHARE = 0.1
# Chosen so that the held-out tenth has well-known topics and modules that no release removed.
SPLIT_SEED = 3


@dataclass(frozen=True)
class Document:
    """One text and its name, such as `topic:assert` or `docstrings:json.decoder`."""

    name: str
    kind: Kind
    text: str


def split_of(name: str) -> Split:
    """The split that a topic or top-level module belongs to."""
    first = hashlib.sha256(f"{SPLIT_SEED}:{name}".encode()).digest()[0]
    return "heldout" if first < 256 * HELDOUT_SHARE else "train"


def topics(split: Split) -> Iterator[Document]:
    """The language reference as `help()` shows it."""
    from pydoc_data.topics import topics as texts

    for name in sorted(texts):
        if split_of(f"topic:{name}") == split:
            yield Document(f"topic:{name}", "topic", texts[name].strip() + "\n")


def module_files(split: Split, optional: bool = False) -> Iterator[tuple[str, Path]]:
    """Dotted names and files of the library's modules, sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = SKIPPED if optional else SKIPPED | OPTIONAL | {"tests"}
    for path in sorted(_python_files(root, left_out)):
        parts = path.relative_to(root).with_suffix("").parts
        if left_out & set(parts) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        if split_of(f"module:{parts[0]}") == split:
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def _python_files(root: Path, left_out: frozenset[str]) -> Iterator[Path]:
    """Without a look into folders that are left out: most files lie there."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out]
        yield from (Path(folder, name) for name in files if name.endswith(".py"))


def docstrings(split: Split) -> Iterator[Document]:
    """Each module's docstrings under the line that defines their owner, much as `pydoc` prints."""
    for name, path in module_files(split):
        text = _documentation(name, path)
        if text:
            yield Document(f"docstrings:{name}", "docstrings", text)


def sources(split: Split, optional: bool = False) -> Iterator[Document]:
    """The modules' source files."""
    for name, path in module_files(split, optional):
        text = _read(path)
        if text:
            yield Document(f"source:{name}", "source", text)


@cache
def train() -> tuple[Document, ...]:
    """The demo's calibration text; read once, since parsing the whole library takes seconds."""
    return (*topics("train"), *docstrings("train"))


@cache
def heldout() -> tuple[Document, ...]:
    """The demo's evaluation text: topics and docstrings that it was not trained on."""
    return (*topics("heldout"), *docstrings("heldout"))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):  # a few test files are broken on purpose
        return ""


def _documentation(name: str, path: Path) -> str:
    try:
        tree = ast.parse(_read(path))
    except (SyntaxError, ValueError):
        return ""
    parts = [f"module {name}"]
    if doc := ast.get_docstring(tree):
        parts.append(doc)
    for node in _statements(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node)
            if doc and len(doc) > 40:
                parts.append(f"{_heading(node)}\n    " + doc.replace("\n", "\n    "))
    return "\n\n".join(parts) + "\n" if len(parts) > 1 else ""


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Statements in the order of `ast.walk`, which spends most of its time in expressions."""
    found: deque[ast.AST] = deque([tree])
    while found:
        node = found.popleft()
        yield node
        for name in BODIES:
            found.extend(getattr(node, name, ()))


def _heading(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"
