"""What every method keeps to, and methods that other packages bring."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import quantkit as qk
from quantkit import grid, methods, numbers
from quantkit.errors import MethodError, RecipeError
from quantkit.methods.contract import BatchRounding, Cost, Linears, Method
from quantkit.methods.statistics import Statistics
from quantkit.recipe import Recipe
from quantkit.schemes import WeightScheme

WIDTH = 128
SCHEMES = {
    "int": WeightScheme(num_bits=4, strategy="group", group_size=32),
    "float": WeightScheme(num_bits=8, type="float", strategy="channel"),
    "fp4": WeightScheme(num_bits=4, type="float", strategy="tensor_group", group_size=16),
}
CASES = [(name, kind) for name in methods.METHODS for kind in methods.find(name).types]
TOY = '''
from quantkit.methods.contract import Cost, Method, Option, Rounded


class TowardsZero:
    """Drops what is behind the point."""

    statistics = ("mean_abs",)

    def cost(self, rows, columns):
        return Cost(rows * columns)

    def round(self, linears):
        import torch

        from quantkit import grid

        assert linears.inputs.mean_abs.shape == linears.weight.shape[1:]
        tiles = grid.tiles(linears.weight, linears.scheme)
        largest = tiles.abs().amax(-1) * linears.options.get("reach", 1.0)
        scale, _ = grid.parameters(-largest, largest, linears.scheme)
        scale = scale.to(linears.dtype)
        bottom, top = grid.limits(linears.scheme)
        values = (tiles / scale.float().unsqueeze(-1)).trunc().clamp(bottom, top).to(torch.int8)
        return Rounded(grid.QuantizedWeight(values.view(linears.weight.shape), scale, None))


METHOD = Method(
    "round towards zero",
    "Weights are rounded towards zero.",
    TowardsZero(),
    options={"reach": Option("a number above 0", lambda value: value > 0)},
    types=("int",),
)
'''
RECIPE = """\
summary: a method of another package
method: toy
weights: {num_bits: 8, strategy: channel}
"""


class Watched(Statistics):
    """Notes which of its figures are read."""

    read: set[str]

    def __getattribute__(self, name):
        if name in ("gram", "total", "max_abs", "n_tokens", "mean_abs"):
            self.__dict__.setdefault("read", set()).add(name)
        return super().__getattribute__(name)


@pytest.fixture
def linears():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(512, WIDTH, generator=generator)
    inputs[:, 5] *= 30
    statistics = Watched.zeros(WIDTH, torch.device("cpu"))
    statistics.add(inputs)
    statistics.complete()
    statistics.__dict__["read"] = set()
    weight = torch.randn(64, WIDTH, generator=generator).bfloat16().float()
    return Linears(weight, torch.bfloat16, SCHEMES["int"], statistics=statistics)


def test_every_row_of_the_table_is_a_method():
    for name in methods.METHODS:
        method = methods.find(name)
        assert isinstance(method, Method), name
        assert method.summary
        assert method.explanation.endswith(".")
        cost = method.cost(4096, 4096)
        assert cost.fast >= 0
        assert cost.slow >= 0
        assert method.calibrated == (cost != Cost())
        assert set(method.types) <= set(SCHEMES)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_method_keeps_to_the_contract(linears, name, kind):
    method, scheme = methods.find(name), SCHEMES[kind]
    linears = replace(linears, scheme=scheme)
    if not method.calibrated:
        linears = replace(linears, statistics=None)
    before = linears.weight.clone()
    if method.smoothing:
        scale = method.smoothing.scale(linears)
        assert scale.shape == (WIDTH,)
        assert scale.isfinite().all()
        assert (scale > 0).all()
        assert torch.equal(scale, method.smoothing.scale(linears))
    rounded = method.rounding.round(linears)
    assert torch.equal(linears.weight, before), "a method must leave its weights alone"
    quantized = rounded.quantized
    number = numbers.of(scheme)
    bottom, top = number.limits
    assert quantized.values.shape == linears.weight.shape
    assert quantized.scale.dtype == (torch.float8_e4m3fn if kind == "fp4" else linears.dtype)
    assert number.widen(quantized.values).min() >= bottom
    assert number.widen(quantized.values).max() <= top
    off = grid.dequantize(quantized, scheme) - linears.weight
    assert off.norm() < 0.3 * linears.weight.norm()
    again = method.rounding.round(linears).quantized
    assert torch.equal(quantized.values.view(torch.int8), again.values.view(torch.int8))
    if method.calibrated:
        read = linears.inputs.__dict__["read"]
        of_mean = {"total", "n_tokens"} if "mean_abs" in read else set()
        assert read - of_mean - set(method.statistics) == set(), "it reads what it does not name"
        assert set(method.statistics) <= read, "it names what it does not read"


def experts(scheme, n_experts=3, width=320):
    """Linears of one shape, each with inputs of its own."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(n_experts):
        statistics = Statistics.zeros(width, torch.device("cpu"))
        statistics.add(
            torch.randn(640, width, generator=generator) * torch.rand(width, generator=generator)
        )
        statistics.complete()
        weight = torch.randn(48, width, generator=generator)
        yield Linears(weight, torch.bfloat16, scheme, statistics=statistics)


BATCHED = [
    (name, kind) for name, kind in CASES if isinstance(methods.find(name).rounding, BatchRounding)
]


@pytest.mark.parametrize(("name", "kind"), [*BATCHED, ("gptq", "asymmetric")])
def test_a_batch_is_rounded_as_its_members_are(name, kind):
    scheme = SCHEMES.get(kind) or WeightScheme(
        num_bits=4, strategy="group", group_size=32, symmetric=False
    )
    batch, rounding = list(experts(scheme)), methods.find(name).rounding
    for linears, found in zip(batch, rounding.round_batch(batch), strict=True):
        alone = rounding.round(linears)
        codes, expected = (made.quantized.values.view(torch.int8) for made in (found, alone))
        assert (codes == expected).float().mean() > 0.999
        assert torch.equal(
            found.quantized.scale.view(torch.uint8), alone.quantized.scale.view(torch.uint8)
        )
        assert found.damping == alone.damping


def test_a_member_of_a_batch_that_does_not_factor_is_rounded_alone():
    batch = list(experts(SCHEMES["int"]))
    never = Statistics.zeros(batch[1].weight.shape[1], torch.device("cpu"))
    batch[1] = replace(batch[1], statistics=never)
    rounding = methods.find("gptq").rounding
    found = rounding.round_batch(batch)
    assert [one.fallback for one in found] == [False, True, False]
    assert torch.equal(found[1].quantized.values, rounding.round(batch[1]).quantized.values)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a package, as a folder with its metadata; its entry points can be chosen."""
    site = tmp_path / "site"

    def install(entry_points="toy = toy_method:METHOD", code=TOY):
        known = site / "toy_method-1.0.dist-info"
        known.mkdir(parents=True)
        (known / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-method\nVersion: 1.0\n")
        (known / "entry_points.txt").write_text(f"[quantkit.methods]\n{entry_points}\n")
        (site / "toy_method.py").write_text(code)
        monkeypatch.syspath_prepend(str(site))
        methods._added.cache_clear()
        methods._load.cache_clear()

    yield install
    sys.modules.pop("toy_method", None)
    monkeypatch.undo()
    methods._added.cache_clear()
    methods._load.cache_clear()


def test_a_method_of_another_package_is_found_runs_and_is_written(package, tmp_path):
    package()
    path = tmp_path / "own.yaml"
    path.write_text(RECIPE + "options: {reach: 0.9}\n")
    made = qk.quantize("demo", str(path), calibration="python-docs", samples=4, length=64,
                       device="cpu", out=tmp_path / "out")[0]  # fmt: skip
    assert qk.verify(made.folder).ok
    assert made.manifest.recipe.method == "toy"
    assert "Weights are rounded towards zero." in (made.folder / "README.md").read_text()
    layer = next(iter(made.manifest.layers.values()))
    assert 0.001 < layer.relative_error < 0.1
    assert layer.output_error > 0
    plain = tmp_path / "plain.yaml"
    plain.write_text(RECIPE.replace("toy", "rtn"))
    nearest = qk.quantize("demo", str(plain), out=tmp_path / "out", device="cpu")[0]
    assert layer.relative_error > next(iter(nearest.manifest.layers.values())).relative_error


def test_options_of_another_packages_method_are_checked(package, tmp_path):
    package()
    assert methods.names() == [*methods.METHODS, "toy"]
    path = tmp_path / "own.yaml"
    path.write_text(RECIPE + "options: {reach: -1, wide: 2}\n")
    with pytest.raises(RecipeError, match=r"reach is a number above 0; method toy has no option w"):
        Recipe.load(str(path))
    path.write_text(RECIPE.replace("num_bits: 8", "num_bits: 8, type: float"))
    with pytest.raises(RecipeError, match="method toy rounds to integers"):
        Recipe.load(str(path))


@pytest.mark.parametrize(
    ("entry_points", "code", "words"),
    [
        ("gptq = toy_method:METHOD", TOY, "toy-method adds a method gptq, but quantkit has one"),
        ("toy = toy_method:METHOD", "import nowhere_at_all", "cannot be loaded: No module named"),
        ("toy = toy_method:METHOD", "METHOD = 3", "is not a quantkit.methods.contract.Method"),
    ],
    ids=["taken", "broken", "another-thing"],
)
def test_a_package_that_is_wrong_is_named(package, entry_points, code, words):
    package(entry_points, code)
    with pytest.raises(MethodError, match=words):
        methods.find("toy")


def test_recipes_are_checked_without_torch():
    code = (
        "import sys; from quantkit import recipe, resources\n"
        "for name in resources.names('recipes'): recipe.load(name).explain()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
