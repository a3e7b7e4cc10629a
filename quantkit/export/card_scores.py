"""The scores on a model card: each beside the source's, and whether the change is real."""

from collections.abc import Sequence

from quantkit import metrics
from quantkit.export.card_facts import Figure, Scored
from quantkit.export.card_markup import plain, table

Z95 = 1.96


def scores(scored: Sequence[Scored]) -> str:
    """What is known about a checkpoint's quality, run by run."""
    if not scored:
        return "No scores: the cost of quantisation was not measured, or not given to this card."
    return "\n\n".join(_run(run) for run in scored)


def _run(run: Scored) -> str:
    rows = [
        [
            plain(f"{figure.task}/{figure.metric}"),
            _shown(figure.metric, figure.source, figure.source_stderr),
            _shown(figure.metric, figure.value, figure.stderr),
            _change(figure),
            "higher" if figure.higher_is_better else "lower",
            f"{figure.n:,} {metrics.of(figure.metric).counts}",
        ]
        for figure in run.figures
    ]
    figures = table(["score", "source", "this checkpoint", "change", "better", "measured on"], rows)
    limit = f", the first {run.limit:,} documents of each task" if run.limit else ""
    shots = f", {run.num_fewshot} examples" if run.num_fewshot else ""
    where = {
        "served": "answers came from a serving engine",
        "llama.cpp": "answers came from llama.cpp",
    }.get(run.computed_in, f"computed by quantkit in {run.computed_in}, not by a serving engine")
    harness = f"lm-eval {run.lm_eval}" if run.lm_eval else "lm-eval"
    how = (
        f"{harness}{limit}{shots}; windows of {run.max_length:,} tokens; {where}; "
        f"{run.created[:10]}. Brackets hold 95% intervals of the figure alone."
    )
    verdicts = [
        f"- {plain(f'{figure.task}/{figure.metric}')}: {plain(figure.verdict)}"
        + (" (the source itself does no better than guessing)" if figure.source_at_chance else "")
        for figure in run.figures
        if figure.verdict
    ]
    paired = (
        ["Against the source, document by document and answer by answer:\n\n" + "\n".join(verdicts)]
        if verdicts
        else []
    )
    return "\n\n".join([figures, plain(how), *paired])


def _shown(metric: str, value: float | None, stderr: float | None) -> str:
    if value is None:
        return ""
    is_share = metrics.of(metric).is_share
    scale, digits = 100 if is_share else 1, metrics.decimals(metric)
    words = metrics.shown(metric, value)
    if stderr is None:
        return words
    ends = [scale * (value + side * Z95 * stderr) for side in (-1, 1)]
    if is_share:  # with few questions the usual interval would reach beyond the range
        ends = [min(max(end, 0.0), 100.0) for end in ends]
    return f"{words} ({' to '.join(f'{end:.{digits}f}' for end in ends)})"


def _change(figure: Figure) -> str:
    if figure.source is None:
        return ""
    return metrics.change(figure.metric, figure.source, figure.value)
