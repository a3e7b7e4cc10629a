"""What the campaign damages: a small model, checkpoints of it, and every file that people write.

Built once into a folder and the same every time; each case works on a copy whose files are hard
links, apart from the one that it changes.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from tiny import READABLE, save_llama

RECIPES = ("rtn-w4a16", "rtn-w8a16", "awq-w4a16", "fp8-static+kv-fp8", "gguf-q8_0", "gguf-q4_k_m")
TEXT = "Every block is finished, or it is not; which of both is written down last of all. "
RECIPE = """\
# Round to nearest, 4 bits in groups of 64.
name: mine
method: rtn
weights: {num_bits: 4, type: int, symmetric: false, strategy: group, group_size: 64}
"""
SWEEP = """\
models: [{model: demo, name: small}]
recipes: [rtn-w4a16, fp8-dynamic]
tasks: [python_docs]
limit: 2
device: cpu
resources: {score: {cpus: 1.5, memory: 2GiB}}
"""
POLICY = """\
rules:
  - metric: perplexity
    max_ratio: 1.05
"""


@dataclass(frozen=True)
class World:
    """Where everything lies."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def text(self) -> Path:
        return self.folder / "text.txt"

    @property
    def rows(self) -> Path:
        return self.folder / "rows"

    @property
    def scores(self) -> Path:
        return self.folder / "scores"

    @property
    def report(self) -> Path:
        return self.folder / "report" / "report.json"

    def checkpoint(self, recipe: str) -> Path:
        return self.folder / "made" / recipe


def build(folder: Path) -> World:
    """All of it, unless it is there."""
    from quantkit.cli.main import main
    from quantkit.model import lean_import

    world = World(folder)
    if (folder / "done").exists():
        return world
    lean_import.load()  # as the commands below would, before the model needs it
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_llama(world.model, **READABLE)
    world.text.write_text(TEXT * 200)
    asked = [option for recipe in RECIPES for option in ("-r", recipe)]
    learn = ["--calibration", str(world.text), "--samples", "4", "--length", "64"]
    where = ["-o", str(folder / "made"), "--device", "cpu", "-q"]
    _must(main(["quantize", str(world.model), *asked, *learn, *where]))
    tasks = ["--tasks", "python_docs,python_quiz", "--limit", "3", "--cache", str(folder / "cache")]
    models = [str(world.model), str(world.checkpoint("rtn-w4a16"))]
    _must(main(["score", *models, *tasks, "-o", str(world.scores), "--device", "cpu", "-q"]))
    _must(main(["report", str(world.scores), "-o", str(world.report.parent)]))
    for name, text in (("recipe", RECIPE), ("sweep", SWEEP), ("policy", POLICY)):
        (folder / f"{name}.yaml").write_text(text)
    _rows(world.rows)
    (folder / "done").touch()
    return world


def _rows(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    rows = [{"text": f"Row {n} says {n * n} and no more."} for n in range(40)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "a.json").write_text(json.dumps(rows))
    (folder / "a.csv").write_text("text\n" + "".join(f'"{row["text"]}"\n' for row in rows))
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")


def _must(code: int) -> None:
    assert code == 0, f"exit code {code}"


def linked(source: Path, target: Path) -> Path:
    """A copy of a folder that costs nothing; change files in it by replacing them."""
    return shutil.copytree(source, target, copy_function=os.link)


def replace(path: Path, content: bytes) -> None:
    """Write a file anew without touching those that are linked to it."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)
