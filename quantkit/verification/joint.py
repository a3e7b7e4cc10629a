"""Experts of a block that lie in one tensor, as gpt-oss stores them: MXFP4 blocks and scales.

    experts.gate_up_proj_blocks   [experts, rows, columns / 32, 16]   two numbers per byte
    experts.gate_up_proj_scales   [experts, rows, columns / 32]       exponents, E8M0
    experts.gate_up_proj_bias     [experts, rows]                     in 16 bits

Rows of gate and up are interleaved. The model, built from its config, says how many there are.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantkit.model.architecture import Architecture
from quantkit.model.dequantized import joint_layers, of_experts
from quantkit.model.fused import SEPARATE
from quantkit.model.headers import StoredTensor

GROUP = 32
FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "down_proj": "down_proj"}


@dataclass(frozen=True)
class Joint:
    """One parameter of all experts of a block."""

    name: str
    n_experts: int
    rows: int
    columns: int
    has_bias: bool

    def expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Its tensors: dtype and shape; empty dtype: any."""
        groups = (self.n_experts, self.rows, self.columns // GROUP)
        found = {
            f"{self.name}_blocks": ("U8", (*groups, GROUP // 2)),
            f"{self.name}_scales": ("U8", groups),
        }
        if self.has_bias:
            found[f"{self.name}_bias"] = ("", groups[:2])
        return found

    def layers(self) -> list[str]:
        """The layers that it holds, as the model has them."""
        return [one for expert in joint_layers(self.name, self.n_experts) for one in expert]


def of(architecture: Architecture) -> list[Joint]:
    """What a model's files must hold where experts are stored together."""
    sizes: dict[str, dict[tuple[int, str], tuple[int, int]]] = {}
    biases: set[str] = set()
    for name, shape in architecture.shapes.items():
        match = SEPARATE.fullmatch(name)
        if match is None or (whole := FUSED.get(match["layer"])) is None:
            continue
        label = f"{match['block']}.experts.{whole}"
        if match["kind"] == "bias":
            biases.add(label)
        else:
            own = sizes.setdefault(label, {})
            own[int(match["index"]), match["layer"]] = (shape[0], shape[1])
    found = []
    for label, layers in sizes.items():
        n_experts = len({index for index, _ in layers})
        rows = sum(shape[0] for (index, _), shape in layers.items() if index == 0)
        columns = next(iter(layers.values()))[1]
        found.append(Joint(label, n_experts, rows, columns, label in biases))
    return found


def tensor_faults(joint: Joint, tensors: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Tensors that are missing or have another type or shape."""
    for name, (dtype, shape) in joint.expected().items():
        stored = tensors.get(name)
        if stored is None:
            yield f"{name} is missing"
        elif dtype and stored.dtype != dtype:
            yield f"{name} is {stored.dtype}, mxfp4 needs {dtype}"
        elif stored.shape != shape:
            yield f"{name} is {list(stored.shape)}, mxfp4 needs {list(shape)}"


def scales(tensors: Mapping[str, StoredTensor]) -> Iterator[StoredTensor]:
    """The scales that belong to blocks of experts."""
    for name in tensors:
        whole = of_experts(name)
        if whole is not None and (found := tensors.get(f"{whole}_scales")) is not None:
            yield found
