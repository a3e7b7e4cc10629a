"""A verdict on the terminal, on GitHub, and in files."""

import json
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from quantkit.errors import QuantkitError

if TYPE_CHECKING:
    from quantkit.gating.verdict import Verdict


@dataclass(frozen=True)
class View:
    """Where a verdict goes.

    Stale files from an earlier, better run must not survive: files are written in any case.
    """

    junit: Path | None
    markdown: Path | None
    as_json: bool

    @contextmanager
    def report_errors(self) -> Iterator[None]:
        """Errors that keep a report from being judged go to the same places as a verdict."""
        from quantkit.gating import github, junit, markdown

        try:
            yield
        except QuantkitError as error:
            words = str(error)
            with suppress(QuantkitError):  # the first error is the one to report
                self._write(junit.render_error(words), markdown.render_error(words))
            if github.is_here(os.environ):
                typer.echo(github.annotation("error", "quantkit gate", words), err=self.as_json)
                error.args = (github.harmless(words),)
            raise

    def write(self, verdict: "Verdict") -> None:
        """Write the requested files, and GitHub's summary."""
        from quantkit.gating import junit, markdown

        self._write(junit.render(verdict), markdown.render(verdict))
        for path in (self.junit, self.markdown):
            if path is not None:
                typer.echo(f"written: {path}", err=True)

    def _write(self, junit_text: str, markdown_text: str) -> None:
        from quantkit.gating import github
        from quantkit.storage import write_text

        for path, text in ((self.junit, junit_text), (self.markdown, markdown_text)):
            if path is not None:
                write_text(path, text)
        if github.is_here(os.environ):
            github.summarize(markdown_text, os.environ)

    def show(self, verdict: "Verdict") -> None:
        """Print the verdict."""
        from quantkit.gating import github

        if self.as_json:
            text = json.dumps(verdict.to_json(), indent=2, ensure_ascii=False)
        else:
            text = _screen(verdict)
        if github.is_here(os.environ):
            # stdout holds only what programs read; the GitHub runner obeys stderr just as well.
            if self.as_json:
                text = text.replace("##[", "\\u0023#[")
            else:
                text = github.paused(text, secrets.token_hex(16))
            typer.echo("\n".join(github.annotations(verdict)), err=self.as_json)
        typer.echo(text)


def _screen(verdict: "Verdict") -> str:
    """A table, a sentence on everything that did not pass, and the verdict last."""
    from quantkit.cli import console, wrapping
    from quantkit.gating import words
    from quantkit.gating.text import plain
    from quantkit.gating.verdict import Answer

    rows = [
        [
            plain(check.candidate),
            words.metric(check),
            words.amount(check),
            words.short_limit(check),
            str(check.answer),
        ]
        for check in verdict.checks
    ]
    headings = ["candidate", "metric", "value", "limit", "answer"]
    parts = [console.table_text(headings, rows, words=(0, 1, 3, 4))]
    for answer in (Answer.FAIL, Answer.CANNOT_TELL):
        if found := verdict.of(answer):
            parts.append(console.lines_text(f"{answer}:", words.reasons(found)))
    if verdict.of(Answer.CANNOT_TELL):
        parts.append(wrapping.fitted(words.TO_SETTLE, sys.stdout))
    if verdict.notes:
        parts.append(console.lines_text("notes:", [("-", note) for note in verdict.notes]))
    return "\n\n".join([*parts, wrapping.fitted(words.last_line(verdict), sys.stdout)])
