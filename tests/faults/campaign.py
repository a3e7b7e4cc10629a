"""The long part: thousands of mutations and kills, over ranges of seeds that add up.

    python tests/faults/campaign.py mutations 0:10000
    python tests/faults/campaign.py kills 0:500
    python tests/faults/campaign.py limits 0:60
    python tests/faults/campaign.py again          # seeds of known defects once more
    python tests/faults/campaign.py collect        # into benchmarks/results/faults.json

Every range leaves a file in build/faults, written as it goes on; one that was stopped continues
where it was. `again` is for what was mended, or for a machine that stood still meanwhile: a seed
that is not a defect any more is counted as what it is. `collect` adds up all of them. `make faults`
does all of it.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Threads of tokenizers do not outlive a fork, and whoever waits for them in a child waits for ever.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

PARTS = Path(os.environ.get("QUANTKIT_FAULTS", ROOT / "build" / "faults"))
RESULT = ROOT / "benchmarks" / "results" / "faults.json"
RECORDED = ("first", "next", "counts", "defects", "most_memory", "longest_s", "machine", "note")
"""What is kept of a range, so that others add up with it."""
EVERY = 50
"""Cases after which what was found is written down."""
GOOD = int(os.environ.get("QUANTKIT_FAULTS_GOOD", "3"))
"""Undamaged inputs whose memory damaged ones are held against."""


def mutations(first: int, last: int) -> None:
    """Mutations of a range of seeds."""
    import torch

    torch.set_num_threads(1)
    path, part = _part("mutations", first, last)
    with _mutating() as tried:
        for seed in range(part["next"], last):
            tried(part, seed)
            part["next"] = seed + 1
            if (seed + 1) % EVERY == 0 or seed + 1 == last:
                path.write_text(json.dumps(part, indent=1))
                print(f"{seed + 1 - first} of {last - first}", _short(part), flush=True)


def again() -> None:
    """Seeds of mutations that were found to be defects."""
    import torch

    torch.set_num_threads(1)
    with _mutating() as tried:
        for path in sorted(PARTS.glob("mutations-*.json")):
            part = json.loads(path.read_text())
            known, part["defects"] = part["defects"], []
            for one in known:
                part["counts"][one["of"]]["defect"] -= 1
                tried(part, one["seed"])
            path.write_text(json.dumps(part, indent=1))
            if known:
                print(f"{path.name}: {len(known)} tried again", _short(part), flush=True)


@contextmanager
def _mutating() -> Iterator[Callable[[dict[str, Any], int], None]]:
    """What tries a seed and counts it, while there is a world to try it in."""
    from faults import judge, mutations
    from faults.world import build

    with tempfile.TemporaryDirectory(prefix="faults-") as room:
        world = build(PARTS / "world")
        for recipe in (*mutations.WEIGHTS, *mutations.GGUFS):
            mutations.reference(world, recipe)

        def tried(part: dict[str, Any], seed: int) -> None:
            work = Path(room) / "case"
            shutil.rmtree(work, ignore_errors=True)
            name, (command, is_same) = mutations.case(world, seed, work)
            if name not in part["good_bytes"]:
                part["good_bytes"][name] = _good(world, name, Path(room))
            found = judge.tried(command, is_same, Path(room) / "log")
            _count(part, name, seed, found, part["good_bytes"][name])

        yield tried


def _good(world: Any, name: str, room: Path) -> int:
    """The memory that an undamaged input of the same kind takes."""
    from faults import damage, judge, mutations

    kept = {key: getattr(damage, key) for key in ("raw", "text", "json_text", "yaml_text")}
    kept |= {key: getattr(damage, key) for key in ("tensors", "gguf")}
    try:
        for key in kept:
            setattr(damage, key, _unchanged(key))
        peak = 0
        import random

        for seed in range(GOOD):
            work = room / "good"
            shutil.rmtree(work, ignore_errors=True)
            chance = random.Random(f"good {seed}")
            command, is_same = mutations.TARGETS[name](world, chance, work)
            found = judge.tried(command, is_same, room / "log")
            peak = max(peak, found.peak_bytes)
        return peak
    finally:
        for key, function in kept.items():
            setattr(damage, key, function)


def _unchanged(key: str) -> Any:
    return {
        "tensors": lambda chance, path: None,
        "gguf": lambda chance, path, content: content,
    }.get(key, lambda chance, content: content)


def _count(part: dict[str, Any], name: str, seed: int, found: Any, good_bytes: int) -> None:
    from faults import judge

    counts = part["counts"].setdefault(
        name, {judge.REFUSED: 0, judge.EQUIVALENT: 0, judge.DEFECT: 0}
    )
    verdict, why = found.verdict, found.why
    ratio = found.peak_bytes / max(1, good_bytes)
    if ratio > 1.5 and verdict != judge.DEFECT:
        verdict, why = judge.DEFECT, f"takes {ratio:.1f} times the memory of a good input"
    counts[verdict] += 1
    part["most_memory"] = max(part["most_memory"], round(ratio, 3))
    part["longest_s"] = max(part["longest_s"], round(found.cpu_s, 2))
    if verdict == judge.DEFECT:
        part["defects"].append({"seed": seed, "of": name, "why": why})
        print("DEFECT", seed, name, why, flush=True)


def kills(first: int, last: int) -> None:
    """Kills of a range of seeds."""
    from faults import kills

    path, part = _part("kills", first, last)
    with tempfile.TemporaryDirectory(prefix="faults-") as room:
        field = kills.Field(Path(room), PARTS / "world")
        for seed in range(part["next"], last):
            name, was_killed, why = field.one(seed)
            counts = part["counts"].setdefault(name, {"killed": 0, "too late": 0, "defect": 0})
            counts["defect" if why else "killed" if was_killed else "too late"] += 1
            if why:
                part["defects"].append({"seed": seed, "of": name, "why": why})
                print("DEFECT", seed, name, why, flush=True)
            part["next"] = seed + 1
            path.write_text(json.dumps(part, indent=1))
            if (seed + 1) % 10 == 0:
                print(f"{seed + 1 - first} of {last - first}", _short(part), flush=True)


def limits(first: int, last: int) -> None:
    """Limits of a range of seeds."""
    from faults import kills

    path, part = _part("limits", first, last)
    with tempfile.TemporaryDirectory(prefix="faults-") as room:
        field = kills.Field(Path(room), PARTS / "world")
        for seed in range(part["next"], last):
            name, ended, why = field.limited(seed)
            empty = {"refused": 0, "done all the same": 0, "ended by a library": 0, "defect": 0}
            counts = part["counts"].setdefault(name, empty)
            counts["defect" if why else ended] += 1
            if why:
                part["defects"].append({"seed": seed, "of": name, "why": why})
                print("DEFECT", seed, name, why, flush=True)
            part["next"] = seed + 1
            path.write_text(json.dumps(part, indent=1))
            if (seed + 1) % 10 == 0:
                print(f"{seed + 1 - first} of {last - first}", _short(part), flush=True)


def _part(kind: str, first: int, last: int) -> tuple[Path, dict[str, Any]]:
    PARTS.mkdir(parents=True, exist_ok=True)
    path = PARTS / f"{kind}-{first}-{last}.json"
    if path.is_file():
        return path, json.loads(path.read_text())
    empty: dict[str, Any] = {"kind": kind, "first": first, "next": first, "counts": {}}
    empty["machine"] = platform.machine()
    return path, empty | {"defects": [], "good_bytes": {}, "most_memory": 0.0, "longest_s": 0.0}


def _short(part: dict[str, Any]) -> str:
    total: dict[str, int] = {}
    for counts in part["counts"].values():
        for key, n in counts.items():
            total[key] = total.get(key, 0) + n
    return ", ".join(f"{n} {key}" for key, n in total.items())


def collect() -> None:
    """Add up all ranges, those that are recorded already and have no file here included."""
    import recording

    result: dict[str, Any] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "seed": "random.Random(f'{kind} {n}') with n from the ranges",
    }
    known = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    for kind in ("mutations", "kills", "limits"):
        parts = [json.loads(p.read_text()) for p in sorted(PARTS.glob(f"{kind}-*.json"))]
        here = [(p["first"], p["next"]) for p in parts if p["next"] > p["first"]]
        for part in known.get(kind, {}).get("parts", []):  # of other machines, or of earlier days
            if not any(part["first"] < last and first < part["next"] for first, last in here):
                parts.append(part)
        parts = sorted((p for p in parts if p["next"] > p["first"]), key=lambda p: p["first"])
        for one, other in pairwise(parts):
            if other["first"] < one["next"]:
                raise SystemExit(f"{kind}: seeds from {other['first']} on were counted twice")
        counts: dict[str, dict[str, int]] = {}
        for part in parts:
            for name, found in part["counts"].items():
                total = counts.setdefault(name, dict.fromkeys(found, 0))
                for key, n in found.items():
                    total[key] += n
        result[kind] = {
            "ranges": [[p["first"], p["next"]] for p in parts],
            "counts": counts,
            "defects": [defect for p in parts for defect in p["defects"]],
            "parts": [{key: part.get(key) for key in RECORDED} for part in parts],
        }
        if kind == "mutations":
            result[kind]["most_memory"] = max((p["most_memory"] for p in parts), default=0)
            result[kind]["longest_s"] = max((p["longest_s"] for p in parts), default=0)
    recording.write(RESULT, result)


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    return int(first), int(last)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("mutations", "kills", "limits", "again", "collect"))
    parser.add_argument("seeds", nargs="?", type=_range, metavar="FIRST:LAST")
    parser.add_argument("--kills", type=_range, metavar="FIRST:LAST", help="in the same process")
    asked = parser.parse_args()
    if asked.what in ("again", "collect"):
        {"again": again, "collect": collect}[asked.what]()
    else:
        {"mutations": mutations, "kills": kills, "limits": limits}[asked.what](*asked.seeds)
    if asked.kills:
        kills(*asked.kills)
