"""The kernel that vLLM picks for a layer: its candidates in its own order, each with its limits.

Read from vllm/model_executor/kernels/linear (`__init__.py` and one file per kernel) at v0.26.0, and
at 0.28.0 to 0.33.0, for CUDA. Assumes the packages that vLLM's own requirements install:
FlashInfer, and from 0.24 on Humming; not Conch.
"""

from collections.abc import Callable
from dataclasses import dataclass

MARLIN_GROUPS = (-1, 32, 64, 128)
Version = tuple[int, int]
NEWEST: Version = (0, 33)
"""The newest version that was read."""


@dataclass(frozen=True)
class KernelQuery:
    """A layer as the kernel choice sees it."""

    kind: str
    """One of LISTS."""
    rows: int
    columns: int
    capability: int
    """NVIDIA's compute capability times ten: 90 is Hopper."""
    version: Version
    bits: int = 4
    group_size: int = -1
    symmetric: bool = True
    act_order: bool = False
    static: bool = False
    """Static input scales, one per tensor."""
    per_tensor: bool = False
    """One weight scale for the whole tensor."""
    method: str = ""


@dataclass(frozen=True)
class Kernel:
    name: str
    fits: Callable[[KernelQuery], bool]
    slow: Callable[[KernelQuery], str] = lambda asked: ""
    """Why it is a fallback; empty for the kernel that the format is meant for."""
    since: Version = (0, 0)
    before: Version = (9, 0)
    """The first version without it."""


def _never(asked: KernelQuery) -> str:
    return ""


def _words(words: str) -> Callable[[KernelQuery], str]:
    return lambda asked: words


def _machete(a: KernelQuery) -> bool:
    return (
        a.capability == 90
        and not (a.method == "awq" and a.version < (0, 24))  # only Marlin before that
        and a.bits in (4, 8)
        and a.group_size in (-1, 64, 128)
        and a.columns % 64 == 0
        and a.rows % 128 == 0
    )


def _allspark(a: KernelQuery) -> bool:
    plain = a.bits == 8 and a.symmetric and not a.act_order and a.group_size == -1
    return plain and 80 <= a.capability < 90 and a.columns % 16 == 0 and a.rows % 16 == 0


def _marlin(a: KernelQuery) -> bool:
    known = a.bits in ((4, 8) if a.symmetric else (4,)) and a.group_size in MARLIN_GROUPS
    if not known or a.capability < 75:
        return False
    if a.act_order or a.version < (0, 24):
        return a.rows % 64 == 0 and a.columns % 128 == 0
    return True


def _triton(a: KernelQuery) -> bool:
    group = a.group_size in (-1, 32, 64, 128, a.columns)
    return a.bits == 4 and a.rows % 8 == 0 and group and not a.act_order


def _before(capability: int, words: str) -> Callable[[KernelQuery], str]:
    return lambda asked: words if asked.capability < capability else ""


def _prefers_humming(a: KernelQuery) -> bool:
    """Where Humming comes before Marlin, from 0.32 on: on Hopper."""
    return a.capability == 90


def _marlin_fp8(a: KernelQuery) -> bool:
    """Until 0.28 only without FP8 tensor cores; since then wherever no earlier candidate fits."""
    return a.capability >= 75 and (a.capability < 89 or a.version >= (0, 29))


def _without_cores(a: KernelQuery) -> bool:
    """compressed-tensors' FP8 with 16-bit inputs: its weight-only scheme."""
    return a.method == "compressed-tensors" and 75 <= a.capability < 89


FP8_SLOW = "weights only: no FP8 tensor cores before 8.9"
BLOCK_SLOW = "weights only: CUTLASS and DeepGEMM start at 9.0"
FP4_SLOW = "weights only: FP4 tensor cores start at 10.0"
MXFP8_SLOW = "weights only: MXFP8 tensor cores start at 10.0"
LISTS: dict[str, tuple[Kernel, ...]] = {
    "wna16": (
        Kernel("Machete", _machete),
        Kernel("AllSpark", _allspark, before=(0, 31)),
        Kernel("Humming", lambda a: _prefers_humming(a) and not a.act_order, _never, (0, 32)),
        Kernel("Marlin", _marlin),
        Kernel("Triton W4A16", _triton, _words("Triton's generic kernel"), (0, 24)),
        Kernel("Humming", lambda a: a.capability >= 75 and not a.act_order,
               lambda a: "" if a.bits not in (4, 8) else "generic kernel", (0, 24)),
    ),
    "int-inputs": (
        Kernel("Humming", lambda a: a.capability >= 75),
    ),
    "w4afp8": (
        Kernel("CUTLASS W4A8", lambda a: a.capability == 90 and a.group_size == 128
               and a.columns % 128 == 0 and a.rows % 128 == 0 and not a.act_order and a.symmetric),
    ),
    "fp8": (
        Kernel("Humming FP8", _without_cores, _words(FP8_SLOW), (0, 25)),
        Kernel("Marlin FP8", lambda a: 75 <= a.capability < 89, _words(FP8_SLOW)),
        Kernel("FlashInfer FP8", lambda a: a.capability >= 100 and a.static and a.per_tensor),
        Kernel("CUTLASS FP8", lambda a: a.capability >= 89),
    ),
    "fp8-a16": (
        Kernel("Humming FP8", lambda a: a.capability >= 75, _never, (0, 25)),
        Kernel("Marlin FP8", lambda a: a.capability >= 75),
    ),
    "fp8-block": (
        Kernel("DeepGEMM (where installed), else CUTLASS FP8 blocks",
               lambda a: (a.capability == 90 or 100 <= a.capability < 110)
               and a.rows % 64 == 0 and a.columns % 128 == 0),
        Kernel("CUTLASS FP8 blocks", lambda a: a.capability >= 90),
        Kernel("Humming FP8", _without_cores, _words(FP8_SLOW), (0, 25)),
        Kernel("Marlin FP8", _marlin_fp8, lambda a: FP8_SLOW if a.capability < 89 else BLOCK_SLOW),
        Kernel("Triton FP8 blocks", lambda a: a.capability >= 89,
               _words("CUTLASS and DeepGEMM start at 9.0")),
    ),
    "int8": (
        Kernel("CUTLASS INT8", lambda a: 75 <= a.capability < 100),
    ),
    "nvfp4": (
        Kernel("FlashInfer CuTe DSL NVFP4", lambda a: 100 <= a.capability < 110, _never, (0, 24)),
        Kernel("FlashInfer CUTLASS NVFP4", lambda a: a.capability >= 100),
        Kernel("Humming FP4", _prefers_humming, _words(FP4_SLOW), (0, 32)),
        Kernel("Marlin FP4", lambda a: a.capability >= 75, _words(FP4_SLOW)),
    ),
    "nvfp4-a16": (
        Kernel("FlashInfer CuTe DSL NVFP4 W4A16", lambda a: a.capability in (100, 103), _never,
               (0, 30)),
        Kernel("Humming FP4", _prefers_humming, _never, (0, 32)),
        Kernel("Marlin FP4", lambda a: a.capability >= 75),
    ),
    "mxfp4": (
        Kernel("FlashInfer MXFP4", lambda a: a.capability >= 100, _never, (0, 22)),
        Kernel("Humming FP4", _prefers_humming, _words(FP4_SLOW), (0, 32)),
        Kernel("Marlin FP4", lambda a: a.capability >= 80, _before(100, FP4_SLOW)),
    ),
    # One scheme, CompressedTensorsW4A4Mxfp4, asks for 4-bit inputs whatever the checkpoint has;
    # Marlin and Humming ignore that. Marlin's E8M0 scales are built for BF16 alone
    # (csrc/.../marlin/generate_kernels.py), which 7.5 lacks.
    "mxfp4-a16": (
        Kernel("FlashInfer MXFP4 (4-bit activations)", lambda a: a.capability >= 100, _never,
               (0, 22)),
        Kernel("Humming FP4", _prefers_humming, _never, (0, 32)),
        Kernel("Marlin FP4", lambda a: a.capability >= 80),
    ),
    "mxfp8": (
        Kernel("FlashInfer CuTe DSL MXFP8", lambda a: 100 <= a.capability < 110, _never, (0, 24)),
        Kernel("FlashInfer CUTLASS MXFP8", lambda a: a.capability >= 100),
        Kernel("Humming MXFP8", _prefers_humming, _words(MXFP8_SLOW), (0, 32)),
        # vLLM takes it from 7.5 on, and has it built for BF16 alone.
        Kernel("Marlin MXFP8", lambda a: a.capability >= 80, _words(MXFP8_SLOW)),
    ),
    "bitsandbytes": (
        Kernel("bitsandbytes", lambda a: a.capability >= 70,
               _words("unpacked to 16 bits before each product")),
    ),
}  # fmt: skip
MINIMUM = {
    "wna16": 75, "w4afp8": 90, "fp8": 75, "fp8-a16": 75, "fp8-block": 75, "int8": 75, "nvfp4": 75,
    "nvfp4-a16": 75, "mxfp4": 80, "mxfp4-a16": 80, "mxfp8": 75, "bitsandbytes": 70,
    "int-inputs": 75,
}  # fmt: skip
"""`get_min_capability` of the schemes; FP8 falls back to weight-only below 8.9."""
METHOD_MINIMUM = {
    "compressed-tensors": 70, "gptq": 60, "awq": 75, "fp8": 75, "fbgemm_fp8": 80, "modelopt": 75,
    "mxfp4": 80, "bitsandbytes": 70,
}  # fmt: skip
MODELOPT_FP8_MINIMUM = {(0, 0): 89, (0, 27): 80}
"""By the first version that it applies to."""
MODELOPT_MXFP8_MINIMUM = 80


def choose(asked: KernelQuery) -> tuple[str, str] | None:
    """The kernel's name and why it is slow, if it is; None where no kernel takes the layer."""
    for kernel in LISTS[asked.kind]:
        if kernel.since <= asked.version < kernel.before and kernel.fits(asked):
            return kernel.name, kernel.slow(asked)
    return None


LAYER = 4096
"""Rows and columns of a typical layer, divisible by every kernel's tiles."""
USUAL: dict[str, tuple[str, int, int]] = {
    **{f"w{bits}a16": ("wna16", bits, 128) for bits in range(2, 9)},
    "int8-w8a8": ("int8", 8, -1), "fp8-w8a8": ("fp8", 8, -1), "fp8-block": ("fp8-block", 8, -1),
    "nvfp4": ("nvfp4", 4, 16), "nvfp4-fp8": ("nvfp4", 4, 16), "nvfp4-a16": ("nvfp4-a16", 4, 16),
    "mxfp4": ("mxfp4", 4, 32), "mxfp4-a16": ("mxfp4-a16", 4, 32), "mxfp8": ("mxfp8", 8, 32),
    "w4afp8": ("w4afp8", 4, 128),
}  # fmt: skip
"""Formats of `support.FORMATS` that are served as compressed-tensors: list, bits, group size."""


def usual(format: str, capability: float) -> tuple[str, str] | None:
    """The kernel for a typical layer in the newest version, and why it is slow; None: none."""
    kind, bits, size = USUAL[format]
    number = round(capability * 10)
    if number < max(MINIMUM[kind], METHOD_MINIMUM["compressed-tensors"]):
        return None
    method = "compressed-tensors"
    return choose(KernelQuery(kind, LAYER, LAYER, number, NEWEST, bits, size, method=method))
