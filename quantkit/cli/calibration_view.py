"""A calibration set in the terminal."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from quantkit.calibration.calibration_set import CalibrationSet, Manifest

BAR = 28
SHOWN = 300


def show(found: "CalibrationSet", folder: Path, n_samples: int) -> None:
    """Figures, pictures, some samples, and what is thin."""
    from quantkit.calibration import inspection

    manifest = found.manifest
    typer.echo(
        f"{folder}: {manifest.n_samples} samples of {manifest.length:,} tokens, "
        f"{manifest.n_tokens:,} in all, for {manifest.tokenizer.model}"
    )
    _show_sources(manifest)
    _show_figures(manifest)
    _show_lengths(manifest)
    if manifest.redacted:
        counts = ", ".join(f"{n:,} of {kind}" for kind, n in sorted(manifest.redacted.items()) if n)
        typer.echo(f"replaced: {counts or 'nothing'}")
    if n_samples:
        _show_samples(found, n_samples)
    for warning in inspection.warnings(found):
        typer.echo(f"warning: {warning}")


def _show_sources(manifest: "Manifest") -> None:
    from quantkit.cli import console

    rows = []
    for source in manifest.sources:
        share = source.n_tokens / manifest.n_tokens
        taken = source.rows.get("whole", 0) + source.rows.get("in part", 0)
        left = {k: n for k, n in source.rows.items() if k not in ("read", "whole", "in part")}
        rows.append(
            [
                source.name,
                _bar(share),
                f"{share:.1%}",
                f"{source.share:.1%}",
                f"{source.rows.get('read', 0):,}",
                f"{taken:,}",
                ", ".join(f"{n:,} {reason}" for reason, n in left.items()),
            ]
        )
    console.print_table(
        ["source", "tokens", "", "asked", "rows", "used", "left out"], rows, words=(0, 1, 6)
    )


def _show_figures(manifest: "Manifest") -> None:
    from quantkit.calibration.figures import BETTER_HIGH, Figures
    from quantkit.calibration.inspection import NAMES
    from quantkit.cli import console

    rows = []
    for name in Figures.model_fields:
        ours = getattr(manifest.figures, name)
        theirs = None if manifest.random is None else getattr(manifest.random, name)
        better = "higher is better" if name in BETTER_HIGH else "lower is better"
        rows.append([NAMES[name], f"{ours:.4f}", "" if theirs is None else f"{theirs:.4f}", better])
    console.print_table(
        ["against the pool", "this set", f"mean of {manifest.n_random} random", ""],
        rows,
        words=(0, 3),
    )


def _show_lengths(manifest: "Manifest") -> None:
    from quantkit.cli import console

    pool, ours = manifest.pool.lengths, manifest.pool.set_lengths
    top = max(*pool, *ours, 1)
    rows = [
        [f"{5 * place}%", str(ours[place]), _bar(ours[place] / top), str(pool[place])]
        for place in range(0, len(pool), 2)
    ]
    console.print_table(["shorter than", "tokens", "", "in the pool"], rows, words=(0, 2))


def _show_samples(found: "CalibrationSet", n: int) -> None:
    step = max(1, len(found.samples) // n)
    for piece in found.samples[::step][:n]:
        text = " ".join(piece["text"].split())
        typer.echo(
            f"{piece['source']}, {piece['place']}: {piece['n_tokens']} tokens"
            f"{', cut' if piece['cut'] else ''}; {piece['why']}"
        )
        typer.echo(f"  {text[:SHOWN]}{'…' if len(text) > SHOWN else ''}\n")


def _bar(share: float) -> str:
    return "█" * round(share * BAR) or "▏"
