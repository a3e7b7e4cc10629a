"""Runs steps one after another, in this process."""

from quantkit.progress import Progress
from quantkit.sweep.expand import Devices
from quantkit.sweep.graph import Step
from quantkit.sweep.spec import SweepSpec
from quantkit.sweep.worker import Functions, Job, Outcome, execute


class LocalExecutor:
    """Runs one job at a time."""

    def __init__(self, progress: Progress, functions: Functions | None = None) -> None:
        self._progress, self._functions = progress, functions
        self._job: Job | None = None

    def bundle(self, step: Step) -> str:
        """Recipes share a pass, and all tasks share a loaded model."""
        return f"score {step.work['title']}" if step.kind == "score" else step.together

    def room(self) -> int:
        """One job at a time."""
        return int(self._job is None)

    def start(self, job: Job) -> None:
        """Accept a job."""
        self._job = job

    def wait(self) -> list[tuple[Job, Outcome]]:
        """Run it."""
        if (job := self._job) is None:
            return []
        self._job = None
        return [(job, execute(job, self._progress, self._functions))]


def devices(spec: SweepSpec) -> Devices:
    """The devices of this machine; more than it has is refused."""
    import torch

    from quantkit import device
    from quantkit.errors import HardwareError

    count = torch.cuda.device_count()
    for kind in spec.resources:
        asked = spec.of(kind).gpus or 0
        if asked > count:
            raise HardwareError(
                f"resources.{kind} asks for {asked} GPU{'s' * (asked > 1)}, and this machine has "
                f"{count or 'none'}; ask for fewer, or run on a cluster with --on ray"
            )

    def chosen(kind: str) -> str:
        return "cpu" if spec.of(kind).gpus == 0 else device.choose(spec.device).type

    return Devices(chosen("quantize"), chosen("score"), spec.of("quantize").gpus or 1)
