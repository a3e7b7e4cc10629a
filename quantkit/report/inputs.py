"""What a report is made from: score files, manifests of checkpoints, and measured speeds."""

from collections.abc import Sequence
from pathlib import Path

from quantkit.bench import record
from quantkit.bench.record import Bench
from quantkit.errors import ScoreError
from quantkit.export.manifest import Manifest, is_checkpoint
from quantkit.score.evaluation import Evaluation, read_all
from quantkit.score.harness import made


def read(paths: Sequence[Path]) -> list[Evaluation]:
    """Evaluations of score files and folders of them.

    Checkpoint folders among the paths tell how a checkpoint was made, where a score file of old
    does not; they are told apart by digests.
    """
    folders = [path for path in paths if path.is_dir() and is_checkpoint(path)]
    manifests = {found.digest: found for found in map(Manifest.read, folders)}
    scores = [file for path in paths if path not in folders for file in _without_speeds(path)]
    if not scores:
        raise ScoreError("there are no score files among these; run quantkit score -o DIR first")
    return [_told(evaluation, manifests) for evaluation in read_all(scores)]


def speeds(paths: Sequence[Path]) -> list[Bench]:
    """What `quantkit bench` measured, among the same paths."""
    files = [path / record.FILE if path.is_dir() else path for path in paths]
    return [record.read(file) for file in files if record.is_bench(file)]


def _without_speeds(path: Path) -> list[Path]:
    """The same path, or what else a folder of measurements holds."""
    if path.is_dir() and record.is_bench(path / record.FILE):
        return [file for file in sorted(path.glob("*.json")) if file.name != record.FILE]
    return [] if record.is_bench(path) else [path]


def _told(evaluation: Evaluation, manifests: dict[str, Manifest]) -> Evaluation:
    card = evaluation.card
    if card.made is not None or card.digest not in manifests:
        return evaluation
    return Evaluation(
        card.model_copy(update={"made": made(manifests[card.digest])}), evaluation.outcomes
    )
