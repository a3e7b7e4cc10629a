"""Which GPUs run a scored model in its own arithmetic."""

from quantkit.export.gpus import EVERYWHERE, LLAMA_CPP, native
from quantkit.score.scorecard import Scorecard


def runs_on(card: Scorecard) -> str | None:
    """For one scored model; None where it is not known how it was made."""
    if card.recipe is None:
        return EVERYWHERE
    if card.made is None:
        return LLAMA_CPP if card.format == "gguf" else None
    return native(card.format, card.made.weight_type, card.made.activation_bits)
