"""Which tokens count how much in the statistics of a block's linears."""

import torch

from quantkit.methods import statistics
from quantkit.methods.statistics import Statistics
from quantkit.onepass.collector import Collector

WIDTH = 8
LENGTHS = (40, 24, 56)
"""Real tokens of three samples, padded to the longest."""


class Block(torch.nn.Module):
    """Queries, keys and values of one input, and a layer that reads their sum."""

    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, torch.nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, states):
        return self.o_proj(self.q_proj(states) + self.k_proj(states) + self.v_proj(states))


def gathered(hold_out: bool = False):
    """Statistics of a padded batch, the real inputs in order, and where each sample begins."""
    torch.manual_seed(0)
    block, states = Block(), torch.randn(len(LENGTHS), max(LENGTHS), WIDTH)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    keep = mask.flatten().nonzero().flatten()
    collector = Collector(dict(block.named_children()), hold_out=hold_out)
    with torch.no_grad(), collector.watching(keep):
        block(states)
    collector.complete()
    begins = [sum(LENGTHS[:place]) for place in range(len(LENGTHS))]
    return collector, states[mask], begins


def test_the_first_token_counts_as_a_share_of_its_sample_where_later_ones_read_it():
    collector, inputs, begins = gathered()
    assert collector.groups == {"q_proj": ["q_proj", "k_proj", "v_proj"], "o_proj": ["o_proj"]}
    counts = torch.ones(len(inputs))
    counts[begins] = torch.tensor(LENGTHS) * statistics.FIRST_SHARE
    assert counts[begins].min() > 1
    found = collector.statistics["q_proj"]
    assert torch.allclose(found.gram, inputs.t() @ (counts[:, None] * inputs), atol=1e-4)
    assert found.n_tokens == len(inputs)
    assert torch.allclose(found.mean_abs, inputs.abs().mean(0))


def test_the_first_token_is_one_of_many_where_no_other_reads_it():
    collector, inputs, _ = gathered()
    block = collector.linears
    read = sum(inputs @ block[name].weight.detach().t() for name in ("q_proj", "k_proj", "v_proj"))
    assert torch.allclose(collector.statistics["o_proj"].gram, read.t() @ read, atol=1e-4)


def test_a_held_out_first_token_counts_only_among_the_held_out():
    torch.manual_seed(0)
    first, lengths = torch.randn(4, WIDTH), torch.tensor([64, 64, 64, 24])
    found = Statistics.zeros(WIDTH, first.device, held_out=True)
    found.emphasise(first, lengths, n_tokens=216)  # an eighth is held out: from token 189 on
    more = (lengths * statistics.FIRST_SHARE - 1)[:, None] * first
    assert torch.allclose(found.gram, more[:3].t() @ first[:3], atol=1e-5)
    assert torch.allclose(found.held_out, more[3:].t() @ first[3:], atol=1e-5)


def test_short_samples_count_as_they_are():
    first = torch.ones(2, WIDTH)
    found = Statistics.zeros(WIDTH, first.device)
    found.emphasise(first, torch.tensor([1, int(1 / statistics.FIRST_SHARE)]), n_tokens=17)
    assert not found.gram.any()
