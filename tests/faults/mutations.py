"""Mutations: one damaged file each, given to the command that reads it.

`case(world, seed, work)` is decided by its seed alone. What a command accepts is proved the same by
another way of reading: logits of the loaded model, rows and values by other libraries.
"""

import csv
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from faults import damage
from faults.world import World, linked, replace

from quantkit.cli.main import main
from quantkit.errors import QuantkitError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.folder import SCALES_FILE, hash_files
from quantkit.export.manifest import FILE
from quantkit.gguf.reader import read_file
from quantkit.model.source import ModelSource, side_files

Command = Callable[[], int]
Same = Callable[[], str]
Case = tuple[Command, Same]
CPU = torch.device("cpu")
WEIGHTS = ("rtn-w4a16", "awq-w4a16", "fp8-static+kv-fp8")
GGUFS = ("gguf-q8_0", "gguf-q4_k_m")
TOKENS = torch.arange(1, 4001, 125).reshape(2, 16)


def forge(folder: Path) -> None:
    """Let the manifest's hashes be those of the files."""
    data = json.loads((folder / FILE).read_bytes())
    data["files"] = {n: f.model_dump() for n, f in hash_files(folder).items()}
    replace(folder / FILE, json.dumps(data).encode())


def logits(model: "ModelSource | Checkpoint") -> torch.Tensor:
    """What a model computes."""
    from quantkit.scoring import loading

    with torch.no_grad():
        return loading.load(model, CPU)(TOKENS).logits.float()


@cache
def reference(world: World, recipe: str) -> tuple[torch.Tensor, float]:
    """What an undamaged checkpoint computes, and how far that is from its source."""
    before = logits(ModelSource.open(str(world.model)))
    after = logits(Checkpoint.open(world.checkpoint(recipe)))
    return after, float((after - before).square().mean().sqrt())


def computes_the_same(world: World, recipe: str, folder: Path) -> str:
    """Whether a checkpoint computes what it should within its recipe's own rounding."""
    expected, rounding = reference(world, recipe)
    found = logits(Checkpoint.open(folder))
    gap = float((found - expected).square().mean().sqrt())
    if not gap <= rounding:
        return f"logits are off by {gap:.3g}, where the recipe's own rounding is {rounding:.3g}"
    for path in side_files(world.model):
        if path.name in ("config.json", "model.safetensors.index.json"):
            continue
        if (folder / path.name).read_bytes() != path.read_bytes():
            return f"{path.name} is another"
    return ""


def verified(world: World, recipe: str, folder: Path) -> Case:
    """Verify with the source at hand."""

    def command() -> int:
        return main(["verify", str(folder), "--source", str(world.model)])

    return command, lambda: computes_the_same(world, recipe, folder)


def of_tensors(world: World, chance: random.Random, work: Path) -> Case:
    recipe = chance.choice(WEIGHTS)
    folder = linked(world.checkpoint(recipe), work / "checkpoint")
    name = SCALES_FILE if recipe.startswith("awq") and chance.random() < 0.3 else None
    damage.tensors(chance, folder / (name or "model.safetensors"))
    if chance.random() < 0.9:
        forge(folder)
    return verified(world, recipe, folder)


def of_safetensors_bytes(world: World, chance: random.Random, work: Path) -> Case:
    recipe = chance.choice(WEIGHTS)
    folder = linked(world.checkpoint(recipe), work / "checkpoint")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    if chance.random() < 0.4:  # the header is small, and where lengths are believed
        content = damage.raw(chance, content[:head]) + content[head:]
    elif chance.random() < 0.3:
        made = damage.json_text(chance, content[8:head])
        content = len(made).to_bytes(8, "little") + made + content[head:]
    else:
        content = damage.raw(chance, content)
    replace(path, content)
    if chance.random() < 0.9:
        forge(folder)
    return verified(world, recipe, folder)


def of_config(world: World, chance: random.Random, work: Path) -> Case:
    recipe = chance.choice(WEIGHTS)
    folder = linked(world.checkpoint(recipe), work / "checkpoint")
    path = folder / "config.json"
    replace(path, damage.json_text(chance, path.read_bytes()))
    if chance.random() < 0.9:
        forge(folder)
    return verified(world, recipe, folder)


def of_manifest(world: World, chance: random.Random, work: Path) -> Case:
    recipe = chance.choice((*WEIGHTS, *GGUFS))
    folder = linked(world.checkpoint(recipe), work / "checkpoint")
    replace(folder / FILE, damage.json_text(chance, (folder / FILE).read_bytes()))
    return verified(world, recipe, folder)


def of_side_files(world: World, chance: random.Random, work: Path) -> Case:
    recipe = chance.choice((*WEIGHTS, *GGUFS))
    folder = linked(world.checkpoint(recipe), work / "checkpoint")
    names = sorted(p.name for p in side_files(world.model) if p.name != "config.json")
    path = folder / chance.choice(names)
    kind = chance.randrange(5)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        name = chance.choice(
            ("evil.py", "pytorch_model.bin", "x.json", "a.so", "added_tokens.json")
        )
        replace(folder / name, chance.choice((b"", b"{}", b"import os\n")))
    elif path.suffix == ".json":
        replace(path, damage.json_text(chance, path.read_bytes()))
    else:
        replace(path, damage.text(chance, path.read_bytes()))
    forge(folder)
    return verified(world, recipe, folder)


def of_gguf(world: World, chance: random.Random, work: Path) -> Case:
    recipe = chance.choice(GGUFS)
    folder = linked(world.checkpoint(recipe), work / "checkpoint")
    path = next(p for p in folder.glob("*.gguf") if "imatrix" not in p.name)
    before = read_file(path).metadata
    content = damage.gguf(chance, path, path.read_bytes())
    replace(path, content)
    if chance.random() < 0.9:
        forge(folder)
    command, same = verified(world, recipe, folder)

    def is_same() -> str:
        after = read_file(path).metadata
        for key in sorted({*before, *after}):
            told = key.startswith("general.") and key != "general.architecture"
            if not told and repr(before.get(key)) != repr(after.get(key)):
                return f"{key} is another"
        return same()

    return command, is_same


def of_source(world: World, chance: random.Random, work: Path) -> Case:
    """A damaged source is refused, or quantised as another library reads it."""
    folder = linked(world.model, work / "model")
    name = chance.choice(("model.safetensors", "model.safetensors", "config.json"))
    path = folder / name
    if name == "config.json":
        replace(path, damage.json_text(chance, path.read_bytes()))
    elif chance.random() < 0.5:
        damage.tensors(chance, path)
    else:
        replace(path, damage.raw(chance, path.read_bytes()))
    out = work / "out"

    def command() -> int:
        arguments = ["-r", "rtn-w8a16", "-o", str(out), "--device", "cpu", "-q"]
        return main(["quantize", str(folder), *arguments])

    def is_same() -> str:
        from safetensors.torch import load_file

        made, read = (
            Checkpoint.open(out / "rtn-w8a16"),
            load_file(path.with_name("model.safetensors")),
        )
        for name, weight in made.state(torch.float32):
            known = read[name].float()
            gap = float((weight - known).norm() / known.norm().clamp(min=1e-30))
            if not gap <= 0.05:
                return f"{name} is off by {gap:.3g}"
        return ""

    return command, is_same


def of_yaml(world: World, chance: random.Random, work: Path) -> Case:
    import yaml

    from quantkit.specs import read_yaml

    kind = chance.choice(("recipe", "sweep", "policy"))
    work.mkdir(parents=True)
    path = work / f"{kind}.yaml"
    content = damage.yaml_text(chance, (world.folder / path.name).read_bytes())
    path.write_bytes(content)
    arguments = {
        "recipe": ["recipes", "validate", str(path)],
        "sweep": ["sweep", "run", str(path), "--dry-run", "-o", str(work / "runs")],
        "policy": ["gate", str(world.report), "--policy", str(path)],
    }[kind]

    def is_same() -> str:
        found, known = read_yaml(path, QuantkitError), yaml.safe_load(content.decode("utf-8-sig"))
        return "" if repr(found) == repr(known) else "it is read as something else"

    return lambda: main(arguments), is_same


def of_scores(world: World, chance: random.Random, work: Path) -> Case:
    """A report of a damaged score file, or a gate over a damaged report."""
    from quantkit.report import document
    from quantkit.scoring.scorecard import Scorecard

    if chance.random() < 0.5:
        work.mkdir(parents=True)
        path = work / "report.json"
        path.write_bytes(damage.json_text(chance, world.report.read_bytes()))
        return (
            lambda: main(["gate", str(path)]),
            lambda: _differs(document.read(path).to_json(), path),
        )
    folder = linked(world.scores, work / "scores")
    path = chance.choice(sorted(folder.iterdir()))
    if path.suffix == ".parquet":
        replace(path, damage.raw(chance, path.read_bytes()))
        return lambda: main(["report", str(folder), "-o", str(work / "out")]), lambda: ""
    replace(path, damage.json_text(chance, path.read_bytes()))
    return (
        lambda: main(["report", str(folder), "-o", str(work / "out")]),
        lambda: _differs(Scorecard.read(path).to_json(), path),
    )


def _differs(found: Any, path: Path) -> str:
    """Where we read something else than Python does, of what both know."""
    return _unlike(found, json.loads(path.read_bytes().decode("utf-8-sig")), "")


def _unlike(found: Any, known: Any, where: str) -> str:
    if isinstance(found, dict) and isinstance(known, dict):
        parts = (_unlike(found[key], known[key], f"{where}.{key}") for key in found if key in known)
        return next((part for part in parts if part), "")
    if isinstance(found, list) and isinstance(known, list) and len(found) == len(known):
        parts = (_unlike(a, b, f"{where}[]") for a, b in zip(found, known, strict=True))
        return next((part for part in parts if part), "")
    same = found == known or (isinstance(known, bool | int | float) and found == float(known))
    return "" if same else f"{where} is read as {found!r:.60} where it says {known!r:.60}"


def of_rows(world: World, chance: random.Random, work: Path) -> Case:
    from quantkit.calibration.reading import files

    work.mkdir(parents=True)
    source = world.rows / chance.choice(("a.jsonl", "a.json", "a.csv", "a.parquet"))
    path = work / source.name
    change = damage.raw if path.suffix == ".parquet" else damage.text
    if path.suffix == ".json" and chance.random() < 0.5:
        change = damage.json_text
    path.write_bytes(change(chance, source.read_bytes()))
    found: list[Any] = []

    def command() -> int:
        try:
            found.extend(record.value for record in files.read(path))
        except QuantkitError as error:
            print(f"quantkit: {error}", flush=True)  # noqa: T201
            return 3
        return 0

    return command, lambda: _other_rows(path, found)


def _other_rows(path: Path, found: list[Any]) -> str:
    """Whether other libraries read the same rows, as far as they read the file."""
    try:
        if path.suffix == ".parquet":
            from pyarrow import parquet

            known = parquet.read_table(path).to_pylist()
        else:
            text = _decoded(path.read_bytes())
            if path.suffix == ".csv":
                known = list(csv.DictReader(text.splitlines(), restval=""))
            elif path.suffix == ".json":
                known = json.loads(text)
                known = known if isinstance(known, list) else [known]
            else:
                known = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, OSError, csv.Error):
        return "only quantkit reads it"
    if path.suffix == ".csv":
        known = [{k: v for k, v in row.items() if k} for row in known]
        known = [row for row in known if row]
    return "" if repr(known) == repr(found) else "rows are read as something else"


def _decoded(content: bytes) -> str:
    return content.decode("utf-16" if content[:2] == b"\xff\xfe" else "utf-8-sig")


TARGETS: dict[str, Callable[[World, random.Random, Path], Case]] = {
    "tensors": of_tensors,
    "safetensors bytes": of_safetensors_bytes,
    "configs": of_config,
    "manifests": of_manifest,
    "side files": of_side_files,
    "GGUF": of_gguf,
    "source models": of_source,
    "YAML": of_yaml,
    "scores and reports": of_scores,
    "rows of data": of_rows,
}


def case(world: World, seed: int, work: Path) -> tuple[str, Case]:
    """The damaged input of a seed, and what it is an input of."""
    name = list(TARGETS)[seed % len(TARGETS)]
    return name, TARGETS[name](world, random.Random(f"mutations {seed}"), work)
