"""Templates that escape everything which is not markup already."""

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

FOLDER = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> Markup:
    """Fill in one of our templates; whatever is no `Markup` is shown as text."""
    return Markup(_environment().get_template(template).render(values))


def asset(name: str) -> Markup:
    """A style sheet or script of ours, as it is."""
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
