"""The text of tasks, questions and answers: none of it may be used for calibration."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from quantkit.calibration.overlap.contamination import EvaluationText
from quantkit.calibration.reading import files, recognise
from quantkit.errors import DataError, ScoreError
from quantkit.scoring import lmeval


def texts(tasks: Sequence[str], data: Path | None = None) -> Iterator[str]:
    """Every string that a model is scored on, from all documents of the scored split.

    A question occurs once with each of its choices, so that words that span both are covered
    whichever is right. Few-shot examples are left out.
    """
    with lmeval.quiet():
        loaded = lmeval.load(tasks, data)
    for task in loaded["tasks"].values():
        # One task at a time: nothing may be yielded while output is suppressed.
        with lmeval.quiet(), lmeval.templates_compiled_once():
            found = [text for document in task.eval_docs for text in _of_document(task, document)]
        yield from found


def load(
    names: Sequence[str], base: Path, data: Path | None = None
) -> tuple[EvaluationText, dict[str, str]]:
    """The combined text of tasks and of files below `base`, and a digest for each name."""
    parts, digests = [], {}
    for name in names:
        found = _of_file(base / name) if files.is_data(name) else texts([name], data)
        parts.append(EvaluationText.of(found))
        digests[name] = parts[-1].digest
    return EvaluationText.joined(parts), digests


def to_avoid_when_building(
    names: Sequence[str], base: Path, data: Path | None = None
) -> tuple[EvaluationText, dict[str, str]]:
    """The same for `calibrate build`, with advice for failures."""
    try:
        return load(names, base, data)
    except ScoreError as error:
        raise DataError(
            f"a calibration set leaves out what models are scored on, and needs the text of "
            f"{', '.join(names)} for that: {str(error).partition('; ')[0]}; connect to the hub "
            "once, or pass `--data DIR`, a folder that holds it under the dataset's name; the set "
            "python-docs, or your own data with `--avoid python_docs,python_quiz`, needs no hub"
        ) from error


def to_avoid(names: Sequence[str], base: Path) -> tuple[EvaluationText, dict[str, str]]:
    """The same for a calibration set that is built during the run, with advice for failures."""
    try:
        return load(names, base)
    except ScoreError as error:
        raise DataError(
            f"a calibration set leaves out what models are scored on, and needs the text of "
            f"{', '.join(names)} for that: {str(error).partition('; ')[0]}; without a hub, give a "
            "text file of your own, `--calibration python-docs`, or the folder of a set made by "
            "`quantkit calibrate build … --data DIR`"
        ) from error


def _of_file(path: Path) -> Iterator[str]:
    recogniser = recognise.Recogniser(path.name)
    for file in files.find(path):
        for record in files.read(file):
            with suppress(recognise.Empty):
                yield recogniser(record).plain


def _of_document(task: Any, document: Any) -> list[str]:
    target = task.doc_to_target(document)
    if task.OUTPUT_TYPE == "loglikelihood_rolling":
        return [str(target)]
    question = task.doc_to_text(document)
    choices = _choices(task, document)
    if isinstance(question, int):
        # Such as WinoGrande: the choices are beginnings, and the same ending follows all of them.
        return [f"{choice} {target}" for choice in choices]
    if choices:
        return [f"{question} {choice}" for choice in choices]
    answers = target if isinstance(target, list) else [target]
    return [f"{question} {answer}" for answer in answers] or [str(question)]


def _choices(task: Any, document: Any) -> list[str]:
    """Tasks written in Python have no such field in their configuration."""
    if getattr(task.config, "doc_to_choice", None) is None:
        return []
    return list(task.doc_to_choice(document))
