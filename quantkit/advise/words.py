"""Recommendations in words."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from quantkit.advise import parallel
from quantkit.advise.candidates import Candidate, merit
from quantkit.advise.links import ASSUMED_PCIE
from quantkit.advise.memory import Fit
from quantkit.advise.offload import Offload
from quantkit.advise.quality import Quality
from quantkit.advise.question import Question, utilisation
from quantkit.advise.ranking import HANDICAP, TIE, kept_step
from quantkit.advise.speed import Span, Speed
from quantkit.advise.split import Split
from quantkit.engine import label
from quantkit.hardware.gpus import GPU
from quantkit.page.scale import UNKNOWN
from quantkit.storage import gib

if TYPE_CHECKING:
    from quantkit.advise.recommendation import Recommendation

IN_ONE_MACHINE = 8
"""GPUs in a typical machine."""
OTHER_SIZE = "~~ of a model more than twice or less than half as large"


def number(value: float) -> str:
    """Two significant digits; estimates have no more."""
    value = float(f"{value:.2g}")  # first, since 9.97 is 10 and not 10.0
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def seconds(value: float) -> str:
    """A time with its unit."""
    if value < 0.995:  # otherwise it would be 1,000 ms
        return f"{number(value * 1000)} ms"
    return f"{number(value)} s" if value < 600 else f"{number(value / 60)} min"


def span(found: Span) -> str:
    """A range of rates, `120-190`."""
    low, high = number(found.low), number(found.high)
    return low if low == high else f"{low}-{high}"


def span_of_seconds(found: Span) -> str:
    """A range of times; minutes at one end are minutes at the other."""
    low, high = seconds(found.low), seconds(found.high)
    if high.endswith("min"):
        low = f"{number(found.low / 60)} min"
    if low == high:
        return low
    same = low.split()[1] == high.split()[1]
    return f"{low.split()[0] if same else low}-{high}"


def first_token(speed: Speed | None) -> str:
    """The typical time to the first token."""
    found = None if speed is None else speed.first_token
    return UNKNOWN if found is None else seconds(found.typical)


def quality_kept(candidate: Candidate) -> str:
    """The quality of a candidate, as `kept` writes it."""
    return UNKNOWN if candidate.quality is None else kept(candidate.quality)


def kept(found: Quality) -> str:
    """A quality, marked if it is a prior, and twice if that is of a model of another size."""
    return f"{'~' * (found.is_prior + found.other_size)}{found.recovery:.3f}"


def weights_gib(size_bytes: int) -> str:
    """A number of GiB; of a small model it is not zero."""
    found = size_bytes / (1 << 30)
    return f"{found:.1f}" if found >= 0.1 or not size_bytes else f"{found:.3f}"


def users(n: int) -> str:
    return "1 user" if n == 1 else f"{n:,} users"


def on(gpu: GPU, count: int) -> str:
    """GPUs, such as `2 x L40S`."""
    return gpu.name if count == 1 else f"{count} x {gpu.name}"


def memory(fit: Fit) -> str:
    """A GPU's memory by component, and how many users fit."""
    named = {"weights": "of weights", "draft model": "for the draft model"}
    held = [f"{gib(size)} {named.get(name, f'for {name}')}" for name, size in fit.parts.items()]
    own = f" ({gib(fit.draft_user_bytes)} of it the draft's)" if fit.draft_user_bytes else ""
    if fit.shared_bytes:
        held.append(f"{gib(fit.shared_bytes)} for the shared prefix, once")
    return (
        f"{', '.join(held)}, {gib(fit.overhead_bytes)} for the engine and {gib(fit.user_bytes)} "
        f"per user{own}, of {gib(fit.usable_bytes)}{whose(fit)}: room for {users(fit.users)}, "
        f"{fit.kv_tokens:,} tokens"
    )


def whose(fit: Fit) -> str:
    """Which of several GPUs has that memory; empty if there is one."""
    if fit.split.n_gpus == 1:
        return ""
    if fit.host_bytes:
        return f" on {fit.split.n_gpus} GPUs together"
    return " on each GPU" if fit.split.pipeline == 1 else " on the fullest GPU"


def offloaded(found: Offload, fit: Fit | None) -> str:
    """What is in the host's memory."""
    size = gib(fit.host_bytes) if fit else "the rest"
    rate = f"{found.host.bandwidth_gb_s:g} GB/s"
    return f"{found.words}; {size} in {found.host.name} at {rate}"


def cost(candidate: Candidate) -> str:
    """Cost of tokens, split into prompts and answers if known."""
    if candidate.cost is None:
        return ""
    total = f"{span(candidate.cost)} per million answer tokens, prompts included"
    if candidate.costs is None:
        return total
    prompt, answer = candidate.costs.prompt, candidate.costs.answer
    return (
        f"{total}: {span(prompt)} per million prompt tokens, {span(answer)} per million answer "
        "tokens alone"
    )


def extra_parts(candidates: Iterable[Candidate]) -> list[str]:
    """Names of what is beside the model's own weights: a draft model, LoRA adapters."""
    named = {name for one in candidates if one.fit for name in one.fit.parts}
    return [name for name in ("draft model", "LoRA adapters") if name in named]


def figure(candidate: Candidate, objective: str) -> str:
    """A candidate's figure for an objective."""
    speed, load = candidate.speed, candidate.load
    if objective == "memory" or speed is None:
        where = whose(candidate.fit) if candidate.fit else ""
        return f"{gib(candidate.needed_bytes)}{where} for {users(load.users)}"
    if objective == "throughput":
        return f"{span(speed.total)} output tokens/s with {users(load.users)}"
    if objective == "quality":
        return f"{quality_kept(candidate)} of the quality"
    return f"a whole answer in {span_of_seconds(speed.answer)} with {users(load.users)}"


MEANING = {
    "latency": "seconds for a whole answer",
    "throughput": "output tokens per second, all users together",
    "memory": "GiB of memory",
    "quality": "share of the quality kept",
}


def meaning(question: Question) -> str:
    """What the numbers of a table mean, and for how many users they hold."""
    objective, n = question.objective, question.users
    text = "GiB per GPU" if objective == "memory" and question.count > 1 else MEANING[objective]
    if objective == "quality" or (n is None and objective == "throughput"):
        return text
    return f"{text.removesuffix(', all users together')} with {users(n or 1)}"


def star(objective: str) -> str:
    """What the star in a table of figures means, and why it need not be at the best of them."""
    if objective == "quality":
        return "* is the choice."
    text = f"* is the choice: within {TIE:.0%} of the best, the format that keeps most quality."
    if objective == "memory":
        return text
    return (
        f"{text} llama.cpp is chosen over vLLM if it is {HANDICAP - 1:.0%} better "
        "(on CPUs the reverse)."
    )


EMPTY = "Empty: it does not run or fit there, or keeps too little quality."
"""What an empty cell in a table of figures means."""

EITHER_CACHE = "Each format with or without an FP8 KV cache, whichever is better."
"""Which of a format's two figures a picture shows."""

NO_FP8_CACHE = "An FP8 KV cache has a row where it is chosen, or fits and 16 bits do not."
"""Why a table that compares GPUs has fewer rows than one GPU's."""


UNITS = {
    "latency": "take {} s for an answer",
    "throughput": "give {} tokens/s",
    "memory": "take {} GiB per GPU",
}


def value(candidate: Candidate, objective: str) -> float | None:
    """A candidate's typical figure in the unit of `meaning`; None if it is not known."""
    speed, quality = candidate.speed, candidate.quality
    if objective == "quality":
        return None if quality is None else quality.recovery
    if objective == "memory":
        return candidate.needed_bytes / (1 << 30)
    if speed is None:
        return None
    return speed.total.typical if objective == "throughput" else speed.answer.typical


def short_figure(candidate: Candidate, objective: str) -> str:
    """The same in a table; where no speed is known, memory."""
    found = value(candidate, objective)
    if objective == "quality":
        return quality_kept(candidate)
    if objective == "memory" or found is None:
        return f"{candidate.needed_bytes / (1 << 30):.1f}"
    return number(found)


BOUND = {
    "weights": "bound by reading weights",
    "cache": "bound by reading the KV cache",
    "compute": "bound by the matrix products with the weights",
    "attention": "bound by the matrix products of attention",
    "links": "bound by the links between GPUs",
    "host": "bound by the CPU work of each step",
    "host memory": "bound by reading host memory",
}


def lack(candidate: Candidate) -> tuple[str, str]:
    """Why a format cannot be the answer, in short, and a figure."""
    fit = candidate.fit
    if candidate.lacks == "quality" and candidate.quality is not None:
        return "keeps less quality than required", quality_kept(candidate)
    if candidate.lacks == "memory" and fit is not None:
        if fit.users:
            return f"room for fewer than {users(candidate.load.users)}", f"{fit.users:,}"
        needed = fit.weight_bytes + fit.overhead_bytes + fit.shared_bytes + fit.user_bytes
        room = fit.usable_bytes / (1 << 30)
        return f"too large for {room:.1f} GiB", f"{needed / (1 << 30):.1f}"
    return candidate.problem, ""


BEST = {
    "latency": "the fastest answers",
    "throughput": "the most tokens per second",
    "memory": "the least memory",
    "quality": "the best quality",
}


def reason(chosen: Candidate, serving: Sequence[Candidate], question: Question) -> str:
    """Why this format was chosen."""
    objective = question.objective
    if len(serving) == 1:
        among = "nothing else fits and keeps"
    else:
        among = f"{BEST[objective]} among {len(serving)} formats that fit and keep"
    text = f"{among} at least {question.min_quality:g} of the quality: {figure(chosen, objective)}"
    if objective == "throughput" and (roomless := _without_room(chosen, serving)):
        room = users(roomless.load.users)
        text += f"; {roomless.format.name} keeps more, but leaves cache room for only {room}"
    alike = [c for c in serving if not c.quality or c.quality.is_prior == _is_prior(chosen)]
    best = min(alike, key=lambda c: merit(c, objective))
    if objective == "memory":
        return _least(text, chosen, serving)
    if objective == "quality" or best is chosen:
        return text
    if kept_step(best) < kept_step(chosen):
        return f"{text}; {best.format.name} is only slightly better and keeps less quality"
    if best.format.engine != chosen.format.engine:
        better = f"{best.format.name} may be better ({figure(best, objective)})"
        return f"{text}; {better}, but needs {label(best.format.engine)}"
    return text


def _without_room(chosen: Candidate, serving: Sequence[Candidate]) -> Candidate | None:
    """The best of those that keep more quality and have room for fewer users."""
    return next(
        (
            c
            for c in serving
            if kept_step(c) > kept_step(chosen) and c.load.users < chosen.load.users
        ),
        None,
    )


def _least(text: str, chosen: Candidate, serving: Sequence[Candidate]) -> str:
    """What takes a little more and keeps more is not the smallest, so it names the one that is."""
    best = min(serving, key=lambda c: c.needed_bytes)
    if best.needed_bytes == chosen.needed_bytes:
        return text
    if best.needed_bytes * (1 + TIE) < chosen.needed_bytes:  # measured candidates come first
        return text.replace(BEST["memory"], "the least memory of those in the report,", 1)
    but = "keeps less" if kept_step(best) < kept_step(chosen) else "keeps as much"
    if but == "keeps as much" and best.format.engine != chosen.format.engine:
        but = f"needs {label(best.format.engine)}"
    text = text.replace(BEST["memory"], "barely more than the least memory", 1)
    return f"{text}; {best.format.name} takes {gib(best.needed_bytes)} and {but}"


def _is_prior(candidate: Candidate) -> bool:
    return candidate.quality is None or candidate.quality.is_prior


def against(second: Candidate, chosen: Candidate, question: Question) -> str:
    """What the runner-up offers, and what it lacks."""
    text = figure(second, question.objective)
    if question.objective != "quality" and second.quality and chosen.quality:
        gap = kept_step(second) - kept_step(chosen)
        if gap:
            text += f"; keeps {'more' if gap > 0 else 'less'} quality, {quality_kept(second)}"
    if question.qualities and _is_prior(second) and not _is_prior(chosen):
        text += "; not in the report"
    if question.objective == "throughput" and second.load.users < chosen.load.users:
        text += f"; leaves cache room for {users(second.load.users)}, not {chosen.load.users:,}"
    if second.format.engine != chosen.format.engine:
        text += f"; served by {label(second.format.engine)}"
    return text


def change(option: str, best: Candidate | None, question: Question) -> str:
    """The answer to another question; None: nothing serves."""
    if best is None:
        return f"with {option}: no format fits"
    return f"with {option}: {best.format.name}, {figure(best, question.objective)}"


def sharing(chosen: Candidate, question: Question) -> str:
    """How GPUs share the answer, and why; empty with one GPU."""
    count, split = question.count, chosen.split
    if count == 1:
        return ""
    if chosen.format.engine == "llama.cpp":
        return f"whole layers on each of the {count} GPUs, one after another"
    text = f"{split}{idle(split, count)}"
    others = sorted(chosen.others, key=lambda one: merit(one, question.objective))
    compared = [f"{one.split} {_would(one, question)}" for one in others]
    because = "as you asked" if question.constraint.is_any else ""
    whole = parallel.usual(chosen.format.recipe, count)
    if not because and split != whole:
        because = parallel.obstacle(question.catalogue.shape, chosen.format.recipe, whole)
    return "; ".join([f"{text}: {because}" if because else text, *compared[:2]])


def idle(split: Split, count: int) -> str:
    """What happens to GPUs that a split leaves unused."""
    if not (left := count - split.n_gpus):
        return ""
    if left >= split.n_gpus:
        more = left // split.n_gpus
        return f" of the {count} (room for {more} more such server{'s' * (more > 1)})"
    return f" of the {count} ({left} left idle)"


def _would(other: Candidate, question: Question) -> str:
    if other.lacks == "memory":
        return "does not fit"
    objective = "latency" if question.objective == "quality" else question.objective
    return f"would {UNITS[objective].format(short_figure(other, objective))}"


def nothing_serves(found: Sequence[Candidate], question: Question) -> str:
    """Why nothing serves, in one sentence about the closest candidate."""
    slow = [c for c in found if c.lacks == "speed"]
    if slow and not any(c.lacks == "quality" for c in slow):
        # Formats that lack quality as well are not close.
        good = [c for c in slow if c.quality and c.quality.recovery >= question.min_quality]
        best = min(good or slow, key=lambda c: question.limits.excess(c.speed))
        return f"what fits is too slow; {best.format.name} comes closest: {best.problem}"
    with_memory = [c for c in found if c.lacks == "quality"]
    if with_memory:
        best = max(with_memory, key=lambda c: c.quality.recovery if c.quality else 0)
        return f"what fits loses too much: {best.format.name} {best.problem}"
    tight = [c for c in found if c.lacks == "memory" and c.fit]
    if tight:
        best = min(tight, key=lambda c: c.needed_bytes)
        return f"even {best.format.name} does not fit: {best.problem}"
    if question.constraint.is_any:
        return f"the GPUs cannot split it as asked: {found[0].problem}"
    return f"no known engine runs it there: {found[0].problem}"


def _unknown(gpu: GPU) -> list[str]:
    """GPU properties that were not given, and the options that set them."""
    notes = []
    if gpu.bandwidth_gb_s == 0:
        notes.append(
            f"The memory bandwidth of {gpu.name} is not known (--bandwidth), so only memory is "
            "estimated, not speed."
        )
    elif gpu.fp16_tflops is None:
        flag = " (--tflops)" if gpu.vendor == "unknown" or not gpu.sources else ""
        notes.append(
            f"The compute rate of {gpu.name} is not known{flag}: speeds count memory traffic only, "
            "and there is no time to the first token."
        )
    if gpu.vendor == "cpu" and not gpu.sources and "bandwidth_gb_s" in gpu.derived:
        notes.append(f"{gpu.name}: {gpu.derived['bandwidth_gb_s']}.")
    if gpu.vendor == "unknown":
        notes.append(
            "vLLM's formats are left out, since what runs depends on the chip: --capability 8.9 "
            "(NVIDIA's compute capability) or gfx942 (AMD) adds them."
        )
    return notes


def assumptions(question: Question, gpu: GPU) -> tuple[str, ...]:
    """What the figures are based on."""
    load = question.load(question.users or 1)
    shape, share = question.catalogue.shape, utilisation(question, gpu)
    notes = []
    if shape.assumed:
        notes.append(f"{shape.label} is only a size: {shape.note}.")
    notes += [
        f"Each user has a context of {load.context:,} tokens: a prompt of {load.prompt:,}, then an "
        f"answer of {load.answer:,}. Engines may use {share:.0%} of the memory, and are set up for "
        f"{question.traffic.name} traffic.",
        "Memory is exact except for the engines' own overhead. Speeds are roofline estimates with "
        "a slow and a fast end, not a promise; measure before you buy.",
    ]
    if not question.qualities:
        notes.append(
            f"Quality (~) is a prior from published figures of other models, {OTHER_SIZE}; a "
            "report of this one (--report) replaces it."
        )
    else:
        notes.append(
            "Formats that the report does not cover come last, with published figures (~), "
            f"{OTHER_SIZE}."
        )
    if read := gpu.derived.get("memory_bytes"):
        notes.append(
            f"{read}; the driver keeps half a GiB of it. With ECC a GPU reports up to 6% less: "
            "give what nvidia-smi shows instead, such as --memory 23034MiB."
        )
    notes += _unknown(gpu)
    if question.shared_prefix:
        notes.append(
            f"Prompts begin with {question.shared_prefix:,} tokens in common, which vLLM computes "
            "and keeps once; llama.cpp keeps them in every slot."
        )
    if question.speculation is not None:
        accepted = question.speculation.acceptance
        notes.append(
            f"The target accepts {accepted.rate:.0%} of drafted tokens ({accepted.source}); the "
            f"draft {'samples' if accepted.sampling == 'probabilistic' else 'is greedy'}."
        )
    if question.count > 1 and gpu.link_gb_s is None and gpu.pcie is None:
        notes.append(f"GPUs are assumed to be connected by PCIe {ASSUMED_PCIE}.")
    if gpu.link_gpus and question.count > gpu.link_gpus:
        notes.append(
            f"{gpu.link} bridges join {gpu.link_gpus} {gpu.name}; beyond that, GPUs communicate "
            f"over PCIe {gpu.pcie or ASSUMED_PCIE}."
        )
    if question.count > IN_ONE_MACHINE:
        notes.append(
            "All GPUs are assumed to be in one machine; links between machines are slower."
        )
    return tuple(notes)


def notes_by_model(found: "Sequence[Recommendation]") -> list[str]:
    """Each note once; what does not apply to every model names the models that it applies to."""
    models: dict[str, list[str]] = {}
    for one in found:
        for note in one.notes:
            models.setdefault(note, []).append(one.question.catalogue.shape.label)
    # What names one model comes first, as it does for each of them.
    own = [note for note, labels in models.items() if note.startswith(f"{labels[0]} ")]
    others = [
        note if len(labels) == len(found) else f"{', '.join(labels)}: {note}"
        for note, labels in models.items()
        if note not in own
    ]
    return [*own, *others]
