"""Small parts of a page besides tables and figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from quantkit.page.markup import render


@dataclass(frozen=True)
class Fact:
    """An important number, and what it counts."""

    value: str
    name: str


def facts(items: Sequence[Fact]) -> Markup:
    """A row of large numbers."""
    return render("facts.html", items=items)


def notices(title: str, sentences: Sequence[str]) -> Markup:
    """Warnings to read first; empty where there are none."""
    return render("notices.html", title=title, sentences=sentences) if sentences else Markup()


def details(items: Mapping[str, str | Markup]) -> Markup:
    """Names and what they stand for, such as settings and hashes."""
    return render("details.html", items=items)


def extract(title: str, marks: Sequence[str], note: str, text: str) -> Markup:
    """A text excerpt in a box that scrolls."""
    return render("extract.html", title=title, marks=marks, note=note, text=text)
