"""How many batches go through a block at once."""

from types import SimpleNamespace

import pytest
import torch

from quantkit.onepass.estimate import MERGED_BYTES, n_merged, running_bytes

GPU = torch.device("cuda")
SHAPES = {"135M": (1536, 576), "1.5B": (8960, 1536), "8B": (14336, 4096)}
"""The most and the fewest columns of a block's linears."""


@pytest.fixture
def memory(monkeypatch):
    """Sets the memory of a GPU that need not be here."""

    def of(gib):
        found = SimpleNamespace(total_memory=gib << 30)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)

    return of


@pytest.mark.parametrize(("gib", "expected"), [(8, [2, 1, 1]), (24, [4, 1, 1]), (141, [8, 2, 1])])
def test_narrow_blocks_take_more_at_once_where_memory_allows(memory, gib, expected):
    memory(gib)
    assert [n_merged(GPU, 8192, *shape) for shape in SHAPES.values()] == expected
    for wide, narrow in SHAPES.values():
        n = n_merged(GPU, 8192, wide, narrow)
        taken = n * running_bytes(GPU, 8192, wide, narrow)
        assert n == 1 or taken <= min(MERGED_BYTES["cuda"], (gib << 30) // 16)


def test_a_cpu_merges_nothing():
    assert n_merged(torch.device("cpu"), 2048, 64, 64) == 1
