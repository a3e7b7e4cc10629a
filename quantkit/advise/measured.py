"""Measured speeds in place of estimates, if they were measured under the load in question."""

from collections.abc import Iterable
from typing import Protocol

from quantkit.advise import parallel
from quantkit.advise.candidates import Measurements, Question
from quantkit.advise.formats import Format
from quantkit.advise.speed import Speed
from quantkit.advise.split import Split
from quantkit.errors import AdviceError
from quantkit.hardware.gpus import GPU, normal
from quantkit.storage import gib

NEAR = 0.25
"""Relative difference in prompt and answer lengths up to which a measurement applies."""
OTHER = 1.5
"""Factor between weights in memory and in the file beyond which it is a different model."""


class Seen(Protocol):
    """Results of a load generator for one model under one load."""

    @property
    def model(self) -> str:
        """The checkpoint's name, which is that of its recipe."""
        ...

    @property
    def gpu(self) -> str | None: ...
    @property
    def n_gpus(self) -> int: ...
    @property
    def sharing(self) -> tuple[int, int, bool] | None:
        """Tensor-parallel size, pipeline stages, and whether experts stay whole; None: unknown."""
        ...

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
    def weight_bytes(self) -> int | None: ...
    @property
    def n_failed(self) -> int: ...


def speeds(found: Iterable[Seen], question: Question, gpu: GPU) -> Measurements:
    """What was measured on this GPU, with these users and lengths.

    Of several settings, the one with the most tokens per second.
    """
    if question.users is None and question.objective == "throughput":
        raise AdviceError(
            "for throughput give --users: what was measured holds for its "
            "own number of users, not for as many as fit"
        )
    load = question.load(question.users or 1)
    formats = {format.name: format for format in question.catalogue.formats}
    best: dict[str, Seen] = {}
    for seen in found:
        fits = (
            seen.model in formats
            and seen.gpu is not None
            and normal(seen.gpu) in {normal(name) for name in (gpu.name, *gpu.aliases)}
            and (seen.n_gpus, seen.concurrency) == (question.count, load.users)
            # Several replicas are not a way to share a model.
            and (seen.sharing is None or Split(*seen.sharing).n_gpus == question.count)
            and _near(seen.prompt_tokens, load.prompt)
            and _near(seen.output_tokens, load.answer)
            and not seen.n_failed
        )
        if not fits or seen.ttft_s is None or seen.tpot_s is None:
            continue
        _refuse_another(seen, formats[seen.model], question)
        before = best.get(seen.model)
        if before is None or seen.output_tokens_per_s > before.output_tokens_per_s:
            best[seen.model] = seen
    result = {
        name: Speed.measured(seen.ttft_s, seen.tpot_s, seen.output_tokens_per_s, load.answer)
        for name, seen in best.items()
        if seen.ttft_s is not None and seen.tpot_s is not None
    }
    splits = {name: Split(*seen.sharing) for name, seen in best.items() if seen.sharing}
    return Measurements(gpu.name, question.count, load, result, splits)


def _refuse_another(seen: Seen, format: Format, question: Question) -> None:
    """Refuse another model's measurements: they have the recipe's name, but other bytes."""
    if not seen.weight_bytes:
        return
    shape, count = question.catalogue.shape, question.count
    expected = count * parallel.bytes_per_gpu(shape, format.recipe, count)
    if not 1 / OTHER < seen.weight_bytes / expected < OTHER:
        raise AdviceError(
            f"another model was measured: its {seen.model} has {gib(seen.weight_bytes)} of "
            f"weights, that of {shape.label} has {gib(expected)}"
        )


def _near(seen: int | None, asked: int) -> bool:
    return seen is not None and abs(seen - asked) <= NEAR * max(asked, 1)
