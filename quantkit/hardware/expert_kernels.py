"""The kernel that vLLM picks for a block's experts: its backends in its own order.

Read from vllm/model_executor/layers/fused_moe/oracle (fp8.py, int8.py, int_wna16.py, nvfp4.py,
mxfp8.py, and of mxfp4.py what it does for gpt-oss, with the Triton kernels that wheels for CUDA
bring), the classes in fused_moe/experts that they ask, and what asks them in layers/quantization:
compressed_tensors_moe (MXFP4 outside gpt-oss is chosen there, in its w4a4_mxfp4.py), auto_gptq.py,
auto_awq.py (with moe_wna16.py, where Marlin does not take the sizes), fp8.py and modelopt.py, at
v0.26.0, 0.32.0 and 0.33.0; which GPUs CUTLASS' MXFP4 is for in csrc (mxfp4_experts_quant.cu), and
which types Marlin is built for in its generate_kernels.py. For CUDA, gated SiLU, on one GPU or
tensor parallel, with FlashInfer and Humming installed as vLLM's own requirements install them. A
version between these gets an answer where all have the same.
"""

from collections.abc import Callable
from dataclasses import replace

from quantkit.hardware.kernels import (
    FP4_SLOW,
    FP8_SLOW,
    MARLIN_GROUPS,
    MXFP8_SLOW,
    Kernel,
    KernelQuery,
    Version,
)

ANY_WIDTH: Version = (0, 29)
"""From here on, shapes of packed experts are right for integers of any width."""
FIRST: Version = (0, 26)
READ: tuple[Version, ...] = (FIRST, (0, 32), (0, 33))
COMPRESSED = "compressed-tensors"


def _hopper(a: KernelQuery) -> bool:
    return a.capability == 90


def _blackwell(a: KernelQuery) -> bool:
    """Data-centre Blackwell, family 10.x."""
    return 100 <= a.capability < 110


def _desk(a: KernelQuery) -> bool:
    return 120 <= a.capability < 130


def _marlin(a: KernelQuery) -> bool:
    """`check_moe_marlin_supports_layer`: rows are an expert's intermediate size, columns its
    inputs.
    """
    known = a.bits in ((4, 8) if a.symmetric else (4,)) and a.group_size in MARLIN_GROUPS
    size = max(64, a.group_size) if a.act_order else max(1, a.group_size)
    return known and a.capability >= 75 and a.columns % 128 == 0 and a.rows % size == 0


def _is_static(a: KernelQuery) -> bool:
    return a.static and a.per_tensor


def _weights_only(before: str) -> Callable[[KernelQuery], str]:
    """What is said before Blackwell; Blackwell's other GPUs have the cores, vLLM no kernel."""
    other = "weights only: vLLM's own kernels for experts in MX formats are for 10.x"
    return lambda asked: before if asked.capability < 100 else other


def _words(words: str) -> Callable[[KernelQuery], str]:
    return lambda asked: words


LISTS: dict[str, tuple[Kernel, ...]] = {
    "wna16": (
        # GPTQ and AWQ allow groups of any size, or may have biases, which it does not take.
        Kernel("FlashInfer TRT-LLM MxInt4", lambda a: _blackwell(a) and a.bits == 4
               and a.symmetric and a.group_size == 32 and not a.act_order
               and a.method == COMPRESSED),
        Kernel("Humming", lambda a: _hopper(a) and not a.act_order, since=(0, 32)),
        Kernel("Marlin", _marlin),
        Kernel("Triton WNA16", lambda a: a.bits in (4, 8) and not a.act_order,
               _words("Triton's generic kernel")),
        Kernel("Humming", lambda a: a.capability >= 75 and a.symmetric and not a.act_order
               and a.group_size > 0 and a.method == COMPRESSED, since=ANY_WIDTH),
    ),
    "int8": (
        Kernel("Triton INT8", lambda a: a.capability >= 75),
    ),
    "fp8": (
        Kernel("FlashInfer TRT-LLM FP8", lambda a: _is_static(a) and _blackwell(a)),
        Kernel("FlashInfer CUTLASS FP8", lambda a: _is_static(a) and (_hopper(a) or _desk(a))),
        Kernel("CUTLASS FP8 (Triton for some shapes)",
               lambda a: _hopper(a) and a.static == a.per_tensor and a.method == COMPRESSED),
        Kernel("Triton FP8", lambda a: a.capability >= 89),
        Kernel("Marlin FP8", lambda a: a.capability >= 75, _words(FP8_SLOW)),
    ),
    "fp8-block": (
        Kernel("Triton FP8 blocks", lambda a: a.capability in (89, 90)),
        Kernel("FlashInfer TRT-LLM FP8 blocks", _blackwell),
        Kernel("Marlin FP8", lambda a: 75 <= a.capability < 89, _words(FP8_SLOW)),
    ),
    "nvfp4": (
        Kernel("FlashInfer TRT-LLM NVFP4", _blackwell),
        Kernel("FlashInfer CUTLASS NVFP4", _desk),
        Kernel("Humming FP4", _hopper, _words(FP4_SLOW), (0, 32)),
        Kernel("Marlin FP4", lambda a: 75 <= a.capability < 100, _words(FP4_SLOW)),
    ),
    "gpt-oss": (
        Kernel("FlashInfer TRT-LLM MXFP4", _blackwell),
        Kernel("Triton MXFP4", _hopper),
        Kernel("Marlin MXFP4", lambda a: 80 <= a.capability < 90),
    ),
    "nvfp4-a16": (
        Kernel("Humming FP4", _hopper, since=(0, 32)),
        Kernel("Marlin FP4", lambda a: a.capability >= 75),
    ),
    # Marlin has E8M0 scales in BF16 alone, which Turing lacks.
    "mxfp4": (
        Kernel("CUTLASS MXFP4", _blackwell),
        Kernel("Marlin MXFP4", lambda a: a.capability >= 80, _weights_only(FP4_SLOW)),
    ),
    "mxfp4-a16": (
        Kernel("CUTLASS MXFP4 (4-bit activations)", _blackwell),
        Kernel("Marlin MXFP4", lambda a: a.capability >= 80),
    ),
    "mxfp8": (
        Kernel("FlashInfer TRT-LLM MXFP8", _blackwell),
        Kernel("Humming MXFP8", _hopper, _words(MXFP8_SLOW), (0, 32)),
        Kernel("Marlin MXFP8", lambda a: a.capability >= 80, _weights_only(MXFP8_SLOW)),
    ),
}  # fmt: skip
UNSURE: dict[str, Callable[[KernelQuery], bool]] = {
    # Whether CUTLASS' grouped product is available depends on the build of 0.26.
    "fp8": lambda a: (
        a.capability >= 100
        and a.version < (0, 32)
        and a.static == a.per_tensor
        and a.method == COMPRESSED
    ),
    "fp8-block": lambda a: a.capability >= 110,
    "nvfp4": lambda a: a.capability >= 100 and not (_blackwell(a) or _desk(a)),
    # CUTLASS' for 11.x is built by CUDA 13.
    "mxfp4": lambda a: 110 <= a.capability < 120,
    "mxfp4-a16": lambda a: 110 <= a.capability < 120,
}
"""Kernels whose choice depends on how vLLM was built or what is installed."""
KINDS: dict[str, tuple[str, ...]] = {
    COMPRESSED: tuple(kind for kind in LISTS if kind != "gpt-oss"),
    "gptq": ("wna16",),
    "awq": ("wna16",),
    "fp8": ("fp8", "fp8-block"),
    "modelopt": ("fp8", "nvfp4", "nvfp4-a16", "mxfp8"),
    "mxfp4": ("gpt-oss",),
}
"""Which of those lists each method uses."""


def choose(asked: KernelQuery) -> tuple[str, str] | None:
    """The kernel's name and why it is slow, if it is; None: not known here."""
    if asked.kind not in KINDS.get(asked.method, ()) or asked.version < FIRST:
        return None
    if asked.method == "awq" and asked.bits != 4:
        return None  # refused
    if asked.method == "modelopt" and asked.kind == "fp8" and not _is_static(asked):
        return None  # its class for experts expects one scale per tensor, inputs included
    if asked.version in READ:
        return _at(asked)
    answers = {_at(replace(asked, version=version)) for version in READ}
    return answers.pop() if len(answers) == 1 else None


def _at(asked: KernelQuery) -> tuple[str, str] | None:
    unsure = UNSURE.get(asked.kind)
    if asked.kind not in LISTS or (unsure is not None and unsure(asked)):
        return None
    for kernel in LISTS[asked.kind]:
        if kernel.since <= asked.version and kernel.fits(asked):
            return kernel.name, kernel.slow(asked)
    return None
