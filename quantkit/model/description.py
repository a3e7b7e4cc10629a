"""Facts from a model's own README: licence, languages, its name on the hub."""

import re
from pathlib import Path
from typing import Any

import yaml

from quantkit.parsing import parse_yaml

README = "README.md"
FRONT = re.compile(r"\A\ufeff?\s*---[ \t]*\r?\n(?P<front>.*?)^---[ \t]*(?:\r?\n|\Z)", re.S | re.M)
"""The YAML between two lines of dashes at the top of a model card."""
MOST_CHARACTERS = 1 << 20
HUB_ID = re.compile(r"(?:[A-Za-z0-9][\w.-]{0,95}/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
# Where cards name their own model.
OWN_NAMES = ("model_id", "model_name")


def read(folder: Path) -> dict[str, Any]:
    """The front matter of a model's README, every scalar as text; empty when it cannot be read."""
    try:
        with (folder / README).open(encoding="utf-8") as stream:
            found = FRONT.match(stream.read(MOST_CHARACTERS))
        # Read as plain text: the language `no` is Norwegian.
        card = parse_yaml(found["front"], yaml.BaseLoader) if found else None
    except (OSError, ValueError):
        return {}  # only a description is lost
    return card if isinstance(card, dict) else {}


def own_name(card: dict[str, Any]) -> str | None:
    """The hub id that a card gives for its own model, if any."""
    index = card.get("model-index")
    first = index[0] if isinstance(index, list) and index else None
    names = [card.get(key) for key in OWN_NAMES]
    names.append(first.get("name") if isinstance(first, dict) else None)
    return next((n for n in map(text, names) if n and "/" in n and HUB_ID.fullmatch(n)), None)


def text(value: Any) -> str | None:
    """A non-empty text, or None."""
    return value.strip() if isinstance(value, str) and value.strip() else None


def texts(value: Any) -> list[str]:
    """One text or a list of them as a list."""
    values = value if isinstance(value, list) else [value]
    return [found for found in map(text, values) if found]
