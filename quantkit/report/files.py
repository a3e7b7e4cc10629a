"""The files of a report."""

from pathlib import Path

from quantkit.report import markdown
from quantkit.report.comparison import Report
from quantkit.storage import guarded, write_json, write_text


def write(report: Report, out: Path) -> None:
    """`report.json` and `report.md`."""
    with guarded(out):
        out.mkdir(parents=True, exist_ok=True)
    write_json(out / "report.json", report.to_json())
    write_text(out / "report.md", markdown.render(report))
