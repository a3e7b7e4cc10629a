"""Recommendations as data: what `--json` prints. Later versions add keys and change none."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from quantkit.advise import not_considered, words
from quantkit.advise.candidates import Candidate
from quantkit.advise.comparison import ModelComparison
from quantkit.advise.question import Question
from quantkit.advise.recommendation import Recommendation
from quantkit.advise.shape import ModelShape
from quantkit.advise.speed import Span, Speed

VERSION = 1


def to_json(
    found: Sequence[Recommendation],
    across: ModelComparison | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Answers to one question, on one or several kinds of GPU, or for several models."""
    question = found[0].question
    data = {
        "schema": VERSION,
        "model": _model(question.catalogue.shape),
        "question": _question(question),
        "answers": [_answer(one) for one in found],
        "notes": list(notes),
    }
    if across is not None:
        data["models"] = [_model(one.question.catalogue.shape) for one in found]
        data["across"] = asdict(across) | {"best": across.best}
    return data


def _model(shape: ModelShape) -> dict[str, Any]:
    return {
        "name": shape.label,
        "parameters": shape.n_parameters,
        "size_bytes": shape.size_bytes,
        "assumed": shape.note if shape.assumed else None,
    }


def _question(question: Question) -> dict[str, Any]:
    load = question.load(question.users or 1)
    return {
        "objective": question.objective,
        "gpu_count": question.count,
        "context": load.context,
        "prompt": load.prompt,
        "answer": load.answer,
        "users": question.users,
        "min_quality": question.min_quality,
        "utilisation": question.utilisation,
        "gpu_hour": question.gpu_hour,
        "ttft": question.limits.ttft,
        "tpot": question.limits.tpot,
        "shared_prefix": question.shared_prefix,
        "prefix_hit_rate": load.hit_rate,
    }


def _answer(found: Recommendation) -> dict[str, Any]:
    second = found.runner_up
    return {
        "gpu": found.gpu.name,
        "format": None if found.chosen is None else found.chosen.format.name,
        "reason": found.reason,
        "sharing": words.sharing(found.chosen, found.question) or None if found.chosen else None,
        "runner_up": None if second is None else second.format.name,
        "runner_up_reason": found.runner_up_reason or None,
        "changes": list(found.changes),
        "remedies": [asdict(remedy) for remedy in found.remedies],
        "candidates": [_candidate(candidate) for candidate in found.candidates],
        "not_considered": not_considered.recipes(found.question.catalogue),
        "notes": list(found.notes),
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    quality, costs = candidate.quality, candidate.costs
    offload = candidate.size.offload if candidate.size else None
    return {
        "format": candidate.format.name,
        "engine": candidate.format.engine,
        "serves": candidate.serves,
        "problem": candidate.problem or None,
        "lacks": candidate.lacks or None,
        "support": candidate.support._asdict(),
        "users": candidate.load.users,
        "split": asdict(candidate.split),
        "memory": None if candidate.fit is None else candidate.fit.to_json(),
        "speed": None if candidate.speed is None else _speed(candidate.speed),
        "quality": None if quality is None else asdict(quality),
        "cost_per_million_tokens": _span(candidate.cost),
        "cost_per_million_prompt_tokens": _span(costs.prompt) if costs else None,
        "cost_per_million_answer_tokens": _span(costs.answer) if costs else None,
        "offload": None
        if offload is None
        else {
            "n_gpu_layers": offload.n_gpu_layers,
            "n_cpu_moe": offload.n_cpu_moe,
            "host_bytes": candidate.fit.host_bytes if candidate.fit else 0,
        },
    }


def _speed(speed: Speed) -> dict[str, Any]:
    return {
        "measured": speed.is_measured,
        "first_token_seconds": _span(speed.first_token),
        "seconds_between_tokens": _span(speed.step),
        "answer_seconds": _span(speed.answer),
        "tokens_per_second_each": _span(speed.each),
        "tokens_per_second_all": _span(speed.total),
        "bound": speed.bound,
        "drafted": speed.drafted,
        "gain": speed.gain,
    }


def _span(span: Span | None) -> dict[str, float] | None:
    return None if span is None else asdict(span)
