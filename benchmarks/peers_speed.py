"""How fast quantkit, llm-compressor and AutoRound are, all measured the same way on one machine.

    python benchmarks/peers_speed.py blocks --work DIR --out FILE [--path PACKAGE=DIRS ...]
    python benchmarks/peers_speed.py whole --model DIR --name NAME --origin TEXT
        --calibration FILE [FILE ...] --work DIR --out FILE [--path PACKAGE=DIRS ...]

blocks  marginal seconds per block of an 8B Llama's shape: one process per package calls each run
        on models of two block counts, from files to files, after a warm-up call in the same
        process; the difference over the blocks between them leaves out everything that a block
        does not add. Weights are random and the text is made up: the work does not depend on them.
whole   wall clock of whole commands on a real model, each in a process of its own, from the start
        of the process to files on disk; `quality.py` scores what they leave in --work.

All runs get the same token ids. Memory is `torch.cuda.max_memory_allocated` of the process for
all. A run that fails is recorded with its error. FILE is written after every measurement, and both
parts share it; commands that --work already has results of are not run again.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import peers
from data_free import make_model
from recording import recorded
from whole_model import make_text

ROOT = Path(__file__).parents[1]
N_BLOCKS_8B = 32
BLOCK_RUNS = [
    *(run for run in peers.RUNS if run.startswith("quantkit")),
    *(f"llmcompressor-{method}@{batch}" for method in ("gptq", "awq") for batch in (8, 1)),
    *(run for run in peers.RUNS if run.startswith("autoround")),
]
RIVALS = {
    "quantkit-gptq": ("llmcompressor-gptq",),
    "quantkit-awq": ("llmcompressor-awq",),
    "quantkit-awq-gptq": ("autoround-200", "autoround-light"),
}
NOTES = {
    "memory": "torch.cuda.max_memory_allocated of the process that quantises",
    "kernels": "compiled kernels are cached where Triton and torch put them; no run clears them",
}


def provenance(commit: str | None) -> dict[str, Any]:
    """Where and from what a result comes."""
    import torch

    from quantkit import device as devices
    from quantkit.export.manifest import versions

    when = recorded()
    when["commit"] = commit or when["commit"]
    if when["commit"] is None:
        raise SystemExit(f"{ROOT} is not a git checkout: give --commit")
    return {
        "recorded": when,
        "device": devices.describe(devices.choose()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "cuda": torch.version.cuda,
        "versions": versions(),
    }


def environment(package: str, paths: dict[str, str]) -> dict[str, str]:
    """The variables of a package's own process."""
    path = paths.get(package, os.environ.get("PYTHONPATH", ""))
    if package == "quantkit":
        path = f"{ROOT}:{path}"
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def build_set(
    model: Path, texts: list[Path], samples: int, length: int, out: Path, paths: dict[str, str]
) -> None:
    """Token ids for everybody, unless they are there."""
    if (out / "calibration.json").is_file():
        return
    command = [sys.executable, "-m", "quantkit", "calibrate", "build", "--model", str(model)]
    command += [part for text in texts for part in ("--from", str(text))]
    command += ["--samples", str(samples), "--length", str(length), "-o", str(out), "-q", "--json"]
    env = environment("quantkit", paths)
    subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)


def set_record(folder: Path) -> dict[str, Any]:
    """What a set's tokens are."""
    manifest = json.loads((folder / "calibration.json").read_text())
    return {
        "samples": manifest["n_samples"],
        "length": manifest["length"],
        "digest": manifest["digest"],
        "sources": {source["name"]: source["n_tokens"] for source in manifest["sources"]},
    }


def start(command: list[str], env: dict[str, str], log: Path, limit: float) -> str | None:
    """Run a command; returns why it failed."""
    with log.open("w") as stream:
        try:
            done = subprocess.run(
                command,
                env=env,
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"stopped after {limit:.0f} s"
    if done.returncode == 0:
        return None
    return f"exit code {done.returncode}: {log.read_text(errors='replace')[-2000:]}"


def whole(
    name: str,
    model: Path,
    tokens: Path,
    group_size: int,
    work: Path,
    paths: dict[str, str],
    limit: float,
) -> dict[str, Any]:
    """One command from process start to files on disk; its row is kept beside what it made."""
    run, batch = peers.split(name)
    package = peers.package_of(run)
    folder = work / run
    kept = folder / "row.json"
    if kept.is_file():
        return json.loads(kept.read_text())
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out, call = folder / "out", folder / "call.json"
    if package == "quantkit":
        recipes = [path.name for path in peers.checkpoints(run, out).values()]
        command = [sys.executable, "-m", "quantkit", "quantize", str(model), "-o", str(out), "-q"]
        command += [part for recipe in recipes for part in ("-r", recipe)]
        command += ["--calibration", str(tokens), *(["--tune"] if run.endswith("-tune") else [])]
    else:
        command = [sys.executable, str(Path(peers.__file__)), name, "--model", str(model)]
        command += ["--set", str(tokens), "--group-size", str(group_size), "--keep"]
        command += ["--out", str(out), "--result", str(call)]
    started = time.monotonic()
    error = start(command, environment(package, paths), folder / "log.txt", limit)
    seconds = time.monotonic() - started
    row: dict[str, Any] = {
        "run": run,
        "batch": None if package == "quantkit" else batch,
        "seconds": seconds,
        "peak_device_bytes": None,
        "error": error,
    }
    if error is None and package == "quantkit":
        manifests = [
            json.loads((path / "quantkit.json").read_text())
            for path in peers.checkpoints(run, out).values()
        ]
        row["peak_device_bytes"] = manifests[0]["peak_device_bytes"]
        row["stage_seconds"] = manifests[0]["stage_seconds"]
        row["versions"] = manifests[0]["versions"]
        digests = {manifest["calibration"]["digest"] for manifest in manifests}
        if digests != {set_record(tokens)["digest"]}:
            row["error"] = f"it was calibrated on other tokens: {digests}"
    elif error is None:
        made = json.loads(call.read_text())
        row["peak_device_bytes"] = made["calls"][0]["peak_device_bytes"]
        row["error"] = made["calls"][0]["error"]
        row["versions"] = made["versions"]
    kept.write_text(json.dumps(row, indent=2))
    return row


def marginal(
    names: list[str], counts: tuple[int, int], calls: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Seconds that a further block adds to each run, from its calls on both block counts."""
    rows = []
    for name in names:
        run, batch = peers.split(name)
        mine = [c for c in calls if (c["run"], c["batch"]) == (run, batch) and not c["warm_up"]]
        by_model = {call["model"]: call for call in mine}
        both = [by_model.get(f"blocks-{count}") for count in counts]
        row: dict[str, Any] = {
            "run": run,
            "batch": None if peers.package_of(run) == "quantkit" else batch,
            "block_counts": list(counts),
            "seconds": [call and call["seconds"] for call in both],
            "peak_device_bytes": [call and call["peak_device_bytes"] for call in both],
            "seconds_per_block": None,
            "error": None,
        }
        failed = [call["error"] for call in both if call and call["error"]]
        if failed or None in both:
            row["error"] = failed[0] if failed else "it was stopped before both calls were made"
        else:
            few, many = row["seconds"]
            row["seconds_per_block"] = (many - few) / (counts[1] - counts[0])
            row["extrapolated_seconds_of_32_blocks"] = N_BLOCKS_8B * row["seconds_per_block"]
        rows.append(row)
    return rows


def best_batches(rows: list[dict[str, Any]]) -> dict[str, int]:
    """The batch size at which each run of a peer is fastest."""
    best: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["batch"] is None or row["seconds_per_block"] is None:
            continue
        old = best.get(row["run"])
        if old is None or row["seconds_per_block"] < old["seconds_per_block"]:
            best[row["run"]] = row
    return {run: row["batch"] for run, row in best.items()}


def times_faster(rows: list[dict[str, Any]], key: str) -> dict[str, float]:
    """How many times as long each peer takes as our counterpart, at its best batch."""
    best: dict[str, float] = {}
    for row in rows:
        if row["error"] is None and row[key] is not None:
            best[row["run"]] = min(row[key], best.get(row["run"], row[key]))
    return {
        f"{own} against {peer}": best[peer] / best[own]
        for own, others in RIVALS.items()
        for peer in others
        if own in best and peer in best
    }


def others(part: dict[str, Any] | None, names: list[str]) -> list[dict[str, Any]]:
    """Rows of an earlier call that this one does not measure again."""
    again = [(run, batch) for run, batch in map(peers.split, names)]
    rows = part["rows"] if part else []
    return [r for r in rows if (r["run"], r["batch"] or peers.DEFAULT_BATCH) not in again]


def blocks(args: argparse.Namespace, result: dict[str, Any], save: Any) -> None:
    counts = {"quantkit": tuple(args.own_blocks)}
    shape = {
        "hidden": args.hidden,
        "intermediate": args.intermediate,
        "vocabulary": args.vocabulary,
    }
    for count in {*args.own_blocks, *args.blocks}:
        if not (args.work / f"blocks-{count}").is_dir():
            make_model(args.work / f"blocks-{count}", count, *shape.values())
    tokens, text = args.work / "set", args.work / "text.txt"
    if not tokens.is_dir():
        make_text(text, 2 * args.samples * args.length)
    few = args.work / f"blocks-{min(args.blocks)}"
    build_set(few, [text], args.samples, args.length, tokens, args.path)
    part = result["blocks"] = {
        "what": "seconds that one more block takes, from files to files in a warm process",
        "shape": shape,
        "group_size": args.group_size,
        "tokens": set_record(tokens),
        "warm_samples": args.warm_samples,
        "rows": others(result.get("blocks"), args.runs),
    }
    for package in dict.fromkeys(peers.package_of(run) for run in args.runs):
        names = [run for run in args.runs if peers.package_of(run) == package]
        pair = counts.get(package, tuple(args.blocks))
        call = args.out.with_name(f"{args.out.stem}-{package}.json")
        call.unlink(missing_ok=True)
        command = [sys.executable, str(Path(peers.__file__)), *names, "--model"]
        command += [str(args.work / f"blocks-{count}") for count in pair]
        command += ["--set", str(tokens), "--group-size", str(args.group_size)]
        command += ["--warm-samples", str(args.warm_samples)]
        command += ["--out", str(args.work / f"out-{package}"), "--result", str(call)]
        log = args.work / f"{package}.log"
        error = start(command, environment(package, args.path), log, args.limit)
        made = json.loads(call.read_text()) if call.is_file() else {"versions": {}, "calls": []}
        rows = marginal(names, pair, made["calls"])
        for row in rows:
            if error and row["error"] and not any(c["error"] for c in made["calls"]):
                row["error"] = error
        part["rows"] += rows
        result["versions"] |= made["versions"]
        part["best_batch"] = best_batches(part["rows"])
        part["times_faster"] = times_faster(part["rows"], "seconds_per_block")
        save()
        for row in rows:
            print(shown(row, "seconds_per_block"), flush=True)


def whole_commands(args: argparse.Namespace, result: dict[str, Any], save: Any) -> None:
    tokens = args.work / "set"
    build_set(args.model, args.calibration, args.samples, args.length, tokens, args.path)
    best = result.get("blocks", {}).get("best_batch", {})
    names = [run if "@" in run or run not in best else f"{run}@{best[run]}" for run in args.runs]
    part = result["whole"] = {
        "what": "wall clock of whole commands, from the start of the process to files on disk",
        "model": args.name,
        "origin": args.origin,
        "group_size": args.group_size,
        "tokens": set_record(tokens),
        "rows": others(result.get("whole"), names),
    }
    for name in names:
        row = whole(name, args.model, tokens, args.group_size, args.work, args.path, args.limit)
        part["rows"].append(row)
        result["versions"] |= row.get("versions", {})
        part["times_faster"] = times_faster(part["rows"], "seconds")
        save()
        print(shown(row, "seconds"), flush=True)


def shown(row: dict[str, Any], key: str) -> str:
    """A row in one line."""
    batch = f"@{row['batch']}" if row["batch"] else ""
    ended = row["error"].strip().splitlines()[-1] if row["error"] else f"{row[key]:.3f} s"
    return f"{row['run']}{batch}: {ended}, memory {row['peak_device_bytes']}"


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options of every program that runs peers."""
    parser.add_argument("--path", type=lambda text: text.split("=", 1), action="append", default=[])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=400, help="seconds that a command may take")
    parser.add_argument("--commit", help="of the tree, where it is not a git checkout")
    parser.add_argument("--out", type=Path, required=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("blocks")
    part.add_argument("--runs", nargs="+", default=BLOCK_RUNS)
    part.add_argument("--blocks", type=int, nargs=2, default=[1, 3], help="of the peers' models")
    part.add_argument("--own-blocks", type=int, nargs=2, default=[2, 10], help="of our models")
    part.add_argument("--hidden", type=int, default=4096)
    part.add_argument("--intermediate", type=int, default=14336)
    part.add_argument("--vocabulary", type=int, default=32000)
    part.add_argument("--group-size", type=int, default=128)
    part.add_argument("--warm-samples", type=int, default=8)
    add_common(part)
    part = parts.add_parser("whole")
    part.add_argument("--runs", nargs="+", default=list(peers.RUNS))
    part.add_argument("--model", type=Path, required=True)
    part.add_argument("--name", required=True)
    part.add_argument("--origin", required=True, help="where the source's weights come from")
    part.add_argument("--calibration", type=Path, nargs="+", required=True)
    part.add_argument("--group-size", type=int, default=128)
    add_common(part)
    args = parser.parse_args()
    args.path = dict(args.path)
    args.work.mkdir(parents=True, exist_ok=True)
    known = json.loads(args.out.read_text()) if args.out.is_file() else {}
    result: dict[str, Any] = {
        "what": "speed of quantkit and its peers, measured the same way in one run",
        **provenance(args.commit),
        **NOTES,
        **{key: known[key] for key in ("blocks", "whole") if key in known},
    }
    result["versions"] |= known.get("versions", {})

    def save() -> None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")

    {"blocks": blocks, "whole": whole_commands}[args.part](args, result, save)


if __name__ == "__main__":
    main()
