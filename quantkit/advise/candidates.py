"""Every format of a model on one kind of GPU: does it serve, how fast, how well, at what cost."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from quantkit.advise import (
    formats,
    memory,
    offload,
    parallel,
    profiles,
    quality,
    refusals,
    sizing,
    speculation,
    work,
)
from quantkit.advise import speed as speeds
from quantkit.advise.formats import Format
from quantkit.advise.memory import Extras, Fit
from quantkit.advise.offload import Host
from quantkit.advise.profiles import Profile
from quantkit.advise.quality import Quality
from quantkit.advise.shape import ModelShape
from quantkit.advise.sizing import Size
from quantkit.advise.speculation import Speculation
from quantkit.advise.speed import Load, Span, Speed
from quantkit.advise.split import ANY, ONE, Split, SplitConstraint
from quantkit.advise.work import Work
from quantkit.errors import AdviceError, QuantkitError
from quantkit.families import MXFP4_EXPERTS
from quantkit.hardware.gpus import GPU
from quantkit.hardware.support import Support, runs
from quantkit.model.architecture import EXPERT
from quantkit.model.source import context_of

OBJECTIVES = ("latency", "throughput", "memory", "quality")
MIN_QUALITY = 0.97
MOST_TOGETHER = 256
"""Most concurrent users if none are given: vLLM's own limit on most GPUs."""

ALONE = ("apple", "cpu")
"""Vendors whose devices cannot share a model."""
BOARDS = ("Jetson", "Ryzen")
"""Devices that are complete computers, and cannot either."""
NO_QUALITY = "no quality data: no report of this model, and no published figure"
NO_SCALES = "no layer of this model caches keys and values in a form that has scales"
UNUSUAL = 1.2
"""Factor by which another split must beat tensor parallel over all GPUs: how busy a pipeline is
depends on arrival times, which no estimate knows.
"""


def considered(shape: ModelShape, scored: Iterable[str] = ()) -> tuple[Format, ...]:
    """All formats to choose from for a model, also those that were scored in a report of it."""
    own = (formats.MXFP4_FILE,) if shape.is_published_in_mxfp4 else ()
    return formats.considered((*scored, *own), parallel.n_experts(shape) > 0)


class Catalogue:
    """A model in all formats; whatever does not depend on the GPU is computed once."""

    def __init__(self, shape: ModelShape, among: tuple[Format, ...] | None = None) -> None:
        self.shape = shape
        if among is None:
            among = considered(shape)
        self.formats = among
        self._works: dict[str, Work | str] = {}
        self._cases: dict[tuple[str, str, Split], speeds.Case] = {}

    def work(self, format: Format) -> Work | str:
        """The work of a format, or why the model does not come in it."""
        if format.has_fp8_cache and not self.shape.has_cache_scales:
            return NO_SCALES
        name = format.base  # two scales per layer make no measurable difference
        if name not in self._works:
            try:
                self._works[name] = work.of(self.shape, format)
            except QuantkitError as error:
                self._works[name] = str(error)
        return self._works[name]

    def case(self, format: Format, made: Work, gpu: GPU, split: Split) -> speeds.Case:
        """What the times of a format depend on, whatever the load."""
        key = format.name, gpu.name, split
        known = self._cases.get(key)
        if known is None or known.gpu is not gpu:
            known = self._cases[key] = speeds.Case(self.shape, made, format, gpu, split)
        return known

    def plain(self, gpu: GPU) -> speeds.Case | None:
        """The unquantised model on one GPU; None if it does not come unquantised."""
        format = formats.of(None)
        made = self.work(format)
        return None if isinstance(made, str) else self.case(format, made, gpu, ONE)


def no_extras(split: Split, format: Format) -> Extras:
    """Nothing but the model on its GPUs."""
    return Extras()


@dataclass(frozen=True)
class Limits:
    """Latency limits in seconds; None: no limit."""

    ttft: float | None = None
    """Time to first token."""
    tpot: float | None = None
    """Time between two tokens."""

    def problem(self, found: Speed) -> str:
        """The limit that is exceeded, with both figures; empty if none is."""
        slow, first = [], found.first_token
        if self.ttft is not None and first is None:
            slow.append("the time to its first token needs the GPU's compute rate (--tflops)")
        elif self.ttft is not None and first is not None and first.typical > self.ttft:
            slow.append(f"first token after {_time(first.typical)}, later than {_time(self.ttft)}")
        if self.tpot is not None and found.step.typical > self.tpot:
            step = found.step.typical
            slow.append(f"{_time(step)} per token, slower than {_time(self.tpot)}")
        return "; ".join(slow)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


NO_LIMITS = Limits()


@dataclass(frozen=True)
class Cost:
    """Cost of a million tokens, in the currency of `gpu_hour`."""

    prompt: Span
    """Of prompts, including those in the prefix cache."""
    answer: Span
    """Of answers, without their prompts."""


@dataclass(frozen=True)
class Measurements:
    """Measured speeds, and the GPU and load they hold for; they say nothing about others."""

    gpu: str
    count: int
    load: Load
    speeds: Mapping[str, Speed]
    """By recipe."""
    splits: Mapping[str, Split] = field(default_factory=dict)
    """How GPUs shared the model in these runs, by recipe; the usual split if unknown."""

    def of(self, format: Format, gpu: GPU, split: Split, load: Load) -> Speed | None:
        """The measured speed of a format with this split, under exactly this load."""
        shared = self.splits.get(format.name) or parallel.usual(format.recipe, self.count)
        same = (self.gpu, shared, self.load) == (gpu.name, split, load)
        return self.speeds.get(format.name) if same else None


def check_objective(name: str) -> None:
    """Refuse an unknown objective."""
    if name not in OBJECTIVES:
        raise AdviceError(f"unknown objective '{name}'; choose from {', '.join(OBJECTIVES)}")


@dataclass(frozen=True)
class Question:
    """A request for a recommendation."""

    catalogue: Catalogue
    context: int = 8192
    """Tokens of a prompt and its answer together."""
    users: int | None = None
    """Concurrent users; None: one, or as many as fit if the objective is throughput."""
    answer: int | None = None
    """Tokens per answer; None: a quarter of the context."""
    count: int = 1
    objective: str = "latency"
    min_quality: float = MIN_QUALITY
    utilisation: float = sizing.UTILISATION
    profile: str | None = None
    """The kind of traffic; None: batch for throughput, otherwise chat."""
    gpu_hour: float | None = None
    """Price of one GPU per hour."""
    qualities: Mapping[str, Quality] = field(default_factory=dict)
    """From a report of this model, by recipe."""
    measured: Measurements | None = None
    """Speeds that replace estimates where GPU and load match."""
    extras: Callable[[Split, Format], Extras] = no_extras
    """What else occupies each of the GPUs that share a format this way: a draft, adapters."""
    limits: Limits = NO_LIMITS
    shared_prefix: int = 0
    """Length of the prefix that all prompts share, in tokens."""
    speculation: Speculation | None = None
    """A draft and its acceptance."""
    host: Host | None = None
    """The host's memory, if GGUF files may be partly offloaded to it."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Engines that cannot serve the request, and why."""
    constraint: SplitConstraint = ANY
    """Constraints on how GPUs share the model."""

    def __post_init__(self) -> None:
        shape = self.catalogue.shape
        check_objective(self.objective)
        if min(self.context, self.count, 1 if self.users is None else self.users) < 1:
            raise AdviceError("context, users and the number of GPUs must be at least 1")
        if self.context > (most := context_of(shape.config)):
            raise AdviceError(
                f"{shape.described} supports contexts of up to {most:,} tokens, not "
                f"{self.context:,}; shorten --context"
            )
        if self.answer is not None and not 1 <= self.answer <= self.context:
            raise AdviceError(
                f"an answer of {self.answer:,} tokens does not fit into a context of "
                f"{self.context:,}, which holds prompt and answer"
            )
        if not 0 < self.min_quality <= 1:
            raise AdviceError(
                f"--min-quality {self.min_quality:g} is out of range: it is a share of the "
                "source's quality, above 0 and at most 1"
            )
        if not 0 <= self.shared_prefix <= (prompt := self.load(1).prompt):
            raise AdviceError(
                f"a shared prefix of {self.shared_prefix:,} tokens does not fit into prompts of "
                f"{prompt:,}; a context of {self.context:,} holds prompt and answer"
            )
        self._check_wish()
        if self.profile is not None:
            profiles.find(self.profile)
        if self.gpu_hour is not None and not 0 < self.gpu_hour < math.inf:
            raise AdviceError("the price per hour must be a number above 0")

    def _check_wish(self) -> None:
        constraint, shape = self.constraint, self.catalogue.shape
        tensor, pipeline = (1 if n is None else n for n in (constraint.tensor, constraint.pipeline))
        if min(tensor, pipeline) < 1:
            raise AdviceError("tensor-parallel and pipeline-parallel sizes must be at least 1")
        if tensor * pipeline > self.count:
            asked, needed = Split(tensor, pipeline), tensor * pipeline
            raise AdviceError(f"{asked} needs --count {needed} or more, not {self.count}")
        if constraint.has_whole_experts and not parallel.n_experts(shape):
            raise AdviceError(
                f"{shape.label} is not an MoE model and has no experts to distribute; leave out "
                "--expert-parallel"
            )
        if constraint.has_whole_experts and (self.count == 1 or constraint.tensor == 1):
            raise AdviceError(
                "expert parallel needs tensor parallel over 2 or more GPUs for the other layers; "
                "raise --count or --tensor-parallel"
            )

    @property
    def traffic(self) -> Profile:
        """The profile a server is set up for; it determines the memory a server takes."""
        usual = "batch" if self.objective == "throughput" else "chat"
        return profiles.find(self.profile or usual)

    def load(self, users: int) -> Load:
        answer = max(1, self.context // 4) if self.answer is None else self.answer
        return Load(self.context, answer, users, self.shared_prefix)

    def but(self, **changed: object) -> "Question":
        """The same question with some fields changed."""
        return replace(self, **changed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Candidate:
    """One format on `count` GPUs of one kind."""

    format: Format
    gpu: GPU
    count: int
    support: Support
    quality: Quality | None
    load: Load
    fit: Fit | None = None
    """Memory use on the GPUs when a server is set up for the question's traffic."""
    size: Size | None = None
    """The settings of that server."""
    speed: Speed | None = None
    """None if it does not fit."""
    cost: Span | None = None
    """Per million answer tokens with their prompts, in the currency of `gpu_hour`."""
    costs: Cost | None = None
    """The same split into prompts and answers; None if it was measured, not estimated."""
    problem: str = ""
    """Why it cannot be the answer; empty if it can."""
    lacks: str = ""
    """What is missing in that case: `support`, `memory`, `speed` or `quality`."""
    split: Split = ONE
    """How the GPUs share it."""
    others: tuple["Candidate", ...] = ()
    """The same with other splits, which are no better."""

    @property
    def serves(self) -> bool:
        return not self.problem

    @property
    def room(self) -> int:
        """Users that fit in memory."""
        return 0 if self.fit is None else self.fit.users

    @property
    def needed_bytes(self) -> int:
        """Bytes needed on each GPU for these users."""
        fit = self.fit
        if fit is None:
            return 0
        fixed = fit.weight_bytes + fit.overhead_bytes + fit.shared_bytes
        return fixed + self.load.users * fit.user_bytes


def evaluate(question: Question, gpu: GPU) -> list[Candidate]:
    """All formats on `count` GPUs of one kind, in the catalogue's order."""
    return [judged(one, question.min_quality) for one in served(question, gpu)]


def served(question: Question, gpu: GPU) -> list[Candidate]:
    """The same, whatever their quality."""
    return [_candidate(question, gpu, format) for format in question.catalogue.formats]


def serving(question: Question, gpu: GPU) -> Iterator[Candidate]:
    """Those that serve; what cannot is left out as soon as that is known.

    Formats of too low quality are not tried, nor those larger than all memory, and none is if
    prompts take too long in any.
    """
    limit = question.limits.ttft
    if limit is not None and question.measured is None:
        plain, load = question.catalogue.plain(gpu), question.load(1)
        if plain and speeds.least_first_token(plain, question.count, load) > limit:
            return
    for format in good_enough(question):
        made = question.catalogue.work(format)
        if isinstance(made, str) or not may_fit(question, gpu, format, made.stored_bytes):
            continue
        found = _candidate(question, gpu, format)
        if found.serves:
            yield found


def may_fit(question: Question, gpu: GPU, format: Format, weight_bytes: int) -> bool:
    """Whether the memory of all GPUs together holds weights and caches, and nothing beside them."""
    if question.host is not None and format.engine == "llama.cpp":
        return True
    shape, own = question.catalogue.shape, question.context - question.shared_prefix
    (user,) = memory.user_bytes(shape, own, format.kv_bits, ONE)
    return weight_bytes + (question.users or 1) * user <= question.count * gpu.usable_bytes


def good_enough(question: Question) -> Iterator[Format]:
    """Formats that keep as much quality as asked for."""
    for format in question.catalogue.formats:
        known = quality.of(format, question.catalogue.shape, question.qualities)
        if known is not None and known.recovery >= question.min_quality:
            yield format


def rechosen(candidate: Candidate, question: Question) -> Candidate:
    """The same format for another objective that is served alike: the best of its splits."""
    tried = sorted(
        (candidate, *candidate.others), key=lambda one: (-one.split.tensor, -one.split.pipeline)
    )  # as they were tried, which decides between equals
    best = _best(tried, question)
    return replace(best, others=tuple(one for one in tried if one is not best))


def judged(candidate: Candidate, min_quality: float) -> Candidate:
    """A candidate, with its problem set if its quality is too low."""
    known = candidate.quality
    if not candidate.serves:
        return candidate
    if known is None:
        return replace(candidate, problem=NO_QUALITY, lacks="quality")
    if known.recovery < min_quality:
        kept = f"keeps {known.recovery:.3f} of the quality, below {min_quality:g}"
        return replace(candidate, problem=kept, lacks="quality")
    return candidate


def _candidate(question: Question, gpu: GPU, format: Format) -> Candidate:
    catalogue, count = question.catalogue, question.count
    known = quality.of(format, catalogue.shape, question.qualities)
    support = runs(gpu, format.key, format.engine)
    if format.has_fp8_cache and support.how != "no":
        cache = runs(gpu, "kv-fp8", format.engine)
        support = cache if cache.how == "no" else support
    made = catalogue.work(format)
    load = question.load(question.users or 1)
    candidate = Candidate(format, gpu, count, support, known, load)
    if reason := question.refused.get(format.engine):
        return replace(candidate, problem=reason, lacks="support")
    if count > 1 and (gpu.vendor in ALONE or gpu.name.startswith(BOARDS)):
        return replace(candidate, problem="several of them cannot share a model", lacks="support")
    if support.how == "no" or isinstance(made, str):
        reason = made if isinstance(made, str) else support.reason
        return replace(candidate, problem=reason, lacks="support")
    if format.engine == "vllm" and (
        refused := refusals.refusal(catalogue.shape, format.recipe, gpu)
    ):
        return replace(candidate, problem=refused, lacks="support")
    if format.key == "gguf" and gpu.capability is not None and published_bytes(question, gpu):
        # It holds the same numbers in as many bits, or rounds them again.
        reason = "the published model is already quantised, and vLLM serves it unchanged"
        return replace(candidate, problem=reason, lacks="support")
    ways = parallel.ways_to_share(catalogue.shape, format.recipe, count, question.constraint)
    if not ways:
        reason = _no_way(question, format)
        return replace(candidate, problem=reason, lacks="support")
    tried = [_shared(question, candidate, made, split) for split in ways]
    best = _best(tried, question)
    return replace(best, others=tuple(one for one in tried if one is not best))


MXFP4_BITS = 425
"""Bits per weight in hundredths: four, plus an 8-bit scale for 32 of them."""


def published_bytes(question: Question, gpu: GPU) -> int | None:
    """Bytes of the publisher's own quantised model, where vLLM serves its experts in no other form;
    None where it does not fit.
    """
    model = question.catalogue.shape
    if model.config.get("model_type") not in MXFP4_EXPERTS:
        return None
    if "published" not in model.cache:  # tens of thousands of tensors
        linears = (t for t in model.tensors if t.is_linear and EXPERT.search(t.name))
        experts = sum(tensor.n_elements for tensor in linears)
        model.cache["published"] = model.size_bytes - 2 * experts + experts * MXFP4_BITS // 800
    size: int = model.cache["published"]
    room = question.count * int(utilisation(question, gpu) * gpu.usable_bytes)
    return size if size <= room else None


def _no_way(question: Question, format: Format) -> str:
    """Why GPUs cannot share a model, or not under the constraints."""
    shape, constraint, usual = question.catalogue.shape, question.constraint, format.recipe
    if not constraint.is_any:
        return parallel.obstacle(shape, usual, parallel.usual(usual, question.count))
    split = Split(constraint.tensor or 1, constraint.pipeline or 1, constraint.has_whole_experts)
    return (
        parallel.obstacle(shape, usual, split) or "the model cannot be split over the GPUs as asked"
    )


def _shared(question: Question, candidate: Candidate, made: Work, split: Split) -> Candidate:
    """A candidate with one particular split."""
    shape, format, gpu = question.catalogue.shape, candidate.format, candidate.gpu
    load, extras = candidate.load, question.extras(split, format)
    if question.shared_prefix:
        extras = replace(extras, shared_tokens=question.shared_prefix)
    wanted = sizing.SizingRequest(
        shape, format.recipe, gpu, candidate.count, question.context, question.users,
        question.traffic, split, format.kv_bits, format.engine == "llama.cpp",
        question.utilisation, extras,
    )  # fmt: skip
    size, fit = sizing.fitted(wanted)
    if not fit.fits and question.host is not None:
        size, fit = offload.fitted(wanted, question.host) or (size, fit)
    if question.users is None and question.objective == "throughput":
        load = question.load(max(1, min(fit.users, MOST_TOGETHER)))
    problem, lacks = (fit.reason, "memory") if not fit.fits else ("", "")
    found = cost = costs = None
    if not problem:
        if question.measured and question.measured.count == candidate.count:
            found = question.measured.of(format, gpu, split, load)
        if found is None and gpu.bandwidth_gb_s > 0:
            case = question.catalogue.case(format, made, gpu, split)
            found = _estimate(question, case, load, size)
    if found is not None:
        cost, costs = _cost(question, found), _costs(question, found, load)
        if slow := question.limits.problem(found):
            problem, lacks = slow, "speed"
    return replace(
        candidate, load=load, fit=fit, size=size, split=split, speed=found, cost=cost, costs=costs,
        problem=problem, lacks=lacks,
    )  # fmt: skip


def _estimate(question: Question, case: speeds.Case, load: Load, size: Size) -> Speed:
    if size.offload is not None:
        return offload.estimate(case, load, size.offload)
    if question.speculation is not None:
        return speculation.estimate(case, load, question.speculation)
    return speeds.estimate(case, load)


def _best(tried: Sequence[Candidate], question: Question) -> Candidate:
    """The best split of those tried, or the one that comes closest to fitting."""
    fitting = [one for one in tried if one.speed is not None]
    if not fitting:
        return max(tried, key=lambda one: (one.room, -one.needed_bytes))

    def held_back(one: Candidate) -> float:
        is_usual = one.split.tensor == question.count
        return merit(one, question.objective) * (1.0 if is_usual else UNUSUAL)

    # A split within the limits outranks a better one beyond them, and a measured speed an estimate
    # that claims to be faster.
    within = [one for one in fitting if not one.problem] or fitting
    measured = [one for one in within if one.speed and one.speed.is_measured]
    return min(measured or within, key=held_back)


def merit(candidate: Candidate, objective: str) -> float:
    """The figure an objective minimises."""
    speed = candidate.speed
    if objective == "memory" or speed is None:
        host = candidate.fit.host_bytes if candidate.fit else 0
        return float(candidate.needed_bytes + host)
    if objective == "throughput":
        return 1 / speed.total.typical
    return speed.answer.typical


def utilisation(question: Question, gpu: GPU) -> float:
    """Share of a device's memory that engines may use."""
    return sizing.usable_share(gpu, question.utilisation)


def _cost(question: Question, found: Speed) -> Span | None:
    if question.gpu_hour is None:
        return None
    second = question.gpu_hour * question.count / 3600
    total = found.total
    return Span(*(1e6 * second / rate for rate in (total.high, total.typical, total.low)))


def _costs(question: Question, found: Speed, load: Load) -> Cost | None:
    """GPU time split between prompts and answers that are computed together."""
    if question.gpu_hour is None or found.prompt is None or found.decode is None:
        return None
    second = question.gpu_hour * question.count / 3600
    prompt, answer = (
        Span(*(1e6 * second * value / n for value in (span.low, span.typical, span.high)))
        for span, n in ((found.prompt, max(1, load.prompt)), (found.decode, load.users))
    )
    return Cost(prompt, answer)
