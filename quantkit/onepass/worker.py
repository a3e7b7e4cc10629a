"""What the first rank, which prepares and writes a run, sends to the others to do."""

from dataclasses import dataclass

import torch

from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import SourceError
from quantkit.model.source import ModelSource
from quantkit.onepass.estimate import Estimate, require_room
from quantkit.onepass.importance import Importance
from quantkit.onepass.onepass import Pass, quantize_blocks
from quantkit.onepass.prepare import Job
from quantkit.onepass.ranks import Ranks
from quantkit.plan.checkpoint import Plan


@dataclass(frozen=True)
class WorkerJob:
    """Everything that a rank must know."""

    fingerprint: str
    """Fingerprint of the source, which must be the same on all."""
    plans: list[Plan]
    calibration: CalibrationTokens | None
    """None where nothing is learned from data: the first rank does that alone."""
    cost: Estimate | None
    seeks_importance: bool

    @classmethod
    def of(cls, job: Job, plans: list[Plan]) -> "WorkerJob":
        learns = bool(plans or job.files_by_gram) or job.seeks_importance
        calibration = job.calibration if learns else None
        mark = job.source_record.fingerprint
        return cls(mark, plans, calibration, job.cost, job.seeks_importance)


def take_part(source: ModelSource, device: torch.device, offload: str, ranks: Ranks) -> None:
    """The work of every rank but the first: everything except preparing and writing."""
    job: WorkerJob = ranks.share(None)
    if job.calibration is not None:
        if source.fingerprint != job.fingerprint:
            raise SourceError(
                f"{source.folder} is not the model that rank 0 has; give all machines the same"
            )
        assert job.cost is not None
        if require_room(job.cost, device, offload):
            offload = "always"
        importance = Importance() if job.seeks_importance else None
        wanted = Pass(
            source,
            job.plans,
            job.calibration,
            device,
            importance=importance,
            ranks=ranks,
            shares_experts=job.cost.shares_experts,
        )
        quantize_blocks(wanted, offload)
    ranks.part()
