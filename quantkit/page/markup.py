"""Templates that escape everything that is not already markup."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> Markup:
    """Fill in one of quantkit's templates; anything that is not `Markup` is shown as text."""
    return Markup(_environment().get_template(template).render(values))


def asset(name: str) -> Markup:
    """A bundled style sheet or script, verbatim."""
    return Markup((FOLDER / name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
