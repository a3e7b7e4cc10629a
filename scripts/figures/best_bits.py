"""What ideas for few bits are worth (benchmarks/best_bits.py)."""

from figures.regions import RESULTS, link, number, paragraph, region, result, table

PLACES = ("best_bits-h200", "best_bits-cpu")


@region
def best_bits() -> str:
    """The record of the larger machine, where there are two."""
    name = next(n for n in PLACES if (RESULTS / f"{n}.json").is_file())
    run = result(name)
    rows = [
        [
            idea,
            f"{one['change_percent']:+.2f}%",
            number(one["kl_mean"]),
            f"{100 * one['top1_agreement']:.1f}%",
        ]
        for idea, one in run["rows"].items()
    ]
    told = (
        f"{run['model']}, calibrated on {run['calibration']}, compared with the source on "
        f"{run['windows']} windows of {run['length']} tokens of held-out text "
        f"({link('recorded', name)}, {run['device']})."
    )
    return f"{paragraph(told)}\n\n" + table(["", "perplexity:", "KL:", "same first token:"], rows)
