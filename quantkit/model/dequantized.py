"""Already quantised sources, read as 16-bit weights.

A tensor is dequantised when it is read, one layer (or expert) at a time, so a large model is never
in memory as a whole. What a tensor is follows from its dtype and its companion tensors, not from
the method that a config names: the same few layouts come under many names.

    weight (FP8 or int8) and weight_scale or weight_scale_inv     a scale per tensor, row or block,
                                                                  or (MXFP8) an exponent per 32
    weight_packed or weight (two FP4 per byte) and weight_scale   a scale per 16, and one for all
    weight_packed (int32 words) and weight_scale, weight_shape    compressed-tensors
    qweight, qzeros and scales, with g_idx or without             AutoGPTQ, AutoAWQ
    ..._blocks and ..._scales                                     MXFP4 of all experts, gpt-oss
    weight, weight.absmax and others; weight (int8) and SCB       bitsandbytes
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.errors import QuantkitError, SourceError
from quantkit.formats import declared, packing
from quantkit.model import bitsandbytes
from quantkit.model.config import method_of
from quantkit.model.derived import DerivedTensor, slice_of
from quantkit.model.headers import StoredTensor

if TYPE_CHECKING:
    import torch

TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of FP4."""
NARROW = ("F8_E4M3", "F8_E5M2", "I8")
BESIDE = (
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "input_global_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "qzeros",
    "scales",
    "g_idx",
    "SCB",
    "weight_format",
)


def dequantized(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """Parameters in 16 bits by their usual names; unquantised ones are unchanged."""
    method = method_of(config) or ""
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = TYPES.get(named.removeprefix("torch."), "BF16")
    widths = _widths(config)
    result: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        beside = {
            part: tensors[f"{module}.{part}"] for part in BESIDE if f"{module}.{part}" in tensors
        }
        if bitsandbytes.state_name(name, tensors) is not None:
            result[name] = bitsandbytes.four_bits(tensor, tensors, dtype)
        elif last == "weight" and tensor.dtype == "I8" and "SCB" in beside:
            result[name] = bitsandbytes.eight_bits(tensor, beside["SCB"], dtype)
        elif last == "weight" and tensor.dtype in NARROW:
            result[name] = _scaled(name, tensor, beside, dtype)
        elif last in ("weight_packed", "weight") and tensor.dtype == "U8":
            result[f"{module}.weight"] = _fp4(module, tensor, beside, dtype)
        elif last == "weight_packed":
            result[f"{module}.weight"] = _words(module, tensor, beside, dtype, widths(module))
        elif last == "qweight":
            of_format = (
                _awq
                if declared.packs_rows(declared.section(config))
                else partial(_gptq, _zero_offset(config))
            )
            result[f"{module}.weight"] = of_format(module, tensor, beside, dtype)
        elif (whole := of_experts(name)) and f"{whole}_scales" in tensors:
            bias = tensors.get(f"{whole}_bias")
            result |= _mxfp4(whole, tensor, tensors[f"{whole}_scales"], bias, dtype)
        elif not _stands_beside(name, tensors):
            if tensor.dtype in NARROW:
                raise SourceError(
                    f"{tensor.file.parent}: {name} is {tensor.dtype}, which quantkit does not know "
                    f"how to read in a model quantised by {method}; give the 16-bit model"
                )
            result[name] = tensor
    return result


def modules(tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The layers that are stored quantised, by the module names of their 16-bit weights."""
    found = []
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        narrow = last == "weight" and tensor.dtype in (*NARROW, "U8")
        narrow = narrow or bitsandbytes.state_name(name, tensors) is not None
        if narrow or last in ("weight_packed", "qweight"):
            found.append(module)
        elif (whole := of_experts(name)) and f"{whole}_scales" in tensors:
            found += [one for expert in joint_layers(whole, tensor.shape[0]) for one in expert]
    return found


def of_experts(name: str) -> str | None:
    """The fused expert parameter whose MXFP4 blocks a tensor holds; None: it holds none."""
    return (
        name.removesuffix("_blocks") if name.endswith("_blocks") and ".experts." in name else None
    )


def joint_layers(whole: str, n_experts: int) -> list[tuple[str, ...]]:
    """The layers of each expert that a fused parameter holds, with interleaved rows."""
    block, _, last = whole.rpartition(".experts.")
    layers = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    return [
        tuple(f"{block}.experts.{index}.{layer}" for layer in layers) for index in range(n_experts)
    ]


def _stands_beside(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor only describes another one."""
    module, _, last = name.rpartition(".")
    if bitsandbytes.owner(name, tensors) is not None:
        return True
    if any(f"{name.removesuffix(end)}_blocks" in tensors for end in ("_scales", "_bias")):
        return True
    weights = (f"{module}.{part}" for part in ("weight", "weight_packed", "qweight"))
    return last in BESIDE and any(weight in tensors for weight in weights)


def _need(
    module: str, tensor: StoredTensor, beside: Mapping[str, StoredTensor], *parts: str
) -> list[StoredTensor]:
    missing = next((part for part in parts if part not in beside), None)
    if missing is not None:
        raise SourceError(
            f"{tensor.file.parent}: {tensor.name} is quantised but {module}.{missing} is missing; "
            "download the model again"
        )
    return [beside[part] for part in parts]


def _scaled(
    name: str, tensor: StoredTensor, beside: Mapping[str, StoredTensor], dtype: str
) -> StoredTensor:
    known = [part for part in ("weight_scale_inv", "weight_scale") if part in beside]
    (scale,) = _need(name.removesuffix(".weight"), tensor, beside, *(known[:1] or ["weight_scale"]))
    return DerivedTensor.of(name, dtype, tensor.shape, [tensor, scale], _multiply)


def _multiply(parents: "Sequence[torch.Tensor]") -> "torch.Tensor":
    values, scale = parents[0].float(), _steps(parents[1])
    if scale.ndim == 1 and scale.numel() > 1:
        scale = scale[:, None]
    while 1 < scale.ndim < values.ndim:
        scale = scale[..., None]
    if scale.numel() > 1:
        for dim in range(values.ndim):
            if scale.shape[dim] not in (1, values.shape[dim]):
                size = _block(values.shape[dim], scale.shape[dim])
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, values.shape[dim])
    return values * scale


def _steps(scale: "torch.Tensor") -> "torch.Tensor":
    """Scales as numbers: bytes are E8M0 exponents."""
    if scale.element_size() == 1 and not scale.is_floating_point():
        return (scale.float() - 127).exp2()
    return scale.float()


def _block(size: int, n_blocks: int) -> int:
    """The block size, a power of two; the last block may be incomplete."""
    found = 1
    while found * n_blocks < size:
        found *= 2
    return found


def _fp4(
    module: str, tensor: StoredTensor, beside: Mapping[str, StoredTensor], dtype: str
) -> StoredTensor:
    rows, columns = tensor.shape
    inverse = "weight_global_scale" in beside
    whole = [part for part in ("weight_global_scale", "weight_scale_2") if part in beside]
    scales = _need(module, tensor, beside, "weight_scale", *whole)
    return DerivedTensor.of(
        f"{module}.weight",
        dtype,
        (rows, 2 * columns),
        [tensor, *scales],
        partial(_from_fp4, inverse),
    )


def _from_fp4(inverse: bool, parents: "Sequence[torch.Tensor]") -> "torch.Tensor":
    packed, scale, *whole = parents
    values = _e2m1(packed)
    steps = _steps(scale)
    if whole:
        steps = steps / whole[0].float() if inverse else steps * whole[0].float()
    return values * steps.repeat_interleave(values.shape[-1] // steps.shape[-1], -1)


def _e2m1(packed: "torch.Tensor") -> "torch.Tensor":
    """Two numbers per byte, the first in the low nibble."""
    import torch

    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    return table[halves.long()]


def _fields(packed: "torch.Tensor", num_bits: int) -> "torch.Tensor":
    """Unsigned fields of int32 words, the lowest first, along the last dimension."""
    import torch

    shifts = torch.arange(32 // num_bits) * num_bits
    found = (packed.long()[..., None] & 0xFFFFFFFF) >> shifts & ((1 << num_bits) - 1)
    return found.flatten(-2)


def _widths(config: Mapping[str, Any]) -> "Callable[[str], int | None]":
    """The bits that a config declares for each layer; None where it does not say."""
    try:
        known = declared.of(config, "config.json")
    except QuantkitError:  # whoever needs the config reports what is wrong with it
        return lambda module: None
    if not known.dialect.spells_out:
        return lambda module: None

    def width(module: str) -> int | None:
        part = known.part(module)
        return part.weights.num_bits if part is not None else None

    return width


def _words(
    module: str,
    tensor: StoredTensor,
    beside: Mapping[str, StoredTensor],
    dtype: str,
    width: int | None,
) -> StoredTensor:
    """Integers in words: dense, or, for widths that do not divide 32, as many as fit into a
    word.
    """
    shape, scale = _need(module, tensor, beside, "weight_shape", "weight_scale")
    rows, columns = (int(n) for n in shape.read().tolist())
    num_bits = width or (4 if tensor.shape[1] == -(-columns // 8) else 8)
    padded = -(-columns // (32 // num_bits))
    if tensor.shape[1] not in (padded, packing.n_words(columns, num_bits)):
        raise SourceError(
            f"{tensor.file.parent}: {tensor.name} holds {columns} columns in {tensor.shape[1]} "
            f"words, which integers of {num_bits} bits do not fill; run `quantkit verify`"
        )
    if 32 % num_bits and "weight_zero_point" in beside:
        raise SourceError(
            f"{tensor.file.parent}: {tensor.name} has {num_bits} bits and zero points, which "
            "quantkit does not read; give the 16-bit model"
        )
    parents = [tensor, scale]
    order = [part for part in ("weight_zero_point", "weight_g_idx") if part in beside]
    parents += [beside[part] for part in order]
    compute = partial(_from_words, num_bits, columns, tuple(order))
    return DerivedTensor.of(f"{module}.weight", dtype, (rows, columns), parents, compute)


def _from_words(
    num_bits: int, columns: int, order: tuple[str, ...], parents: "Sequence[torch.Tensor]"
) -> "torch.Tensor":
    packed, scale, *more = parents
    beside = dict(zip(order, more, strict=True))
    middle = float(1 << (num_bits - 1))
    if 32 % num_bits and packed.shape[1] == packing.n_words(columns, num_bits):
        values = packing.unpack(packed, num_bits, columns).float() + middle
    else:
        values = _fields(packed, num_bits)[:, :columns].float()
    zero = None
    if (stored := beside.get("weight_zero_point")) is not None:
        zero = _fields(stored.t().contiguous(), num_bits).t()[: len(values)].float() - middle
    groups = beside.get("weight_g_idx")
    values = values - middle
    scale = scale.float()
    if groups is not None and (groups >= 0).all():
        places = groups.long()
        return (values - (0 if zero is None else zero[:, places])) * scale[:, places]
    size = columns // scale.shape[1]
    if zero is not None:
        values = values - zero.repeat_interleave(size, 1)
    return values * scale.repeat_interleave(size, 1)


def _zero_offset(config: Mapping[str, Any]) -> int:
    """AutoGPTQ stores zero points minus one, unless it is the second version of its format."""
    found = config.get("quantization_config") or {}
    return 0 if str(found.get("checkpoint_format", "")).endswith("v2") else 1


def _gptq(
    offset: int,
    module: str,
    tensor: StoredTensor,
    beside: Mapping[str, StoredTensor],
    dtype: str,
) -> StoredTensor:
    zeros, scales = _need(module, tensor, beside, "qzeros", "scales")
    rows = tensor.shape[1]
    num_bits = 32 * zeros.shape[1] // rows
    if num_bits not in (2, 4, 8):
        raise SourceError(
            f"{tensor.file.parent}: {tensor.name} has {num_bits} bits per weight; quantkit reads "
            "2, 4 and 8 in this format"
        )
    columns = tensor.shape[0] * 32 // num_bits
    parents = [tensor, zeros, scales, *([beside["g_idx"]] if "g_idx" in beside else [])]
    compute = partial(_from_gptq, num_bits, offset)
    return DerivedTensor.of(f"{module}.weight", dtype, (rows, columns), parents, compute)


def _from_gptq(num_bits: int, offset: int, parents: "Sequence[torch.Tensor]") -> "torch.Tensor":
    import torch

    packed, packed_zeros, scales, *order = parents
    values = _fields(packed.t().contiguous(), num_bits).float()
    zeros = (_fields(packed_zeros, num_bits) + offset).float()
    columns = values.shape[1]
    groups = order[0].long() if order else torch.arange(columns) // (columns // len(scales))
    return (values - zeros.t()[:, groups]) * scales.float().t()[:, groups]


def _awq(
    module: str, tensor: StoredTensor, beside: Mapping[str, StoredTensor], dtype: str
) -> StoredTensor:
    zeros, scales = _need(module, tensor, beside, "qzeros", "scales")
    shape = (scales.shape[1], tensor.shape[0])
    return DerivedTensor.of(f"{module}.weight", dtype, shape, [tensor, zeros, scales], _from_awq)


def _from_awq(parents: "Sequence[torch.Tensor]") -> "torch.Tensor":
    import torch

    from quantkit.formats.awq import INVERSE

    packed, packed_zeros, scales = parents
    order = torch.tensor(INVERSE)
    values, zeros = (
        _fields(part, 4).view(len(part), -1, len(INVERSE))[:, :, order].flatten(1).float()
        for part in (packed, packed_zeros)
    )
    size = len(values) // len(scales)
    zeros, steps = (part.repeat_interleave(size, 0) for part in (zeros, scales.float()))
    return ((values - zeros) * steps).t()


def _mxfp4(
    name: str, blocks: StoredTensor, scales: StoredTensor, bias: StoredTensor | None, dtype: str
) -> dict[str, StoredTensor]:
    """The layers of all experts one by one, with rows arranged as in a linear layer."""
    n_experts, rows, n_groups, n_bytes = blocks.shape
    columns = n_groups * n_bytes * 2
    found: dict[str, StoredTensor] = {}
    for index, layers in enumerate(joint_layers(name, n_experts)):
        parents = [slice_of(blocks, index), slice_of(scales, index)]
        for place, layer in enumerate(layers):
            own = f"{layer}.weight"
            compute: Callable[[Sequence[torch.Tensor]], torch.Tensor]
            compute = partial(_from_mxfp4, place, len(layers))
            shape = (rows // len(layers), columns)
            found[own] = DerivedTensor.of(own, dtype, shape, parents, compute)
            if bias is not None:
                own = f"{layer}.bias"
                compute = partial(_part, place, len(layers))
                part = slice_of(bias, index)
                found[own] = DerivedTensor.of(own, bias.dtype, shape[:1], [part], compute)
    return found


def _part(place: int, n_layers: int, parents: "Sequence[torch.Tensor]") -> "torch.Tensor":
    return parents[0][place::n_layers]


def _from_mxfp4(place: int, n_layers: int, parents: "Sequence[torch.Tensor]") -> "torch.Tensor":
    packed, scales = (parent[place::n_layers] for parent in parents)
    values = _e2m1(packed)
    return (values * (scales.float() - 127).exp2()[..., None]).flatten(1)
