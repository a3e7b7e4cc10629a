"""A whole page from its sections.

Style and script are inlined and allowed by their hash, so a browser runs nothing else, whatever a
model or a data set is called.
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from quantkit.page.markup import asset, render

STYLE = "page.css"
SCRIPT = "page.js"


@dataclass(frozen=True)
class Section:
    """A heading and its content."""

    title: str
    parts: Sequence[str | Markup]
    """Tables, pictures and other markup; plain text becomes a paragraph."""


@dataclass(frozen=True)
class _Placed:
    anchor: str
    title: str
    parts: Sequence[str | Markup]


def document(
    title: str,
    sections: Sequence[Section],
    *,
    kind: str = "",
    lead: str = "",
    top: Sequence[str | Markup] = (),
    footer: str = "",
) -> str:
    """A complete HTML page.

    `kind` is a word or two above the title, `lead` a sentence below it; `top` comes before the
    first section: what nobody should miss.
    """
    style, script = asset(STYLE), asset(SCRIPT)
    page = render(
        "document.html",
        title=title,
        kind=kind,
        lead=lead,
        top=top,
        sections=_placed(sections),
        footer=footer,
        style=style,
        script=script,
        policy=(
            f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
            f"style-src '{_hash_of(style)}'; script-src '{_hash_of(script)}'"
        ),
    )
    # File names may contain what UTF-8 cannot encode.
    return str(page).encode("utf-8", "replace").decode("utf-8")


def _placed(sections: Sequence[Section]) -> list[_Placed]:
    """Sections with unique anchors to link to."""
    taken: set[str] = set()
    placed = []
    for number, section in enumerate(sections, start=1):
        words = re.findall(r"[a-z0-9]+", section.title.lower())
        anchor = "-".join(words) or f"section-{number}"
        if anchor in taken:
            anchor = f"{anchor}-{number}"
        taken.add(anchor)
        placed.append(_Placed(anchor, section.title, section.parts))
    return placed


def _hash_of(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
