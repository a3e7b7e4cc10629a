"""The kernel that each layer gets, fused layers once and under vLLM's own name."""

from collections.abc import Iterator
from dataclasses import dataclass

from quantkit.dispatch.schemes import Judged, Scheme, columns_of, is_readable
from quantkit.hardware import kernels
from quantkit.hardware.kernels import Asked


@dataclass(frozen=True)
class Choice:
    """The kernel of one layer of vLLM's, fused ones under their own name."""

    layer: str
    scheme: Scheme
    rows: int
    columns: int
    kernel: str | None
    slow: str


def choices(judged: Judged) -> Iterator[Choice]:
    """The kernel of each layer that is built quantised, experts once per block."""
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
        asked = Asked(
            scheme.kind, rows, columns, judged.capability, judged.version, scheme.bits,
            scheme.group_size, scheme.symmetric, scheme.act_order, scheme.static, scheme.per_tensor,
            judged.method,
        )  # fmt: skip
        chosen = kernels.choose(asked)
        yield Choice(label, scheme, rows, columns, *(chosen or (None, "")))
