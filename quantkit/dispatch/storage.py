"""Checks what a checkpoint stores against what vLLM builds: tensors, shapes, scales, order."""

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quantkit.dispatch import fusion
from quantkit.dispatch.layers import Layer
from quantkit.dispatch.rules import (
    Consequence,
    Finding,
    finding,
)
from quantkit.dispatch.schemes import (
    Judged,
    Scheme,
    columns_of,
    is_readable,
    scheme_of,
)
from quantkit.tensorspec import TensorSpec

FORMATS = {"F16": "<e", "F32": "<f"}
"""`struct` formats of scales."""


def storage(judged: Judged) -> Iterator[Finding]:
    """Layers that vLLM builds differently from how they are stored, and `ignore` entries without
    effect.
    """
    tied = bool(judged.checkpoint.config.get("tie_word_embeddings"))
    odd: list[tuple[str, Consequence]] = []
    split = {
        shard
        for one in fusion.fused(judged)
        for shard in dict(judged.checkpoint.fused).get(one.layer, ())
    }
    for name, layer in judged.checkpoint.linears.items():
        if name in split or (tied and name.rpartition(".")[2] == "lm_head"):
            continue
        if judged.method == "mxfp4" and ".experts." in name:
            continue  # gpt-oss's loader skips names that it does not know
        scheme = scheme_of(judged, name)
        if scheme is None and layer.is_quantized and is_readable(judged):
            entry = judged.ignoring(judged.checkpoint.inside(name))
            why = f"`ignore` has {entry}" if entry else "no group of the config covers it"
            yield finding("stored-quantized", name, f"stored quantised, and {why}")
        elif scheme is not None and not layer.is_quantized:
            casts = scheme.kind in ("fp8", "fp8-block", "fp8-a16", "int8")
            how: Consequence = "garbage" if casts else "refuses"
            odd.append((name, how))
            yield finding("stored-plain", name, f"stored in 16 bits, built as {scheme.tag}", how)
    if odd:
        inside = [judged.checkpoint.inside(name) for name in judged.checkpoint.layers]
        for entry, mapped in judged.ignore:
            if not any(judged.ignores(mapped, name) for name in inside):
                words = f"it matches none of vLLM's modules, such as {inside[-1]}"
                yield finding("ignore-name", f"ignore: {entry}", words, odd[0][1])


def _expected(judged: Judged, scheme: Scheme, layer: Layer) -> Iterator[str]:
    """Tensors that vLLM computes with, besides the weight."""
    parts = layer.parts
    if judged.method in ("gptq", "awq"):
        yield "scales"
        if judged.method == "awq":
            yield "qzeros"
        elif scheme.act_order:
            yield "g_idx"
        return
    if judged.method == "bitsandbytes":
        if scheme.bits == 8:
            yield "SCB"
        return
    block = scheme.kind == "fp8-block" and judged.method == "fp8"
    yield "weight_scale_inv" if block else "weight_scale"
    if scheme.kind.startswith("nvfp4"):
        yield "weight_scale_2" if "weight_packed" not in parts else "weight_global_scale"
        if scheme.kind == "nvfp4":
            yield "input_scale" if "weight_packed" not in parts else "input_global_scale"
    if scheme.static:
        yield "input_scale"
    if scheme.kind == "wna16" and not scheme.symmetric:
        yield "weight_zero_point"
    if scheme.kind == "wna16" and scheme.act_order:
        yield "weight_g_idx"


def tensors(judged: Judged) -> Iterator[Finding]:
    for name, layer in judged.checkpoint.linears.items():
        scheme = scheme_of(judged, name)
        if scheme is None or not layer.is_quantized:
            continue
        for part in _expected(judged, scheme, layer):
            if part not in layer.parts:
                yield finding("missing-tensor", f"{name}.{part}", "it is missing")
        if judged.method == "bitsandbytes" and scheme.bits == 4:
            yield from _states(judged, name)
        if scheme.kind == "wna16" and judged.method == "compressed-tensors":
            yield from _packing(judged, name, layer, scheme)
        if (fault := _misshapen(judged, layer, scheme)) is not None:
            yield finding("shape", f"{name}.{fault[0]}", fault[1])
    blocks = _block_size(judged.section)
    for whole, shards in judged.checkpoint.fused:
        scheme = scheme_of(judged, shards[0])
        if scheme is None or scheme.kind != "fp8-block":
            continue
        for shard in shards[:-1]:
            rows, _ = judged.checkpoint.linears[shard].shape(8)
            if rows % blocks[0]:
                words = f"{shard.rpartition('.')[2]} has {rows} rows, blocks have {blocks[0]}"
                yield finding("fp8-blocks", whole, words)


def _states(judged: Judged, name: str) -> Iterator[Finding]:
    """What bitsandbytes stores beside 4 bits, from which vLLM builds its QuantState."""
    kind = str(judged.section.get("bnb_4bit_quant_type") or "fp4")
    for part in ("absmax", "quant_map", f"quant_state.bitsandbytes__{kind}"):
        if f"{name}.weight.{part}" not in judged.checkpoint.tensors:
            yield finding("bnb-state", f"{name}.weight.{part}", "it is missing")


def _packing(judged: Judged, name: str, layer: Layer, scheme: Scheme) -> Iterator[Finding]:
    """Dense words against words that hold whole integers only."""
    columns = columns_of(layer, scheme)
    if 32 % scheme.bits == 0 or columns is None:
        return
    dense, padded = -(-columns * scheme.bits // 32), -(-columns // (32 // scheme.bits))
    words = layer.parts["weight_packed"].shape[-1]
    if words == padded != dense:
        detail = (
            f"{words} words per row for {columns} columns of {scheme.bits} bits, dense: {dense}"
        )
        yield finding("packing", f"{name}.weight_packed", detail, "refuses")


def _misshapen(judged: Judged, layer: Layer, scheme: Scheme) -> tuple[str, str] | None:
    """Name and message for a scale whose shape does not match the weight's."""
    scale = layer.parts.get("weight_scale") or layer.parts.get("scales")
    if scale is None or scheme.group_size < 1 or len(scale.shape) != 2 or 32 % scheme.bits:
        return None
    rows, columns = layer.shape(scheme.bits, judged.method == "awq")
    expected = (rows, columns // scheme.group_size)
    if "scales" in layer.parts:
        expected = (columns // scheme.group_size, rows)
    if scale.shape == expected:
        return None
    part = "scales" if "scales" in layer.parts else "weight_scale"
    return part, f"{list(scale.shape)}, {scheme.tag} needs {list(expected)}"


def _block_size(section: Mapping[str, Any]) -> tuple[int, int]:
    for group in (section.get("config_groups") or {}).values():
        if found_here := (group.get("weights") or {}).get("block_structure"):
            return int(found_here[0]), int(found_here[1])
    high, wide = section.get("weight_block_size") or (128, 128)
    return int(high), int(wide)


def scalars(judged: Judged) -> Iterator[Finding]:
    """Per-tensor scales that differ within what vLLM loads as one layer."""
    if judged.read is None:
        return
    for whole, shards in judged.checkpoint.fused:
        layers = [judged.checkpoint.linears[shard] for shard in shards]
        for part, rule in (
            ("weight_global_scale", "global-scales"), ("weight_scale_2", "global-scales"),
            ("weight_scale", "fp8-merge"), ("input_scale", "input-scales"),
            ("input_global_scale", "input-scales"),
        ):  # fmt: skip
            if rule == "fp8-merge" and not _is_per_tensor(judged, shards[0]):
                continue
            specs = [layer.parts.get(part) for layer in layers]
            if any(spec is None or spec.n_elements != 1 for spec in specs):
                continue
            values = [_scalar(judged.read, spec) for spec in specs if spec is not None]
            known = [value for value in values if value is not None]
            if len(known) == len(values) and len(set(known)) > 1:
                ratio = max(known) / min(known) if min(known) > 0 else float("inf")
                words = f"{part} differs by a factor of {ratio:.4g} between its shards"
                yield finding(rule, whole, words)


def _is_per_tensor(judged: Judged, shard: str) -> bool:
    scheme = scheme_of(judged, shard)
    return scheme is not None and scheme.per_tensor


def _scalar(read: Callable[[TensorSpec], bytes], spec: TensorSpec) -> float | None:
    raw = read(spec)
    if spec.dtype == "BF16":
        return float(struct.unpack("<f", b"\0\0" + raw)[0])
    if (form := FORMATS.get(spec.dtype)) is None:
        return None
    return float(struct.unpack(form, raw)[0])


def order(judged: Judged) -> Iterator[Finding]:
    """A column order that the config does not declare."""
    for name, layer in judged.checkpoint.linears.items():
        scheme = scheme_of(judged, name)
        if scheme is None or scheme.kind != "wna16" or scheme.act_order:
            continue
        if "weight_g_idx" in layer.parts and judged.method == "compressed-tensors":
            words = "weight_g_idx is stored, but actorder is not declared"
            how: Consequence = "garbage" if judged.version < (0, 30) else "refuses"
            yield finding("act-order", name, words, how)
        index = layer.parts.get("g_idx")
        if index is None or judged.read is None or scheme.group_size < 1:
            continue
        raw = judged.read(index)
        places = struct.unpack(f"<{len(raw) // 4}i", raw)
        if any(place != n // scheme.group_size for n, place in enumerate(places)):
            yield finding("act-order", name, "g_idx has its own order, but desc_act is false")
        return  # one layer is enough
    for block, experts in judged.checkpoint.experts.items():
        layer = next(iter(next(iter(experts.values())).values()))
        scheme = scheme_of(judged, layer.name)
        if scheme is not None and scheme.act_order:
            rows, columns = layer.shape(scheme.bits)
            if columns % 128 or rows % max(64, scheme.group_size):
                words = f"experts of {rows} x {columns} with act-order"
                yield finding("act-order-experts", block, words)
