"""Output that pages show below a command, and its form: the words without figures and names."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^```\n(\$ .*?)^```$", re.S | re.M)


def shown(page: str, part: str) -> dict[str, str]:
    """The commands of the block that contains a text, each with the output below it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (block,) = (b for b in BLOCK.findall(text) if part in b)
    found = {}
    for part in re.split(r"^\$ ", block.replace("\\\n    ", ""), flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        found[command] = output
    return found


def words(text: str) -> str:
    """All on one line, however it was wrapped."""
    return " ".join(text.split())


def form(text: str) -> list[str]:
    """Lines without their figures, quotations and alignment."""
    quoted = re.sub(r"'[^'\n]*'", "''", text)
    plain = re.sub(r"\d[\d,.]*", "#", quoted)
    return [words(line) for line in plain.splitlines() if line.strip(" ─")]
