"""Makes foreign text harmless: names in a report may hold anything."""

import unicodedata

# Control characters, invisible marks, text directions, lone surrogates: whatever moves a cursor
# or hides letters.
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def plain(text: str) -> str:
    """One visible line; invisible characters are escaped as in Python."""
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in UNSEEN else char
        for char in text
    )
