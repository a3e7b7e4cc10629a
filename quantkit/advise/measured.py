"""Measured speeds in place of estimates, where they were measured under the load in question."""

from collections.abc import Iterable
from typing import Protocol

from quantkit.advise.candidates import Question
from quantkit.advise.gpus import GPU, normal
from quantkit.advise.speed import Speed

NEAR = 0.25
"""Prompts and answers may differ from those in question by this share."""


class Seen(Protocol):
    """What a load generator tells of one model under one load."""

    @property
    def model(self) -> str:
        """The checkpoint's name, which is its recipe's."""
        ...

    @property
    def gpu(self) -> str | None: ...
    @property
    def n_gpus(self) -> int: ...
    @property
    def concurrency(self) -> int | None: ...
    @property
    def prompt_tokens(self) -> int | None: ...
    @property
    def output_tokens(self) -> int | None: ...
    @property
    def output_tokens_per_s(self) -> float: ...
    @property
    def ttft_s(self) -> float | None: ...
    @property
    def tpot_s(self) -> float | None: ...
    @property
    def n_failed(self) -> int: ...


def speeds(found: Iterable[Seen], question: Question, gpu: GPU) -> dict[str, Speed]:
    """For `Question.speeds`: what was measured on this GPU, with these users and lengths."""
    load = question.load(question.users or 1)
    names = {format.name for format in question.catalogue.formats}
    result = {}
    for seen in found:
        fits = (
            seen.model in names
            and seen.gpu is not None
            and normal(seen.gpu) in {normal(name) for name in (gpu.name, *gpu.aliases)}
            and (seen.n_gpus, seen.concurrency) == (question.count, load.users)
            and _near(seen.prompt_tokens, load.prompt)
            and _near(seen.output_tokens, load.answer)
            and not seen.n_failed
        )
        if fits and seen.ttft_s is not None and seen.tpot_s is not None:
            result[seen.model] = Speed.measured(
                seen.ttft_s, seen.tpot_s, seen.output_tokens_per_s, load.answer
            )
    return result


def _near(seen: int | None, asked: int) -> bool:
    return seen is not None and abs(seen - asked) <= NEAR * max(asked, 1)
