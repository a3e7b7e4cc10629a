"""`quantkit doctor`."""

import typer

from quantkit.cli.options import AsJson


def command(json: AsJson = False) -> None:
    """Show versions, devices and optional engines."""
    from quantkit import doctor
    from quantkit.cli import console

    findings = doctor.examine()
    if json:
        console.print_json(findings)
        return
    shown = [
        console.lines_text(name, list(rows.items())) for name, rows in findings.items() if rows
    ]
    typer.echo("\n\n".join(shown))
