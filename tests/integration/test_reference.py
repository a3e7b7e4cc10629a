"""Our arithmetic and files against compressed-tensors and transformers, which are the reference."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization import QuantizationConfig as ReferenceConfig
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from compressed_tensors.quantization.utils import calculate_qparams
from families import loaded_by_transformers

from quantkit import formats, grid, resources
from quantkit.export.checkpoint import Checkpoint
from quantkit.formats import packing
from quantkit.methods.contract import Linears
from quantkit.methods.rtn import RTN
from quantkit.model.source import ModelSource
from quantkit.numbers.fp8 import FP8
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize as run_quantize
from quantkit.recipe import Recipe, WeightScheme, load
from quantkit.scoring import loading

pytestmark = pytest.mark.usefixtures("coarse_awq")

SCHEMES = [
    WeightScheme(num_bits=4, strategy="group", group_size=128),
    WeightScheme(num_bits=4, strategy="group", group_size=32, symmetric=False),
    WeightScheme(num_bits=8, strategy="group", group_size=64),
    WeightScheme(num_bits=8, strategy="channel"),
    WeightScheme(num_bits=8, strategy="channel", symmetric=False),
    WeightScheme(num_bits=8, type="float", strategy="channel"),
    WeightScheme(num_bits=8, type="float", strategy="tensor"),
    WeightScheme(num_bits=8, type="float", strategy="block", block_structure=(128, 128)),
]


def difficult_weight(dtype: torch.dtype) -> torch.Tensor:
    """Random, with a row of zeros, outliers, one-sided rows and ties."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(1)) * 0.05
    weight[3] = 0
    weight[5, 7] = 1e4
    weight[8] = weight[8].abs()
    weight[9] = -weight[9].abs()
    weight[11] = torch.arange(256) / 32
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: f"{s.type}{s.num_bits}-{s.strategy}")
def test_round_to_nearest_equals_the_reference_bit_for_bit(scheme, dtype):
    weight = difficult_weight(dtype)
    arguments = QuantizationArgs(**scheme.model_dump())
    tiles = grid.tiles(weight, scheme)
    scale, zero = calculate_qparams(tiles.amin(-1), tiles.amax(-1), arguments)
    # In float32: in bf16 the reference itself differs between CPU and GPU.
    values = quantize(
        weight.float(),
        scale.float(),
        None if scheme.symmetric else zero,
        arguments,
        dtype=torch.float8_e4m3fn if scheme.type == "float" else torch.int8,
    )
    ours = RTN.rounding.round(Linears(weight, dtype, scheme)).quantized
    assert ours.scale.dtype == dtype
    assert torch.equal(ours.scale, scale)
    assert torch.equal(ours.values.view(torch.int8), values.view(torch.int8))
    if scheme.symmetric:
        assert ours.zero_point is None
    else:
        assert torch.equal(ours.zero_point, zero)
    expected = dequantize(
        values.float(),
        scale.float(),
        None if scheme.symmetric else zero,
        arguments,
        dtype=torch.float32,
    )
    assert torch.equal(grid.dequantize(ours, scheme), expected)


@pytest.mark.parametrize("num_bits", [4, 8])
@pytest.mark.parametrize("columns", [8, 64, 100, 129])
def test_packing_equals_the_reference(num_bits, columns):
    half = 1 << (num_bits - 1)
    generator = torch.Generator().manual_seed(columns)
    values = torch.randint(-half, half, (16, columns), generator=generator, dtype=torch.int8)
    packed = packing.pack(values, num_bits)
    assert torch.equal(packed, pack_to_int32(values, num_bits))
    assert torch.equal(packing.unpack(packed, num_bits, columns), values)
    assert torch.equal(unpack_from_int32(packed, num_bits, values.shape), values)


def test_widening_is_exact_for_every_fp8_number():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = every.float()
    real = ~expected.isnan()
    assert torch.equal(FP8().widen(every)[real], expected[real])
    assert FP8().has_nan(every)
    assert not FP8().has_nan(every[real])


KINDS = (
    "rtn-w4a16", "awq-w4a16", "gptq-w3a16", "int8-w8a8", "fp8-dynamic", "fp8-block", "fp8-tensor",
    "nvfp4-a16", "rtn-mxfp4-a16", "mxfp8", "w4afp8",
)  # fmt: skip
"""One recipe of every kind of numbers."""


@pytest.fixture(scope="module", params=["kinds", pytest.param("all", marks=pytest.mark.slow)])
def checkpoints(request, short_demo, tmp_path_factory):
    """Shipped recipes on the demo model: one of each kind on two blocks, or every one on all."""
    out = tmp_path_factory.mktemp("out")
    source, names = short_demo, KINDS
    if request.param == "all":
        source, names = ModelSource.open("demo"), resources.names("recipes")
    recipes = [r for r in map(load, names) if isinstance(r, Recipe)]
    few = CalibrationChoice("python-docs", 8, 128)
    return run_quantize(source, recipes, out, calibration=few)


def test_config_is_what_the_reference_library_reads(checkpoints):
    for checkpoint in checkpoints:
        written = formats.config(checkpoint.manifest.recipe, ["lm_head"])
        config = ReferenceConfig.model_validate(written)
        group = config.config_groups["group_0"]
        assert config.format == written["format"]
        assert group.weights.num_bits == checkpoint.manifest.recipe.weights.num_bits
        assert group.weights.group_size == checkpoint.manifest.recipe.weights.group_size
        assert config.ignore == ["lm_head"]


MICROSCALED = ("group", "tensor_group")
LIMITS = {
    "int8-w8a8": 0.02,  # the library divides by 127.5; we follow vLLM's kernels, by 127
    "w4afp8": 0.03,  # vLLM's kernel keeps scales of groups in FP8, which the library does not do
}


def test_transformers_loads_every_checkpoint_and_computes_the_same(checkpoints):
    # Few: many processors multiply bfloat16 a hundred times slower than float32.
    ids = torch.randint(0, 4096, (2, 8), generator=torch.Generator().manual_seed(0))
    for checkpoint in checkpoints:
        recipe = checkpoint.manifest.recipe
        # The library makes bfloat16 of these, in which rounded inputs become others: only weights
        # can be compared so (inputs are in test_fp4.py).
        halves = recipe.weights.type == "float" and recipe.weights.strategy in MICROSCALED
        if halves and recipe.input_activations is not None:
            continue
        dtype = torch.bfloat16 if halves else torch.float32
        reference, inexact = loaded_by_transformers(checkpoint.folder, dtype)
        # What a symmetric checkpoint costs there would hide nothing: it loads as it is.
        assert not (inexact and recipe.weights.symmetric), checkpoint.label
        ours = loading.load(Checkpoint.open(checkpoint.folder), torch.device("cpu"))
        with torch.no_grad():
            expected = reference(ids).logits
            logits = ours(ids).logits
        error = (logits - expected).norm() / expected.norm()
        limit = 0.01 if halves else LIMITS.get(recipe.name, 1e-6)
        assert error < max(limit, inexact), checkpoint.label
