"""Every format of a model on one kind of GPU: does it serve, how fast, how well, at what cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from quantkit.advise import memory, offload, parallel, quality, refusals, sizing, speculation
from quantkit.advise import speed as speeds
from quantkit.advise.formats import Format
from quantkit.advise.memory import Fit
from quantkit.advise.quality import Quality
from quantkit.advise.question import Question, utilisation
from quantkit.advise.sizing import Size
from quantkit.advise.speed import Load, Span, Speed
from quantkit.advise.split import ONE, Split
from quantkit.advise.work import Work
from quantkit.families import MXFP4_EXPERTS
from quantkit.hardware.gpus import GPU
from quantkit.hardware.support import Support, runs
from quantkit.model.architecture import EXPERT

MOST_TOGETHER = 256
"""Most concurrent users if none are given: vLLM's own limit on most GPUs."""

ALONE = ("apple", "cpu")
"""Vendors whose devices cannot share a model."""
BOARDS = ("Jetson", "Ryzen")
"""Devices that are complete computers, and cannot either."""
NO_QUALITY = "no quality data: no report of this model, and no published figure"
UNUSUAL = 1.2
"""Factor by which another split must beat tensor parallel over all GPUs: how busy a pipeline is
depends on arrival times, which no estimate knows.
"""


@dataclass(frozen=True)
class Cost:
    """Cost of a million tokens, in the currency of `gpu_hour`."""

    prompt: Span
    """Of prompts, including those in the prefix cache."""
    answer: Span
    """Of answers, without their prompts."""


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
        digits = 3 if round(known.recovery, 3) < min_quality else 5  # 0.980 is not below 0.98
        kept = f"keeps {known.recovery:.{digits}f} of the quality, below {min_quality:g}"
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
