"""vLLM's dispatch applied to a config and headers: the scheme and kernel of each layer, and faults.

Each function follows one of vLLM's own; the rule that a finding names says which (`rules.py`).
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quantkit.dispatch import gptoss, sizes
from quantkit.dispatch.choices import choices
from quantkit.dispatch.layers import TOGETHER, Layer
from quantkit.dispatch.rules import (
    ARGUMENT_KEYS,
    ARGUMENT_VALUES,
    METHODS,
    RULES,
    Consequence,
    Finding,
    found,
    pinned,
)
from quantkit.dispatch.schemes import (
    MODELOPT,
    Judged,
    Scheme,
    Unsupported,
    columns_of,
    compressed,
    is_match,
    is_readable,
    scheme_of,
)
from quantkit.hardware import kernels
from quantkit.tensorspec import TensorSpec

REQUIRED = {
    "gptq": (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    "awq": (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",)),
    "fp8": (("activation_scheme",),),
}
"""Keys that vLLM reads without a default; one of each."""
DTYPES = {
    "gptq": ("float16", "bfloat16"), "awq": ("float16", "bfloat16"),
    "fp8": ("float16", "bfloat16"), "modelopt": ("float16", "bfloat16"), "mxfp4": ("bfloat16",),
}  # fmt: skip
FORMATS = {"F16": "<e", "F32": "<f"}


def findings(judged: Judged) -> list[Finding]:
    """Everything that is wrong, most general first."""
    holds = {rule.id for rule in RULES if rule.engine == "vllm" and rule.holds(judged.version)}
    result: list[Finding] = []
    for check in (_method, _keys, _numbers):
        result += [one for one in check(judged) if one.rule.id in holds]
        if any(one.is_fault for one in result):
            return result
    for check in (
        _groups, sizes.model, _fused, _experts, gptoss.findings, _storage, _tensors, _scalars,
        _order, sizes.cache, sizes.heads, _kernels,
    ):  # fmt: skip
        result += [one for one in check(judged) if one.rule.id in holds]
    return result


def _method(judged: Judged) -> Iterator[Finding]:
    method = judged.method
    if not method:
        return
    span = METHODS.get(method)
    if span is None or judged.version < span[0] or (span[1] and judged.version >= span[1]):
        words = f"{method} is not a method of vLLM {judged.version[0]}.{judged.version[1]}"
        yield found("method", "quantization_config", words)
    model = str(judged.checkpoint.config.get("model_type"))
    if method == "mxfp4" and model != "gpt_oss":
        yield found("mxfp4-family", "quantization_config", f"mxfp4 in a model of type {model}")
    minimum = kernels.METHOD_MINIMUM.get(method, 0)
    if method == "modelopt" and judged.algorithm.startswith("FP8"):
        known = kernels.MODELOPT_FP8_MINIMUM
        minimum = known[max(since for since in known if since <= judged.version)]
    if judged.capability is not None and judged.capability < minimum:
        words = f"{method} needs {minimum / 10:.1f}, the GPU has {judged.capability / 10:.1f}"
        yield found("capability", "quantization_config", words)
    dtype = judged.checkpoint.text.get("dtype") or judged.checkpoint.text.get("torch_dtype")
    dtype = dtype or judged.checkpoint.config.get("torch_dtype")
    if method in DTYPES and dtype is not None and str(dtype) not in DTYPES[method]:
        words = f"{method} computes in {' or '.join(DTYPES[method])}, config.json says {dtype}"
        # vLLM takes float16 for a float32 model unless told otherwise.
        if str(dtype) not in ("float32", "float16"):
            yield found("dtype", "config.json", words)


def _keys(judged: Judged) -> Iterator[Finding]:
    section, library = judged.section, pinned(judged.version)
    for keys in REQUIRED.get(judged.method, ()):
        if not any(key in section for key in keys):
            yield found("required-key", "quantization_config", f"{keys[-1]} is missing")
    if (section.get("sparsity_config") or {}).get("targets"):
        yield found("sparsity", "sparsity_config", "it names targets")
    if judged.method != "compressed-tensors":
        return
    for name, group in (section.get("config_groups") or {}).items():
        if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
            yield found("required-key", f"config_groups.{name}", "targets is missing")
            continue
        for part in ("weights", "input_activations", "output_activations"):
            given = group.get(part)
            if not isinstance(given, dict):
                if part == "weights" and given is None:
                    yield found("required-key", f"config_groups.{name}", "weights is missing")
                continue
            where = f"config_groups.{name}.{part}"
            for key in sorted(given.keys() - ARGUMENT_KEYS):
                yield found(
                    "unknown-key", where, f"{key}, which compressed-tensors {library} forbids"
                )
            for key, values in ARGUMENT_VALUES.items():
                if key in given and given[key] not in values:
                    words = f"{key} is {given[key]!r}, which compressed-tensors {library} forbids"
                    yield found("unknown-key", where, words)


def _numbers(judged: Judged) -> Iterator[Finding]:
    section, method = judged.section, judged.method
    if method == "gptq" and not section.get("dynamic"):
        bits, symmetric = section.get("bits"), section.get("sym", True)
        if (bits, symmetric) not in ((4, True), (8, True)):
            words = f"{bits} bits, {'symmetric' if symmetric else 'with zero points'}"
            yield found("gptq-numbers", "quantization_config", words)
        if bits not in (2, 3, 4, 8):
            yield found("gptq-numbers-old", "quantization_config", f"{bits} bits")
        if section.get("group_size") not in kernels.MARLIN_GROUPS:
            words = f"group_size is {section.get('group_size')}"
            yield found("gptq-group", "quantization_config", words)
    yield from _act_order(judged)
    if method == "awq" and section.get("w_bit", section.get("bits")) != 4:
        words = f"{section.get('w_bit', section.get('bits'))} bits"
        yield found("awq-numbers", "quantization_config", words)
    if method == "fp8":
        scheme, blocks = section.get("activation_scheme"), section.get("weight_block_size")
        if scheme not in ("static", "dynamic"):
            yield found("fp8-scheme", "quantization_config", f"activation_scheme is {scheme!r}")
        elif blocks and scheme == "static":
            yield found("fp8-scheme", "quantization_config", "static inputs beside blocks")
    if method == "bitsandbytes" and section.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        words = f"bnb_4bit_quant_storage is {section['bnb_4bit_quant_storage']}, vLLM reads uint8"
        yield found("bnb-state", "quantization_config", words)
    if method == "modelopt" and judged.algorithm not in MODELOPT:
        words = f"quant_algo is {judged.algorithm or 'missing'}"
        yield found("modelopt-algo", "quantization_config", words)


def _act_order(judged: Judged) -> Iterator[Finding]:
    """An order of columns by group, which later versions refuse where it is declared."""
    section = judged.section
    if judged.method == "gptq":
        parts = {"quantization_config": section}
        for pattern, change in (section.get("dynamic") or {}).items():
            if not pattern.startswith("-:") and isinstance(change, dict):
                parts[f"dynamic: {pattern}"] = {**section, **change}
        for where, part in parts.items():
            if part.get("desc_act") and part.get("group_size") != -1:
                yield found("act-order-gone", where, "desc_act is true")
    for name, group in (section.get("config_groups") or {}).items():
        order = (group.get("weights") or {}).get("actorder") if isinstance(group, dict) else None
        if order in ("group", "dynamic", True):
            yield found("act-order-gone", f"config_groups.{name}", f"actorder is {order!r}")


def _groups(judged: Judged) -> Iterator[Finding]:
    """Groups that vLLM has no scheme for."""
    if judged.method != "compressed-tensors":
        return
    form = str(judged.section.get("format"))
    for name, group in (judged.section.get("config_groups") or {}).items():
        try:
            compressed(group, form, judged.version, judged.capability)
        except Unsupported as error:
            yield found(error.args[0], f"config_groups.{name}", error.args[1])


def _fused(judged: Judged) -> Iterator[Finding]:
    if not is_readable(judged):
        return
    for whole, shards in judged.checkpoint.fused:
        ignored = [judged.ignoring(judged.checkpoint.inside(s)) is not None for s in shards]
        by_tensors = judged.method in ("gptq", "awq")
        if by_tensors and not (judged.method == "awq" and judged.ignore):
            ignored = [not judged.checkpoint.linears[shard].is_quantized for shard in shards]
        last = [shard.rpartition(".")[2] for shard in shards]
        if 0 < sum(ignored) < len(ignored):
            out = " and ".join(name for name, is_out in zip(last, ignored, strict=True) if is_out)
            words = f"{out} stays in 16 bits, and vLLM loads {', '.join(last)} as one layer"
            yield found("fused-ignore", whole, words)
            continue
        own = [_own_scheme(judged, shard) for shard in shards]
        if len({scheme.tag if scheme else None for scheme in own}) > 1:
            told = ", ".join(
                f"{name} {scheme.tag if scheme else 'in 16 bits'}"
                for name, scheme in zip(last, own, strict=True)
            )
            alike = len({_layout(judged.checkpoint.linears[shard]) for shard in shards}) == 1
            taken = judged.schemes[shards[0]]
            words = f"{told}; vLLM builds {taken.tag if taken else '16 bits'} for all"
            yield found("fused-scheme", whole, words, "garbage" if alike else "refuses")


def _own_scheme(judged: Judged, shard: str) -> Scheme | None:
    """What the config declares of a shard by itself."""
    if judged.method == "compressed-tensors":
        inside = judged.checkpoint.inside(shard)
        group = next((g for t, g in judged.groups if is_match(inside, t)), None)
        if group is not None and group.get("weights") is not None:
            return judged.of_group(group)
    return judged.schemes[shard]


def _layout(layer: Layer) -> tuple[tuple[str, str, int], ...]:
    """Names and types of a layer's tensors, and columns of its packed words."""
    return tuple(
        sorted(
            (part, spec.dtype, spec.shape[-1] if len(spec.shape) == 2 else 0)
            for part, spec in layer.parts.items()
            if part != "bias"
        )
    )


def _experts(judged: Judged) -> Iterator[Finding]:
    for name, layer in judged.checkpoint.linears.items():
        if layer.is_quantized and TOGETHER.match(name):
            yield found("experts-together", name, "all experts are stored in one tensor")
    for block, experts in judged.checkpoint.experts.items():
        first = experts.get(0) or next(iter(experts.values()))
        usual = {name: _layout(layer) for name, layer in first.items()}
        for index, layers in experts.items():
            odd = next((n for n in usual if n in layers and _layout(layers[n]) != usual[n]), None)
            gone = next((n for n in usual if n not in layers), None)
            if gone is not None:
                yield found("missing-tensor", f"{block}.{index}.{gone}", "it has no tensors")
            if odd is not None:
                kind = _form(layers[odd], first[odd])
                words = f"stored as {kind}, expert 0 as {_form(first[odd], layers[odd])}"
                yield found("experts-scheme", f"{block}.{index}.{odd}", words, "refuses")
        tags: dict[str, str] = {}
        for index, layers in experts.items():
            for name in layers:
                scheme = _expert_scheme(judged, f"{block}.{index}.{name}")
                tags.setdefault(scheme.tag if scheme else "16 bits", f"{block}.{index}.{name}")
        if len(tags) > 1:
            told = "; ".join(f"{tag} ({name})" for tag, name in tags.items())
            yield found("experts-scheme", block, f"declared unlike: {told}", "refuses")


def _expert_scheme(judged: Judged, name: str) -> Scheme | None:
    try:
        if judged.method == "compressed-tensors":
            return _own_scheme(judged, name)
        return judged.schemes[name]
    except Unsupported:
        return None


def _form(layer: Layer, other: Layer) -> str:
    """What a layer is stored as, in so many words as tell it from another."""
    if layer.is_quantized != other.is_quantized:
        return "numbers of its own" if layer.is_quantized else "16 bits"
    mine, its = set(layer.parts), set(other.parts)
    if mine != its:
        return f"{', '.join(sorted(mine - its)) or 'fewer tensors'}"
    return next(
        f"{part} {spec.dtype} {list(spec.shape)}"
        for part, spec in layer.parts.items()
        if (spec.dtype, spec.shape) != (other.parts[part].dtype, other.parts[part].shape)
    )


def _storage(judged: Judged) -> Iterator[Finding]:
    """Layers that vLLM builds otherwise than they are stored, and entries of `ignore` in vain."""
    tied = bool(judged.checkpoint.config.get("tie_word_embeddings"))
    odd: list[tuple[str, Consequence]] = []
    split = {
        shard
        for one in _fused(judged)
        for shard in dict(judged.checkpoint.fused).get(one.layer, ())
    }
    for name, layer in judged.checkpoint.linears.items():
        if name in split or (tied and name.rpartition(".")[2] == "lm_head"):
            continue
        if judged.method == "mxfp4" and ".experts." in name:
            continue  # gpt-oss's loader leaves names out that it does not know
        scheme = scheme_of(judged, name)
        if scheme is None and layer.is_quantized and is_readable(judged):
            entry = judged.ignoring(judged.checkpoint.inside(name))
            why = f"`ignore` has {entry}" if entry else "no group of the config means it"
            yield found("stored-quantized", name, f"stored quantised, and {why}")
        elif scheme is not None and not layer.is_quantized:
            casts = scheme.kind in ("fp8", "fp8-block", "fp8-a16", "int8")
            how: Consequence = "garbage" if casts else "refuses"
            odd.append((name, how))
            yield found("stored-plain", name, f"stored in 16 bits, built as {scheme.tag}", how)
    if odd:
        inside = [judged.checkpoint.inside(name) for name in judged.checkpoint.layers]
        for entry, mapped in judged.ignore:
            if not any(judged.ignores(mapped, name) for name in inside):
                words = f"it names none of vLLM's modules, such as {inside[-1]}"
                yield found("ignore-name", f"ignore: {entry}", words, odd[0][1])


def _expected(judged: Judged, scheme: Scheme, layer: Layer) -> Iterator[str]:
    """Tensors that vLLM computes with, beside the weight."""
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


def _tensors(judged: Judged) -> Iterator[Finding]:
    for name, layer in judged.checkpoint.linears.items():
        scheme = scheme_of(judged, name)
        if scheme is None or not layer.is_quantized:
            continue
        for part in _expected(judged, scheme, layer):
            if part not in layer.parts:
                yield found("missing-tensor", f"{name}.{part}", "it is missing")
        if judged.method == "bitsandbytes" and scheme.bits == 4:
            yield from _states(judged, name)
        if scheme.kind == "wna16" and judged.method == "compressed-tensors":
            yield from _packing(judged, name, layer, scheme)
        if (fault := _misshapen(judged, layer, scheme)) is not None:
            yield found("shape", f"{name}.{fault[0]}", fault[1])
    blocks = _block_size(judged.section)
    for whole, shards in judged.checkpoint.fused:
        scheme = scheme_of(judged, shards[0])
        if scheme is None or scheme.kind != "fp8-block":
            continue
        for shard in shards[:-1]:
            rows, _ = judged.checkpoint.linears[shard].shape(8)
            if rows % blocks[0]:
                words = f"{shard.rpartition('.')[2]} has {rows} rows, blocks have {blocks[0]}"
                yield found("fp8-blocks", whole, words)


def _states(judged: Judged, name: str) -> Iterator[Finding]:
    """What bitsandbytes keeps beside 4 bits, from which vLLM builds its QuantState."""
    kind = str(judged.section.get("bnb_4bit_quant_type") or "fp4")
    for part in ("absmax", "quant_map", f"quant_state.bitsandbytes__{kind}"):
        if f"{name}.weight.{part}" not in judged.checkpoint.tensors:
            yield found("bnb-state", f"{name}.weight.{part}", "it is missing")


def _packing(judged: Judged, name: str, layer: Layer, scheme: Scheme) -> Iterator[Finding]:
    """Dense words against words that hold whole integers only."""
    columns = columns_of(layer, scheme)
    if 32 % scheme.bits == 0 or columns is None:
        return
    dense, padded = -(-columns * scheme.bits // 32), -(-columns // (32 // scheme.bits))
    words = layer.parts["weight_packed"].shape[-1]
    if words == padded != dense:
        told = f"{words} words per row for {columns} columns of {scheme.bits} bits, dense: {dense}"
        yield found("packing", f"{name}.weight_packed", told, "refuses")


def _misshapen(judged: Judged, layer: Layer, scheme: Scheme) -> tuple[str, str] | None:
    """A scale whose shape does not follow from the weight's, in name and words."""
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


def _scalars(judged: Judged) -> Iterator[Finding]:
    """Scales of a whole tensor that differ within what vLLM loads as one layer."""
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
                yield found(rule, whole, words)


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


def _order(judged: Judged) -> Iterator[Finding]:
    """An order of columns that the config does not declare."""
    for name, layer in judged.checkpoint.linears.items():
        scheme = scheme_of(judged, name)
        if scheme is None or scheme.kind != "wna16" or scheme.act_order:
            continue
        if "weight_g_idx" in layer.parts and judged.method == "compressed-tensors":
            words = "weight_g_idx is stored, and actorder is not declared"
            how: Consequence = "garbage" if judged.version < (0, 30) else "refuses"
            yield found("act-order", name, words, how)
        index = layer.parts.get("g_idx")
        if index is None or judged.read is None or scheme.group_size < 1:
            continue
        raw = judged.read(index)
        places = struct.unpack(f"<{len(raw) // 4}i", raw)
        if any(place != n // scheme.group_size for n, place in enumerate(places)):
            yield found("act-order", name, "g_idx has an order of its own, and desc_act is false")
        return  # one layer tells it of all
    for block, experts in judged.checkpoint.experts.items():
        layer = next(iter(next(iter(experts.values())).values()))
        scheme = scheme_of(judged, layer.name)
        if scheme is not None and scheme.act_order:
            rows, columns = layer.shape(scheme.bits)
            if columns % 128 or rows % max(64, scheme.group_size):
                words = f"experts of {rows} x {columns} with act-order"
                yield found("act-order-experts", block, words)


def _kernels(judged: Judged) -> Iterator[Finding]:
    if judged.capability is None:
        return
    alike: dict[tuple[str, str], list[str]] = {}
    for choice in choices(judged):
        minimum = kernels.MINIMUM[choice.scheme.kind]
        if choice.kernel is None and judged.capability < minimum:
            key = ("capability", f"{choice.scheme.tag} needs {minimum / 10:.1f}")
        elif choice.kernel is None:
            key = ("kernel", choice.scheme.tag)
        elif choice.slow:
            key = ("slow-kernel", f"{choice.kernel}: {choice.slow}")
        else:
            continue
        alike.setdefault(key, []).append(choice.layer)
    for (rule, words), names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield found(rule, f"{names[0]}{more}", words)
