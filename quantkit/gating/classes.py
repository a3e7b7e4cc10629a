"""Classes of bits and model size used in policies."""

import re

from quantkit.report.document import Document, Entry

# Bits per weight over the whole model, if it is unknown how the quantised layers were stored:
# embeddings in 16 bits lift a 4-bit model to 7, and GGUF's 3-bit mixtures end near 4.
FOUR_FROM = 4.1
EIGHT_FROM = 7.5
SIZES = {"under-1B": 1e9, "1B-4B": 4e9, "4B-15B": 15e9, "over-15B": float("inf")}
"""Classes of model size, and the number of weights where each ends."""


def class_of(entry: Entry) -> str:
    """The class of a candidate's quantised layers, as far as it is known how they were stored."""
    bits = _stored_bits(entry)
    if bits is not None:
        return of_bits(bits)
    bpw = entry.bits_per_weight
    return "8-bit" if bpw >= EIGHT_FROM else "4-bit" if bpw >= FOUR_FROM else "below"


def of_bits(bits: int) -> str:
    """`8-bit`, also for more bits; `4-bit` for 4 to 6; `below` for 2 and 3."""
    return "8-bit" if bits > 6 else "4-bit" if bits >= 4 else "below"


def size_of(document: Document) -> str:
    """The class of the source's size; in an MoE model all experts count."""
    source = document.baseline
    n_weights = 8 * source.size_bytes / source.bits_per_weight
    return next(name for name, end in SIZES.items() if n_weights < end)


def _stored_bits(entry: Entry) -> int | None:
    """Bits of the quantised layers; GGUF's mixtures have them in their name."""
    if entry.made is None:
        return None
    if entry.made.weight_bits is not None:
        return entry.made.weight_bits
    found = re.match(r"(?:I?Q|(?:B|MX|NV)?FP?)(\d+)", entry.made.method)
    return int(found[1]) if found else None
