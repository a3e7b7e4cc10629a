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
    for section, lines in findings.items():
        typer.echo(section)
        for name, value in lines.items():
            console.say(f"  {name:<22} {value}", hang=23)
