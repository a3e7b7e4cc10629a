"""What counts as a feeder: a linear whose scaled rows scale the reader's input, exactly."""

import pytest
import torch

from quantkit.onepass import feeders

WIDTH, HEADS, HEAD_WIDTH = 48, 3, 16
GROUPS = {"o_proj": ["o_proj"]}
TYPES = [torch.float32, torch.bfloat16, torch.float16]


class Attention(torch.nn.Module):
    """Values, attention over positions, and whatever else reaches the output projection."""

    def __init__(self, beside=lambda values: 0.0, dtype=torch.float32) -> None:
        super().__init__()
        self.qk_proj = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.v_proj = torch.nn.Linear(WIDTH, WIDTH)
        self.o_proj = torch.nn.Linear(WIDTH, WIDTH)
        self.beside = beside
        self.to(dtype)

    def forward(self, hidden):
        queries, keys = self._heads(self.qk_proj(hidden)).chunk(2, -3)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            queries, keys, self._heads(self.v_proj(hidden)), is_causal=True
        )
        flat = mixed.transpose(-3, -2).flatten(-2)
        return self.o_proj(flat + self.beside(flat))

    @staticmethod
    def _heads(states):
        return states.unflatten(-1, (-1, HEAD_WIDTH)).transpose(-3, -2)


def found(block, dtype=torch.float32):
    torch.manual_seed(1)
    hidden = torch.randn(2, 40, WIDTH).to(dtype)
    return feeders.find(block, GROUPS, lambda: block(hidden), HEAD_WIDTH)


def made(dtype=torch.float32, beside=lambda values: 0.0):
    torch.manual_seed(0)
    return Attention(beside, dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_values_feed_the_output_projection_in_every_type(dtype):
    assert found(made(dtype), dtype)["o_proj"].name == "v_proj"


@pytest.mark.parametrize("dtype", TYPES)
def test_half_a_percent_that_does_not_follow_is_refused(dtype):
    """A share of the values as they were the first time, as a cache or a residual would add."""
    first = []

    def beside(values):
        first.append(values)
        return 0.005 * first[0]

    assert found(made(dtype, beside), dtype) == {}


def test_one_channel_among_many_that_does_not_follow_is_refused():
    """Seen per channel: in the norm of all channels together it is a thousandth."""
    first = []

    def beside(values):
        first.append(values)
        leak = torch.zeros_like(values)
        leak[..., 7] = 0.005 * first[0][..., 7]
        return leak

    assert found(made(beside=beside)) == {}


def test_what_is_not_a_number_is_refused():
    assert found(made(beside=lambda values: values * float("inf"))) == {}
