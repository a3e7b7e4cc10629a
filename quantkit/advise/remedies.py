"""The smallest changes after which a format serves, the cheapest first."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quantkit.advise import offload, shape, sizes
from quantkit.advise.candidates import (
    BOARDS,
    Candidate,
    good_enough,
    may_fit,
    published_bytes,
    serving,
)
from quantkit.advise.question import NO_LIMITS, Catalogue, Question, as_time
from quantkit.advise.ranking import ranking_of
from quantkit.advise.split import ANY
from quantkit.hardware import gpus
from quantkit.hardware.gpus import GPU

COUNTS = (2, 3, 4, 5, 6, 7, 8, 16)
LEAST_CONTEXT = 256
MOST_USERS = 1 << 20
LEAST_RATE = 0.1
"""Tokens per second per user; offloading that is slower helps nobody."""
COMPUTERS = (*BOARDS, "DGX Spark")
"""Complete computers, not GPUs to put into one."""


@dataclass(frozen=True)
class Remedy:
    """A change, and the format that serves after it."""

    change: str
    """As an option of `quantkit recommend`."""
    format: str
    says: str


def find(question: Question, gpu: GPU, found: Sequence[Candidate]) -> list[Remedy]:
    """Every single change that helps: another split if one was required, an FP8 cache, lower
    quality, slower answers, a shorter context, fewer users, partial offload to the host's memory,
    more such GPUs, another GPU, a smaller model. `found` are the formats of which none serves.
    """
    return list(_find(question, gpu, found))


def _find(question: Question, gpu: GPU, found: Sequence[Candidate]) -> Iterator[Remedy]:
    if published := _published(question, gpu):
        yield published
    if question.constraint.is_any and (first := _first(question.but(constraint=ANY), gpu)):
        yield Remedy(
            "without --tensor-parallel and the like",
            first.format.name,
            f"another way to split it: {first.split} with {first.format.name}",
        )
    # Formats that fit and lack only quality: of those, the best.
    short = [c for c in found if c.lacks == "quality" and c.quality is not None]
    if short:
        best = max(short, key=_kept)
        # Rounded down, so that the option admits it.
        floor = int(_kept(best) * 1000) / 1000
        yield Remedy(
            f"--min-quality {floor:g}",
            best.format.name,
            f"less quality: {best.format.name} fits and keeps {_kept(best):.3f} of it",
        )
    if slower := _slower(question, gpu):
        yield slower
    if shorter := _longest_context(question, gpu):
        context, best = shorter
        yield Remedy(
            f"--context {context}",
            best.format.name,
            f"a shorter context: {context:,} tokens fit with {best.format.name}",
        )
    if fewer := _most_users(question, gpu, found):
        users, best = fewer
        yield Remedy(
            f"--users {users}",
            best.format.name,
            f"fewer users: {users} at the same time with {best.format.name}",
        )
    if split := _partly(question, gpu):
        yield split
    for count in COUNTS:
        if count > question.count and (first := _first(question.but(count=count), gpu)):
            yield Remedy(
                f"--count {count}",
                first.format.name,
                f"more GPUs: {count} x {gpu.name} serve it with {first.format.name}",
            )
            break
    if larger := _smallest_gpu(question, gpu):
        yield Remedy(
            f"--gpu {shlex.quote(larger.gpu.name)}",
            larger.format.name,
            f"a larger GPU: {larger.count} x {larger.gpu.name} ({larger.gpu.memory_gb:g} GB) "
            f"with {larger.format.name}",
        )
    if smaller := _smaller_model(question, gpu):
        yield smaller


def _published(question: Question, gpu: GPU) -> Remedy | None:
    """The publisher's own quantised model, where engines serve its experts in no other form."""
    model, size = question.catalogue.shape, published_bytes(question, gpu)
    if size is None:
        return None
    name = f"openai/{model.label}" if model.assumed else "the published model"
    return Remedy(
        f"vllm serve {name}",
        "mxfp4",
        f"the published model: its experts are MXFP4, {size / 2**30:.1f} GiB in all, which vLLM "
        "serves as they are",
    )


def _slower(question: Question, gpu: GPU) -> Remedy | None:
    """The least that the limits must give way, if only latency is too high."""
    if question.limits == NO_LIMITS:
        return None
    free = question.but(limits=NO_LIMITS)
    ranked = ranking_of(list(serving(free, gpu)), free)
    first = min(ranked, key=lambda c: question.limits.excess(c.speed), default=None)
    if first is None or first.speed is None:
        return None
    limits, speed, name = question.limits, first.speed, first.format.name
    options, unknown, figures = [], [], []
    for given, span, option, figure in (
        (limits.ttft, speed.first_token, "--ttft", "the first token after {}"),
        (limits.tpot, speed.step, "--tpot", "{} per token"),
    ):
        if given is not None and span is None:
            unknown.append(f"without {option}")
        elif given is not None and span is not None and span.typical > given:
            # Rounded up, so that the option admits it.
            options.append(f"{option} {-(-span.typical * 1000 // 1):.0f}ms")
            figures.append(figure.format(as_time(span.typical)))
    if unknown:
        says = f"no limit on a time that cannot be estimated for {gpu.name}: then {name} fits"
        return Remedy(", ".join(unknown + options), name, says)
    if not options:
        return None
    return Remedy(" ".join(options), name, f"slower answers: {' and '.join(figures)} with {name}")


def _partly(question: Question, gpu: GPU) -> Remedy | None:
    """A GGUF file partly offloaded to the host's memory."""
    if question.host is not None or not offload.is_possible(gpu) or gpu.bandwidth_gb_s == 0:
        return None
    host = offload.usual_host(gpu)
    # Its speed is the user's choice.
    first = _first(question.but(host=host, limits=NO_LIMITS), gpu)
    if first is None or first.size is None or first.size.offload is None or not first.fit:
        return None
    found, needed = first.size.offload, first.fit.host_bytes
    flag = f"--n-gpu-layers {found.n_gpu_layers}"
    if found.n_cpu_moe:
        flag = f"--n-cpu-moe {found.n_cpu_moe}"
    memory = -(-(needed + offload.SPARE_BYTES) // 10**9)
    rate = first.speed.each if first.speed else None
    if rate is not None and rate.high < LEAST_RATE:
        return None
    speed = f", {rate.low:.2g}-{rate.high:.2g} tokens/s per user" if rate else ""
    return Remedy(
        f"--host-memory {memory}GB",
        first.format.name,
        f"offload to host memory: {first.format.name} with {found.words} (llama-server {flag}) and "
        f"{needed / (1 << 30):.1f} GiB in {host.name}{speed}",
    )


def _smaller_model(question: Question, gpu: GPU) -> Remedy | None:
    """The largest usual size below this one that serves; its quality is not judged."""
    n_weights = question.catalogue.shape.n_parameters
    known = {sizes.parse(part): part for name in sizes.PUBLISHED for part in name.split("-")}
    for size, text in sorted(((s, t) for s, t in known.items() if s), reverse=True):
        if size > 0.9 * n_weights:
            continue
        of_it = shape.of(text)
        other = question.but(
            catalogue=Catalogue(of_it), qualities={}, measured=None, speculation=None
        )
        # What cannot fit by its bits alone need not be planned.
        among = tuple(
            one
            for one in good_enough(other)
            if may_fit(other, gpu, one, of_it.n_parameters * one.least_bits // 8)
        )
        if not among:
            continue
        if first := _first(other.but(catalogue=Catalogue(of_it, among)), gpu):
            like = of_it.note.removeprefix("taken to be like ").partition(" with ")[0]
            return Remedy(
                f"{text} as the model",
                first.format.name,
                f"a smaller model: {text} (such as {like}) with {first.format.name}; compare "
                "reports of both before you switch",
            )
    return None


def _kept(candidate: Candidate) -> float:
    return candidate.quality.recovery if candidate.quality else 0.0


def _first(question: Question, gpu: GPU) -> Candidate | None:
    """What would then be chosen."""
    return next(iter(ranking_of(list(serving(question, gpu)), question)), None)


def _longest_context(question: Question, gpu: GPU) -> tuple[int, Candidate] | None:
    """In steps of 256 tokens; a longer context never fits if a shorter one does not."""
    low, high = 0, (question.context - 1) // LEAST_CONTEXT
    if question.shared_prefix:  # which prompts must contain in any case
        low = min(high, -(-4 * question.shared_prefix // 3) // LEAST_CONTEXT + 1)

    def shortened(context: int) -> Question:
        answer = None if question.answer is None else min(question.answer, context // 4)
        return question.but(context=context, answer=answer)

    best: int | None = None
    while low < high:
        middle = (low + high + 1) // 2
        if any(serving(shortened(middle * LEAST_CONTEXT), gpu)):
            low = best = middle
        else:
            high = middle - 1
    if best is None:
        return None
    context = best * LEAST_CONTEXT
    first = _first(shortened(context), gpu)
    return None if first is None else (context, first)


def _most_users(
    question: Question, gpu: GPU, found: Sequence[Candidate]
) -> tuple[int, Candidate] | None:
    """As many as the roomiest format holds, the number that is printed for it; fewer if answers
    would be too slow.
    """
    good = [c for c in found if c.lacks == "memory" and _kept(c) >= question.min_quality]
    roomiest = max(good, key=lambda c: c.room, default=None)
    room = roomiest.room if roomiest else 0
    low, high = 0, min(room or MOST_USERS, (question.users or 1) - 1)
    middle = high
    while low < high:
        if any(serving(question.but(users=middle), gpu)):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    if low == 0:
        return None
    able = ranking_of(list(serving(question.but(users=low), gpu)), question)
    same = (c for c in able if low == room and roomiest and c.format == roomiest.format)
    return low, next(same, able[0])


def _smallest_gpu(question: Question, gpu: GPU) -> Candidate | None:
    """The GPU of the same vendor with the least memory that serves the model.

    GPUs with unreasonably slow memory are left out, and boards replace only boards.
    """
    is_board = gpu.name.startswith(COMPUTERS)
    larger = [
        other
        for other in gpus.outlines()
        if other.vendor == gpu.vendor
        and other.name.startswith(COMPUTERS) == is_board
        and other.memory_gb > gpu.memory_gb
        and other.bandwidth_gb_s >= gpu.bandwidth_gb_s / 2
    ]
    for other in sorted(larger, key=lambda g: (g.memory_gb, -(g.year or 0))):
        if first := _first(question, other.gpu):
            return first
    return None
