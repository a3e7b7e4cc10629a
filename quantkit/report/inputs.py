"""What a report is made from: score files, manifests of checkpoints, and measured speeds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.bench import record
from quantkit.bench.record import Bench
from quantkit.errors import ScoreError
from quantkit.export import verified
from quantkit.export.manifest import Manifest, is_checkpoint
from quantkit.export.verified import Verified
from quantkit.scoring import provenance
from quantkit.scoring.evaluation import Evaluation, read_all


def read(paths: Sequence[Path]) -> list[Evaluation]:
    """Evaluations from score files and folders of them.

    Checkpoint folders among the paths add how a checkpoint was made, where an old score file does
    not say, and how an engine handled it; they are matched by digests.
    """
    folders = [path for path in paths if path.is_dir() and is_checkpoint(path)]
    manifests = {found.digest: found for found in map(Manifest.read, folders)}
    proofs = {found.digest: found for f in folders if (found := _proof(f)) is not None}
    scores = [file for path in paths if path not in folders for file in _without_speeds(path)]
    if not scores:
        raise ScoreError("there are no score files among these; run quantkit score -o DIR first")
    return [_with_manifest(evaluation, manifests, proofs) for evaluation in read_all(scores)]


def speeds(paths: Sequence[Path]) -> list[Bench]:
    """What `quantkit bench` measured, among the same paths."""
    files = [path / record.FILE if path.is_dir() else path for path in paths]
    return [record.read(file) for file in files if record.is_bench(file)]


def _without_speeds(path: Path) -> list[Path]:
    """The same path, or what else a folder of measurements holds."""
    if path.is_dir() and record.is_bench(path / record.FILE):
        return [file for file in sorted(path.glob("*.json")) if file.name != record.FILE]
    return [] if record.is_bench(path) else [path]


def _proof(folder: Path) -> Verified | None:
    return verified.current(folder, Manifest.read(folder))


def _with_manifest(
    evaluation: Evaluation, manifests: dict[str, Manifest], proofs: dict[str, Verified]
) -> Evaluation:
    card = evaluation.card
    update: dict[str, Any] = {}
    if card.made is None and card.digest in manifests:
        update["made"] = provenance.of_manifest(manifests[card.digest])
    if card.digest in proofs:
        update["verified"] = proofs[card.digest]
    return Evaluation(card.model_copy(update=update), evaluation.outcomes) if update else evaluation
