"""Ranking of candidates by an objective."""

from collections.abc import Sequence

from quantkit.advise.candidates import Candidate, merit
from quantkit.advise.question import Question

TIE = 0.1
"""Estimates that differ by less than this count as equal; quality decides between them."""
HANDICAP = 1.2
"""Factor by which an engine other than the usual one must win: estimates for two engines compare
less well than those for one. The usual engine is vLLM, which batches users; on CPUs llama.cpp.
"""
QUALITY_STEP = 0.005
"""Resolution at which qualities from different benchmarks are compared."""
SPEED_STEP = 0.02


def ranking_of(found: Sequence[Candidate], question: Question) -> list[Candidate]:
    """Candidates, best first.

    Near the best figure quality decides, then the usual engine, then whether the GPU has the
    format's arithmetic. With a report, candidates it does not cover come after those it does.
    """
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
    """Quality in steps of the resolution."""
    return round(candidate.quality.recovery / QUALITY_STEP) if candidate.quality else 0
