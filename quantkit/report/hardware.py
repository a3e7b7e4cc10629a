"""Which GPUs run a scored model, as the one table of support has it."""

from quantkit.hardware import support
from quantkit.scoring.scorecard import Scorecard


def runs_on(card: Scorecard) -> str | None:
    """For one scored model; None where it is not known how it was made."""
    if card.recipe is None:
        return support.where("bf16")
    if card.format == "gguf":
        return support.where("gguf")
    if (made := card.made) is None:
        return None
    return support.where(
        support.format_with(
            made.weight_type, made.weight_bits, made.activation_bits, made.weight_strategy
        )
    )
