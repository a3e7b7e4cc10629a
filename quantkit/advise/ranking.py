"""Which of several candidates is better, for what somebody wants."""

from collections.abc import Sequence

from quantkit.advise.candidates import Candidate, Question, evaluate, merit
from quantkit.hardware.gpus import GPU

TIE = 0.1
"""Estimates that differ by less than this are taken as equal; quality decides between them."""
HANDICAP = 1.2
"""What another engine than the usual one must be better by: estimates of two engines compare less
well than those of one. Usual is vLLM, which serves several users at a time; on CPUs llama.cpp."""
QUALITY_STEP = 0.005
"""Qualities from different benchmarks are not told apart more finely than this."""
SPEED_STEP = 0.02


def ranked(question: Question, gpu: GPU) -> list[Candidate]:
    """All candidates, best first. Near the best figure quality decides, then the usual
    engine, then whether the GPU has the format's arithmetic. Where there is a report, what it does
    not cover comes after what it does."""
    return ranking_of(evaluate(question, gpu), question)


def ranking_of(found: Sequence[Candidate], question: Question) -> list[Candidate]:
    """The same of candidates that are there already."""
    serving = [c for c in found if c.serves]
    rest = [c for c in found if not c.serves]
    proven = [c for c in serving if c.quality is not None and not c.quality.is_prior]
    if question.qualities and proven:
        others = [c for c in serving if c not in proven]
        ordered = _ordered(proven, question.objective) + _ordered(others, question.objective)
    else:
        ordered = _ordered(serving, question.objective)
    return ordered + sorted(rest, key=lambda c: c.lacks == "support")


def _ordered(serving: Sequence[Candidate], objective: str) -> list[Candidate]:
    usual = "llama.cpp" if any(c.gpu.vendor == "cpu" for c in serving) else "vllm"

    def fair(candidate: Candidate) -> float:
        is_held = candidate.format.engine != usual and objective != "memory"
        return merit(candidate, objective) * (HANDICAP if is_held else 1.0)

    best = min(map(fair, serving), default=0.0)

    def key(candidate: Candidate) -> tuple[float, ...]:
        own = fair(candidate)
        kept = candidate.quality.recovery if candidate.quality else 0.0
        is_prior = candidate.quality is None or candidate.quality.is_prior
        is_unusual = candidate.format.engine != usual
        is_emulated = candidate.support.how != "native"
        if objective == "quality":
            return (-kept, is_prior, is_unusual, own // (best * SPEED_STEP))
        if own > best * (1 + TIE):
            return (1, own)
        near = (own / best - 1) // SPEED_STEP
        return (0, -kept_step(candidate), is_unusual, is_emulated, near)

    return sorted(serving, key=key)


def kept_step(candidate: Candidate) -> int:
    """The quality in steps that are told apart."""
    return round(candidate.quality.recovery / QUALITY_STEP) if candidate.quality else 0
