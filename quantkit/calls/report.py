"""Compare scored models with their source, and write scores into model cards."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.calls import Notify, Work, hub, silent, validation
from quantkit.errors import ScoreError

if TYPE_CHECKING:
    from quantkit.export.card_facts import Scored
    from quantkit.export.foreign_card import Foreign
    from quantkit.export.manifest import Manifest
    from quantkit.progress import Progress
    from quantkit.report.comparison import Report
    from quantkit.scoring.evaluation import Evaluation


@dataclass(frozen=True)
class Reporting:
    """One call of `report`, or of `compare` with scores."""

    scores: "Sequence[Path | Evaluation]"
    """Score files, folders of them, checkpoint folders, bench.json files, or evaluations."""
    out: Path | None = None
    notes: tuple[str, ...] = ()

    needs_hub = False
    needs_transformers = False

    def ready(self, notify: Notify = silent) -> "Work[Report]":
        """Refuse missing files."""
        paths = [one for one in self.scores if isinstance(one, Path)]
        for path in paths:
            validation.file(path)
        validation.output(self.out)

        def work(progress: "Progress") -> "Report":
            from quantkit.report import files, inputs, speed
            from quantkit.report.comparison import Report
            from quantkit.storage import output_folder

            given = [one for one in self.scores if not isinstance(one, Path)]
            with output_folder(self.out) if self.out is not None else nullcontext():
                read = inputs.read(paths) if paths else []
                report = speed.joined(Report.of([*given, *read], self.notes), inputs.speeds(paths))
                if self.out is not None:
                    files.write(report, self.out)
            return report

        return work


@dataclass(frozen=True)
class Card:
    """A model card after a call of `card`."""

    path: Path
    changed: bool
    tasks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "changed": self.changed, "tasks": list(self.tasks)}


@dataclass(frozen=True)
class Describing:
    """One call of `card`."""

    checkpoints: Sequence[Path]
    """Folders, GGUF files, or hub ids, whose cards go into a local folder of that name: the hub's
    cache stays as it was downloaded.
    """
    scores: Sequence[Path] = ()
    report: Path | None = None
    without_scores: bool = False
    """Existing scores of a card may be dropped."""

    needs_transformers = False

    @property
    def needs_hub(self) -> bool:
        return hub.any_named(self.checkpoints)

    def ready(self, notify: Notify = silent) -> "Work[list[Card]]":
        """Refuse folders and scores that cannot be read."""
        from quantkit.export.manifest import Manifest, is_checkpoint
        from quantkit.model.source import is_hub_id, placed
        from quantkit.report import document
        from quantkit.scoring.evaluation import read_all

        outs = {
            placed(path): Path(path.name.partition(":")[0]) if is_hub_id(str(path)) else None
            for path in self.checkpoints
        }
        ours = [path for path in outs if is_checkpoint(path) or not path.exists()]
        for folder in ours:
            Manifest.read(folder).require_whole(folder)
        evaluations = read_all(list(self.scores))
        report = document.read(self.report) if self.report else None

        def work(progress: "Progress") -> list[Card]:
            from quantkit.export import foreign_card
            from quantkit.report import card

            # Everything is read and validated before the first card is written.
            found = []
            for path, out in outs.items():
                name = out.name if out is not None else None
                known = (
                    Manifest.read(path) if path in ours else foreign_card.Foreign.open(path, name)
                )
                folder = path if path in ours or path.is_dir() else path.parent
                runs = card.scored(known, evaluations, report)
                self._refuse_loss(out or folder, runs)
                found.append((folder, known, runs, out))
            return [_written(*one) for one in found]

        return work

    def _refuse_loss(self, folder: Path, runs: "list[Scored]") -> None:
        from quantkit.export import card

        if not runs and not self.without_scores and card.has_scores(card.existing(folder)):
            raise ScoreError(
                f"{folder}: its card has scores, which would be lost; give them with --scores or "
                "--report, or drop them with --without-scores"
            )


def _written(
    folder: Path, known: "Manifest | Foreign", runs: "list[Scored]", out: Path | None
) -> Card:
    from quantkit.export import card, foreign_card
    from quantkit.export.manifest import Manifest
    from quantkit.model.description import README

    if isinstance(known, Manifest):
        changed = card.refresh(folder, known, runs, out)
    else:
        changed = foreign_card.refresh(known, runs, out)
    return Card(
        (out or folder) / README, changed, tuple(task for run in runs for task in run.tasks)
    )
