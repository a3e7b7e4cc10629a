"""NVFP4, MXFP4, MXFP8, W4AFP8 and integers of odd widths: bytes, arithmetic, files, faults."""

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from quantkit import formats, grid, numbers
from quantkit.conversion import convert
from quantkit.errors import RecipeError
from quantkit.export.checkpoint import Checkpoint
from quantkit.formats import packing
from quantkit.methods import gptq, products, scales
from quantkit.methods.contract import Linears
from quantkit.methods.rtn import RTN
from quantkit.methods.statistics import Statistics
from quantkit.model.source import ModelSource
from quantkit.numbers import channel_scales
from quantkit.numbers.activations import round_inputs
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.plan import checkpoint as planning
from quantkit.recipe import Recipe
from quantkit.schemes import ActivationScheme, WeightScheme
from quantkit.scoring import loading
from quantkit.verification.checkpoint import verify

DATA = CalibrationChoice("python-docs", 4, 64)
FLOATS = {
    "NVFP4A16": ("rtn-nvfp4-a16", "nvfp4-pack-quantized"),
    "MXFP4A16": ("rtn-mxfp4-a16", "mxfp4-pack-quantized"),
    "MXFP8": ("mxfp8", "mxfp8-quantized"),
}
NVFP4 = WeightScheme(num_bits=4, type="float", strategy="tensor_group", group_size=16)
MXFP4 = WeightScheme(num_bits=4, type="float", strategy="group", group_size=32)
W4 = WeightScheme(num_bits=4, strategy="group", group_size=128)
FP8_INPUTS = ActivationScheme(type="float", strategy="token", dynamic=True)
SQUARE = {"num_key_value_heads": 4}
"""Every layer of such a model is a multiple of 128 both ways."""


def weights(dtype=torch.bfloat16, rows=64, columns=256):
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(rows, columns, generator=generator)
    found *= torch.rand(rows, 1, generator=generator) * 0.1
    found[3, :64] = 0
    found[5, 0] = -0.0
    return found.to(dtype)


def linears_of(weight, scheme, **more):
    """With the statistics of some correlated inputs, a part of them held out."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(weight.shape[1], weight.shape[1], generator=generator) / 16
    inputs = torch.randn(2048, weight.shape[1], generator=generator) @ (mix + torch.eye(len(mix)))
    inputs[:, 7] *= 8
    found = Statistics.zeros(weight.shape[1], torch.device("cpu"), more.pop("held_out", False))
    found.add(inputs)
    found.complete()
    return Linears(weight.float(), weight.dtype, scheme, statistics=found, **more)


def output_error(linears, quantized):
    change = grid.dequantize(quantized, linears.scheme) - linears.weight
    gram = products.Halves.of(linears.inputs.gram)
    return products.row_energies(change, gram).sum().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("preset", FLOATS)
def test_rounding_gives_the_bytes_of_the_reference_library(preset, dtype):
    name, layout = FLOATS[preset]
    recipe = Recipe.load(name)
    weight, arguments = weights(dtype), PRESET_SCHEMES[preset]["weights"]
    tiles = weight.unflatten(-1, (-1, recipe.weights.group_size))
    state = {"weight": weight.clone()}
    if preset == "NVFP4A16":
        state["weight_global_scale"] = generate_gparam(weight.amin(), weight.amax())
    whole = state.get("weight_global_scale")
    state["weight_scale"], _ = calculate_qparams(tiles.amin(-1), tiles.amax(-1), arguments, whole)
    library = BaseCompressor.get_value_from_registry(layout)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    theirs = library.compress(state, scheme)
    ours = RTN.rounding.round(Linears(weight, dtype, recipe.weights)).quantized
    packed = formats.pack("a", ours, recipe)
    assert {name.removeprefix("a.") for name in packed} == set(theirs)
    for part, tensor in packed.items():
        other = theirs[part.removeprefix("a.")]
        assert tensor.dtype == other.dtype
        assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), part
    back = library.decompress(theirs, scheme)["weight"]
    stored = formats.unpack("a", packed, recipe)
    assert torch.equal(grid.dequantize(stored, recipe.weights).to(back.dtype), back)


@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_lie_densely_as_in_the_reference_library(bits):
    generator = torch.Generator().manual_seed(bits)
    half = 1 << (bits - 1)
    for columns in (32, 100, 256):
        values = torch.randint(-half, half, (7, columns), generator=generator).to(torch.int8)
        packed = packing.pack(values, bits)
        assert torch.equal(packed, pack_to_int32(values, bits))
        assert packed.shape[1] == packing.n_words(columns, bits)
        assert torch.equal(packing.unpack(packed, bits, columns), values)


def test_every_fp4_code_means_its_number_and_ties_go_to_even_codes():
    number = numbers.of(NVFP4)
    sizes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    codes = torch.arange(16, dtype=torch.uint8)
    assert number.widen(codes).tolist() == [*sizes, *(-size for size in sizes)]
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert number.round(between.clone()).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert number.round(torch.tensor([-0.1, -0.0, 9.0, -9.0])).tolist() == [8, 0, 7, 15]


def test_nvfp4_inputs_are_rounded_as_kernels_do_it():
    """By a loop over groups: a scale in E4M3 under the global one, then the nearest FP4 number."""
    scheme = ActivationScheme(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, dynamic="local"
    )
    values = weights(torch.float32, 6, 64) * 50
    values[1, :16] = 0
    whole = torch.tensor([448 * 6 / 20.0])
    ours = round_inputs(values, scheme, whole)
    grid_of = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for row in range(6):
        for start in range(0, 64, 16):
            group = values[row, start : start + 16]
            scale = (whole * group.abs().max() / 6).clamp(max=448).to(torch.float8_e4m3fn).float()
            step = scale / whole
            for place, value in enumerate(group):
                expected = 0.0
                if step > 0:
                    nearest = (grid_of * step - value.abs()).abs().argmin()
                    expected = (grid_of[nearest] * step * value.sign()).item()
                assert ours[row, start + place].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("bits", "top"), [(4, 6.0), (8, 448.0)])
def test_mx_inputs_have_powers_of_two_as_scales(bits, top):
    scheme = ActivationScheme(
        num_bits=bits, type="float", strategy="group", group_size=32, dynamic=True
    )
    number = numbers.of(scheme)
    largest = torch.tensor([6.0, 6.99, 7.0, 448.0, 449.0, 1e-3])
    scale = number.activation_scale(largest)
    assert torch.equal(scale, torch.exp2(torch.log2(scale).round()))
    if bits == 8:  # rounded up: nothing is clipped
        assert (largest / scale <= top).all()
        assert (2 * largest / scale > top).all()
    else:  # to the nearest power of two below, but from 1.75 on above
        assert (largest / scale)[:3].tolist() == pytest.approx([6.0, 6.99, 3.5])
    values = weights(torch.float32)
    assert ((round_inputs(values, scheme) - values).norm() / values.norm()) < 0.2


@pytest.mark.parametrize("scheme", [NVFP4, MXFP4], ids=["nvfp4", "mxfp4"])
def test_searched_scales_and_gptq_each_lose_less(scheme):
    linears = linears_of(weights(), scheme)
    whole = scales.global_scale(linears)
    plain = RTN.rounding.round(linears).quantized
    searched = grid.quantize(linears.weight, scales.searched(linears), None, scheme, whole)
    solved = gptq.GPTQ.rounding.round(linears)
    errors = [output_error(linears, one) for one in (plain, searched, solved.quantized)]
    assert errors[1] < (0.9 if scheme is NVFP4 else 0.98) * errors[0]  # powers of two are few
    assert errors[2] < 0.8 * errors[1]
    assert solved.held_out is None


def test_held_out_tokens_choose_for_each_linear():
    linears = linears_of(weights(), NVFP4, held_out=True, heights=(40, 24))
    made = gptq.GPTQ.rounding.round(linears)
    assert {way: len(errors) for way, errors in made.held_out.items()} == {"gptq": 2, "rounding": 2}
    held = products.Halves.of(linears.inputs.held_out)
    change = grid.dequantize(made.quantized, NVFP4) - linears.weight
    rows = slice(0, 40)
    share = products.row_energies(change[rows], held).sum()
    share /= products.row_energies(linears.weight[rows], held).sum()
    least = min(errors[0].item() for errors in made.held_out.values())
    assert share.item() == pytest.approx(least, rel=1e-4)
    # Where tokens to learn from say nothing of those held out, GPTQ has nothing to offer.
    found = linears.inputs
    found.gram = found.held_out + torch.diag(1e3 * torch.rand(256) ** 4)
    assert (gptq.GPTQ.rounding.round(linears).held_out["gptq"] > 0).all()


def test_scales_of_w4afp8_survive_the_kernel():
    linears = linears_of(weights(rows=128), W4, activations=FP8_INPUTS, options={"scales": "gram"})
    scale = scales.searched(linears)
    assert scale.dtype == torch.bfloat16
    ordinary = scale.amax(-1) > 0.002  # the kernel has a least factor, which is not a round number
    assert 100 < ordinary.sum() < 128
    assert torch.equal(channel_scales.served(scale)[ordinary], scale[ordinary].float())
    assert torch.allclose(channel_scales.served(scale), scale.float(), rtol=2**-8)
    usual = RTN.rounding.round(linears_of(weights(rows=128), W4)).quantized.scale
    assert not torch.allclose(channel_scales.served(usual), usual.float(), rtol=2**-6)
    solved = gptq.GPTQ.rounding.round(linears).quantized
    plain = RTN.rounding.round(linears).quantized
    assert torch.allclose(channel_scales.served(plain.scale), plain.scale.float(), rtol=2**-8)
    assert output_error(linears, solved) < 0.8 * output_error(linears, plain)


RECIPES = (
    "nvfp4", "nvfp4-fp8", "mxfp4", "w4afp8", "gptq-w3a16", "mxfp8", "rtn-nvfp4-a16", "rtn-w6a16",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints of a small model in the new formats, from one pass."""
    from tiny import READABLE, save_llama

    folder = save_llama(tmp_path_factory.mktemp("source") / "model", **READABLE | SQUARE)
    out = tmp_path_factory.mktemp("made")
    recipes = [Recipe.load(name) for name in RECIPES]
    quantize(ModelSource.open(str(folder)), recipes, out, "cpu", calibration=DATA)
    return out


@pytest.mark.parametrize("name", RECIPES)
def test_a_checkpoint_verifies_and_the_reference_library_knows_its_config(made, name):
    found = verify(made / name)
    assert found.ok, found.faults
    written = json.loads((made / name / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(written)
    recipe = Recipe.load(name)
    assert len(config.config_groups) == len(recipe.parts)
    for group, part in zip(config.config_groups.values(), recipe.parts, strict=True):
        preset = {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "MXFP8"}.get(
            numbers.of(part.weights).tag
        )
        if preset:
            theirs = PRESET_SCHEMES[preset]
            assert group.weights.model_dump() == theirs["weights"].model_dump()
            if part.input_activations:
                ours = group.input_activations.model_dump(exclude={"observer"})
                assert ours == theirs["input_activations"].model_dump(exclude={"observer"})
    model = loading.load(Checkpoint.open(made / name), torch.device("cpu"))
    logits = model(torch.arange(64).reshape(1, -1)).logits
    assert logits.isfinite().all()


def test_layers_that_are_fused_share_a_global_scale(made):
    tensors = load_file(made / "nvfp4" / "model.safetensors")
    for kind in ("weight_global_scale", "input_global_scale"):
        for names in (("q", "k", "v"), ("gate", "up")):
            where = "self_attn" if names[0] == "q" else "mlp"
            found = {tensors[f"model.layers.0.{where}.{n}_proj.{kind}"].item() for n in names}
            assert len(found) == 1


def test_experts_of_a_layer_share_a_global_scale():
    among = [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
        for layer in (0, 1) for expert in (0, 1, 2) for part in ("gate", "up", "down")
    ]  # fmt: skip
    gate = planning.sharing("model.layers.1.mlp.experts.2.up_proj", among)
    assert len(gate) == 6
    assert all(n.startswith("model.layers.1.") and "down" not in n for n in gate)
    assert len(planning.sharing("model.layers.0.mlp.experts.0.down_proj", among)) == 3


def test_the_manifest_says_what_held_out_tokens_chose(made):
    layers = Checkpoint.open(made / "nvfp4").manifest.layers
    assert all(set(layer.held_out) == {"gptq", "rounding"} for layer in layers.values())
    assert all(0 < error < 1 for layer in layers.values() for error in layer.held_out.values())
    mixed = Checkpoint.open(made / "nvfp4-fp8")
    chosen = {name for name, layer in mixed.manifest.layers.items() if layer.held_out}
    assert chosen == {name for name in mixed.manifest.layers if ".mlp." in name}
    assert mixed.tensors["model.layers.0.self_attn.q_proj.weight"].dtype == "F8_E4M3"
    config = json.loads((mixed.folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert [g["format"] for g in config["config_groups"].values()] == [
        "nvfp4-pack-quantized",
        "float-quantized",
    ]


@pytest.mark.parametrize("name", ["nvfp4", "rtn-nvfp4-a16"])
def test_nvfp4_goes_to_modelopts_layout_and_back(made, name, tmp_path):
    there = convert(made / name, "modelopt", tmp_path / "there")
    assert verify(there.folder).ok
    config = json.loads((there.folder / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == ("NVFP4" if name == "nvfp4" else "W4A16_NVFP4")
    before = load_file(made / name / "model.safetensors")
    after = load_file(there.folder / "model.safetensors")
    layer = "model.layers.0.mlp.down_proj"
    assert torch.equal(after[f"{layer}.weight"], before[f"{layer}.weight_packed"])
    assert after[f"{layer}.weight_scale_2"] == 1 / before[f"{layer}.weight_global_scale"]
    if name == "nvfp4":
        assert after[f"{layer}.input_scale"] == 1 / before[f"{layer}.input_global_scale"]
    convert(there.folder, "compressed-tensors", tmp_path / "back")
    back = (tmp_path / "back" / "model.safetensors").read_bytes()
    assert back == (made / name / "model.safetensors").read_bytes()


def spoilt(folder, out, change):
    """A copy of a checkpoint with changed tensors, whose manifest says that they belong there."""
    import shutil

    from quantkit.export.folder import hash_files

    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    manifest = json.loads((out / "quantkit.json").read_text())
    file = hash_files(out)["model.safetensors"]
    manifest["files"]["model.safetensors"] = file.model_dump()
    (out / "quantkit.json").write_text(json.dumps(manifest))
    return verify(out).faults


def test_fused_layers_with_unlike_scales_are_a_fault(made, tmp_path):
    def change(tensors):
        name = "model.layers.0.self_attn.k_proj.input_global_scale"
        tensors[name] = tensors[name] * 2

    faults = spoilt(made / "nvfp4", tmp_path / "a", change)
    assert any(
        "k_proj.input_global_scale is not that of model.layers.0.self_attn.q_proj" in fault
        for fault in faults
    )


@pytest.mark.parametrize(
    ("recipe", "part", "value"),
    [
        ("nvfp4", "weight_scale", 0x7F),
        ("nvfp4", "weight_scale", 0),
        ("mxfp4", "weight_scale", 255),
        ("mxfp8", "weight_scale", 255),
    ],
)
def test_nan_or_zero_as_a_scale_is_a_fault(made, tmp_path, recipe, part, value):
    module = "model.layers.0.mlp.down_proj"

    def change(tensors):
        tensors[f"{module}.{part}"].view(torch.uint8)[0, 0] = value

    faults = spoilt(made / recipe, tmp_path / "a", change)
    assert any(f"{module} has scales that are not finite and positive" in f for f in faults)


@pytest.mark.parametrize(
    ("recipe", "size", "said"),
    [
        ("nvfp4", {"intermediate_size": 264}, "NVFP4 has groups of 16 columns; put it into"),
        ("mxfp4", {"intermediate_size": 272}, "MXFP4 has groups of 32 columns; put it into"),
        ("mxfp8", {"intermediate_size": 272}, "MXFP8 has groups of 32 columns; put it into"),
        ("w4afp8", {}, "W4AFP8 needs .* multiples of 128"),
    ],
)
def test_a_shape_that_does_not_fit_is_named(tiny_model, tmp_path, recipe, size, said):
    source = ModelSource.open(str(tiny_model(**size)))
    with pytest.raises(RecipeError, match=said):
        quantize(source, [Recipe.load(recipe)], tmp_path, "cpu", calibration=DATA)


def test_groups_must_not_part_what_vllm_fuses(tiny_model, tmp_path):
    mixed = Recipe.load("nvfp4-fp8").model_dump()
    mixed["groups"][0]["targets"] = ["re:.*q_proj"]
    recipe = Recipe.validated(mixed, "own")
    with pytest.raises(RecipeError, match=r"q_proj and its siblings"):
        quantize(ModelSource.open(str(tiny_model())), [recipe], tmp_path, "cpu", calibration=DATA)
