"""Measure what a draft model gains for a target."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.calls import Notify, Work, hub, silent, validation
from quantkit.errors import AdviceError

if TYPE_CHECKING:
    from quantkit.draft.measure import Draft
    from quantkit.draft.speedup import Costs
    from quantkit.progress import Progress


@dataclass(frozen=True)
class Continuations:
    """Text that the target generates and the draft is compared with."""

    calibration: str
    """A set, its file, or a text: the source of prompts."""
    samples: int = 32
    prompt: int = 64
    """Tokens per prompt."""
    tokens: int = 64
    """Tokens that the target generates."""
    temperature: float = 1.0
    on_text: bool = False
    """Use the set's own continuations."""
    seed: int = 0


@dataclass(frozen=True)
class Drafting:
    """One call of `draft`."""

    target: str
    draft: str
    text: Continuations
    gpu: str | None = None
    """GPU whose roofline gives the speed-ups; None: based on the bytes that both models read."""
    users: int = 1
    device: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False

    needs_transformers = True

    @property
    def needs_hub(self) -> bool:
        away = not (hub.is_local(self.target) and hub.is_local(self.draft))
        return away or hub.set_needs(self.text.calibration)

    def ready(self, notify: Notify = silent) -> "Work[Draft]":
        """Validate before a model is loaded."""
        validation.models([self.target], self.revision)
        validation.models([self.draft])
        validation.calibration(self.text.calibration)
        if self.gpu is not None:
            from quantkit.hardware import gpus

            gpus.find(self.gpu)
        return self._measure

    def _measure(self, progress: "Progress") -> "Draft":
        from quantkit import opening
        from quantkit.draft.measure import DraftOptions, measure
        from quantkit.scoring import evaluation_text

        text, trusting = self.text, self.trust_remote_code
        asked = DraftOptions(
            text.calibration,
            text.samples,
            text.prompt,
            text.tokens,
            text.temperature,
            text.on_text,
            text.seed,
            evaluation_text.to_avoid,
        )
        big = opening.find(self.target, self.revision, trusting)
        small = opening.find(self.draft, None, trusting)
        costs, name = None, None
        if self.gpu is not None:
            depth = text.prompt + text.tokens
            costs, name = _costs(big.folder, small.folder, self.gpu, self.users, depth)
        found = measure(big, small, asked, self.device, progress, trusting, costs)
        return replace(found, gpu=name, users=self.users)


def _costs(target: Path, draft: Path, gpu: str, users: int, depth: int) -> "tuple[Costs, str]":
    """Cost of a pass of each model on a GPU, and the GPU's full name."""
    from quantkit.advise import formats, work
    from quantkit.advise.speed import Case
    from quantkit.draft.speedup import Costs, on_gpu, shortest
    from quantkit.hardware import gpus
    from quantkit.hardware.support import runs
    from quantkit.serving.target import open_target

    place, found = gpus.find(gpu), []
    for folder in (target, draft):
        model = open_target(folder)
        if model.shape is None or (model.is_stored and model.recipe is not None):
            raise AdviceError(f"{folder} belongs to a family without a speed estimate; omit --gpu")
        form = formats.of(model.recipe)
        support = runs(place, form.key, form.engine)
        if support.how == "no":
            raise AdviceError(f"{place.name} does not run {folder.name}: {support.reason}")
        found.append(Case(model.shape, work.of(model.shape, form), form, place))
    big, small = (on_gpu(case, users, depth) for case in found)
    return Costs(big, small, shortest(found[0], users)), place.name
