"""What the block types share: ggml's arithmetic in float32, the search for a scale, and bytes.

ggml looks at one block after the other; here all blocks are looked at together, as planes
[numbers of a block, rows, blocks of a row]. Every operation rounds as ggml's does and sums go in
its order, so that bytes are equal, on a GPU too: no product is fused with a sum.
"""

from collections.abc import Iterable

import torch

EMPTY = 1e-15
"""A block whose largest number is below this is stored as zeros."""


def planes(x: torch.Tensor, size: int) -> torch.Tensor:
    """[rows, columns] as [numbers of a block, rows, blocks of a row]."""
    rows, columns = x.shape
    return x.reshape(rows, columns // size, size).permute(2, 0, 1).contiguous()


def join(*fields: torch.Tensor) -> torch.Tensor:
    """Fields of blocks, each uint8 [bytes, rows, blocks of a row], as rows of bytes."""
    return torch.cat(fields).permute(1, 2, 0).flatten(1).contiguous()


def half_bytes(numbers: torch.Tensor) -> torch.Tensor:
    """The two bytes of each number as float16, low byte first, in a new first dimension."""
    return numbers.half().unsqueeze(-1).view(torch.uint8).movedim(-1, 0)


def pack_nibbles(levels: torch.Tensor) -> torch.Tensor:
    """Four bits of each number: the first half of a block in low nibbles, the second in high."""
    low, high = (levels.to(torch.uint8) & 15).chunk(2)
    return low | high << 4


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Eight numbers that are 0 or 1 in a byte, the first lowest."""
    bits = bits.to(torch.uint8)
    packed = bits[::8]
    for place in range(1, 8):
        packed = packed | bits[place::8] << place
    return packed


def ordered_sum(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum over the first dimension, one after the other as in a loop.

    A reduction of torch has an order of its own, another on every device, and its last bit
    decides between two scales that are equally good, or where a scale rounds to float16.
    """
    first, *others = terms
    total = first + 0.0  # ggml starts from zero, which takes the sign from a negative zero
    for term in others:
        total += term
    return total


def divide(a: torch.Tensor | float, b: torch.Tensor | float) -> torch.Tensor:
    """a / b, correctly rounded: with a plain number torch may multiply by an inverse."""
    if not isinstance(a, torch.Tensor):
        assert isinstance(b, torch.Tensor)
        a = b.new_full((), a)
    return torch.div(a, b if isinstance(b, torch.Tensor) else a.new_full((), b))


def divide_or_zero(a: torch.Tensor | float, b: torch.Tensor) -> torch.Tensor:
    """a / b, and 0 where b is 0."""
    return divide(a, b).masked_fill(b == 0, 0)


def extreme(x: torch.Tensor) -> torch.Tensor:
    """The number of every block that is farthest from zero, with its sign; of equals the first."""
    found: torch.Tensor = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
    return found + 0.0  # a block of negative zeros has the extreme zero


def steps(first: int, last: int, width: float, *offsets: float) -> list[float]:
    """width * step + offset + offset ... for every step, each operation in float32."""
    counted = torch.arange(first, last + 1, dtype=torch.float32) * width
    for offset in offsets:
        counted += offset
    return counted.tolist()


def search_weights(x: torch.Tensor, importance: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """How much an error of each number counts: `mean` is a mean square that x is seen against."""
    # torch's root of a float32 is not always the nearest one.
    return importance * (mean + x * x).double().sqrt_().float()


def fit_symmetric(
    x: torch.Tensor, weights: torch.Tensor, half: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale of every block and its levels of 0 ... 2 half - 1; x is (level - half) * scale.

    Candidates put the extreme number near -half. Each rounds x to integers, and then the best
    scale for these integers is known; the candidate with the least weighted error stays.
    """
    peak = extreme(x)
    empty = peak.abs() < EMPTY
    peak.masked_fill_(empty, 1)
    weighted = weights * x

    def rounded(inverse: torch.Tensor) -> torch.Tensor:
        return (inverse * x).round_().clamp_(-half, half - 1)

    def sums(inverse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        integers = rounded(inverse)
        return ordered_sum(weighted * integers), ordered_sum(weights * integers * integers)

    inverse = divide(-half, peak)
    product, square = sums(inverse)
    scale = divide_or_zero(product, square)
    best = scale * product
    for wanted in steps(-9, 9, 0.1, half):
        if wanted == half:
            continue
        candidate = divide(-wanted, peak)
        product, square = sums(candidate)
        better = (square > 0) & (product * product > best * square)
        inverse = torch.where(better, candidate, inverse)
        scale = torch.where(better, divide(product, square), scale)
        best = torch.where(better, scale * product, best)
    return scale.masked_fill_(empty, 0), rounded(inverse).add_(half).masked_fill_(empty, 0)
