"""`quantkit quantize --fit`: the recipe that a GPU asks for, with the reason."""

from quantkit.errors import AdviceError, HardwareError


def calibration(model: str, recipes: list[str], named: str | None, quiet: bool) -> str | None:
    """The set to learn from: the one that was named, else ours, where a recipe learns at all."""
    from quantkit.cli import console
    from quantkit.recipe import load

    if named is not None or not any(load(name).needs_calibration for name in recipes):
        return named
    chosen = "python-docs" if model == "demo" else "general"
    if not quiet:
        console.say(f"It learns from the set {chosen}; --calibration names another.", err=True)
    return chosen


def recipes(
    model: str, gpu: str, count: int, context: int | None, users: int, quiet: bool
) -> list[str]:
    """Names of the recipes to make; says why on stderr."""
    from quantkit.advise import formats, parallel, shape, words
    from quantkit.advise.candidates import Catalogue, Question
    from quantkit.advise.recommendation import recommend
    from quantkit.cli import console, start
    from quantkit.hardware import gpus
    from quantkit.model.source import context_of

    device = gpus.find(gpu)
    start.stay_offline_if(start.is_local(model))
    of_model = shape.of(model)
    if of_model.assumed:
        raise AdviceError(f"{model} is only a size, and nothing to quantise; name a model")
    every = formats.considered(is_mixture=parallel.n_experts(of_model) > 0)
    among = tuple(f for f in every if f.recipe and f.name != "gguf-bf16")
    tokens = min(8192, context_of(of_model.config)) if context is None else context
    question = Question(Catalogue(of_model, among), context=tokens, users=users, count=count)
    found = recommend(question, device)
    where = words.on(device, count)
    if found.chosen is None:
        ways = "; ".join(f"{remedy.says} ({remedy.change})" for remedy in found.remedies)
        raise HardwareError(
            f"no recipe makes {of_model.label} fit on {where}: {found.reason}"
            + (f". What would: {ways}" if ways else "")
        )
    if not quiet:
        name = found.chosen.format.name
        console.say(f"{name} for {where}: {found.reason}", err=True)
        if found.runner_up is not None:
            second = found.runner_up.format.name
            console.say(f"The runner-up is {second}: {found.runner_up_reason}", err=True)
        console.say("`quantkit recommend` tells the rest.", err=True)
    return [found.chosen.format.name]
