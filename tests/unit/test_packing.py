"""Pieces in samples: full ones, each piece once, nothing invented."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.calibration.choosing import packing
from quantkit.calibration.choosing.packing import Part

PACKED = {
    "length": st.integers(2, 40),
    "n_samples": st.integers(1, 12),
    "n_spare": st.integers(0, 20),
    "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=60),
}


def packed(lengths, n_spare, n_samples, length):
    lengths = np.minimum(np.array(lengths), length)
    pieces = list(range(len(lengths)))
    n_spare = min(n_spare, len(pieces) - 1)
    first, spare = pieces[: len(pieces) - n_spare], pieces[len(pieces) - n_spare :]
    return packing.pack(first, spare, lengths, n_samples, length), lengths, first


@settings(max_examples=300, deadline=None)
@given(**PACKED)
def test_samples_are_full_and_pieces_are_used_once(lengths, n_spare, n_samples, length):
    samples, lengths, first = packed(lengths, n_spare, n_samples, length)
    sizes = [sum(part.n_tokens for part in sample) for sample in samples]
    assert len(samples) <= n_samples
    assert all(size == length for size in sizes[:-1])
    used = [part.piece for sample in samples for part in sample]
    assert len(used) == len(set(used))
    if len(samples) < n_samples or sizes[-1] < length:
        assert len(used) == len(lengths)  # all there is
    if len(set(used)) < len(lengths) and len(used) < len(first):
        assert set(used) <= set(first)  # the others are for need


@settings(max_examples=300, deadline=None)
@given(**PACKED)
def test_only_the_last_piece_of_a_sample_is_cut(lengths, n_spare, n_samples, length):
    samples, lengths, _ = packed(lengths, n_spare, n_samples, length)
    for sample in samples:
        assert all(1 <= part.n_tokens <= lengths[part.piece] for part in sample)
        assert all(part.n_tokens == lengths[part.piece] for part in sample[:-1])


@settings(max_examples=100, deadline=None)
@given(**PACKED)
def test_packing_is_the_same_every_time(lengths, n_spare, n_samples, length):
    once = packed(lengths, n_spare, n_samples, length)[0]
    assert packed(lengths, n_spare, n_samples, length)[0] == once


@settings(max_examples=100, deadline=None)
@given(**PACKED)
def test_arrays_hold_the_tokens_of_the_parts(lengths, n_spare, n_samples, length):
    samples, lengths, _ = packed(lengths, n_spare, n_samples, length)
    ids = [1000 * piece + np.arange(n) + 1 for piece, n in enumerate(lengths.tolist())]
    tokens, sizes = packing.arrays(samples, ids, length, padding=-7)
    assert tokens.shape == (len(samples), length)
    for row, size, sample in zip(tokens.tolist(), sizes.tolist(), samples, strict=True):
        expected = [token for p in sample for token in ids[p.piece][: p.n_tokens].tolist()]
        assert size == len(expected)
        assert row == expected + [-7] * (length - size)


def test_the_piece_that_fits_best_closes_a_sample():
    lengths = np.array([6, 9, 4, 5])
    assert packing.pack([0, 1, 2, 3], [], lengths, 1, 10) == [(Part(0, 6), Part(2, 4))]
    # Of pairs, too: 6 + 1 + 3 leaves nothing over, 6 + 5 does.
    lengths = np.array([6, 5, 1, 3])
    (sample,) = packing.pack([0, 1, 2, 3], [], lengths, 1, 10)
    assert [part.n_tokens for part in sample] == [6, 1, 3]


@settings(max_examples=300, deadline=None)
@given(**PACKED)
def test_ends_that_were_cut_off_serve_before_a_sample_is_short(lengths, n_spare, n_samples, length):
    lengths = np.minimum(np.array(lengths), length)
    divisible = np.arange(len(lengths)) % 2 == 0
    order = list(range(len(lengths)))
    spare = order[len(order) - min(n_spare, len(order) - 1) :]
    first = order[: len(order) - len(spare)]
    samples = packing.pack(first, spare, lengths, n_samples, length, divisible)
    sizes = [sum(part.n_tokens for part in sample) for sample in samples]
    assert all(size == length for size in sizes[:-1])
    # No token twice, none that is not there, and what begins inside may begin there.
    spans = sorted((p.piece, p.start, p.start + p.n_tokens) for sample in samples for p in sample)
    for (piece, start, stop), following in zip(spans, [*spans[1:], (None, 0, 0)], strict=True):
        assert start < stop <= lengths[piece]
        assert not start or divisible[piece]
        assert following[0] != piece or following[1] >= stop
    plain = packing.pack(first, spare, lengths, n_samples, length)
    assert samples[: len(plain) - 1] == plain[:-1]
    if len(samples) < n_samples or sizes[-1] < length:
        lost = int(lengths.sum()) - sum(sizes)
        assert lost == sum(lengths[p] - b for p, b in _ends(spans).items() if not divisible[p])


def _ends(spans):
    return {piece: stop for piece, _, stop in spans}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_padding_keeps_one_piece_a_sample(lengths):
    order = list(reversed(range(len(lengths))))
    samples = packing.pad(order, np.array(lengths))
    assert samples == [(Part(piece, lengths[piece]),) for piece in order]
