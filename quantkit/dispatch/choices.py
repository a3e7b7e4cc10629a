"""The kernel of each layer; fused layers count once, under vLLM's own name."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.dispatch import gptoss
from quantkit.dispatch.schemes import MXFP4_FP8, Judged, Scheme, columns_of, is_readable
from quantkit.families.record import SILU
from quantkit.hardware import expert_kernels, kernels
from quantkit.hardware.kernels import KernelQuery

GATES = ("gate_proj", "w1")
"""Names of an expert's first layer, if it has a gate."""
FP8_INPUTS = (0, 32)
"""From here on experts in MXFP4 with FP8 inputs have a choice of their own, which was not read."""


@dataclass(frozen=True)
class Choice:
    """The kernel of one of vLLM's layers, fused ones under their own name."""

    layer: str
    scheme: Scheme
    rows: int
    columns: int
    kernel: str | None
    slow: str


def choices(judged: Judged) -> Iterator[Choice]:
    """The kernel of each quantised layer except experts."""
    if judged.capability is None or not is_readable(judged):
        return
    whole = {shard: name for name, shards in judged.checkpoint.fused for shard in shards}
    shards_of = dict(judged.checkpoint.fused)
    done: set[str] = set()
    for name, layer in judged.checkpoint.linears.items():
        if layer.name.rpartition(".experts.")[1]:
            continue
        scheme = judged.schemes[name]
        label = whole.get(name, name)
        if scheme is None or label in done or not layer.is_quantized:
            continue
        done.add(label)
        awq = judged.method == "awq"
        shapes = [
            judged.checkpoint.linears[shard].shape(scheme.bits, awq)
            for shard in shards_of.get(label, [name])
        ]
        rows, columns = sum(shape[0] for shape in shapes), shapes[0][1]
        if scheme.kind == "wna16" and (known := columns_of(layer, scheme)):
            columns = known
        asked = KernelQuery(
            scheme.kind, rows, columns, judged.capability, judged.version, scheme.bits,
            scheme.group_size, scheme.symmetric, scheme.act_order, scheme.static, scheme.per_tensor,
            judged.method,
        )  # fmt: skip
        chosen = kernels.choose(asked)
        yield Choice(label, scheme, rows, columns, *(chosen or (None, "")))


def expert_choices(judged: Judged) -> Iterator[Choice]:
    """The kernel of every block's experts, gate and up as in vLLM; None if unknown."""
    if judged.capability is None or not is_readable(judged):
        return
    if str(judged.checkpoint.text.get("hidden_act") or SILU[0]) not in SILU:
        return
    for block, experts in judged.checkpoint.experts.items():
        layers = experts.get(0) or next(iter(experts.values()))
        first = next((layers[name] for name in GATES if name in layers), None)
        scheme = None if first is None else judged.schemes.get(first.name)
        if first is None or scheme is None or not first.is_quantized:
            continue
        if scheme.tag == MXFP4_FP8 and judged.version >= FP8_INPUTS:
            continue
        rows, columns = first.shape(scheme.bits, judged.method == "awq")
        if scheme.kind == "wna16" and (known := columns_of(first, scheme)):
            columns = known
        asked = KernelQuery(
            scheme.kind, rows, columns, judged.capability, judged.version, scheme.bits,
            scheme.group_size, scheme.symmetric, scheme.act_order, scheme.static, scheme.per_tensor,
            judged.method,
        )  # fmt: skip
        yield _of_experts(block, scheme, asked)
    for block, (rows, columns) in gptoss.blocks(judged).items():
        scheme = Scheme("gpt-oss", "mxfp4", 4, gptoss.GROUP)
        yield _of_experts(block, scheme, KernelQuery(
            scheme.kind, rows, columns, judged.capability, judged.version, 4, gptoss.GROUP,
            method=judged.method,
        ))  # fmt: skip


def _of_experts(block: str, scheme: Scheme, asked: KernelQuery) -> Choice:
    kernel, slow = expert_kernels.choose(asked) or (None, "")
    named = None if kernel is None else f"{kernel} for experts"
    return Choice(block, scheme, asked.rows, asked.columns, named, slow)
