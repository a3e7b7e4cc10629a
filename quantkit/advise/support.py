"""Whether a device runs a format, and in which arithmetic.

Rules by vendor and compute capability, after vLLM's table of supported hardware
(https://docs.vllm.ai/en/latest/features/quantization/), its pages on FP8, INT8 and the KV cache
below it, and, for AMD and Intel, the kernels that its source lists
(vllm/model_executor/kernels/linear/__init__.py). All move: the rules are those of mid-2026.
"""

from typing import Literal, NamedTuple

from quantkit.advise.gpus import GPU
from quantkit.errors import UnknownName

How = Literal["native", "emulated", "no"]
FORMATS = (
    "bf16", "w4a16", "w8a16", "int8-w8a8", "fp8-w8a8", "fp8-block", "kv-fp8", "gguf",
)  # fmt: skip
ENGINES = ("vllm", "llama.cpp")
FP8_GFX = ("gfx94", "gfx95", "gfx12")
"""AMD's chips that multiply FP8: MI300 and later, and RDNA 4."""


class Support(NamedTuple):
    """`native`: in the arithmetic that the format is for. `emulated`: it runs, and saves memory,
    without the speed that the format promises elsewhere."""

    how: How
    reason: str


def runs(gpu: GPU, format: str, engine: str = "vllm") -> Support:
    """How a device runs a format in an engine, and why."""
    if format not in FORMATS:
        raise UnknownName("format", format, FORMATS)
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    if engine == "llama.cpp":
        return _llama_cpp(gpu, format)
    if gpu.capability is not None:
        return _nvidia(gpu.capability, format)
    if gpu.vendor == "amd" and gpu.compute_capability:
        return _amd(gpu.compute_capability, format)
    if gpu.vendor == "intel":
        return _gaudi(format) if gpu.generation == "Gaudi" else _intel(format)
    if gpu.vendor == "cpu":
        return _cpu(format)
    if gpu.vendor == "apple":
        return Support("no", "vLLM does not use Apple's GPUs; take a GGUF file and llama.cpp")
    return Support("no", "its compute capability is not known, so neither is what vLLM does on it")


def _llama_cpp(gpu: GPU, format: str) -> Support:
    if gpu.generation == "Gaudi":
        return Support("no", "llama.cpp has no backend for Gaudi")
    if format == "gguf":
        return Support("native", "llama.cpp has kernels for it on CPUs and on GPUs of every vendor")
    if format == "bf16":
        return Support("native", "as a GGUF file of type BF16 or F16")
    if format == "kv-fp8":
        return Support("no", "llama.cpp's cache has Q8_0 in its place: -ctk q8_0 -ctv q8_0")
    return Support("no", "llama.cpp reads GGUF files only")


def _nvidia(capability: float, format: str) -> Support:
    if capability < 7.0:
        return Support("no", "vLLM needs compute capability 7.0 or later")
    if format == "gguf":
        return _gguf_in_vllm()
    if format == "bf16":
        if capability >= 8.0:
            return Support("native", "BF16 tensor cores, from 8.0 on")
        return Support("emulated", "no BF16 before 8.0: vLLM computes in FP16 (--dtype half)")
    if capability < 7.5:
        return Support("no", "vLLM has no kernel for it before 7.5")
    if format in ("w4a16", "w8a16"):
        if capability >= 8.0:
            return Support("native", "Marlin kernels, which compute in 16 bits, from 8.0 on")
        return Support("native", "Marlin kernels of a vLLM later than 0.15, in FP16")
    if format == "int8-w8a8":
        if capability < 10.0:
            return Support("native", "INT8 tensor cores, from 7.5 to 9.0")
        return Support("no", "vLLM has no INT8 kernels from 10.0 on (Blackwell); FP8 serves there")
    if format == "kv-fp8":
        if capability >= 8.9:
            return Support("native", "FP8 converts in hardware, from 8.9 on")
        if capability >= 8.0:
            return Support(
                "emulated", "by FlashInfer; other attention kernels refuse FP8 before 8.9"
            )
        return Support("no", "attention kernels with an FP8 cache start at 8.0")
    if capability < 8.9:
        return Support("emulated", "no FP8 tensor cores before 8.9: Marlin, weights only")
    if format == "fp8-block" and capability < 9.0:
        return Support("native", "FP8 tensor cores, by a Triton kernel before 9.0")
    return Support("native", "FP8 tensor cores, from 8.9 on")


def _amd(gfx: str, format: str) -> Support:
    has_fp8 = gfx.startswith(FP8_GFX)
    if format == "bf16":
        return Support("native", "BF16 matrix instructions")
    if format == "gguf":
        return _gguf_in_vllm()
    if format in ("w4a16", "w8a16", "int8-w8a8"):
        return Support("emulated", "generic kernels only: vLLM's table names none for AMD")
    if has_fp8:
        kind = "FNUZ, to which vLLM converts" if gfx.startswith("gfx94") else "OCP's E4M3"
        return Support("native", f"FP8 matrix instructions, in {kind}")
    if format == "kv-fp8":
        return Support("emulated", "FP8 converts in software before MI300")
    return Support("no", f"{gfx} has no FP8, and vLLM no weight-only kernel for it on AMD")


def _intel(format: str) -> Support:
    if format == "bf16":
        return Support("native", "BF16 on XMX engines")
    if format == "w4a16":
        return Support("native", "GPTQ and AWQ are in vLLM's table for Intel GPUs")
    if format == "fp8-w8a8":
        return Support("emulated", "a kernel exists, and vLLM's table does not name it")
    return Support("no", "not in vLLM's table for Intel GPUs")


def _gaudi(format: str) -> Support:
    if format == "bf16":
        return Support("native", "through the vLLM-Gaudi plug-in")
    if format == "fp8-w8a8":
        return Support("native", "through the vLLM-Gaudi plug-in and Intel Neural Compressor")
    return Support("no", "not known of the vLLM-Gaudi plug-in")


def _cpu(format: str) -> Support:
    if format in ("bf16", "w4a16", "int8-w8a8"):
        return Support("native", "in vLLM's table for x86 CPUs")
    return Support("no", "not in vLLM's table for x86 CPUs")


def _gguf_in_vllm() -> Support:
    return Support("emulated", "vLLM read GGUF as an experiment and lists it no more: llama.cpp")
