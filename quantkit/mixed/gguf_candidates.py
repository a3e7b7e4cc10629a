"""GGUF types as candidates: any tensor of a file may have any of them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.errors import UnknownName
from quantkit.gguf import by_gram, mixture
from quantkit.gguf.layout import Layout
from quantkit.gguf.mixture import KINDS
from quantkit.gguf.names import GGML_QUANT_SIZES
from quantkit.gguf.names import GGMLQuantizationType as Kind
from quantkit.gguf.plan import layer_of
from quantkit.gguf.tensors import GGUFTensor, size_bytes
from quantkit.mixed.table import Table
from quantkit.mixed.units import Unit
from quantkit.recipe import GGUFRecipe
from quantkit.tensorspec import TensorSpec

NAMES = (
    "Q2_K", "Q3_K", "IQ4_XS", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16",
)  # fmt: skip
"""By size: types with blocks of 256 weights first, then those of 32, then 16 bits."""
LARGE = 256
"""Block size of the best types ..."""
SMALL = (Kind.IQ4_NL, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1)
"""... and their replacements where the rows are not a multiple of it."""
BASES = {kind: name for name, kind in reversed(mixture.BASE.items())}
"""llama.cpp's file type by the type of most of its weights."""
_LAYER = re.compile(r"^blk\.(\d+)\.(.*)$")


@dataclass(frozen=True)
class GGUFCandidate:
    """One type of blocks."""

    kind: Kind

    @property
    def name(self) -> str:
        return self.kind.name

    @property
    def activations(self) -> None:
        """llama.cpp rounds inputs in its kernels for every type."""
        return

    @property
    def is_exact(self) -> bool:
        """16 bits."""
        return self.kind in mixture.UNQUANTISED

    @property
    def by_gptq(self) -> bool:
        """Whether GPTQ chooses its levels in the end."""
        return self.kind in by_gram.KINDS

    def size_bytes(self, module: str, weight: TensorSpec) -> int | None:
        """Bytes in a file; None where the rows are not whole blocks, or larger blocks do better."""
        columns = weight.shape[-1]
        if columns % GGML_QUANT_SIZES[self.kind][0]:
            return None
        if self.kind in SMALL and columns % LARGE == 0:
            return None
        return size_bytes(weight.shape, self.kind)


def by_names(names: Sequence[str] = ()) -> list[GGUFCandidate]:
    """Candidates by name; all where none is given."""
    wanted = [name.upper() for name in names] or list(NAMES)
    if unknown := [name for name in wanted if name not in KINDS]:
        raise UnknownName("GGUF type", unknown[0], KINDS)
    return [GGUFCandidate(KINDS[name]) for name in dict.fromkeys((*wanted, "BF16"))]


def tensors(layout: Layout) -> dict[str, GGUFTensor]:
    """Tensors that can be stored in blocks, by the source's name for the layer."""
    return {layer_of(t): t for t in layout.tensors if mixture.quantised(t.name, t.shape)}


def units(layout: Layout) -> list[Unit]:
    """Every tensor on its own."""
    return [Unit(name, (name,)) for name in tensors(layout)]


def other_bytes(layout: Layout) -> int:
    """Bytes of the tensors that stay in 32 bits."""
    mine = {tensor.name for tensor in tensors(layout).values()}
    return sum(size_bytes(t.shape, Kind.F32) for t in layout.tensors if t.name not in mine)


def recipe(
    table: Table, choice: Sequence[int], layout: Layout, name: str, summary: str
) -> GGUFRecipe:
    """The recipe of a choice, with one pattern per type and sort of tensor."""
    known = tensors(layout)
    sizes: dict[str, int] = {}
    groups: dict[tuple[str, str], list[int]] = {}
    plain: dict[str, str] = {}
    for row, place in zip(table.units, choice, strict=True):
        format, tensor = table.formats[place], known[row.name]
        sizes[format] = sizes.get(format, 0) + row.n_weights
        if match := _LAYER.match(tensor.name):
            groups.setdefault((match[2], format), []).append(int(match[1]))
        else:
            plain[f"^{re.escape(tensor.name)}$"] = format
    patterns = {
        rf"^blk\.({'|'.join(map(str, sorted(numbers)))})\.{re.escape(ending)}$": format
        for (ending, format), numbers in groups.items()
    }
    most = max(sizes, key=sizes.__getitem__)
    data = {"name": name, "summary": summary, "gguf": BASES[KINDS[most]], "method": "gptq"}
    return GGUFRecipe.validated({**data, "tensors": plain | patterns}, name)
