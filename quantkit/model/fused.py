"""Experts that a checkpoint stores in one fused tensor, as separate tensors.

Serving engines read quantised experts one by one (`experts.3.gate_proj.weight_packed`), whatever
form the 16-bit model has: so plans, checkpoints and checks use these names. Without torch.

Orientation follows from the shapes: gate and up together are [experts, 2 x inner, width] next to a
down projection of [experts, width, inner], or both are transposed. Whether gate and up are
interleaved does not.
"""

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.model.derived import DerivedTensor, rows_of, slice_of
from quantkit.model.headers import StoredTensor

if TYPE_CHECKING:
    import torch

ALTERNATING = ("gpt_oss",)
"""Families whose gate and up rows are interleaved; the model's skeleton must agree."""
PARTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""Fused parameters, and the layers of each expert that they hold."""


@dataclass(frozen=True)
class Style:
    """Names of a checkpoint's fused tensors after the block's own, and of the layers they hold."""

    first: str
    down: str
    experts: str
    layers: Mapping[str, str]
    families: tuple[str, ...] = ()
    """Expert names that this style requires; empty: those of no other style."""


OWN_NAMES = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
STYLES = (
    Style(
        "experts.gate_up_proj",
        "experts.down_proj",
        "experts",
        OWN_NAMES,
    ),
    Style(
        "experts.up_proj",
        "experts.down_proj",
        "experts",
        {"up_proj": "up_proj", "down_proj": "down_proj"},
    ),
    # Granite with state-space blocks: vLLM has a separate loader for them.
    Style(
        "input_linear.weight",
        "output_linear.weight",
        "experts",
        OWN_NAMES,
        ("granitemoehybrid",),
    ),
    # Other Granite models; vLLM splits these under Mixtral's names.
    Style(
        "input_linear.weight",
        "output_linear.weight",
        "experts",
        {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
    ),
)
SEPARATE = re.compile(
    r"(?P<block>.*)\.experts\.(?P<index>\d+)\.(?P<layer>\w+)\.(?P<kind>weight|bias)"
)


def separated(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, StoredTensor]:
    """The same tensors with every expert's layers by name; others are unchanged."""
    types = {str(c.get("model_type")) for c in _configs(config)}
    alternating = not types.isdisjoint(ALTERNATING)
    result: dict[str, StoredTensor] = {}
    done: set[str] = set()
    for name, tensor in tensors.items():
        if name in done:
            continue
        found = _pair(name, tensors, types)
        if found is None:
            result[name] = tensor
            continue
        style, block = found
        both, down = (tensors[f"{block}.{last}"] for last in (style.first, style.down))
        biases = [tensors.get(f"{t.name}_bias") for t in (both, down)]
        layers = _layers(style, block, both, down, biases, alternating)
        if not layers:
            result[name] = tensor
            continue
        done |= {t.name for t in (both, down, *biases) if t is not None}
        result |= layers
    return {name: tensor for name, tensor in result.items() if name not in done}


def fused_names(name: str) -> list[tuple[str, int, str, str]]:
    """Fused tensors that a separate expert's tensor may come from: name, expert, layer, kind."""
    match = SEPARATE.fullmatch(name)
    if match is None:
        return []
    found = []
    for style in STYLES:
        layers = {own: layer for layer, own in style.layers.items()}
        if (layer := layers.get(match["layer"])) is None:
            continue
        last = style.down if layer == "down_proj" else style.first
        ending = "_bias" if match["kind"] == "bias" else ""
        found.append(
            (f"{match['block']}.{last}{ending}", int(match["index"]), layer, match["kind"])
        )
    return found


def _configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [config, *(value for value in config.values() if isinstance(value, dict))]


def _pair(
    name: str, tensors: Mapping[str, StoredTensor], types: Set[str]
) -> tuple[Style, str] | None:
    """The style and the block of a tensor that is one of a pair of fused experts."""
    for style in STYLES:
        if style.families and types.isdisjoint(style.families):
            continue
        for last in (style.first, style.down):
            if not name.endswith(f".{last}"):
                continue
            block = name.removesuffix(f".{last}")
            pair = [tensors.get(f"{block}.{part}") for part in (style.first, style.down)]
            if all(t is not None and len(t.shape) == 3 for t in pair):
                return style, block
    return None


def _layers(
    style: Style,
    block: str,
    both: StoredTensor,
    down: StoredTensor,
    biases: Sequence[StoredTensor | None],
    alternating: bool,
) -> dict[str, StoredTensor]:
    n_experts, height, width = both.shape
    _, first, second = down.shape
    n_parts = len(style.layers) - 1
    transposed = (height, width) != (n_parts * second, first)
    if transposed and (height, width) != (second, n_parts * first):
        return {}  # whoever needs them reports that they do not fit
    result: dict[str, StoredTensor] = {}
    upper = [layer for layer in style.layers if layer != "down_proj"]
    for index in range(n_experts):
        start = f"{block}.{style.experts}.{index}"
        for place, layer in enumerate(upper):
            name = f"{start}.{style.layers[layer]}.weight"
            cut = _Cut(place, n_parts, alternating, transposed)
            result[name] = cut.of(slice_of(both, index), name)
            if biases[0] is not None:
                name = f"{start}.{style.layers[layer]}.bias"
                cut = _Cut(place, n_parts, alternating, False)
                result[name] = cut.of(slice_of(biases[0], index), name)
        name = f"{start}.{style.layers['down_proj']}.weight"
        result[name] = _Cut(0, 1, False, transposed).of(slice_of(down, index), name)
        if biases[1] is not None:
            name = f"{start}.{style.layers['down_proj']}.bias"
            result[name] = _Cut(0, 1, False, False).of(slice_of(biases[1], index), name)
    return result


@dataclass(frozen=True)
class _Cut:
    """Which rows of one expert's tensor a layer takes."""

    place: int
    n_parts: int
    alternating: bool
    transposed: bool

    def of(self, tensor: StoredTensor, name: str) -> StoredTensor:
        rows, *rest = tensor.shape[::-1] if self.transposed else tensor.shape
        size = rows // self.n_parts
        if not self.transposed and not (self.alternating and self.n_parts > 1):
            return rows_of(tensor, name, self.place * size, (self.place + 1) * size)
        compute = partial(_cut, self.place, self.n_parts, self.alternating, self.transposed)
        return DerivedTensor.of(name, tensor.dtype, (size, *rest), [tensor], compute)


def _cut(
    place: int, n_parts: int, alternating: bool, transposed: bool, parents: "Sequence[torch.Tensor]"
) -> "torch.Tensor":
    (tensor,) = parents
    if transposed:
        tensor = tensor.t()
    if alternating:
        return tensor[place::n_parts]
    return tensor.chunk(n_parts)[place]
