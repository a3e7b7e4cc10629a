"""Text that others wrote, made harmless: names in a report may hold anything."""

import unicodedata

# Controls, invisible marks, directions and halves of pairs: what moves a cursor or hides letters.
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def plain(text: str) -> str:
    """One visible line; what cannot be seen is spelled out as Python would."""
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in UNSEEN else char
        for char in text
    )
