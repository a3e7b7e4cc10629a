"""quantkit beside llm-compressor and AutoRound (benchmarks/peers_speed.py and quality.py)."""

from typing import Any

from figures.regions import gib, number, percent, region, result, seconds, table, times

TOOLS = {
    "quantkit-gptq": "quantkit GPTQ",
    "quantkit-awq": "quantkit AWQ",
    "quantkit-awq-gptq": "quantkit AWQ-GPTQ",
    "quantkit-best": "quantkit best-w4a16",
    "llmcompressor-gptq": "llm-compressor GPTQ",
    "llmcompressor-awq": "llm-compressor AWQ",
    "autoround-200": "AutoRound, 200 iterations",
    "autoround-light": "AutoRound, light",
}
COUNTERPARTS = (
    ("GPTQ", "quantkit-gptq", ("llmcompressor-gptq",)),
    ("AWQ", "quantkit-awq", ("llmcompressor-awq",)),
    ("AWQ-GPTQ", "quantkit-awq-gptq", ("autoround-light", "autoround-200")),
)
"""What we hold against what."""
LARGER = "Qwen2.5-Coder-1.5B-Instruct"
SMALLER = "SmolLM2-135M-Instruct"


def rows_of(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in run["rows"]}


def models() -> dict[str, dict[str, Any]]:
    """What each model's checkpoints cost it."""
    return result("quality-h200")["models"]


def whole() -> dict[str, dict[str, Any]]:
    return rows_of(result("peers_speed-h200")["whole"])


@region
def peers_whole() -> str:
    """Whole commands; the fastest of each kind is not marked, since settings differ in quality."""
    found = whole()
    rows = [
        [
            what,
            seconds(found[name]["seconds"]),
            gib(found[name]["peak_device_bytes"]),
            "" if found[name]["batch"] is None else str(found[name]["batch"]),
        ]
        for name, what in TOOLS.items()
        if name in found
    ]
    return table(["", "command:", "GPU memory:", "batch:"], rows)


@region
def peers_blocks() -> str:
    """What one more block costs everybody, and what 32 of them would."""
    rows = []
    for row in result("peers_speed-h200")["blocks"]["rows"]:
        what = TOOLS.get(row["run"], "quantkit GPTQ, AWQ and AWQ-GPTQ from one pass")
        rows.append(
            [
                what,
                seconds(row["seconds_per_block"]),
                seconds(row["extrapolated_seconds_of_32_blocks"]),
                gib(max(row["peak_device_bytes"])),
                "" if row["batch"] is None else str(row["batch"]),
            ]
        )
    head = ["", "per block:", "32 blocks, extrapolated:", "GPU memory:", "batch:"]
    return table(head, rows)


def quality_of(name: str) -> str:
    """Every tool on one model."""
    model = models()[name]
    found = rows_of(model)
    rows = [["source", f"{model['source']['perplexity']:.2f}", "", "", "", ""]]
    rows += [
        [
            what,
            f"{row['perplexity']:.2f}",
            number(row["kl_mean"]),
            percent(row["top1_agreement"]),
            seconds(row["seconds"]),
            gib(row["peak_device_bytes"]),
        ]
        for name, what in TOOLS.items()
        if (row := found.get(name))
    ]
    head = ["", "perplexity:", "KL:", "top-1 agreement:", "command:", "GPU memory:"]
    return table(head, rows)


@region
def peers_quality() -> str:
    return quality_of(LARGER)


@region
def peers_quality_small() -> str:
    return quality_of(SMALLER)


Cost = tuple[float, float]
"""Seconds and bytes."""


def beside_peers(costs: dict[str, Cost], what: str, link: str) -> list[list[str]]:
    """For the README: what each of our methods costs, and its counterparts."""

    def told(cost: Cost) -> str:
        return f"{seconds(cost[0])}, {gib(cost[1])}"

    return [
        [
            f"{name}{what}",
            told(costs[ours]),
            "; ".join(
                f"{TOOLS[peer]} {told(costs[peer])} "
                f"({times(costs[peer][0] / costs[ours][0])} as long)"
                for peer in theirs
            ),
            link,
        ]
        for name, ours, theirs in COUNTERPARTS
    ]


def short_rows(link: str) -> list[list[str]]:
    """Whole commands against the usual tool."""
    costs = {run: (row["seconds"], row["peak_device_bytes"]) for run, row in whole().items()}
    return beside_peers(costs, " of a 1.5B, the whole command", link)


def block_costs() -> dict[str, Cost]:
    """What one more block of an 8B adds, the peers at their best batch."""
    best: dict[str, Cost] = {}
    for row in result("peers_speed-h200")["blocks"]["rows"]:
        cost = (row["seconds_per_block"], max(row["peak_device_bytes"]))
        best[row["run"]] = min(cost, best.get(row["run"], cost))
    return best


def short_blocks(link: str) -> list[list[str]]:
    return beside_peers(block_costs(), ", per block of an 8B", link)


def short_quality(name: str) -> tuple[str, str]:
    """Divergence of one model in 4 bits: ours, and the peers, the best last."""
    found = {run: row["kl_mean"] for run, row in rows_of(models()[name]).items()}
    mine = [run for run in TOOLS if run in found and run.startswith("quantkit")]
    peers = sorted((run for run in found if run not in mine), key=lambda run: -found[run])
    told = [f"{TOOLS[name].removeprefix('quantkit ')} {number(found[name])}" for name in mine]
    theirs = [f"{TOOLS[name]} {number(found[name])}" for name in peers]
    return ", ".join(told), ", ".join(theirs)
