"""Tables of what quantkit knows by name, written from the code itself."""

from figures.regions import region, table
from quantkit.metrics import METRICS

PAIRED = {"answers": "answer by answer", "losses": "document by document", "": ""}
UNITS = {"share": "percent", "": ""}


@region
def metrics() -> str:
    """Every metric, as `quantkit/metrics.py` has it."""
    return table(
        ["metric", "shown as", "in", "better", "compared with the source"],
        [
            [
                f"`{metric.name}`",
                metric.label,
                UNITS.get(metric.unit, metric.unit),
                "higher" if metric.more_is_better else "lower",
                "is a distance from it" if metric.against_source else PAIRED[metric.paired],
            ]
            for metric in METRICS.values()
        ],
    )
