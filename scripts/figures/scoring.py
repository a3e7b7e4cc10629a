"""Scoring against lm-eval and against plain forward passes (benchmarks/scoring.py)."""

from figures.regions import gib, link, number, paragraph, region, result, seconds, table, times
from quantkit.hardware.gpus import label


@region
def scoring() -> str:
    run = result("scoring-h200")
    mmlu, wikitext = run["mmlu"], result("scoring_text-h200")["wikitext"]
    ratios = wikitext["ratios"]
    rows = [
        [
            f"five-shot MMLU, {mmlu['same']['answers']:,} questions, SmolLM2-135M",
            seconds(mmlu["our_seconds"]),
            f"`lm_eval --model hf --batch_size auto` {seconds(mmlu['lm_eval_seconds'])}",
            f"{times(mmlu['times_faster'])} as fast",
            "4 times",
        ],
        [
            "losses of WikiText-2 in windows of 2,048",
            seconds(wikitext["seconds"]["losses alone"]),
            f"plain forward passes {seconds(wikitext['seconds']['plain forward passes'])}",
            f"{times(ratios['losses alone'])} the time",
            "1.2 times",
        ],
    ]
    rows += [
        [
            f"the whole task, {what}",
            seconds(wikitext["seconds"][name]),
            "the same",
            f"{times(ratios[name])} the time",
            "",
        ]
        for what, name in (
            ("recording the source's hidden states", "task, predictions recorded"),
            ("with the exact divergence from the source", "task, compared with the record"),
        )
    ]
    memory = run["memory"]["peak_beyond_model_bytes"]
    rows.append(
        [
            "memory beyond the model, 150,000 tokens of vocabulary, windows of 4,096",
            gib(memory),
            "",
            "",
            "4 GiB",
        ]
    )
    return table(["", "quantkit:", "compared with", "ratio:", "aim:"], rows)


@region
def scoring_exactness() -> str:
    run = result("scoring-h200")
    same, exact = run["mmlu"]["same"], run["exactness"]["float32, ours against lm_eval's"]
    return paragraph(
        f"Of {same['answers']:,} answers, {same['other_answers'] or 'none'} differ from lm-eval's. "
        f"Log-probabilities in bf16 differ by a median of {same['gap_median']:.4f} and by "
        f"{same['gap_largest']:.4f} at most; in float32, on {exact['answers']} questions, by "
        f"{exact['gap_largest']:.1e} at most."
    )


@region
def divergence() -> str:
    """Against brute force in float64, and what it takes."""
    run = result("scoring_text-h200")
    text = run["wikitext"]
    rows = [
        [
            what,
            f"{found['positions']:,}",
            *(
                f"{number(found['found'][name])} ({number(found['expected'][name])})"
                for name in ("mean", "median", "p99")
            ),
            f"{found['largest_relative_gap']:.0e}",
        ]
        for what, found in run["divergence"].items()
    ]
    head = ["KL, by definition in brackets", "positions:", "mean:", "median:", "p99:", "gap:"]
    disk = text["disk_bytes"]
    beside = paragraph(
        f"A model against itself gives {text['largest_kl_against_itself']:g} at all "
        f"{text['compared_positions']:,} compared positions of WikiText-2. The comparison stores "
        f"{number(disk['reference'] / 2**20)} MiB of the source's hidden states and, once for all "
        f"texts, {number(disk['head'] / 2**20)} MiB for its output layer."
    )
    return f"{table(head, rows)}\n\n{beside}"


@region
def answers() -> str:
    run = result("generation-h200")
    ours, theirs, same = run["ours"], run["lm_eval"], run["same"]
    exact = "exact_match,strict-match"
    more = ""
    if found := run.get("exactness"):
        more += (
            f" In float32, where rounding decides nothing, {found['other_answers']} of "
            f"{found['answers']} answers differ."
        )
    served = result("generation-vllm-h200")
    found = served["following"]
    more += (
        f" Comparing a candidate with {found['answers']} answers of "
        f"{found['answer_tokens'] // found['answers']} tokens takes "
        f"{found['in_forward_passes']:.3f} plain forward passes over them "
        f"({link('recorded', 'generation-vllm-h200')}; aim 1.3)."
    )
    engine = served["vllm"]
    more += (
        f" Through a vLLM server the same questions take {times(engine['times_vllm_alone'])} as "
        f"long as in vLLM {engine['version']} alone ({seconds(engine['our_score_seconds'])} and "
        f"{seconds(engine['vllm_alone_seconds'])}; aim 1.1)."
    )
    return paragraph(
        f"{run['task'].upper()}, {ours['questions']:,} questions, five-shot, greedy, "
        f"{run['model']} in bfloat16 on one {label(run['device'])}: {seconds(ours['seconds'])} by "
        f"`quantkit score`, {seconds(theirs['seconds'])} by lm-eval's `hf` at a batch size of "
        f"{theirs['batch_size']}, its best of {len(run['batch_sizes']['rows'])} "
        f"({times(ours['times_faster'])} as fast; aim 5). The scores are "
        f"{ours['scores'][exact]:.1%} and {theirs['scores'][exact]:.1%}: in 16 bits, batches of "
        f"another shape round differently, and {same['between_the_two_likeliest']} of "
        f"{same['looked_into']} differing answers part where the two likeliest tokens are "
        f"close.{more}"
    )
