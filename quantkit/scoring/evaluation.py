"""A model's scores together with its individual answers, and their files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.scoring import answers
from quantkit.scoring.answers import Outcome
from quantkit.scoring.scorecard import Scorecard
from quantkit.storage import guarded, write_json


@dataclass(frozen=True)
class Evaluation:
    """Scores, and the answers they are computed from."""

    card: Scorecard
    outcomes: Sequence[Outcome]
    """Empty when only the scores are known."""

    def write(self, folder: Path) -> None:
        """`NAME.json` and `NAME.answers.parquet`."""
        with guarded(folder):
            folder.mkdir(parents=True, exist_ok=True)
            answers.write(folder / self.card.answers_name, self.outcomes)
        write_json(folder / self.card.file_name, self.card.to_json())

    @classmethod
    def read(cls, path: Path) -> "Evaluation":
        """Read a score file, with the answers next to it."""
        card = Scorecard.read(path)
        beside = path.with_name(card.answers_name)
        return cls(card, answers.read(beside) if beside.is_file() else [])


def read_all(paths: list[Path]) -> list[Evaluation]:
    """Read files, or all score files in folders."""
    from quantkit.errors import ScoreError

    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("*.json"))
            if not inside:
                raise ScoreError(f"{path} has no score files")
            files += inside
        else:
            files.append(path)
    return [Evaluation.read(file) for file in files]
