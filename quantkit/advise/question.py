"""A request for a recommendation: the model in all formats, users, limits, and measured speeds."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from quantkit.advise import formats, parallel, profiles, sizing, work
from quantkit.advise import speed as speeds
from quantkit.advise.formats import Format
from quantkit.advise.memory import Extras
from quantkit.advise.offload import Host
from quantkit.advise.profiles import Profile
from quantkit.advise.quality import Quality
from quantkit.advise.shape import ModelShape
from quantkit.advise.speculation import Speculation
from quantkit.advise.speed import Load, Speed
from quantkit.advise.split import ANY, ONE, Split, SplitConstraint
from quantkit.advise.work import Work
from quantkit.errors import AdviceError, QuantkitError
from quantkit.hardware.gpus import GPU
from quantkit.model.source import context_of

OBJECTIVES = ("latency", "throughput", "memory", "quality")
MIN_QUALITY = 0.97
NO_SCALES = "no layer of this model caches keys and values in a form that has scales"


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
            slow.append(
                f"first token after {as_time(first.typical)}, later than {as_time(self.ttft)}"
            )
        if self.tpot is not None and found.step.typical > self.tpot:
            step = found.step.typical
            slow.append(f"{as_time(step)} per token, slower than {as_time(self.tpot)}")
        return "; ".join(slow)

    def excess(self, found: Speed | None) -> float:
        """How many times a limit the slower figure is; infinite where one is not known."""
        if found is None:
            return math.inf
        times = [0.0]
        if self.ttft is not None:
            times.append(found.first_token.typical / self.ttft if found.first_token else math.inf)
        if self.tpot is not None:
            times.append(found.step.typical / self.tpot)
        return max(times)


def as_time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


NO_LIMITS = Limits()


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


def utilisation(question: Question, gpu: GPU) -> float:
    """Share of a device's memory that engines may use."""
    return sizing.usable_share(gpu, question.utilisation)
