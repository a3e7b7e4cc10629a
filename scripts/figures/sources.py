"""Where every result comes from: file, program, machine, date, commit."""

from typing import Any

from figures.regions import RESULTS, FigureError, link, region, result, table
from quantkit.hardware.gpus import label

# Result files by the beginning of their names; the longest that fits counts.
PROGRAMS = {
    "allocation": "allocation.py",
    "bench-vllm": "`quantkit bench`",
    "best_bits": "best_bits.py",
    "busy": "busy.py",
    "calibration_choice": "calibration_choice.py",
    "calibration_domains": "calibration_domains.py",
    "data_free": "data_free.py",
    "demo": "demo_output.py",
    "drift": "fp4.py",
    "families": "families.py",
    "fp4": "fp4.py",
    "gguf_best": "gguf_best.py",
    "faults": "tests/faults/campaign.py",
    "frontier": "frontier.py",
    "generation": "generation.py",
    "gguf_blocks": "gguf_blocks.py",
    "gguf_llamacpp": "gguf_llamacpp.py",
    "gguf_quality": "gguf_quality.py",
    "gguf_writing": "gguf_writing.py",
    "kv_capacity": "kv_capacity.py",
    "low-bits": "frontier.py",
    "million_rows": "million_rows.py",
    "moe_speed": "moe_speed.py",
    "off_grid": "off_grid.py",
    "offload": "offload.py",
    "one_pass": "one_pass.py",
    "peers_speed": "peers_speed.py",
    "published": "published.py",
    "quality": "quality.py",
    "ranks": "ranks.py",
    "ray-kill": "sweep_kill.py",
    "ray-overhead": "sweep.py",
    "redaction": "redaction.py",
    "report": "report.py",
    "scoring": "scoring.py",
    "speed_points": "speed_points.py",
    "startup": "startup.py",
    "suite": "suite.py",
    "tried": "tried.py",
    "vllm": "vllm_generate.py",
    "vllm-draft": "draft_acceptance.py",
    "vllm-experts": "vllm_proof.py",
    "vllm-formats": "vllm_proof.py",
    "vllm-mixed": "vllm_proof.py",
    "vllm-proof": "vllm_proof.py",
    "vllm-speed": "vllm_speed.py",
    "whole_model": "whole_model.py",
    "block_profile": "block_profile.py",
    "seeds": "seeds.py",
    "wild-cpu": "wild.py",
    "wild-h200": "wild.py",
    "wild_headers": "wild_headers.py",
    "wild_peers": "wild_peers.py",
}
BY_GIT = " ¹"


def program(name: str) -> str:
    fitting = [start for start in PROGRAMS if name.startswith(start)]
    if not fitting:
        raise FigureError(f"scripts/figures/sources.py does not say what writes {name}.json")
    found = PROGRAMS[max(fitting, key=len)]
    if not found.endswith(".py"):
        return found
    place = found if "/" in found else f"benchmarks/{found}"
    return f"[{found.rpartition('/')[2]}](../{place})"


def machine(name: str, run: dict[str, Any]) -> str:
    """The GPU if there is one, and the processor."""
    one = run["runs"][0] if "runs" in run else run
    told = one.get("machine") or run.get("machine")
    processor = told["processor"] if isinstance(told, dict) else told or "x86_64"
    cores = run.get("cores")
    if cores and "core" not in processor:
        processor += f", {cores} cores"
    device = one.get("device") or ("NVIDIA H200" if name.endswith("-h200") else "")
    if told is None and device.startswith("cpu ("):
        return str(device.removeprefix("cpu (").removesuffix(")"))
    if processor == device:
        return label(device)
    return f"{label(device)}, {processor}" if device.startswith("NVIDIA") else processor


def recorded(name: str, run: dict[str, Any]) -> tuple[str, str]:
    """Date and commit."""
    if "recorded" in run:
        when = run["recorded"]
        commit = f"`{when['commit']}`" if when["commit"] else "not known"
        return when["date"], commit + (BY_GIT if "from" in when else "")
    if "created" in run:
        return run["created"][:10], ""
    raise FigureError(
        f"benchmarks/results/{name}.json does not say when it was recorded: let its program write "
        f"it with benchmarks/recording.py, or run scripts/write_figures.py --date on it"
    )


@region
def result_files() -> str:
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        run = result(path.stem)
        made = [program(path.stem), machine(path.stem, run), *recorded(path.stem, run)]
        rows.append([link(path.name, path.stem), *made])
    return table(["results", "program", "machine", "recorded", "commit"], rows)
