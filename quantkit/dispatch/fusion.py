"""Layers that vLLM loads as one, shards and experts: are they declared and stored alike?"""

from collections.abc import Iterator

from quantkit.dispatch.layers import TOGETHER, Layer
from quantkit.dispatch.rules import Finding, finding
from quantkit.dispatch.schemes import Judged, Scheme, Unsupported, is_match, is_readable
from quantkit.hardware import expert_kernels


def fused(judged: Judged) -> Iterator[Finding]:
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
            yield finding("fused-ignore", whole, words)
            continue
        own = [_own_scheme(judged, shard) for shard in shards]
        if len({scheme.tag if scheme else None for scheme in own}) > 1:
            schemes = ", ".join(
                f"{name} {scheme.tag if scheme else 'in 16 bits'}"
                for name, scheme in zip(last, own, strict=True)
            )
            alike = len({_layout(judged.checkpoint.linears[shard]) for shard in shards}) == 1
            taken = judged.schemes[shards[0]]
            words = f"{schemes}; vLLM builds {taken.tag if taken else '16 bits'} for all"
            yield finding("fused-scheme", whole, words, "garbage" if alike else "refuses")


def _own_scheme(judged: Judged, shard: str) -> Scheme | None:
    """The scheme that the config declares for a shard by itself."""
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


def experts(judged: Judged) -> Iterator[Finding]:
    for name, layer in judged.checkpoint.linears.items():
        if layer.is_quantized and TOGETHER.match(name):
            yield finding("experts-together", name, "all experts are stored in one tensor")
    for block, experts in judged.checkpoint.experts.items():
        first = experts.get(0) or next(iter(experts.values()))
        usual = {name: _layout(layer) for name, layer in first.items()}
        for index, layers in experts.items():
            odd = next((n for n in usual if n in layers and _layout(layers[n]) != usual[n]), None)
            gone = next((n for n in usual if n not in layers), None)
            if gone is not None:
                yield finding("missing-tensor", f"{block}.{index}.{gone}", "it has no tensors")
            if odd is not None:
                kind = _form(layers[odd], first[odd])
                words = f"stored as {kind}, expert 0 as {_form(first[odd], layers[odd])}"
                yield finding("experts-scheme", f"{block}.{index}.{odd}", words, "refuses")
        tags: dict[str, str] = {}
        for index, layers in experts.items():
            for name in layers:
                scheme = _expert_scheme(judged, f"{block}.{index}.{name}")
                tags.setdefault(scheme.tag if scheme else "16 bits", f"{block}.{index}.{name}")
        scheme = _expert_scheme(judged, next(iter(first.values())).name)
        is_odd = scheme is not None and scheme.kind == "wna16" and scheme.bits not in (4, 8)
        if scheme is not None and is_odd and judged.version < expert_kernels.ANY_WIDTH:
            yield finding("expert-width", block, f"experts of {scheme.bits} bits")
        if len(tags) > 1:
            declared = "; ".join(f"{tag} ({name})" for tag, name in tags.items())
            yield finding("experts-scheme", block, f"declared differently: {declared}", "refuses")


def _expert_scheme(judged: Judged, name: str) -> Scheme | None:
    try:
        if judged.method == "compressed-tensors":
            return _own_scheme(judged, name)
        return judged.schemes[name]
    except Unsupported:
        return None


def _form(layer: Layer, other: Layer) -> str:
    """How a layer is stored, in enough detail to tell it from another."""
    if layer.is_quantized != other.is_quantized:
        return "its own format" if layer.is_quantized else "16 bits"
    mine, its = set(layer.parts), set(other.parts)
    if mine != its:
        return f"{', '.join(sorted(mine - its)) or 'fewer tensors'}"
    return next(
        f"{part} {spec.dtype} {list(spec.shape)}"
        for part, spec in layer.parts.items()
        if (spec.dtype, spec.shape) != (other.parts[part].dtype, other.parts[part].shape)
    )
