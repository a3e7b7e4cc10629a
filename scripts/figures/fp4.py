"""FP4 beside llm-compressor's, and 4-bit inputs beside their floor (benchmarks/fp4.py)."""

from figures.regions import link, number, paragraph, region, result, table

PEERS = {"nvfp4-a16": "llmcompressor-NVFP4A16", "mxfp4-a16": "llmcompressor-MXFP4A16"}


@region
def fp4() -> str:
    """Every row; what has a peer says what share of its divergence it has."""
    return _told("fp4-demo-h200")


@region
def fp4_since() -> str:
    """The recipes as they are since, on a CPU and without the peer."""
    return _told("fp4-demo-cpu")


def _told(name: str) -> str:
    run = result(name)
    rows = []
    source = run["source"]["perplexity"]
    for recipe, one in run["rows"].items():
        peer = run["rows"].get(PEERS.get(recipe, ""))
        share = f"{one['kl_mean'] / peer['kl_mean']:.0%}" if peer else ""
        change = f"{100 * (one['perplexity'] / source - 1):+.2f}%"
        rows.append([recipe, change, number(one["kl_mean"]), share])
    told = (
        f"{run['model']}, calibrated on {run['calibration']}, compared with the source on "
        f"{run['windows']} windows of {run['length']} tokens of held-out text "
        f"({link('recorded', name)}, {run['device']})."
    )
    if "note" in run:
        told += f" Since then: {run['note']}."
    head = ["", "perplexity:", "KL:", "of the peer's:"]
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return f"{paragraph(told)}\n\n{table(head, rows)}"
