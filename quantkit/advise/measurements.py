"""Measured speeds in place of estimates, if they were measured under the load in question."""

from collections.abc import Iterable
from typing import Protocol

from quantkit.advise import parallel
from quantkit.advise.formats import Format
from quantkit.advise.question import Measurements, Question
from quantkit.advise.speed import Speed
from quantkit.advise.split import Split
from quantkit.errors import AdviceError
from quantkit.hardware.gpus import GPU, normal
from quantkit.storage import gib

NEAR = 0.25
"""Relative difference in prompt and answer lengths up to which a measurement applies."""
OTHER = 1.5
"""Factor between weights in memory and in the file beyond which it is a different model."""


class SpeedRecord(Protocol):
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


def speeds(found: Iterable[SpeedRecord], question: Question, gpu: GPU) -> Measurements:
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
    best: dict[str, SpeedRecord] = {}
    for record in found:
        fits = (
            record.model in formats
            and record.gpu is not None
            and normal(record.gpu) in {normal(name) for name in (gpu.name, *gpu.aliases)}
            and (record.n_gpus, record.concurrency) == (question.count, load.users)
            # Several replicas are not a way to share a model.
            and (record.sharing is None or Split(*record.sharing).n_gpus == question.count)
            and _near(record.prompt_tokens, load.prompt)
            and _near(record.output_tokens, load.answer)
            and not record.n_failed
        )
        if not fits or record.ttft_s is None or record.tpot_s is None:
            continue
        _refuse_another(record, formats[record.model], question)
        before = best.get(record.model)
        if before is None or record.output_tokens_per_s > before.output_tokens_per_s:
            best[record.model] = record
    result = {
        name: Speed.measured(record.ttft_s, record.tpot_s, record.output_tokens_per_s, load.answer)
        for name, record in best.items()
        if record.ttft_s is not None and record.tpot_s is not None
    }
    splits = {name: Split(*record.sharing) for name, record in best.items() if record.sharing}
    return Measurements(gpu.name, question.count, load, result, splits)


def _refuse_another(record: SpeedRecord, format: Format, question: Question) -> None:
    """Refuse another model's measurements: they have the recipe's name, but other bytes."""
    if not record.weight_bytes:
        return
    shape, count = question.catalogue.shape, question.count
    expected = count * parallel.bytes_per_gpu(shape, format.recipe, count)
    if not 1 / OTHER < record.weight_bytes / expected < OTHER:
        raise AdviceError(
            f"the bench file is of another model: its {record.model} has "
            f"{gib(record.weight_bytes)} of weights, that of {shape.label} has {gib(expected)}"
        )


def _near(measured: int | None, asked: int) -> bool:
    return measured is not None and abs(measured - asked) <= NEAR * max(asked, 1)
