"""Terminal output of a calibration set."""

import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from quantkit.calibration.calibration_set import CalibrationSet, Manifest

BAR = 28
NARROW = 12
SHOWN = 300


def show(found: "CalibrationSet", folder: Path, n_samples: int) -> None:
    """Figures, charts, some samples, and weaknesses."""
    from quantkit.calibration import inspection
    from quantkit.calibration.redaction.redact import LABELS
    from quantkit.cli import console

    manifest = found.manifest
    console.say(
        f"{folder}: {manifest.n_samples} samples of {manifest.length:,} tokens, "
        f"{manifest.n_tokens:,} in all, for {manifest.tokenizer.model}"
    )
    _show_sources(manifest)
    _show_figures(manifest)
    _show_lengths(manifest)
    if manifest.redacted:
        replaced = sorted(manifest.redacted.items())
        counts = ", ".join(f"{LABELS.get(kind, kind)} ({n:,})" for kind, n in replaced if n)
        console.say(f"replaced: {counts or 'nothing'}")
    if n_samples:
        typer.echo()
        _show_samples(found, n_samples)
    for warning in inspection.warnings(found):
        console.say(f"warning: {warning}")


def _show_sources(manifest: "Manifest") -> None:
    from quantkit.cli import console

    rows, others = [], []
    for source in manifest.sources:
        share = source.n_tokens / manifest.n_tokens
        taken = source.rows.get("whole", 0) + source.rows.get("in part", 0)
        left = {k: n for k, n in source.rows.items() if k not in ("read", "whole", "in part")}
        if reasons := ", ".join(f"{n:,} {reason}" for reason, n in left.items() if n):
            others.append((source.name, reasons))
        rows.append(
            [
                source.name,
                _bar(share, NARROW),
                f"{share:.1%}",
                f"{source.share:.1%}",
                f"{source.rows.get('read', 0):,}",
                f"{taken:,}",
            ]
        )
    headings = ["source", "", "share of tokens", "requested", "rows", "rows used"]
    console.print_table(headings, rows, words=(0, 1))
    # There are many reasons, and names may be long: they get a line of their own.
    if others:
        console.print_lines("rows left out of the set:", others)


def _show_figures(manifest: "Manifest") -> None:
    from quantkit.calibration.choosing.figures import BETTER_HIGH, Figures
    from quantkit.calibration.inspection import NAMES
    from quantkit.cli import console

    console.say(
        f"\nThe pool that samples were chosen from: {manifest.pool.n_pieces:,} pieces of text, "
        f"{manifest.pool.n_tokens:,} tokens."
    )
    rows = []
    for name in Figures.model_fields:
        ours = getattr(manifest.figures, name)
        theirs = None if manifest.random is None else getattr(manifest.random, name)
        better = "higher" if name in BETTER_HIGH else "lower"
        rows.append([NAMES[name], f"{ours:.4f}", "" if theirs is None else f"{theirs:.4f}", better])
    console.print_table(
        [
            "compared with the pool",
            "this set",
            f"mean of {manifest.n_random} random sets",
            "better",
        ],
        rows,
        words=(0, 3),
    )


def _show_lengths(manifest: "Manifest") -> None:
    from quantkit.cli import console

    pool, ours = manifest.pool.lengths, manifest.pool.set_lengths
    top = max(*pool, *ours, 1)
    rows = [
        [_share(place), f"{ours[place]:,}", _bar(ours[place] / top), f"{pool[place]:,}"]
        for place in range(0, len(pool), 2)
    ]
    headings = ["length of pieces, tokens", "this set", "", "the pool"]
    console.print_table(headings, rows, words=(0, 2))


def _share(place: int) -> str:
    return {0: "shortest", 20: "longest"}.get(place, f"{5 * place}th percentile")


def _show_samples(found: "CalibrationSet", n: int) -> None:
    from quantkit.cli import console

    step = max(1, len(found.samples) // n)
    # Nothing wraps if the output is not a terminal.
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 2 * SHOWN
    for piece in found.samples[::step][:n]:
        text = " ".join(piece["text"].split())
        source, place = piece["source"], piece["place"]
        console.say(
            f"{place if place.startswith(source) else f'{source}, {place}'}: "
            f"{piece['n_tokens']:,} tokens"
            f"{', cut' if piece['cut'] else ''}; {piece['why']}",
            hang=4,
        )
        text = f"{text[:SHOWN]}{'…' if len(text) > SHOWN else ''}"
        typer.echo(textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ") + "\n")


def _bar(share: float, width: int = BAR) -> str:
    return "█" * round(share * width) or "▏"
