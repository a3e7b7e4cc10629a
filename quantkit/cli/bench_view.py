"""Terminal output of `quantkit bench`."""

import shutil
from typing import TYPE_CHECKING

from quantkit.cli import console
from quantkit.errors import EngineError

if TYPE_CHECKING:
    from quantkit.bench.record import Bench

WIDE = 170
"""Terminal width from which tables show every figure."""


def show(bench: "Bench", as_json: bool) -> None:
    """The measurements; a model without any is an error."""
    if as_json:
        console.print_json(bench.to_json())
    else:
        _show_tables(bench)
    _complain(bench)


def _show_tables(bench: "Bench") -> None:
    """One table per model, then failures and the recommended settings."""
    from quantkit.bench import compare, table

    narrow = shutil.get_terminal_size().columns < WIDE
    console.say(table.header(bench))
    for name in dict.fromkeys(row.model for row in bench.rows):
        rows = [row for row in bench.rows if row.model == name]
        facts = table.facts(rows)
        console.say(f"\n{name}: {facts}" if facts else f"\n{name}")
        for found in (table.figures(rows, narrow), table.engine(rows, narrow)):
            if found.rows:
                console.print_table(found.titles, found.rows, words=found.words)
    failed = [
        (f"{row.model}, {row.load_name}", f"{n} {kind}: {row.failure_examples.get(kind, '')}")
        for row in bench.rows
        for kind, n in row.failures.items()
    ]
    if failed:
        console.print_lines("Failed requests", failed)
    if bench.refusals:
        refused = [
            (" ".join([one.model, *(f"{k}={v}" for k, v in one.setting.items())]), one.brief)
            for one in bench.refusals
        ]
        console.print_lines("Refused", refused)
    if bench.target or any(row.setting for row in bench.rows):
        chosen = [(choice.model, table.chosen(choice)) for choice in bench.choices]
        console.print_lines("Serve with", chosen)
    if bench.comparisons:
        comparisons = [
            (f"{one.model}, {one.load}", compare.words(one)) for one in bench.comparisons
        ]
        console.print_lines("Compared with the first, request by request", comparisons)
    if bench.notes:
        console.print_lines("Notes", [("-", note) for note in bench.notes])


def _complain(bench: "Bench") -> None:
    """A model that was never measured is an error, even if others were."""
    measured = {row.model for row in bench.rows if row.n_ok}
    refused = {one.model: one.reason for one in bench.refusals if one.model not in measured}
    for row in bench.rows:
        if row.model not in measured:
            refused.setdefault(row.model, "no request was answered")
    if refused:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise EngineError(f"not measured: {reasons}")
