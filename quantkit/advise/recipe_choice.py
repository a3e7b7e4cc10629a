"""The recipe that a GPU calls for, with the reason."""

from dataclasses import dataclass

from quantkit.advise import quality, shape, words
from quantkit.advise.question import MIN_QUALITY, Catalogue, Question, considered
from quantkit.advise.recommendation import recommend
from quantkit.errors import AdviceError, HardwareError
from quantkit.hardware import gpus
from quantkit.hardware.place import Place
from quantkit.model.source import context_of


@dataclass(frozen=True)
class RecipeChoice:
    """A recipe for a GPU."""

    recipe: str
    reasons: list[str]
    """Full sentences."""


def choose(model: str, place: Place) -> RecipeChoice:
    """The best built-in recipe with which a model fits; an error if none does."""
    device = gpus.find(place.gpu)
    of_model = shape.of(model)
    if of_model.assumed:
        raise AdviceError(f"{model} is only a size, with nothing to quantise; name a model")
    known = {} if place.report is None else quality.from_report(place.report, of_model)
    among = tuple(format for format in considered(of_model, known) if not format.is_whole)
    tokens = min(8192, context_of(of_model.config)) if place.context is None else place.context
    found = recommend(
        Question(
            Catalogue(of_model, among),
            tokens,
            place.users,
            count=place.count,
            objective=place.objective,
            min_quality=MIN_QUALITY if place.min_quality is None else place.min_quality,
            qualities=known,
        ),
        device,
    )
    where = words.on(device, place.count)
    if found.chosen is None:
        ways = "; ".join(f"{remedy.says} ({remedy.change})" for remedy in found.remedies)
        raise HardwareError(
            f"no recipe makes {of_model.label} fit on {where}: {found.reason}"
            + (f". What would: {ways}" if ways else "")
        )
    name = found.chosen.format.name
    reasons = [f"{name} for {where}: {found.reason}"]
    if found.runner_up is not None:
        reasons.append(f"The runner-up is {found.runner_up.format.name}: {found.runner_up_reason}")
    more = "`quantkit recommend` shows the details, and considers 16-bit formats too."
    return RecipeChoice(name, [*reasons, more])
