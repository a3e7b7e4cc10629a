"""Answers the questions of `recommend`, with a serving plan for the chosen answer."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.advise import (
    comparison,
    foreign,
    measurements,
    quality,
    shape,
    speculation,
)
from quantkit.advise.comparison import ModelComparison
from quantkit.advise.formats import Format
from quantkit.advise.memory import Extras
from quantkit.advise.offload import Host
from quantkit.advise.question import MIN_QUALITY, NO_LIMITS, Catalogue, Limits, Question, considered
from quantkit.advise.recommendation import Recommendation, recommend
from quantkit.advise.shape import ModelShape
from quantkit.advise.speculation import Speculation
from quantkit.advise.split import ANY, Split, SplitConstraint
from quantkit.engine.speculation import HEADS
from quantkit.errors import AdviceError, UsageError
from quantkit.hardware.gpus import GPU
from quantkit.hardware.prices import Prices
from quantkit.model.source import context_of
from quantkit.serving import adapters as loras
from quantkit.serving import draft as drafts
from quantkit.serving import plan as plans
from quantkit.serving import target as targets
from quantkit.serving.adapters import Loras
from quantkit.serving.draft import Draft
from quantkit.serving.plan import Demand, Plan

if TYPE_CHECKING:
    from quantkit.report.document import Document

CONTEXT = 8192
FEW_GPUS = 3
"""Up to so many, each that cannot serve comes with what would help."""
PLACEHOLDER = "MODEL"
"""In a command for a hypothetical model: a size that no publisher has."""


@dataclass(frozen=True)
class Drafting:
    """The requested draft."""

    text: str
    acceptance: str | None = None
    """A share, or a file of `quantkit draft --json`."""
    n_tokens: int | None = None
    sampling: str | None = None


@dataclass(frozen=True)
class Query:
    """Everything that a question of `recommend` may specify."""

    models: tuple[str, ...]
    gpus: tuple[GPU, ...]
    count: int | None = None
    constraint: SplitConstraint = ANY
    context: int | None = None
    answer: int | None = None
    users: int | None = None
    objective: str | None = None
    """None: latency, or quality where the GPU's bandwidth is not known."""
    min_quality: float | None = None
    reports: "tuple[Path | Document, ...]" = ()
    """Files, folders that have one, or the parsed contents of one."""
    gpu_hour: float | None = None
    prices: Prices | None = None
    bench: Path | None = None
    drafting: Drafting | None = None
    adapters: Loras = loras.NONE
    profile: str | None = None
    limits: Limits = NO_LIMITS
    shared_prefix: int = 0
    host: Host | None = None
    in_depth: bool = True
    """Whether to look for what would change the answer, where there is one."""


@dataclass(frozen=True)
class Answers:
    """What was found, and how to serve it where there is one answer."""

    found: tuple[Recommendation, ...]
    """For each model all GPUs, in the order given."""
    plan: Plan | None = None
    make: tuple[str, ...] = ()
    """The command that makes the checkpoint; empty where there is nothing to make."""
    make_draft: tuple[str, ...] = ()
    across: ModelComparison | None = None
    """Where several models were named."""
    notes: tuple[str, ...] = ()

    @property
    def commands(self) -> dict[str, str]:
        """What to type, by what it does."""
        found = {"Make it": self.make, "Make the draft": self.make_draft}
        typed = {what: shlex.join(words) for what, words in found.items() if words}
        return typed if self.plan is None else typed | {"Serve it": self.plan.shell()}


@dataclass(frozen=True)
class _Model:
    """One of the models, with what is known about it."""

    text: str
    shape: ModelShape
    report: "tuple[str, Document] | None" = None
    qualities: Mapping[str, quality.Quality] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """Its name for `quantize` and engines."""
        if self.shape.assumed:
            return self.shape.stand_in or PLACEHOLDER
        path = Path(self.text)
        return str(path.parent) if path.is_file() else self.text


def answer(asked: Query) -> Answers:
    """All answers to a question."""
    if len(asked.models) > 1 and len(asked.gpus) > 1:
        raise UsageError(
            "several models can be compared on one GPU only; give one --gpu, or one model"
        )
    models = _models(asked)
    guess = _draft(asked, models[0]) if asked.drafting else None
    found = []
    for model in models:
        question = _question(asked, model, guess)
        if asked.bench is not None:
            question = _measured(question, asked.bench, asked.gpus[0])
        for gpu in asked.gpus:
            priced = question.but(gpu_hour=_price(asked, gpu))
            alone = len(asked.gpus) == 1 and asked.in_depth
            here = _for_gpu(priced, asked, gpu)
            one = recommend(here, gpu, in_depth=alone)
            if one.chosen is None and asked.in_depth and not alone and len(asked.gpus) <= FEW_GPUS:
                one = recommend(here, gpu)  # with what would help
            found.append(one)
    notes = tuple(_notes(asked, found, guess))
    for model in models:
        if model.report is not None:
            path, document = model.report
            notes += tuple(foreign.notes(document, path, asked.gpus))
    if len(models) > 1:
        reports = {m.shape.label: m.report[1] for m in models if m.report}
        return Answers(tuple(found), across=comparison.compare(found, reports), notes=notes)
    if len(found) > 1 or found[0].chosen is None:
        return Answers(tuple(found), notes=notes)
    plan = _plan(found[0], models[0], asked, guess)
    make, make_draft = _commands(found[0], models[0], asked, guess)
    return Answers(tuple(found), plan, make, make_draft, notes=notes)


def _models(asked: Query) -> list[_Model]:
    """The given models, each with the report about it."""
    models = [_Model(text, shape.of(text)) for text in asked.models]
    if not asked.reports:
        return models
    if len(models) == 1 and len(asked.reports) > 1:
        raise AdviceError("one model has one report; name more models, or leave out --report")
    for place in asked.reports:
        path, document = _report(place)
        reasons = []
        for number, model in enumerate(models):
            try:
                known = quality.from_document(document, model.shape, path)
            except AdviceError as error:
                reasons.append(error)
                continue
            models[number] = replace(model, report=(path, document), qualities=known)
            break
        else:
            raise (
                reasons[0]
                if len(models) == 1
                else AdviceError(
                    f"{path} is a report of {document.baseline.name}, which is not one of the "
                    "models"
                )
            )
    return models


def _report(given: "Path | Document") -> "tuple[str, Document]":
    """A report, and its name in sentences."""
    if not isinstance(given, Path):
        return "the report", given
    from quantkit.report.document import read

    path = given / "report.json" if given.is_dir() else given
    return str(path), read(path)


def _draft(asked: Query, model: _Model) -> Draft:
    assert asked.drafting is not None
    wanted = asked.drafting
    served = targets.planned(model.shape, None, model.source)

    # Like the model itself, a draft need not be available locally: its shape is enough.
    def opened(text: str) -> targets.Target:
        of_it = _Model(text, shape.of(text))
        return targets.planned(of_it.shape, None, of_it.source)

    found = drafts.parse(wanted.text, served, wanted.n_tokens, opened, wanted.sampling)
    assert found is not None
    return found


def _question(asked: Query, model: _Model, guess: Draft | None) -> Question:
    of_model = model.shape
    constraint = asked.constraint

    def extras(split: Split, format: Format) -> Extras:
        own = None if guess is None else guess.made_for(format)
        return plans.extras(of_model, own, asked.adapters, split, format.kv_bits)

    context = min(CONTEXT, context_of(of_model.config)) if asked.context is None else asked.context
    return Question(
        Catalogue(of_model, considered(of_model, model.qualities)),
        context=context,
        users=asked.users,
        answer=asked.answer,
        # Specifying how GPUs share it also specifies how many there are.
        count=asked.count or (constraint.tensor or 1) * (constraint.pipeline or 1),
        constraint=constraint,
        objective=asked.objective or "latency",
        min_quality=MIN_QUALITY if asked.min_quality is None else asked.min_quality,
        qualities=model.qualities,
        extras=extras,
        profile=asked.profile,
        limits=asked.limits,
        shared_prefix=asked.shared_prefix,
        speculation=_speculation(asked, guess),
        host=asked.host,
        refused=_refused(asked, guess),
    )


def _for_gpu(question: Question, asked: Query, gpu: GPU) -> Question:
    """For a GPU of unknown bandwidth, only the memory fit can be determined."""
    if gpu.bandwidth_gb_s > 0:
        return question
    if asked.objective in ("latency", "throughput"):
        raise AdviceError(f"--objective {asked.objective} needs the GPU's --bandwidth")
    if asked.limits != NO_LIMITS:
        raise AdviceError("--ttft and --tpot need the GPU's --bandwidth")
    return question.but(objective=asked.objective or "quality")


def _speculation(asked: Query, guess: Draft | None) -> Speculation | None:
    if asked.drafting is None or guess is None or asked.drafting.acceptance is None:
        return None
    accepted = speculation.acceptance(asked.drafting.acceptance, asked.drafting.sampling)
    return Speculation(accepted, guess.pass_seconds, asked.drafting.n_tokens)


def _refused(asked: Query, guess: Draft | None) -> dict[str, str]:
    """Engines that cannot take the draft or adapters."""
    if asked.adapters:
        return {"llama.cpp": "the adapters are folders, and llama.cpp takes them as GGUF files"}
    if guess is not None and guess.kind in (*HEADS, "suffix"):
        return {"llama.cpp": f"llama.cpp has no {guess.kind} that reads this draft"}
    return {}


def _price(asked: Query, gpu: GPU) -> float | None:
    if asked.gpu_hour is not None:
        return asked.gpu_hour
    return None if asked.prices is None else asked.prices.of(gpu)


def _notes(asked: Query, found: Sequence[Recommendation], guess: Draft | None) -> list[str]:
    notes = []
    if guess is not None and asked.drafting is not None and asked.drafting.acceptance is None:
        notes.append(
            "The draft's acceptance rate is not known, so speeds are without it: measure it with "
            "`quantkit draft` and give its JSON, or a share, with --acceptance."
        )
    chosen = found[0].chosen if len(found) == 1 else None
    if chosen is not None and chosen.speed is not None and chosen.speed.drafted:
        gain, load = chosen.speed.gain, chosen.load.users
        verdict = "worth it" if gain > 1.05 else "not worth its memory" if gain < 1 else "no gain"
        who = "1 user" if load == 1 else f"{load} users"
        notes.append(
            f"With {who} the draft makes decoding {gain:.2f} times as fast, at "
            f"{chosen.speed.drafted} drafted tokens per step: {verdict}."
        )
    if asked.prices is not None:
        notes.append(asked.prices.words)
        if missing := [gpu.name for gpu in asked.gpus if asked.prices.of(gpu) is None]:
            notes.append(f"No price for {', '.join(missing)}.")
    return notes


def _measured(question: Question, bench: Path, gpu: GPU) -> Question:
    """The question with what was measured under its own load; refused where nothing was."""
    from quantkit.bench.measured import measured

    found = measured(bench)
    known = measurements.speeds(found, question, gpu)
    if not known.speeds:
        load = question.load(question.users or 1)
        raise AdviceError(
            f"{bench} has no measurement on {question.count} x {gpu.name} with {load.users} "
            f"concurrent users, prompts near {load.prompt:,} and answers near {load.answer:,} "
            "tokens; measure that load, or ask for one that was measured"
        )
    return question.but(measured=known)


def _plan(found: Recommendation, model: _Model, asked: Query, guess: Draft | None) -> Plan | None:
    """How to serve the answer."""
    chosen, question = found.chosen, found.question
    assert chosen is not None
    recipe = chosen.format.recipe
    folder = model.source if recipe is None else f"out/{recipe.name}"
    if guess is not None:
        guess = guess.made_for(chosen.format)
        if chosen.speed is not None and chosen.speed.drafted:
            guess = replace(guess, n_tokens=chosen.speed.drafted)
        if question.speculation is not None:
            guess = replace(guess, sampling=question.speculation.acceptance.sampling)
    demand = Demand(
        gpu=found.gpu,
        count=chosen.count,
        split=chosen.split,
        context=question.context,
        users=question.users,
        profile=question.traffic.name,
        kv_bits=chosen.format.kv_bits,
        utilisation=question.utilisation,
        draft=guess,
        adapters=asked.adapters,
    )
    served = targets.planned(question.catalogue.shape, recipe, folder, model.source)
    return plans.make(served, demand, chosen.size)


def _commands(
    found: Recommendation, model: _Model, asked: Query, guess: Draft | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The commands that make the checkpoint, and the file of its draft."""
    assert found.chosen is not None
    recipe = found.chosen.format.recipe
    if recipe is None or model.source == PLACEHOLDER:
        return (), ()
    usual = "python-docs" if model.text == "demo" else "general"
    # Measured results belong to a calibration set, for a GGUF file too; another file differs.
    learned = _set_of(model, recipe.name) or (usual if recipe.needs_calibration else None)
    calibration = ("--calibration", learned) if learned else ()
    make = ("quantkit", "quantize", model.source, "-r", recipe.name, *calibration, "-o", "out")
    if guess is None or asked.drafting is None or guess.made_for(found.chosen.format) is guess:
        return make, ()
    small = _Model(asked.drafting.text, shape.of(asked.drafting.text)).source
    return make, ("quantkit", "quantize", small, "-r", recipe.name, "-o", drafts.DRAFT_FOLDER)


def _set_of(model: _Model, recipe: str) -> str | None:
    """The calibration set of a report's candidate."""
    if model.report is None:
        return None
    for entry in model.report[1].candidates:
        if entry.recipe == recipe and entry.made and entry.made.calibration:
            return entry.made.calibration
    return None
