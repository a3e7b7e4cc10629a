"""Terminal output of `quantkit draft`."""

from typing import TYPE_CHECKING

from quantkit.cli import console
from quantkit.storage import gib

if TYPE_CHECKING:
    from quantkit.draft.measure import Draft

NAMES = {
    "greedy": "greedy drafts (vLLM's default)",
    "temperature-0": "temperature 0",
    "sampled": "sampled drafts",
}
TITLES = {"greedy": "greedy", "temperature-0": "temp. 0", "sampled": "sampled"}


def _spread(stderr: float | None) -> str:
    """In percentage points, at 95%."""
    return "" if stderr is None else f" +-{196 * stderr:.1f}"


def show(found: "Draft", as_json: bool) -> None:
    """Tables on the terminal, or everything as JSON."""
    if as_json:
        console.print_json(found.to_json())
        return
    wrote = "of the set" if found.on_text else "that the target wrote"
    console.say(
        f"{found.draft} ({gib(found.draft_bytes)} read per token) drafts for {found.target} "
        f"({gib(found.target_bytes)}):\n{found.n_rows} prompts of {found.calibration}, "
        f"{found.n_tokens:,} tokens {wrote}"
    )
    console.print_table(
        ["the engine drafts", "accepted", "best k", "tokens/step", "speed-up"],
        [
            [
                NAMES[name],
                f"{way.acceptance:.1%}" + _spread(way.stderr),
                str(way.best_k) if way.best_k else "none",
                f"{way.steps[way.best_k - 1].tokens:.2f}" if way.best_k else "1.00",
                f"{way.best_speedup:.2f}x",
            ]
            for name, way in found.ways.items()
        ],
    )
    console.print_table(
        ["drafted tokens k", *(str(k + 1) for k in range(len(found.ways["greedy"].steps)))],
        [
            [f"{title}, {what}", *(f"{value:.2f}" for value in values)]
            for name, title in TITLES.items()
            for what, values in (
                ("tokens/step", [step.tokens for step in found.ways[name].steps]),
                ("speed-up", found.ways[name].speedups),
            )
        ],
    )
    if found.gpu is not None:
        at = "1 user" if found.users == 1 else f"{found.users} users"
        console.say(
            f"Speed-ups are by the roofline of {found.gpu} with {at}; "
            "`quantkit bench --sweep speculative=none,DIR:K` measures them."
        )
        return
    console.say(
        "Speed-ups count the bytes that both models read at a batch of one; at large batches, and "
        "where launching kernels takes longer than reading a small draft, they are smaller."
    )
