"""Recipes that ship with quantkit and that no recommendation chooses from, by the reason."""

from quantkit import resources
from quantkit.advise import formats, parallel, question
from quantkit.advise.formats import Format
from quantkit.advise.question import Catalogue
from quantkit.recipe import GGUFRecipe, load

NO_GAIN = "no smaller or faster than one that is considered"
FEW_BITS = "fewer than 4 bits lose too much"
NOT_FOR_MOE = "the native engine does not support them for MoE models"
NO_FIGURE = "no published quality figure"


def recipes(catalogue: Catalogue) -> dict[str, list[str]]:
    """Names of recipes by why they are not in a catalogue; a report that scores them adds them."""
    considered = (*question.considered(catalogue.shape), *catalogue.formats)
    is_moe = parallel.n_experts(catalogue.shape) > 0
    bases, kinds = {one.base for one in considered}, {_kind(one) for one in considered}
    found: dict[str, list[str]] = {}
    for name in resources.names("recipes"):
        if name not in bases:
            found.setdefault(_reason(formats.of(load(name)), kinds, is_moe), []).append(name)
    return found


def lines(catalogue: Catalogue) -> list[str]:
    """The same in words."""
    return [
        f"not considered without a report ({reason}): {', '.join(names)}"
        for reason, names in recipes(catalogue).items()
    ]


def _reason(format: Format, kinds: set[str], is_moe: bool) -> str:
    if _kind(format) in kinds:
        return NO_GAIN
    if is_moe and format.name in formats.SERVED:
        return NOT_FOR_MOE
    is_served = not isinstance(format.recipe, GGUFRecipe)
    return FEW_BITS if is_served and format.least_bits < 4 else NO_FIGURE


def _kind(format: Format) -> str:
    """What decides size and speed: the type of a GGUF file, else the format; without rounded
    activations it is as large, and no faster.
    """
    if isinstance(format.recipe, GGUFRecipe):
        return format.recipe.gguf if format.is_blocks else "GGUF of 16 bits or more"
    return format.key.removesuffix("-a16")
