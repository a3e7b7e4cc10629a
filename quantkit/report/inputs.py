"""What a report is made from: score files, and manifests of the checkpoints that were scored."""

from collections.abc import Sequence
from pathlib import Path

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
    scores = [path for path in paths if path not in folders]
    if not scores:
        raise ScoreError("there are no score files among these; run quantkit score -o DIR first")
    return [_told(evaluation, manifests) for evaluation in read_all(scores)]


def _told(evaluation: Evaluation, manifests: dict[str, Manifest]) -> Evaluation:
    card = evaluation.card
    if card.made is not None or card.digest not in manifests:
        return evaluation
    return Evaluation(
        card.model_copy(update={"made": made(manifests[card.digest])}), evaluation.outcomes
    )
