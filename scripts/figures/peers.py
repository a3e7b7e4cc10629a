"""quantkit beside llm-compressor and AutoRound (benchmarks/peers_speed.py and quality.py)."""

from typing import Any

from figures.regions import gib, number, percent, region, result, seconds, table, times

TOOLS = {
    "quantkit-gptq": "quantkit GPTQ",
    "quantkit-awq": "quantkit AWQ",
    "quantkit-awq-gptq": "quantkit AWQ-GPTQ",
    "llmcompressor-gptq": "llm-compressor GPTQ",
    "llmcompressor-awq": "llm-compressor AWQ",
    "autoround-200": "AutoRound, 200 iterations",
    "autoround-light": "AutoRound, light",
}


def rows_of(run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in run["rows"]}


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
    ]
    return table(["", "command:", "GPU memory:", "batch:"], rows)


@region
def peers_quality() -> str:
    (model,) = result("quality-h200")["models"].values()
    found = rows_of(model)
    source = model["source"]
    rows = [["source", f"{source['perplexity']:.2f}", "", "", "", ""]]
    rows += [
        [
            what,
            f"{row['perplexity']:.2f}",
            number(row["kl_mean"]),
            percent(row["top1_agreement"]),
            seconds(row["seconds"]) if row["seconds"] else "",
            gib(row["peak_device_bytes"]),
        ]
        for name, what in TOOLS.items()
        if (row := found[name])
    ]
    head = ["", "perplexity:", "KL:", "same first token:", "command:", "GPU memory:"]
    return table(head, rows)


def short_rows(link: str) -> list[list[str]]:
    """For the README: whole commands against the usual tool."""
    found = whole()
    return [
        [
            f"{what} of a 1.5B, the whole command",
            f"{seconds(found[ours]['seconds'])}, {gib(found[ours]['peak_device_bytes'])}",
            f"llm-compressor {seconds(found[theirs]['seconds'])}, "
            f"{gib(found[theirs]['peak_device_bytes'])} "
            f"({times(found[theirs]['seconds'] / found[ours]['seconds'])})",
            link,
        ]
        for what, ours, theirs in (
            ("GPTQ", "quantkit-gptq", "llmcompressor-gptq"),
            ("AWQ", "quantkit-awq", "llmcompressor-awq"),
        )
    ]


def short_quality() -> tuple[str, str]:
    """Divergence of the same small model in 4 bits: ours, and the peers, the best last."""
    (model,) = result("quality-h200")["models"].values()
    found = {name: row["kl_mean"] for name, row in rows_of(model).items()}
    mine = ("quantkit-gptq", "quantkit-awq", "quantkit-awq-gptq")
    peers = sorted((n for n in found if n not in mine), key=lambda n: -found[n])
    told = [f"{TOOLS[name].removeprefix('quantkit ')} {number(found[name])}" for name in mine]
    theirs = [f"{TOOLS[name]} {number(found[name])}" for name in peers]
    return ", ".join(told), ", ".join(theirs)
