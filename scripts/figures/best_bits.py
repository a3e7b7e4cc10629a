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


@region
def drift() -> str:
    """What the correction for drifted inputs did on a real model, before it was deleted."""
    name = "drift-h200"
    run = result(name)
    source = run["source"]["perplexity"]
    rows = [
        [recipe, f"{100 * (one['perplexity'] / source - 1):+.1f}%", number(one["kl_mean"])]
        for recipe, one in run["rows"].items()
    ]
    told = (
        f"{run['model']} ({run['origin']}), {run['windows']} windows of {run['length']} tokens of "
        f"WikiText-2 ({link('recorded', name)}, {run['device']}). `floor` is the source's own "
        "weights with rounded inputs; gptq-w3 had no correction, the others had it."
    )
    return f"{paragraph(told)}\n\n" + table(["", "perplexity:", "KL:"], rows)
