"""Formats that a unit may get, in sets that an engine can mix in one checkpoint."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit import formats
from quantkit.errors import UnknownName
from quantkit.hardware import support
from quantkit.hardware.gpus import GPU
from quantkit.model.architecture import EXPERT
from quantkit.recipe import Recipe
from quantkit.schemes import ActivationScheme, WeightScheme
from quantkit.tensorspec import TensorSpec

SIXTEEN = "bf16"
"""Unquantised, whichever 16-bit type the source has."""
ENGINES = ("vllm", "llama.cpp")
GROUP_SIZES = (128, 64, 32)
MIXES = {
    "int": (
        *("w3a16-g128", "w3a16-g64", "w3a16-g32"),
        *("w4a16-g128", "w4a16-g64", "w4a16-g32"),
        *("w5a16-g128", "w5a16-g64", "w6a16-g128", "w6a16-g64"),
        *("w8a16-g128", "w8a16-g32", SIXTEEN),
    ),
    "int4-int8": (
        *("w4a16-g128", "w4a16-g64", "w4a16-g32"),
        *("w8a16-g128", "w8a16-g32", SIXTEEN),
    ),
    "nvfp4": ("nvfp4", "fp8", SIXTEEN),
    "mxfp4": ("mxfp4", "mxfp8", SIXTEEN),
    "fp8": ("fp8", SIXTEEN),
}
"""Sets that vLLM can mix; the first is the default."""
COMMON_WIDTHS = (4, 8)
"""Integers that vLLM runs everywhere; others by Humming's kernels, on NVIDIA GPUs only, and in
experts only from 0.29 on.
"""
GPTQ = "gptq"
_INTEGER = re.compile(r"w([2-8])a16-g(32|64|128)")
_FLOATS = {
    "fp8": (
        "rtn",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    ),
    "nvfp4": (
        GPTQ,
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": 16,
            "dynamic": "local",
        },
    ),
    "mxfp4": (
        GPTQ,
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
    ),
    "mxfp8": (
        "rtn",
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True},
    ),
}


@dataclass(frozen=True)
class Candidate:
    """One format: number types of weights and activations, and how weights are rounded to them."""

    name: str
    method: str = ""
    weights: WeightScheme | None = None
    """None: 16 bits."""
    activations: ActivationScheme | None = None

    @property
    def is_exact(self) -> bool:
        """16 bits."""
        return self.weights is None

    @property
    def by_gptq(self) -> bool:
        """Whether weights are rounded by GPTQ in the end."""
        return self.method == GPTQ

    @property
    def is_common(self) -> bool:
        """Whether vLLM runs it on all GPUs that have kernels for its kind, and in experts."""
        scheme = self.weights
        return scheme is None or scheme.type != "int" or scheme.num_bits in COMMON_WIDTHS

    @property
    def recipe(self) -> Recipe:
        """A recipe with this format only."""
        assert self.weights is not None
        found: dict[str, Any] = {"name": self.name, "summary": self.name, "method": self.method}
        found |= {"weights": self.weights, "input_activations": self.activations}
        return Recipe.model_validate(found)

    def size_bytes(self, module: str, weight: TensorSpec) -> int | None:
        """Bytes of the tensors that store a weight; None where the format does not fit its
        shape, or experts.
        """
        if self.weights is None:
            return weight.size_bytes
        if EXPERT.search(module) and not self.is_common:
            return None
        rows, columns = weight.shape
        size = self.weights.group_size
        if isinstance(size, int) and columns % size:
            return None
        recipe = self.recipe
        if formats.of(recipe).misfit(rows, columns, recipe):
            return None
        return sum(part.size_bytes for part in formats.specs(module, weight, recipe))


def find(name: str) -> Candidate:
    """A candidate by its name."""
    if name == SIXTEEN:
        return Candidate(SIXTEEN)
    if match := _INTEGER.fullmatch(name):
        weights = WeightScheme(num_bits=int(match[1]), group_size=int(match[2]))
        return Candidate(name, GPTQ, weights)
    if name not in _FLOATS:
        known = (*MIXES, *dict.fromkeys(n for names in MIXES.values() for n in names))
        raise UnknownName("format", name, known)
    method, numbers, inputs = _FLOATS[name]
    return Candidate(
        name, method, WeightScheme.model_validate(numbers), ActivationScheme.model_validate(inputs)
    )


def by_names(names: Sequence[str] = ()) -> list[Candidate]:
    """Candidates by name or by the name of a mix; the default mix where none is given."""
    wanted = names or ("int",)
    every = [n for name in wanted for n in MIXES.get(name, (name,))]
    return [find(name) for name in dict.fromkeys((*every, SIXTEEN))]


def mixes_for(gpu: GPU) -> list[str]:
    """Mixes of which vLLM runs every format on a GPU."""
    return [
        mix
        for mix, names in MIXES.items()
        if all(support.runs(gpu, _key(find(name))).how != "no" for name in names)
    ]


def _key(candidate: Candidate) -> str:
    return support.format_of(None if candidate.is_exact else candidate.recipe)
