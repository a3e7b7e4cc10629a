"""Output files of a run: `bench.json` for programs, `bench.csv` for spreadsheets, `bench.html`."""

import csv
import io
from pathlib import Path
from typing import Any

from quantkit.bench import page
from quantkit.bench.record import FILE, Bench, Row
from quantkit.errors import StorageError
from quantkit.storage import guarded, output_folder, write_json, write_text


def write(bench: Bench, out: Path) -> None:
    """Write all three."""
    with output_folder(out):
        write_json(out / FILE, bench.to_json())
        write_text(out / "bench.csv", as_csv(bench))
        write_text(out / "bench.html", page.render(bench))


def refuse_existing(out: Path, force: bool) -> None:
    """Stop before measuring if an earlier measurement would be overwritten."""
    if (out / FILE).exists() and not force:
        raise StorageError(f"{out / FILE} exists already; use --force to replace it")


def log_folder(out: Path) -> Path:
    """Folder of the engines' logs."""
    folder = out / "logs"
    with guarded(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def as_csv(bench: Bench) -> str:
    """One line per row, with every figure unrounded; setting names become columns."""
    flat = [_flat(row) for row in bench.rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    data = row.model_dump(mode="json", exclude={"repetitions", "failure_examples", "failures"})
    found: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            found |= {f"{name}.{part}": inner for part, inner in value.items()}
        else:
            found[name] = value
    return {
        **found,
        "n_failed": row.n_failed,
        **{f"failed.{k}": n for k, n in row.failures.items()},
    }
