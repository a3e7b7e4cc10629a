"""Checkpoints of every recipe and format of the demo model, to compare two versions of the code.

    python scripts/golden.py make DIR          # all checkpoints, conversions, scores and a report
    python scripts/golden.py compare ONE OTHER # exit 1 and a line for every difference

Tensors, configs and all other files must agree byte for byte; manifests, scores, reports and cards
apart from dates, durations, memory and versions.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

CALIBRATION = "python-docs"
SAMPLES, LENGTH = 32, 128
CONVERSIONS = {
    "gptq-w4a16": ["gptq"],
    "awq-w4a16": ["awq"],
    "fp8-tensor": ["fp8"],
    "fp8-block": ["fp8"],
    "fp8-static": ["fp8"],
}
SCORED = ("gptq-w4a16", "fp8-dynamic", "gguf-q4_k_m")
VARYING = {
    "created",
    "seconds",
    "stage_seconds",
    "manifest_sha256",
    "peak_host_bytes",
    "peak_device_bytes",
    "versions",
    "version",
    "disk_bytes",
}
MEASURED = re.compile(
    r"\b\d[\d,.]*\s?(s|ms|min|h|GiB|MiB|seconds?)\b|\b20\d\d-\d\d-\d\d[T\d:.+Z-]*"
    r"|<caption><span>(?:Time of the run|Most memory)(?s:.*?)</table>"
    r"|<svg.*?</svg>|[0-9a-f]{64}|sha256:[0-9a-f]+|data-value=\"[\d.e+-]+\""
)
"""In texts: durations, memory, dates, pictures and tables of these, and hashes of files that hold
such."""


def make(out: Path, device: str, names: list[str]) -> None:
    from quantkit import resources

    names = names or resources.names("recipes")
    recipes = [*names, "fp8-dynamic+kv-fp8", "awq-gptq-w4a16+kv-fp8"]
    chosen = [part for name in recipes for part in ("-r", name)]
    data = ["--calibration", CALIBRATION, "--samples", str(SAMPLES), "--length", str(LENGTH)]
    run("quantize", "demo", *chosen, *data, "-o", out / "made", "--device", device)
    for name, formats in CONVERSIONS.items():
        for to in formats if name in names else ():
            run("convert", out / "made" / name, "--to", to, "-o", out / f"{name}-{to}")
    scored = [out / "made" / name for name in SCORED if name in names]
    tasks = ["--tasks", "python_docs,python_quiz", "--limit", "25", "--cache", out / "cache"]
    run("score", "demo", *scored, *tasks, "-o", out / "scores", "--device", device)
    run("report", out / "scores", "-o", out / "report")


def run(*arguments: object) -> None:
    line = [sys.executable, "-m", "quantkit", *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(line)}\n{done.stderr}")


def compare(one: Path, other: Path) -> list[str]:
    """Every file that differs, with where."""
    names = [files_of(folder) for folder in (one, other)]
    told = [f"only in {folder}: {n}" for folder, n in missing(one, other, *names)]
    for name in sorted(names[0] & names[1]):
        if difference := differs(one / name, other / name):
            told.append(f"{name}: {difference}")
    return told


def files_of(folder: Path) -> set[str]:
    paths = (p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)) for p in paths if "cache" not in p.parts}


def missing(one: Path, other: Path, left: set[str], right: set[str]) -> list[tuple[Path, str]]:
    return [(one, n) for n in sorted(left - right)] + [(other, n) for n in sorted(right - left)]


def differs(one: Path, other: Path) -> str:
    if one.read_bytes() == other.read_bytes():
        return ""
    if one.suffix == ".json" and one.name != "config.json":
        return first_difference(*(json.loads(p.read_bytes()) for p in (one, other)), "")
    if one.suffix in (".md", ".html"):
        texts = (MEASURED.sub("…", p.read_text()).splitlines() for p in (one, other))
        for number, (a, b) in enumerate(zip(*texts, strict=False), start=1):
            if a != b:
                return f"line {number}: {a[:80]!r} and {b[:80]!r}"
        return ""
    return "bytes differ"


def first_difference(one: Any, other: Any, where: str) -> str:
    """The first place where two JSON values differ, leaving out what varies from run to run."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if key in VARYING or (key == "sha256" and where.endswith(".README.md")):
                continue
            if (key in one) != (key in other):
                return f"{where}.{key} is in one only"
            if found := first_difference(one[key], other[key], f"{where}.{key}"):
                return found
        return ""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            if found := first_difference(a, b, f"{where}[{place}]"):
                return found
        return ""
    return "" if one == other else f"{where}: {one!r} and {other!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("out", type=Path)
    making.add_argument("--device", default="auto")
    making.add_argument("--recipes", nargs="*", default=[], help="these; without it, all there are")
    comparing = commands.add_parser("compare")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("other", type=Path)
    args = parser.parse_args()
    if args.command == "make":
        make(args.out, args.device, args.recipes)
        return
    told = compare(args.one, args.other)
    print("\n".join(told) or f"{len(files_of(args.one))} files agree")
    sys.exit(bool(told))


if __name__ == "__main__":
    main()
