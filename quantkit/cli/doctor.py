"""`quantkit doctor`."""

import typer

from quantkit.cli.options import AsJson


def command(json: AsJson = False) -> None:
    """Versions, devices and their memory, and what optional engines would need."""
    from quantkit import doctor
    from quantkit.cli import console, start

    start.stay_offline_if(True)
    findings = doctor.examine()
    if json:
        console.print_json(findings)
        return
    for section, lines in findings.items():
        typer.echo(section)
        for name, value in lines.items():
            typer.echo(f"  {name:<22} {value}")
