"""Changes the layout of quantised experts to what engines read: splits or fuses them. No number
changes, and nothing is read before it is written.

Most engines read experts one by one (`experts.3.gate_proj.weight_packed`); gpt-oss's are read as
one tensor per block, MXFP4 blocks beside scales, with rows of gate and up interleaved.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError, SourceError
from quantkit.model import fused, skeleton
from quantkit.model.derived import DerivedTensor, rows_of, slice_of
from quantkit.model.headers import StoredTensor, TensorSpec
from quantkit.model.source import ModelSource

if TYPE_CHECKING:
    import torch

TOGETHER = re.compile(
    r"^(?P<block>.*\.experts)\.(?P<layer>gate_up_proj|gate_proj|up_proj|down_proj)"
    r"(?:[._](?P<part>weight_\w+|weight|scale_inv|input_\w+|scales|bias))?$"
)
APART = re.compile(r"^(?P<block>.*\.experts)\.(?P<index>\d+)\.(?P<layer>\w+)\.(?P<part>\w+)$")
PARTS = {"": "weight", "scale_inv": "weight_scale_inv"}
"""Parts that have another name in fused experts."""
BLOCKS = {"weight_packed": "blocks", "weight_scale": "scales", "bias": "bias"}
JOINT = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
Change = tuple[str, str]
Stored = dict[str, StoredTensor]


def together(specs: Sequence[TensorSpec], source: ModelSource) -> dict[str, fused.Place]:
    """Places of 16-bit experts in the fused tensors that loaders of the model read.

    These are those of the source's files; a quantised source's are what transformers would save.
    Empty where experts are stored one by one.
    """
    if not any(fused.OF_ONE.search(spec.name) for spec in specs):
        return {}
    whole: Mapping[str, TensorSpec] = source.stored
    if source.quantized_by is not None:
        try:
            whole = skeleton.saved(skeleton.skeleton(source.folder, source.trust_remote_code))
        except SourceError:  # nothing but its own code knows the model
            return {}
    return fused.places(specs, whole, source.config)


def split(
    stored: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> tuple[Stored, list[Change]]:
    """Fused experts split one by one; other tensors unchanged."""
    together = _together(stored)
    result: Stored = {}
    changes: list[Change] = []
    for name, tensor in stored.items():
        if name not in together:
            result[name] = tensor
            continue
        block, layer, part = together[name]
        layers = JOINT.get(layer, (layer,))
        _check(name, tensor, layer, config)
        for index in range(tensor.shape[0]):
            own = slice_of(tensor, index)
            for place, single in enumerate(layers):
                new = f"{block}.{index}.{single}.{part}"
                result[new] = _rows(own, new, place, len(layers), part)
        changes.append((name, f"split into those of {tensor.shape[0]} experts"))
    return result, changes


def _together(stored: Mapping[str, StoredTensor]) -> dict[str, tuple[str, str, str]]:
    """Fused expert tensors of blocks with quantised weights: block, layer and part."""
    found: dict[str, tuple[str, str, str]] = {}
    quantized: set[str] = set()
    for name, tensor in stored.items():
        match = TOGETHER.match(name)
        if match is None or f"{match['block']}.{match['layer']}_blocks" in stored:
            continue
        part = PARTS.get(match["part"] or "", match["part"] or "")
        found[name] = (match["block"], match["layer"], part)
        if part in ("weight", "weight_packed") and tensor.dtype not in ("BF16", "F16", "F32"):
            quantized.add(match["block"])
    return {name: where for name, where in found.items() if where[0] in quantized}


def _check(name: str, tensor: StoredTensor, layer: str, config: Mapping[str, Any]) -> None:
    """Rows must come before columns, or values that share a scale would be separated."""
    text = config.get("text_config") or config
    width = text.get("hidden_size")
    inner = text.get("moe_intermediate_size") or text.get("intermediate_size")
    if len(tensor.shape) != 3 or not name.endswith((layer, "weight", "weight_packed")):
        return
    rows = width if layer == "down_proj" else inner
    rows = 2 * rows if layer == "gate_up_proj" and rows else rows
    if rows and tensor.shape[1] != rows:
        raise CheckpointError(
            f"{name} is {list(tensor.shape)}, where each expert has {rows} rows: it is stored "
            "transposed and cannot be split mechanically; quantise the source model"
        )


def _rows(tensor: StoredTensor, name: str, place: int, n_parts: int, part: str) -> StoredTensor:
    """Rows of one layer; a per-tensor scale applies to each."""
    shared = part == "weight_shape" or not tensor.shape or tensor.shape[0] == 1
    if part == "weight_shape" and n_parts > 1:
        compute = partial(_shape_of_part, n_parts)
        return DerivedTensor.of(name, tensor.dtype, tensor.shape, [tensor], compute)
    if shared or n_parts == 1:
        shape = tensor.shape or (1,)
        return replace(tensor, name=name, shape=shape)
    size = tensor.shape[0] // n_parts
    return rows_of(tensor, name, place * size, (place + 1) * size)


def _shape_of_part(n_parts: int, parents: "Sequence[torch.Tensor]") -> "torch.Tensor":
    shape = parents[0].clone()
    shape[0] //= n_parts
    return shape


def fuse(stored: Mapping[str, StoredTensor]) -> tuple[Stored, list[Change]]:
    """gpt-oss's experts stored one by one in MXFP4, fused into the blocks and scales of a block."""
    experts: dict[tuple[str, str], dict[int, dict[str, StoredTensor]]] = {}
    for name, tensor in stored.items():
        match = APART.match(name)
        if match is not None and match["part"] in BLOCKS:
            key = (match["block"], match["part"])
            own = experts.setdefault(key, {}).setdefault(int(match["index"]), {})
            own[match["layer"]] = tensor
    result: Stored = {}
    changes: list[Change] = []
    taken: set[str] = set()
    for (block, part), found in experts.items():
        if (block, "weight_packed") not in experts:
            continue
        for whole, layers in JOINT.items():
            new = f"{block}.{whole}_{BLOCKS[part]}"
            parents = _in_order(found, layers, new)
            result[new] = _stacked(new, parents, len(found), len(layers), part)
            taken |= {parent.name for parent in parents}
            changes.append((new, f"joined from those of {len(found)} experts"))
    kept = {name: tensor for name, tensor in stored.items() if name not in taken}
    moe_blocks = {block for block, part in experts if part == "weight_packed"}
    if left := [n for n in kept if (m := APART.match(n)) and m["block"] in moe_blocks]:
        raise CheckpointError(
            f"{left[0]} does not fit gpt-oss's MXFP4, which has blocks, scales and biases; "
            "quantise the source model"
        )
    return {**kept, **result}, changes


def _in_order(
    found: Mapping[int, Mapping[str, StoredTensor]], layers: Sequence[str], new: str
) -> list[StoredTensor]:
    parents = []
    for index in range(len(found)):
        for layer in layers:
            if index not in found or layer not in found[index]:
                raise CheckpointError(f"{new} cannot be made: {layer} of expert {index} is missing")
            parents.append(found[index][layer])
    if len({(parent.dtype, parent.shape) for parent in parents}) > 1:
        raise CheckpointError(f"{new} cannot be made: experts differ in shape or dtype")
    return parents


def _stacked(
    new: str, parents: Sequence[StoredTensor], n_experts: int, n_layers: int, part: str
) -> StoredTensor:
    """Rows of gate and up are interleaved; blocks have 16 bytes."""
    rows, *rest = parents[0].shape
    if part == "weight_packed":
        rest = [rest[0] // 16, 16]
    shape = (n_experts, rows * n_layers, *rest)
    compute = partial(_stack, shape, n_layers)
    return DerivedTensor.of(new, parents[0].dtype, shape, parents, compute)


def _stack(
    shape: tuple[int, ...], n_layers: int, parents: "Sequence[torch.Tensor]"
) -> "torch.Tensor":
    import torch

    experts = [
        torch.stack(list(parents[start : start + n_layers]), 1).flatten(0, 1)
        for start in range(0, len(parents), n_layers)
    ]
    return torch.stack(experts).reshape(shape)
