"""Checkpoints of other tools: how fast their headers are judged."""

from figures.regions import region, result, table


@region
def wild_headers() -> str:
    """Large models before `verify --for vllm`."""
    found = result("wild_headers")
    rows = [
        [
            name,
            f"{told['files']}",
            f"{told['tensors']:,}",
            f"{told['bytes'] / (1 << 30):.0f} GiB",
            f"{told['seconds']:.1f} s",
            f"{told['peak_mb']:.0f} MB",
        ]
        for name, told in found["models"].items()
    ]
    head = ["model", "shards:", "tensors:", "size:", "judged in:", "peak memory:"]
    return f"{table(head, rows)}\n\nOn {found['machine']}, with the start of Python."
