"""The kernel that vLLM picks for a layer: its candidates in its own order, each with its limits.

Read from vllm/model_executor/kernels/linear (`__init__.py` and one file per kernel) at v0.26.0, for
CUDA. What is installed counts as vLLM's own requirements install it: FlashInfer, and from 0.24 on
Humming; not Conch.
"""

from collections.abc import Callable
from dataclasses import dataclass

MARLIN_GROUPS = (-1, 32, 64, 128)
Version = tuple[int, int]


@dataclass(frozen=True)
class Asked:
    """A layer as the choice of a kernel sees it."""

    kind: str
    """One of LISTS."""
    rows: int
    columns: int
    capability: int
    """NVIDIA's, times ten: 90 is Hopper."""
    version: Version
    bits: int = 4
    group_size: int = -1
    symmetric: bool = True
    act_order: bool = False
    static: bool = False
    """Fixed input scales, one per tensor."""
    per_tensor: bool = False
    """One weight scale for the whole tensor."""
    method: str = ""


@dataclass(frozen=True)
class Kernel:
    name: str
    fits: Callable[[Asked], bool]
    slow: Callable[[Asked], str] = lambda asked: ""
    """Why it is a fallback; empty where it is what the format is for."""
    since: Version = (0, 0)


def _never(asked: Asked) -> str:
    return ""


def _words(words: str) -> Callable[[Asked], str]:
    return lambda asked: words


def _machete(a: Asked) -> bool:
    return (
        a.capability == 90
        and not (a.method == "awq" and a.version < (0, 24))  # Marlin alone, until then
        and a.bits in (4, 8)
        and a.group_size in (-1, 64, 128)
        and a.columns % 64 == 0
        and a.rows % 128 == 0
    )


def _allspark(a: Asked) -> bool:
    plain = a.bits == 8 and a.symmetric and not a.act_order and a.group_size == -1
    return plain and 80 <= a.capability < 90 and a.columns % 16 == 0 and a.rows % 16 == 0


def _marlin(a: Asked) -> bool:
    known = a.bits in ((4, 8) if a.symmetric else (4,)) and a.group_size in MARLIN_GROUPS
    if not known or a.capability < 75:
        return False
    if a.act_order or a.version < (0, 24):
        return a.rows % 64 == 0 and a.columns % 128 == 0
    return True


def _triton(a: Asked) -> bool:
    group = a.group_size in (-1, 32, 64, 128, a.columns)
    return a.bits == 4 and a.rows % 8 == 0 and group and not a.act_order


def _before(capability: int, words: str) -> Callable[[Asked], str]:
    return lambda asked: words if asked.capability < capability else ""


FP8_SLOW = "weights only: no FP8 tensor cores before 8.9"
FP4_SLOW = "weights only: FP4 tensor cores start at 10.0"
LISTS: dict[str, tuple[Kernel, ...]] = {
    "wna16": (
        Kernel("Machete", _machete),
        Kernel("AllSpark", _allspark),
        Kernel("Marlin", _marlin),
        Kernel("Triton W4A16", _triton, _words("Triton's generic kernel"), (0, 24)),
        Kernel("Humming", lambda a: a.capability >= 75 and not a.act_order,
               lambda a: "" if a.bits not in (4, 8) else "generic kernel", (0, 24)),
    ),
    "w4afp8": (
        Kernel("CUTLASS W4A8", lambda a: a.capability == 90 and a.group_size == 128
               and a.columns % 128 == 0 and a.rows % 128 == 0 and not a.act_order and a.symmetric),
    ),
    "fp8": (
        Kernel("Marlin FP8", lambda a: 75 <= a.capability < 89, _words(FP8_SLOW)),
        Kernel("FlashInfer FP8", lambda a: a.capability >= 100 and a.static and a.per_tensor),
        Kernel("CUTLASS FP8", lambda a: a.capability >= 89),
    ),
    "fp8-a16": (
        Kernel("Marlin FP8", lambda a: a.capability >= 75),
    ),
    "fp8-block": (
        Kernel("DeepGEMM (where installed), else CUTLASS FP8 blocks",
               lambda a: (a.capability == 90 or 100 <= a.capability < 110)
               and a.rows % 64 == 0 and a.columns % 128 == 0),
        Kernel("CUTLASS FP8 blocks", lambda a: a.capability >= 90),
        Kernel("Marlin FP8", lambda a: 75 <= a.capability < 89, _words(FP8_SLOW)),
        Kernel("Triton FP8 blocks", lambda a: a.capability >= 89,
               _words("CUTLASS and DeepGEMM start at 9.0")),
    ),
    "int8": (
        Kernel("CUTLASS INT8", lambda a: 75 <= a.capability < 100),
    ),
    "nvfp4": (
        Kernel("FlashInfer CuTe DSL NVFP4", lambda a: 100 <= a.capability < 110, _never, (0, 24)),
        Kernel("FlashInfer CUTLASS NVFP4", lambda a: a.capability >= 100),
        Kernel("Marlin FP4", lambda a: a.capability >= 75, _words(FP4_SLOW)),
    ),
    "nvfp4-a16": (Kernel("Marlin FP4", lambda a: a.capability >= 75),),
    "mxfp4": (
        Kernel("FlashInfer MXFP4", lambda a: a.capability >= 100, _never, (0, 22)),
        Kernel("Marlin FP4", lambda a: a.capability >= 80, _before(100, FP4_SLOW)),
    ),
    "mxfp8": (
        Kernel("FlashInfer CuTe DSL MXFP8", lambda a: 100 <= a.capability < 110, _never, (0, 24)),
        Kernel("FlashInfer CUTLASS MXFP8", lambda a: a.capability >= 100),
        Kernel("Marlin MXFP8", lambda a: a.capability >= 75,
               _words("weights only: MXFP8 tensor cores start at 10.0")),
    ),
    "bitsandbytes": (
        Kernel("bitsandbytes", lambda a: a.capability >= 70,
               _words("unpacked to 16 bits before each product")),
    ),
}  # fmt: skip
MINIMUM = {
    "wna16": 75, "w4afp8": 90, "fp8": 75, "fp8-a16": 75, "fp8-block": 75, "int8": 75, "nvfp4": 75,
    "nvfp4-a16": 75, "mxfp4": 80, "mxfp8": 75, "bitsandbytes": 70,
}  # fmt: skip
"""`get_min_capability` of the schemes; FP8 falls back to weights only below 8.9."""
METHOD_MINIMUM = {
    "compressed-tensors": 70, "gptq": 60, "awq": 75, "fp8": 75, "fbgemm_fp8": 80, "modelopt": 75,
    "mxfp4": 80, "bitsandbytes": 70,
}  # fmt: skip
MODELOPT_FP8_MINIMUM = 89


def choose(asked: Asked) -> tuple[str, str] | None:
    """The kernel's name and why it is slow, if it is; None where no kernel takes the layer."""
    for kernel in LISTS[asked.kind]:
        if asked.version >= kernel.since and kernel.fits(asked):
            return kernel.name, kernel.slow(asked)
    return None
