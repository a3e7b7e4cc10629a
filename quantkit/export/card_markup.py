"""Markdown of model cards, with foreign text escaped."""

from collections.abc import Sequence


def plain(text: str) -> str:
    """Foreign text: no markup, no new lines, no new columns."""
    text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "\\`*_[]|~#!$":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("://", ":&#47;/")  # no automatic links


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells are already Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fenced(language: str, text: str) -> str:
    """A code block, with a fence longer than any inside it."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}{language}\n{text}\n{fence}"
