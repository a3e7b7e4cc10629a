"""Experts that a checkpoint stores in one fused tensor, as separate tensors, and back.

Serving engines read quantised experts one by one (`experts.3.gate_proj.weight_packed`), whatever
form the 16-bit model has: so plans, checkpoints and checks use these names. Without torch.

Orientation follows from the shapes: gate and up together are [experts, 2 x inner, width] next to a
down projection of [experts, width, inner], or both are transposed. Whether gate and up are
interleaved does not.
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from quantkit.model.derived import DerivedTensor, rows_of, slice_of
from quantkit.model.headers import WEIGHT_TYPES, StoredTensor, TensorSpec

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
OF_ONE = re.compile(r"\.experts\.\d+\.")
"""In the names of tensors of a single expert."""
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
    n_experts, n_parts = both.shape[0], len(style.layers) - 1
    transposed = _is_transposed(both.shape, down.shape, n_parts)
    if transposed is None:
        return {}  # whoever needs them reports that they do not fit
    result: dict[str, StoredTensor] = {}
    upper = [layer for layer in style.layers if layer != "down_proj"]
    for index in range(n_experts):
        start = f"{block}.{style.experts}.{index}"
        for place, layer in enumerate(upper):
            name = f"{start}.{style.layers[layer]}.weight"
            cut = Cut(place, n_parts, alternating, transposed)
            result[name] = cut.of(slice_of(both, index), name)
            if biases[0] is not None:
                name = f"{start}.{style.layers[layer]}.bias"
                cut = Cut(place, n_parts, alternating, False)
                result[name] = cut.of(slice_of(biases[0], index), name)
        name = f"{start}.{style.layers['down_proj']}.weight"
        result[name] = Cut(0, 1, False, transposed).of(slice_of(down, index), name)
        if biases[1] is not None:
            name = f"{start}.{style.layers['down_proj']}.bias"
            result[name] = Cut(0, 1, False, False).of(slice_of(biases[1], index), name)
    return result


@dataclass(frozen=True)
class Cut:
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

    def put(self, layer: "torch.Tensor", expert: "torch.Tensor") -> None:
        """Write a layer's rows into one expert's tensor."""
        rows = expert.t() if self.transposed else expert
        if self.alternating:
            rows[self.place :: self.n_parts] = layer
        else:
            rows[self.place * len(layer) : (self.place + 1) * len(layer)] = layer


@dataclass(frozen=True)
class Place:
    """Where a separate expert's tensor is in a fused one."""

    whole: TensorSpec
    index: int
    cut: Cut

    def of(self, whole: StoredTensor, name: str) -> StoredTensor:
        """The tensor of this place, under its own name."""
        return self.cut.of(slice_of(whole, self.index), name)


def places(
    specs: Iterable[TensorSpec], whole: Mapping[str, TensorSpec], config: Mapping[str, Any]
) -> dict[str, Place]:
    """Places of separate experts in the fused tensors that a model has in files.

    All experts of a part of the model (its blocks, or a head that predicts ahead) are in such
    tensors, or none is: engines expect either form.
    """
    types = {str(c.get("model_type")) for c in _configs(config)}
    alternating = not types.isdisjoint(ALTERNATING)
    found: dict[str, Place] = {}
    apart: set[str] = set()
    left: dict[str, int] = {}
    for spec in specs:
        if not OF_ONE.search(spec.name):
            continue
        place = _place(spec, whole, alternating) if spec.dtype in WEIGHT_TYPES else None
        if place is None:
            apart.add(_part_of_model(spec.name))
            continue
        found[spec.name] = place
        left[place.whole.name] = left.get(place.whole.name, place.whole.n_elements)
        left[place.whole.name] -= spec.n_elements
    apart |= {_part_of_model(name) for name, place in found.items() if left[place.whole.name]}
    return {name: place for name, place in found.items() if _part_of_model(name) not in apart}


def _part_of_model(name: str) -> str:
    """The list of blocks that a tensor belongs to."""
    return re.split(r"\.\d+\.", name, maxsplit=1)[0]


def _place(spec: TensorSpec, whole: Mapping[str, TensorSpec], alternating: bool) -> Place | None:
    match = SEPARATE.fullmatch(spec.name)
    for style in STYLES if match is not None else ():
        assert match is not None
        layers = {own: layer for layer, own in style.layers.items()}
        pair = [whole.get(f"{match['block']}.{last}") for last in (style.first, style.down)]
        both, down = pair
        if match["layer"] not in layers or both is None or down is None or len(both.shape) != 3:
            continue
        layer = layers[match["layer"]]
        own = down if layer == "down_proj" else both
        upper = [layer for layer in style.layers if layer != "down_proj"]
        if (turned := _is_transposed(both.shape, down.shape, len(upper))) is None:
            continue
        if match["kind"] == "bias":
            own, turned = whole.get(f"{own.name}_bias", own), False
            if len(own.shape) != 2:
                continue
        cut = Cut(0, 1, False, turned)
        if layer != "down_proj":
            cut = Cut(upper.index(layer), len(upper), alternating and len(upper) > 1, turned)
        return Place(TensorSpec(own.name, spec.dtype, own.shape), int(match["index"]), cut)
    return None


def _is_transposed(both: Sequence[int], down: Sequence[int], n_parts: int) -> bool | None:
    """Whether experts are stored as columns by rows; None where the shapes do not fit."""
    _, height, width = both
    _, first, second = down
    if (height, width) == (n_parts * second, first):
        return False
    return True if (height, width) == (second, n_parts * first) else None


def _cut(
    place: int, n_parts: int, alternating: bool, transposed: bool, parents: "Sequence[torch.Tensor]"
) -> "torch.Tensor":
    (tensor,) = parents
    if transposed:
        tensor = tensor.t()
    if alternating:
        return tensor[place::n_parts]
    return tensor.chunk(n_parts)[place]
