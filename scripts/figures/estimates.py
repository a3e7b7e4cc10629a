"""What `recommend` computes against what engines reach: ours and published measurements."""

from itertools import zip_longest
from statistics import median
from typing import Any

from figures.regions import (
    RESULTS,
    at_most,
    count,
    items,
    link,
    paragraph,
    percent,
    region,
    result,
    span,
    table,
    times,
)

CASES = {"decode_1": "1 user", "decode_64": "64 users", "prefill": "a prompt of 8,192"}
WEIGHT_ONLY = ("w4a16", "w8a16")
NEAR = 0.25
OFFLOAD_WITHIN = 0.30


# Memory: tokens of the KV cache.


def caches() -> list[dict[str, Any]]:
    run = result("kv_capacity-h200")
    return [*run["rows"], *run["compiled"]]


def cache_gap(rows: list[dict[str, Any]]) -> str:
    """How many tokens fewer we compute than vLLM has, as a span in percent."""
    return span((-row["gap_percent"] / 100 for row in rows), lambda x: percent(x, 2))


def extra(row: dict[str, Any]) -> float:
    """GiB that we reckon with beside the cache and vLLM does not take."""
    return row["available_gib"] - row["our_kv_gib"]


def taken(row: dict[str, Any]) -> float:
    """GiB that vLLM takes beside the cache."""
    return row["total_gib"] * result("kv_capacity-h200")["utilisation"] - row["available_gib"]


@region
def kv_capacity() -> str:
    run = result("kv_capacity-h200")
    large = [row for row in caches() if row["recipe"] == "bf16" and row["model"] == "8B-shaped"]
    share = span((extra(row) / taken(row) for row in large), lambda x: percent(x, 0))
    return items(
        f"KV cache: the estimate is {cache_gap(run['rows'])} fewer tokens than vLLM {run['vllm']} "
        f"has, in {count(len(run['rows']))} eager settings (SmolLM2-135M and an 8B's shape in "
        f"bf16, FP8 and 4 bits, 16- and 8-bit cache), and {cache_gap(run['compiled'])} in "
        f"{count(len(run['compiled']))} with CUDA graphs, as a server starts. Aim 3%.",
        f"Memory without the cache: the estimate is "
        f"{span(map(extra, caches()), lambda x: f'{x:.2f} GiB')} more than vLLM takes, {share} of "
        "what an 8B in bf16 takes.",
    )


# Speed: the roofline against vLLM on an H200.


def outside(found: dict[str, Any], case: str, which: str = "predicted") -> float:
    """By how much a measured ratio lies outside of the predicted range; 0 within it."""
    measured, ends = found[case]["ratio"], found[which][case]["ratio"]
    if measured < ends["low"]:
        return measured / ends["low"] - 1
    return max(0.0, measured / ends["high"] - 1)


def formats() -> dict[str, dict[str, Any]]:
    models = result("vllm-speed-h200")["models"]
    return {name: found for name, found in models.items() if name != "bf16"}


@region
def speed_8b() -> str:
    rows = []
    for name, found in formats().items():
        cells = []
        for case in CASES:
            ends = found["predicted"][case]["ratio"]
            cells.append(f"{found[case]['ratio']:.2f} ({ends['low']:.2f} to {ends['high']:.2f})")
        rows.append([f"`{name}`", *cells])
    return table(["times bf16, and the predicted range", *(f"{c}:" for c in CASES.values())], rows)


@region
def speed_points() -> str:
    """Predictions that were committed first, and what vLLM did."""
    predicted, measured = result("speed_points-predicted"), result("speed_points-h200")
    rows, errors, n_inside, n_points = [], [], 0, 0
    for model, real in zip_longest(predicted["models"], measured["models"]):
        for users, ends in model["points"].items():
            n_points += 1
            if real is None or "tokens_per_s" not in real.get(f"decode_{users}", {}):
                continue
            rate = real[f"decode_{users}"]["tokens_per_s"]
            inside = ends["low"] <= rate <= ends["high"]
            errors.append(abs(ends["typical"] / rate - 1))
            n_inside += inside
            rows.append(
                [
                    f"{model['shape']}, {model['recipe'] or 'bf16'}",
                    users,
                    f"{ends['low']:,.0f} to {ends['high']:,.0f}, {ends['typical']:,.0f}",
                    f"{rate:,.0f}" + ("" if inside else ", outside"),
                ]
            )
    left = n_points - len(rows)
    told = (
        f"{n_inside} of {len(rows)} points are within their range, with a median error of "
        f"{median(errors):.0%} ({link('predicted', 'speed_points-predicted')}, "
        f"{link('measured', 'speed_points-h200')})"
        + (f"; {left} more are not measured yet." if left else ".")
    )
    head = ["model", "users:", "predicted tokens per second:", "measured:"]
    return f"{paragraph(told)}\n\n{table(head, rows)}"


@region
def offload() -> str:
    """A file with some of its layers in the host's memory, before and after it was measured."""
    is_measured = (RESULTS / "offload-h200.json").is_file()
    found = result("offload-h200" if is_measured else "offload-predicted")
    started = "with_threads_started_each_step"
    has_started = any(started in point for point in found["points"])
    rows = []
    for point in found["points"]:
        ends = f"{point['low']:,.0f} to {point['high']:,.0f}, {point['typical']:,.0f}"
        row = [f"{point['share']:.0%}", ends]
        if is_measured:
            rate = point.get("measured")
            row += [f"{rate:,.0f}", f"{point['error']:+.0%}"] if rate else ["failed", ""]
        if has_started:
            row.append(f"{max(point[started]):,.0f}" if started in point else "")
        rows.append(row)
    told = f"Host memory is read at {found['host_gb_s']:.0f} GB/s"
    links = link("predicted", "offload-predicted")
    if is_measured:
        links += f", {link('measured', 'offload-h200')}"
        errors = [abs(point["error"]) for point in found["points"] if "error" in point]
        within = sum(error <= OFFLOAD_WITHIN for error in errors)
        told += f"; {within} of {len(rows)} are within {OFFLOAD_WITHIN:.0%}"
    else:
        told += "; llama.cpp is not measured yet"
    head = ["layers on the GPU", "predicted tokens per second:"]
    head += ["measured:", "off:"] if is_measured else []
    head += ["with threads started each step:"] if has_started else []
    return f"{paragraph(f'{told} ({links}).')}\n\n{table(head, rows)}"


@region
def speed_before() -> str:
    """4 bits: what the roofline said before this run, and that it was wrong."""
    was = [
        found["predicted_before_this_run"]
        for name, found in formats().items()
        if name.endswith(WEIGHT_ONLY) and "predicted_before_this_run" in found
    ]
    told = [
        f"{min(one[case]['ratio']['low'] for one in was):.2f} to "
        f"{max(one[case]['ratio']['high'] for one in was):.2f} times for {what}"
        for case, what in CASES.items()
    ]
    return paragraph(
        f"For 4 bits the roofline had predicted {', '.join(told[:-1])} and {told[-1]}, too fast "
        "for decoding. Its limit for unpacking was then set from this run, so the ranges for 4 "
        "bits above are not an independent prediction."
    )


def small() -> list[tuple[str, str, str, dict[str, float], float]]:
    """Shape, format, case, what was predicted before the run, what was measured."""
    return [
        (shape, name, case, found["predicted_before_this_run"][case]["tokens_per_s"],
         found[case]["tokens_per_s"])
        for shape, models in result("vllm-speed-small-h200")["shapes"].items()
        for name, found in models.items()
        for case in CASES
    ]  # fmt: skip


@region
def speed_small() -> str:
    rows = [
        [
            f"{shape.removeprefix('llama-').upper()}, `{name}`, {CASES[case]}",
            f"{measured:,.0f}",
            f"{ends['typical']:,.0f}",
            f"{ends['low']:,.0f} to {ends['high']:,.0f}",
            f"{ends['typical'] / measured - 1:+.0%}",
        ]
        for shape, name, case, ends, measured in small()
    ]
    head = ["tokens per second", "measured:", "predicted:", "range:", "off:"]
    return table(head, rows)


# What others published.


def published_memory() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Logs of vLLM 0.15 and later, and older ones."""
    logs = [log for log in result("published")["memory"] if "used_off" in log]
    new = [log for log in logs if version(log["vllm"]) >= (0, 15)]
    return new, [log for log in logs if log not in new]


def version(text: str) -> tuple[int, int]:
    first, second = text.split(".")[:2]
    return int(first), int(second)


def published_speed() -> dict[str, list[dict[str, Any]]]:
    """Rates of vLLM since 0.10, of older vLLM, and of llama.cpp."""
    kinds: dict[str, list[dict[str, Any]]] = {"new": [], "old": [], "llama.cpp": []}
    for rate in result("published")["speed"]:
        name, number_of = rate["engine"].split()[:2]
        if name != "vLLM":
            kinds["llama.cpp"].append(rate)
        else:
            kinds["new" if version(number_of) >= (0, 10) else "old"].append(rate)
    return kinds


def worst(rows: list[dict[str, Any]], key: str) -> float:
    return max(abs(row[key]) for row in rows)


def within(rows: list[dict[str, Any]], key: str, limit: float) -> str:
    """`all 14` or `9 of 13`."""
    near = sum(abs(row[key]) <= limit for row in rows)
    return f"all {near}" if near == len(rows) else f"{near} of {len(rows)}"


def pairs(rows: list[dict[str, Any]]) -> str:
    return f"{count(len({(row['model'], row['gpu']) for row in rows}))} pairs of model and GPU"


@region
def published() -> str:
    run = result("published")
    new, old = published_memory()
    speed = published_speed()
    summary = run["summary"]
    missed = [rate for rate in speed["llama.cpp"] if abs(rate["off"]) > NEAR]
    misses = " and ".join(
        f"{rate['model']} as {rate['format']} on {rate['gpu']} ({rate['off']:+.0%})"
        for rate in missed
    )
    fast = max(speed["old"], key=lambda rate: rate["off"])
    far = [log for log in old if abs(log["used_off"]) > 0.05]
    logs = ", ".join(f"{log['model']} in {log['vllm']} ({log['used_off']:+.2%})" for log in far)
    return items(
        f"**Memory.** Weights are within {at_most(summary['weights_within'], 1)} of what vLLM "
        f"logged in {summary['weights']} starts. Memory without the cache is within "
        f"{at_most(worst(new, 'used_off'), 1)} in {within(new, 'used_off', 0.05)} logs of vLLM "
        f"0.15 to 0.21, {pairs(new)}, on up to {count(max(log.get('count', 1) for log in new))} "
        "GPUs. vLLM's own overhead was fitted to these logs, so only the H200 above tests that "
        f"part. Of the older logs, {within(old, 'used_off', 0.05)} are within 5%; the others are "
        f"{logs}. No MoE model was checked.",
        f"**Speed at batch size 1.** Of the figures for vLLM 0.10 to 0.23, "
        f"{within(speed['new'], 'off', NEAR)} are within {at_most(worst(speed['new'], 'off'))} "
        f"({within(speed['new'], 'off', 0.1)} within 10%): {pairs(speed['new'])} from RTX 3090 to "
        "H100 and Jetson Thor, none of which was used to fit a constant. Of those for llama.cpp, "
        f"{within(speed['llama.cpp'], 'off', NEAR)} are within 25%; the misses are {misses}. Of "
        f"those for vLLM 0.4.2 and 0.6.3 on A100, an older engine that took several milliseconds "
        f"between steps, {within(speed['old'], 'off', NEAR)} are within 25%; the others are "
        f"overestimated, by up to {times(1 + fast['off'])} ({fast['model']}).",
    )


# docs/choosing.md, in short.


@region
def how_far_off() -> str:
    run = result("kv_capacity-h200")
    more = span((row["tokens"] / row["ours"] - 1 for row in caches()), lambda x: percent(x, 1))
    near = {name: found for name, found in formats().items() if name != "fp8-block"}
    low = min(outside(found, case) for found in near.values() for case in CASES)
    high = max(outside(found, case) for found in near.values() for case in CASES)
    blocks = min(outside(formats()["fp8-block"], case) for case in CASES)
    speeds = small()
    inside = sum(ends["low"] <= found <= ends["high"] for *_, ends, found in speeds)
    close = [abs(ends["typical"] / found - 1) <= NEAR for *_, ends, found in speeds]
    far = max(speeds, key=lambda one: one[3]["typical"] / one[4])
    intro = f"Measured in vLLM {run['vllm']} on an H200 ([all figures](measured.md#estimates)):"
    found = items(
        f"vLLM's KV cache holds {more} more tokens than estimated, in {count(len(caches()))} "
        f"settings ({link('results', 'kv_capacity-h200')}). Its memory without the cache is "
        f"{span(map(extra, caches()), lambda x: f'{x:.1f} GiB')} less than estimated.",
        f"For an 8B's shape in {count(len(formats()))} formats, decoding for 1 and 64 users and "
        "reading a prompt, the measured speed relative to bf16 is within the estimated range or "
        f"at most {at_most(max(-low, high))} outside it, except for FP8 blocks, which are up to "
        f"{at_most(-blocks)} slower: DeepGEMM, their fastest kernel, was not used. The 4-bit "
        "figures are not a test, because the limit for unpacking was set from this run "
        f"({link('results', 'vllm-speed-h200')}).",
        f"Shapes of 1B and 3B are the test of that limit: of {len(speeds)} speeds in bf16, FP8 and "
        f"4 bits, {'all' if inside == len(speeds) else inside} are within the range and "
        f"{sum(close)} within 25% of the typical value. The worst is "
        f"{far[0].removeprefix('llama-').upper()} with {CASES[far[2]]}, overestimated by "
        f"{percent(far[3]['typical'] / far[4] - 1, 0)}: there the CPU that prepares the steps is "
        "the bottleneck, which the estimate has included since "
        f"({link('results', 'vllm-speed-small-h200')}).",
    )
    return f"{intro}\n\n{found}"
