"""What a run finished before it was stopped while renaming its folders.

Folders are renamed one after another. Until all are, each holds the key of its run, by which the
same command recognises its own work and resumes it. Anything else that exists is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quantkit import __version__
from quantkit.export.checkpoint import Checkpoint
from quantkit.gguf.imatrix import ImportanceMatrix
from quantkit.gguf.plan import GGUFPlan
from quantkit.onepass import mark
from quantkit.progress import Progress
from quantkit.registry import NATIVE
from quantkit.storage import refuse_existing

if TYPE_CHECKING:
    from quantkit.onepass.prepare import Job
    from quantkit.plan.checkpoint import Plan

Key = Mapping[str, str]
"""Everything that determines what a run writes for a recipe; messages name what differs."""


def key_of(job: "Job", plan: "Plan | GGUFPlan") -> Key:
    """The key of one recipe of a run."""
    matrix = job.matrix if isinstance(plan, GGUFPlan) else None
    key = dict(basic_key(job.source_record.fingerprint, plan.recipe.digest, job.device, matrix))
    if job.learns(plan):
        assert job.calibration is not None
        n_samples, length = job.calibration.ids.shape
        size = f"{n_samples:,} samples of {length:,} tokens"
        key["calibration"] = f"{size}{mark.DIGEST}{job.calibration.digest}"
        if job.cost is not None and job.cost.experts_bytes:
            key["choice of experts' statistics"] = "shared" if job.shares_experts else "own"
    if job.engine != NATIVE:
        key["engine"] = job.engine
    return key


def basic_key(
    source: str, recipe: str, device: torch.device, matrix: ImportanceMatrix | None
) -> Key:
    """What determines it without calibration, too."""
    return {
        "source": source,
        "recipe": recipe,
        "device": device.type,
        "version of quantkit or torch": f"{__version__} {torch.__version__}",
        **({"importance matrix": matrix.digest} if matrix is not None else {}),
    }


def finished(keys: Mapping[Path, Key], force: bool, progress: Progress) -> dict[Path, Checkpoint]:
    """Folders that stopped runs with these keys finished; other keys are refused."""
    found: dict[Path, Checkpoint] = {}
    for target, key in keys.items():
        if force or (left := mark.key_in(target)) is None:
            continue
        if left != key:
            refuse_existing(target, force)
        found[target] = Checkpoint.open(target)
        progress.note(f"{target.name}: already finished, resumed")
    return found


def without_finished(job: "Job", force: bool, progress: Progress) -> "Job":
    """The same job with only what remains to be made."""
    keys = {target: key_of(job, plan) for target, plan in job.everything}
    found = finished(keys, force, progress)
    if not found:
        return job
    plans = [(t, p) for t, p in zip(job.targets, job.plans, strict=True) if t not in found]
    files = [(t, p) for t, p in zip(job.file_targets, job.files, strict=True) if t not in found]
    return replace(
        job,
        targets=[target for target, _ in plans],
        plans=[plan for _, plan in plans],
        file_targets=[target for target, _ in files],
        files=[plan for _, plan in files],
        finished=list(found.values()),
    )
