"""Which GPUs run a scored model, from the table in `hardware.support`."""

from quantkit.hardware import support
from quantkit.scoring.scorecard import Provenance, Scorecard


def runs_on(card: Scorecard) -> str | None:
    """For one scored model; None where it is not known how it was made."""
    if card.recipe is None:
        return support.where("bf16")
    if card.format == "gguf":
        return support.where("gguf")
    if (made := card.made) is None:
        return None
    if (words := support.ELSEWHERE.get(made.method)) is not None:
        return words
    return support.where(made.runs_as or _of_old(made))


def _of_old(made: Provenance) -> str:
    """The format, from what old score files record."""
    if made.activation_bits is None:
        return "w4a16" if made.weight_bits == 4 else "w8a16"
    if made.weight_type == "int":
        return "int8-w8a8"
    return "fp8-block" if made.weight_strategy == "block" else "fp8-w8a8"
