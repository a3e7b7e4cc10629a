"""The choice of formats within a budget: exact where brute force can tell, bounded everywhere."""

import itertools
import random

import pytest

from quantkit.errors import UsageError
from quantkit.mixed import page, units
from quantkit.mixed.allocation import Infeasible, solve, solve_each
from quantkit.mixed.budget import size_bytes
from quantkit.mixed.units import Unit


def problem(seed, n_units=5, n_formats=4):
    rng = random.Random(seed)
    costs, sizes = [], []
    for _ in range(n_units):
        n_weights, weight = rng.randint(1, 64) * 1024, rng.lognormvariate(0, 1.5)
        bits = sorted(rng.sample([3.1, 3.5, 4.125, 4.25, 4.5, 6.1, 8.125, 8.5, 16], n_formats))
        sizes.append([int(n_weights * b / 8) // 16 * 16 for b in bits])
        costs.append([weight * 4**-b * rng.uniform(0.8, 1.2) for b in bits])
    return costs, sizes


@pytest.mark.parametrize("seed", range(25))
def test_a_choice_is_the_best_of_all(seed):
    costs, sizes = problem(seed)
    rng = random.Random(seed)
    budget = rng.randint(sum(map(min, sizes)), sum(map(max, sizes)))
    found = solve(costs, sizes, budget)
    every = itertools.product(range(4), repeat=5)
    fit = [p for p in every if sum(s[x] for s, x in zip(sizes, p, strict=True)) <= budget]
    best = min(sum(c[x] for c, x in zip(costs, p, strict=True)) for p in fit)
    assert found.size_bytes <= budget
    assert found.cost == pytest.approx(best, rel=1e-9)
    assert found.bound <= best * (1 + 1e-9)


def test_several_budgets_at_once_are_each_solved():
    costs, sizes = problem(0, n_units=40)
    least, most = sum(map(min, sizes)), sum(map(max, sizes))
    budgets = [least + place * (most - least) // 9 for place in range(10)]
    together = solve_each(costs, sizes, budgets)
    for budget, found in zip(budgets, together, strict=True):
        assert found.size_bytes <= budget
        assert found.cost == pytest.approx(solve(costs, sizes, budget).cost, rel=1e-9)
    with pytest.raises(Infeasible):
        solve_each(costs, sizes, [most, least - 1])


def test_a_large_problem_has_a_small_gap():
    costs, sizes = problem(1, n_units=300, n_formats=8)
    found = solve(costs, sizes, int(1.4 * sum(map(min, sizes))))
    assert found.gap < 1e-3
    cost = sum(c[x] for c, x in zip(costs, found.choice, strict=True))
    assert cost == pytest.approx(found.cost)


def test_formats_that_do_not_fit_a_unit_are_never_chosen():
    found = solve([[None, 1.0], [0.5, 0.1]], [[None, 8], [4, 8]], 12)
    assert found.choice == (1, 0)


def test_a_budget_that_nothing_fits_names_the_smallest_that_works():
    with pytest.raises(Infeasible) as error:
        solve([[1.0, 0.5]], [[10, 20]], 9)
    assert error.value.smallest == 10


LAYER = "model.layers.{}.self_attn.{}_proj"
MODULES = [LAYER.format(n, part) for n in (0, 1) for part in "qkvo"]
EXPERTS = [
    f"model.layers.{n}.mlp.experts.{e}.{part}_proj"
    for n in (0, 1)
    for e in (0, 1)
    for part in ("gate", "up", "down")
]


def test_what_vllm_fuses_is_one_unit_and_so_are_all_experts_of_a_block():
    found = units.fused([*MODULES, *EXPERTS])
    assert {unit.name: len(unit.modules) for unit in found} == {
        "model.layers.0.self_attn.qkv_proj": 3,
        "model.layers.0.self_attn.o_proj": 1,
        "model.layers.1.self_attn.qkv_proj": 3,
        "model.layers.1.self_attn.o_proj": 1,
        "model.layers.0.mlp.experts": 6,
        "model.layers.1.mlp.experts": 6,
    }
    assert units.are_whole(found)
    assert not units.are_whole([Unit(m, (m,)) for m in MODULES])


def test_patterns_match_their_modules_and_the_names_of_fused_layers_alone():
    from quantkit.recipe.checkpoint import _names

    found = units.fused([*MODULES, *EXPERTS])
    mine = [unit for unit in found if unit.block == "1"]
    targets = units.patterns(mine)
    for module in [*MODULES, *EXPERTS]:
        assert _names(targets, module) == (".layers.1." in module)
    # vLLM asks for the fused layer's name before it asks for its class.
    assert _names(targets, "model.layers.1.self_attn.qkv_proj")
    assert not _names(targets, "model.layers.0.self_attn.qkv_proj")
    assert not _names(targets, "model.layers.11.self_attn.q_proj")


def test_sizes_are_read_in_both_kinds_of_units():
    assert size_bytes("9GiB") == 9 << 30
    assert size_bytes("700MB") == 700_000_000
    assert size_bytes("1.5 kib") == 1536
    with pytest.raises(UsageError, match="not a size"):
        size_bytes("nine")


def test_units_are_named_by_what_tells_them_apart():
    names = [f"model.layers.{i}.{part}" for i in range(2) for part in ("mlp.up", "self_attn.qkv")]
    assert page.short_names(names) == ["0 up", "0 qkv", "1 up", "1 qkv"]
    shared = ["model.layers.0.mlp.experts.up", "model.layers.0.mlp.shared_expert.up"]
    assert page.short_names(shared) == ["experts up", "shared_expert up"]
    twins = ["a.0.x.up", "a.0.y.up", "a.1.x.up"]
    assert page.short_names(twins) == ["0.x.up", "0.y.up", "1.x.up"]
    assert page.short_names(["a.up"]) == ["up"]
