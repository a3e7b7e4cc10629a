"""`quantkit gate`."""

import json as json_text
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli.options import AsJson
from quantkit.errors import QuantkitError, ScoreError

if TYPE_CHECKING:
    from quantkit.gating.verdict import Verdict
    from quantkit.report.document import Document


def command(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="A report.json.")],
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rules in YAML; default: ours, by bits.")
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="REPORT", help="The last release: is this one any worse?"),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Must be what was scored, unchanged; repeat for more."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as JUnit XML.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a summary in Markdown.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Judge a report by a policy: exit 0 pass, 1 fail, 3 cannot be judged."""
    from quantkit.calls import early
    from quantkit.gating import github

    files = _Files(junit, markdown)
    try:
        early.folders(checkpoint or [])
        verdict = _judged(report, policy, against, checkpoint or [])
        files.write(verdict)
    except QuantkitError as error:
        with suppress(QuantkitError):  # the first error is the one to tell
            files.write_error(str(error))
        if github.is_here(os.environ):
            typer.echo(github.annotation("error", "quantkit gate", str(error)), err=json)
            error.args = (github.harmless(str(error)),)
        raise
    if json:
        text = json_text.dumps(verdict.to_json(), indent=2, ensure_ascii=False)
    else:
        text = _screen(verdict)
    if github.is_here(os.environ):
        # What programs read stays alone on stdout; the runner obeys stderr just as well.
        if json:
            text = text.replace("##[", "\\u0023#[")
        else:
            text = github.paused(text, secrets.token_hex(16))
        typer.echo("\n".join(github.annotations(verdict)), err=json)
    typer.echo(text)
    raise typer.Exit(verdict.exit_code)


def _judged(
    report: Path, policy: Path | None, against: Path | None, checkpoints: list[Path]
) -> "Verdict":
    from quantkit import api

    return api.gate(
        _read(report / "report.json" if report.is_dir() else report),
        policy or "default",
        against=None if against is None else _read(against),
        checkpoints=checkpoints,
    )


def _read(path: Path) -> "Document":
    from quantkit.gating.text import plain
    from quantkit.report.document import read

    try:
        return read(path)
    except ScoreError as error:  # its keys are quoted, and may hold anything
        raise ScoreError(plain(str(error))) from error


class _Files:
    """Files that must never be those of an earlier, better day: they are written in any case."""

    def __init__(self, junit: Path | None, markdown: Path | None) -> None:
        self.junit, self.markdown = junit, markdown

    def write(self, verdict: "Verdict") -> None:
        from quantkit.gating import junit, markdown

        self._write(junit.render(verdict), markdown.render(verdict))
        for path in (self.junit, self.markdown):
            if path is not None:
                typer.echo(f"written: {path}", err=True)

    def write_error(self, message: str) -> None:
        from quantkit.gating import junit, markdown

        self._write(junit.render_error(message), markdown.render_error(message))

    def _write(self, junit_text: str, markdown_text: str) -> None:
        from quantkit.gating import github
        from quantkit.storage import write_text

        for path, text in ((self.junit, junit_text), (self.markdown, markdown_text)):
            if path is not None:
                write_text(path, text)
        if github.is_here(os.environ):
            github.summarize(markdown_text, os.environ)


def _screen(verdict: "Verdict") -> str:
    """A table, a sentence on everything that did not pass, and the verdict last."""
    from quantkit.cli import console
    from quantkit.gating import words
    from quantkit.gating.text import plain
    from quantkit.gating.verdict import Answer

    rows = [
        [
            plain(check.candidate),
            words.metric(check),
            words.amount(check),
            words.limit(check),
            str(check.answer),
        ]
        for check in verdict.checks
    ]
    headings = ["candidate", "metric", "value", "limit", "answer"]
    parts = [console.table_text(headings, rows, words=(0, 1, 3, 4))]
    for answer in (Answer.FAIL, Answer.CANNOT_TELL):
        if found := verdict.of(answer):
            lines = [(plain(check.candidate), check.reason) for check in found]
            parts.append(console.lines_text(f"{answer}:", lines))
    if verdict.notes:
        parts.append(console.lines_text("notes:", [("-", note) for note in verdict.notes]))
    return "\n\n".join([*parts, words.last_line(verdict)])
