"""Personal data in the rows of a set: replaced on request, otherwise a warning."""

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from quantkit.calibration.pool import GatheredSource
from quantkit.calibration.reading.recognise import QUOTES
from quantkit.calibration.reading.row import Row
from quantkit.calibration.redaction.redact import KINDS, LABELS, redact
from quantkit.calibration.spec import SetSpec
from quantkit.progress import Progress

LOOKED_AT, LOOKED_INTO = 500, 10_000
"""Rows per file, and characters of each, that are checked for personal data by default."""


def redact_rows(
    gathered: list[GatheredSource], spec: SetSpec, progress: Progress
) -> tuple[list[GatheredSource], Counter[str]]:
    """The same rows with personal data replaced, before anything else sees them."""
    counts: Counter[str] = Counter()
    if not spec.redact:
        _warn_of_personal_data(gathered, spec, progress)
        return gathered, counts
    kinds = KINDS if spec.redact is True else tuple(spec.redact)
    progress.start("redact", sum(len(source.rows) for source in gathered), "rows")

    def opened(value: Any) -> Any:
        """A call's arguments as text without escapes, which could hide anything."""
        try:
            known = json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            return value
        return json.dumps(known, ensure_ascii=False) if isinstance(known, dict | list) else value

    def clean(value: Any) -> Any:
        if isinstance(value, str):
            found = redact(value, kinds)
            counts.update(found.counts)
            return found.text
        if isinstance(value, dict):
            return {
                clean(key): clean(opened(item)) if key == "arguments" else clean(item)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [clean(item) for item in value]
        return value

    def rows(source: GatheredSource) -> list[Row]:
        made = []
        for reason, example in source.account.examples.items():
            # A row is quoted shortened, which may cut what would be found.
            example = example.partition(QUOTES)[0]
            source.account.examples[reason] = redact(example, kinds).text
        for row in source.rows:
            messages, tools = clean(list(row.messages)), clean(list(row.tools))
            made.append(replace(row, messages=messages, tools=tools, text=clean(row.text)))
        progress.advance(len(made))
        return made

    done = [replace(source, rows=rows(source)) for source in gathered]
    progress.finish()
    return done, counts


def _warn_of_personal_data(
    gathered: list[GatheredSource], spec: SetSpec, progress: Progress
) -> None:
    """Check some rows of the user's own files, which will be written as they are."""
    for source, wanted in zip(gathered, spec.sources, strict=True):
        if wanted.kind not in ("files", "stdin"):
            continue
        rows = source.rows[:LOOKED_AT]
        found: Counter[str] = Counter()
        for row in rows:
            counts = redact(row.plain[:LOOKED_INTO], KINDS).counts
            found.update(kind for kind, n in counts.items() if n)
        if found:
            kinds = ", ".join(f"{LABELS[kind]} in {n:,}" for kind, n in found.most_common())
            progress.note(
                f"warning: {source.name} may hold personal data or secrets (of {len(rows):,} rows "
                f"checked: {kinds}); `quantkit calibrate build --redact`, or `redact:` in the "
                "set's file, replaces them"
            )
