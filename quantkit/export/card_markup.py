"""Markdown of model cards, in which no text of somebody else's is markup."""

from collections.abc import Sequence


def plain(text: str) -> str:
    """Somebody else's text: no markup, no new lines, no new columns."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*_[]|~#!$":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("://", ":&#47;/")  # no address that turns into a link by itself


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Headings above rows of cells that are Markdown already."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(language: str, text: str) -> str:
    """A block of code, with a fence longer than any inside it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
