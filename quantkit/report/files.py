"""The files of a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit import __version__
from quantkit.report import html, markdown
from quantkit.storage import output_folder, write_json, write_text

if TYPE_CHECKING:
    from pathlib import Path

    from quantkit.report.comparison import Report


def write(report: Report, out: Path) -> None:
    """`report.json`, `report.md` and `report.html`."""
    with output_folder(out):
        write_json(out / "report.json", report.to_json())
        write_text(out / "report.md", markdown.render(report))
        write_text(out / "report.html", html.render(report.document, __version__))
