"""The smallest changes after which something serves, the cheapest first."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.advise.candidates import Candidate, Question, evaluate
from quantkit.advise.ranking import ranked
from quantkit.advise.split import ANY
from quantkit.hardware import gpus
from quantkit.hardware.gpus import GPU

COUNTS = (2, 3, 4, 5, 6, 7, 8, 16)
LEAST_CONTEXT = 256


@dataclass(frozen=True)
class Remedy:
    """A change, and the format that serves after it."""

    change: str
    """As an option of `quantkit recommend`."""
    format: str
    says: str


def find(question: Question, gpu: GPU) -> list[Remedy]:
    """Every single change that helps: another way to share it where one was insisted on, a cache
    in FP8, less quality, a shorter context, fewer users, more such GPUs, another GPU."""
    return list(_find(question, gpu))


def _find(question: Question, gpu: GPU) -> Iterator[Remedy]:
    if question.wish.is_any and (first := _first(question.but(wish=ANY), gpu)):
        yield Remedy(
            "without --tensor-parallel and the like",
            first.format.name,
            f"another way to share it: {first.split} with {first.format.name}",
        )
    found = evaluate(question, gpu)
    # Formats that fit and only lack quality: of those, the one that keeps most.
    short = [c for c in found if c.lacks == "quality" and c.quality is not None]
    if short:
        best = max(short, key=_kept)
        what = "an FP8 KV cache" if best.format.has_fp8_cache else "a smaller format"
        # Rounded down, so that the option lets it in.
        floor = int(_kept(best) * 1000) / 1000
        yield Remedy(
            f"--min-quality {floor:g}",
            best.format.name,
            f"{what}: {best.format.name} fits and keeps {_kept(best):.3f} of the quality",
        )
    if shorter := _longest_context(question, gpu):
        context, best = shorter
        yield Remedy(
            f"--context {context}",
            best.format.name,
            f"a shorter context: {context:,} tokens fit with {best.format.name}",
        )
    if question.users and question.users > 1:
        fewer = [c for c in evaluate(question.but(users=1), gpu) if c.serves and c.fit]
        if fewer:
            best = max(fewer, key=lambda c: c.fit.users if c.fit else 0)
            users = best.fit.users if best.fit else 1
            yield Remedy(
                f"--users {users}",
                best.format.name,
                f"fewer users: {users} fit at the same time with {best.format.name}",
            )
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
            f"--gpu '{larger.gpu.name}'",
            larger.format.name,
            f"a larger GPU: {larger.count} x {larger.gpu.name} ({larger.gpu.memory_gb:g} GB) "
            f"with {larger.format.name}",
        )


def _kept(candidate: Candidate) -> float:
    return candidate.quality.recovery if candidate.quality else 0.0


def _first(question: Question, gpu: GPU) -> Candidate | None:
    """What would be the choice then."""
    best = ranked(question, gpu)[0]
    return best if best.serves else None


def _longest_context(question: Question, gpu: GPU) -> tuple[int, Candidate] | None:
    """In steps of 256 tokens; a longer context never fits where a shorter one does not."""
    low, high = 0, (question.context - 1) // LEAST_CONTEXT
    best: tuple[int, Candidate] | None = None
    while low < high:
        middle = (low + high + 1) // 2
        context = middle * LEAST_CONTEXT
        answer = None if question.answer is None else min(question.answer, context)
        if first := _first(question.but(context=context, answer=answer), gpu):
            low, best = middle, (context, first)
        else:
            high = middle - 1
    return best


def _smallest_gpu(question: Question, gpu: GPU) -> Candidate | None:
    """Of the same vendor, the one with the least memory that serves it; but none whose memory is
    so slow that nobody would take it in place of the other."""
    larger = [
        other
        for other in gpus.load()
        if other.vendor == gpu.vendor
        and other.memory_gb > gpu.memory_gb
        and other.bandwidth_gb_s >= gpu.bandwidth_gb_s / 2
    ]
    for other in sorted(larger, key=lambda g: (g.memory_gb, -(g.year or 0))):
        if first := _first(question, other):
            return first
    return None
