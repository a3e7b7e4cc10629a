"""Load calibration tokens by name: a folder, a named set, or the user's own data."""

from collections.abc import Callable, Sequence
from pathlib import Path

from quantkit.calibration import calibration_set, inspection, spec
from quantkit.calibration.build import Vocabulary, build, choose
from quantkit.calibration.calibration_set import CalibrationSet
from quantkit.calibration.lookup import find as find
from quantkit.calibration.overlap.contamination import EvaluationText
from quantkit.calibration.pool import Reading
from quantkit.calibration.spec import SetSpec
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import DataError
from quantkit.home import expanded
from quantkit.progress import Progress

Evaluation = Callable[[Sequence[str], Path], tuple[EvaluationText, dict[str, str]]]
"""Finds the text that models will be scored on: takes names and a folder for files, returns text
and digests.
"""


def load(
    name: str,
    model: Vocabulary,
    progress: Progress,
    n_samples: int | None = None,
    length: int | None = None,
    evaluation: Evaluation | None = None,
) -> CalibrationTokens:
    """Tokens of a finished set, or of one built now from a set's file or from data."""
    if length is not None and length > model.context:
        raise DataError(
            f"samples of {length:,} tokens are longer than the model's context of "
            f"{model.context:,}; give a smaller --length"
        )
    folder = expanded(name)
    if folder.is_dir() and calibration_set.is_set(folder):
        return part_of(calibration_set.read(folder), model, n_samples, length, name)
    wanted, base = find(name)
    changes = {"n_samples": n_samples, "max_length": length}
    wanted = spec.changed(wanted, {k: v for k, v in changes.items() if v is not None}, name)
    if unusual := inspection.unusual_size(wanted.n_samples):
        progress.note(f"warning: {unusual}")
    text, _ = _avoided(name, wanted, base, evaluation)
    return choose(name, wanted, Reading(base), model, progress, text).tokens


def make(
    name: str,
    wanted: SetSpec,
    reading: Reading,
    model: Vocabulary,
    progress: Progress,
    evaluation: Evaluation | None,
) -> CalibrationSet:
    """Build a set without the text it must avoid."""
    text, digests = _avoided(name, wanted, reading.base, evaluation)
    return build(name, wanted, reading, model, progress, text, digests)


def _avoided(
    name: str, wanted: SetSpec, base: Path, evaluation: Evaluation | None
) -> tuple[EvaluationText | None, dict[str, str]]:
    """The text that a set must not contain, and its digests."""
    if not wanted.avoid:
        return None, {}
    if evaluation is None:
        raise DataError(
            f"{name} avoids {', '.join(wanted.avoid)}: build it first with `quantkit "
            "calibrate build`, and give its folder"
        )
    return evaluation(wanted.avoid, base)


def part_of(
    found: CalibrationSet,
    model: Vocabulary,
    n_samples: int | None,
    length: int | None,
    where: str = "the calibration set",
) -> CalibrationTokens:
    """A finished set, or the first part of it: its samples are shuffled."""
    calibration_set.require_tokenizer(found.manifest, model.tokenizer, where)
    tokens = found.tokens
    have = tokens.ids.shape
    n_samples, length = n_samples or have[0], length or have[1]
    if n_samples > have[0] or length > have[1]:
        raise DataError(
            f"{tokens.name} has {have[0]:,} samples of {have[1]:,} tokens, but {n_samples:,} of "
            f"{length:,} were requested; build a larger set"
        )
    if length > model.context:
        raise DataError(
            f"{tokens.name} has samples of {have[1]:,} tokens, but the model's context is "
            f"{model.context:,}; give --length {model.context}"
        )
    if (n_samples, length) == tuple(have):
        return tokens
    lengths = None if tokens.lengths is None else tokens.lengths[:n_samples].clamp(max=length)
    pictures = tokens.pictures[:n_samples]
    if any(pictures) and length < have[1]:
        raise DataError(f"{tokens.name} has images, which are not cut: leave out --length")
    return CalibrationTokens(tokens.name, tokens.ids[:n_samples, :length], lengths, pictures)
