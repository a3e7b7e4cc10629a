"""Patterns that name layers, in words: which kind of layer, in which blocks."""

import re
from collections.abc import Iterable

BLOCKS = re.compile(r"\\?\.?\((\d+(?:\|\d+)*)\)\\\.(.+)$")
"""In a pattern: block numbers, and what follows them."""


def split(pattern: str) -> tuple[str, list[int]]:
    """The kind of layer that a pattern names, and the numbers of its blocks."""
    match = BLOCKS.search(pattern)
    kind = (match[2] if match else pattern).removeprefix("^").removesuffix("$").replace("\\", "")
    return kind, [int(number) for number in match[1].split("|")] if match else []


def words(patterns: Iterable[str]) -> str:
    """Such as `self_attn.q_proj, k_proj, v_proj (blocks 0-3, 7); mlp.down_proj (block 5)`.

    A pattern that names no blocks stays as it was written.
    """
    found = []
    for pattern in patterns:
        kind, blocks = split(pattern)
        if not blocks:
            found.append(pattern)
            continue
        kind = re.sub(r"\(([\w|]+)\)$", lambda match: match[1].replace("|", ", "), kind)
        noun = "block" if len(blocks) == 1 else "blocks"
        found.append(f"{kind.removesuffix('..*')} ({noun} {ranges(blocks)})")
    return "; ".join(found)


def ranges(blocks: Iterable[int]) -> str:
    """`0-3, 7` for blocks 0, 1, 2, 3 and 7."""
    found: list[list[int]] = []
    for number in sorted(set(blocks)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}-{high}" for low, high in found)
