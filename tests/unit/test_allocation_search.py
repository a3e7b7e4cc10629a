"""The search that shows how far from the best a choice of formats is (benchmarks/allocation.py)."""

import importlib.util
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "allocation.py"
SIZES = [3, 4, 8]
PREDICTED = [[8.0, 4.0, 0.0]] * 4
TRUE = [[9.0, 4.0, 0.0], [5.0, 4.0, 0.0], [9.0, 2.0, 0.0], [30.0, 20.0, 0.0]]
"""What is measured: the last unit matters far more than predicted, the second far less."""


@pytest.fixture(scope="module")
def program():
    spec = importlib.util.spec_from_file_location("allocation", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Bank:
    """Mixtures whose KL is the sum of what their units cost."""

    def __init__(self):
        self.table = SimpleNamespace(
            formats=["w3", "w4", "w8"],
            units=[SimpleNamespace(sizes=SIZES)] * len(TRUE),
            costs=lambda: PREDICTED,
            sizes=lambda: [SIZES] * len(TRUE),
        )

    def kl(self, choice, windows):
        return sum(costs[place] for costs, place in zip(TRUE, choice, strict=True))


def test_the_search_ends_at_the_best_mixture_of_the_size(program):
    found = program.search(Bank(), {"size_bytes": 19}, {"choice": "bbba"}, windows=[None])

    def size(choice):
        return sum(SIZES[place] for place in choice)

    everything = itertools.product(range(3), repeat=len(TRUE))
    best = min((c for c in everything if size(c) <= 19), key=lambda c: Bank().kl(c, None))
    assert tuple(found["choice"]) == best
    assert found["before"] == Bank().kl([1, 1, 1, 0], None)
    assert found["after"] == Bank().kl(best, None) < found["before"]
    assert found["n_measured"] > 0


@pytest.mark.parametrize(
    ("place", "expected"), [(0, [0, 2]), (2, [0, 2, 3]), (3, [2, 3]), (1, [0, 1, 2])]
)
def test_neighbours_leave_out_formats_that_a_smaller_one_beats(program, place, expected):
    """The second of four formats is larger than the first, and worse."""
    assert program.neighbours([3, 4, 5, 8], [8.0, 9.0, 4.0, 0.0], place) == expected
