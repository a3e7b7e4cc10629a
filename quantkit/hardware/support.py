"""Which engine runs which format on which device, and in which arithmetic: one table.

`recommend`, serving plans, model cards, reports and the comments in recipes all read it. The rules
for vLLM are those of August 2026: its table of supported hardware
(https://docs.vllm.ai/en/latest/features/quantization/), the pages on FP8, INT8 and the KV cache
below it, and, where the table is silent, vllm/v1/attention/backends. On NVIDIA GPUs the kernel that
vLLM would pick decides (`kernels.py`); a test checks that the table agrees.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from quantkit import numbers
from quantkit.errors import UnknownName
from quantkit.hardware import kernels
from quantkit.hardware.gpus import GPU
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe
from quantkit.schemes import runs_as

How = Literal["native", "emulated", "no"]
FORMATS = (
    "bf16", "w4a16", "w8a16", "int8-w8a8", "fp8-w8a8", "fp8-block", "kv-fp8", "gguf",
    "nvfp4", "nvfp4-a16", "nvfp4-fp8", "mxfp4", "mxfp4-a16", "mxfp8", "w4afp8",
    "w2a16", "w3a16", "w5a16", "w6a16", "w7a16",
)  # fmt: skip
ENGINES = ("vllm", "llama.cpp")
GENERATIONS = {
    7.0: "Volta", 7.5: "Turing", 8.0: "Ampere", 8.9: "Ada", 9.0: "Hopper", 10.0: "Blackwell",
}  # fmt: skip
"""NVIDIA's generations, by the first compute capability of each."""
LATEST = float("inf")
BOARDS = ("Raspberry Pi",)
"""Single-board computers, whose CPUs are not in vLLM's table."""


class Support(NamedTuple):
    """`native`: computed in the format's own arithmetic. `emulated`: it runs and saves memory,
    without the speed that the format has elsewhere.
    """

    how: How
    reason: str


class Rule(NamedTuple):
    """What one kind of device does with a format."""

    how: How
    reason: str
    since: float = 0.0
    """NVIDIA's compute capability from which the rule applies."""
    before: float = LATEST
    """The first compute capability that it no longer applies to."""
    chips: tuple[str, ...] = ()
    """Prefixes of AMD's gfx names; empty: every other chip."""
    who: str = ""
    """Those chips in words."""


INSTINCT_FP8 = (("gfx94", "gfx95"), "AMD from MI300")
RDNA_FP8 = (("gfx12",), "AMD RDNA 4")
RDNA = (("gfx11", "gfx12"), "AMD RDNA 3 and 4")
OTHER_AMD = "other AMD"
GENERIC = "Triton's kernels, which vLLM's table of supported hardware does not name for AMD"
UNNAMED = "a kernel exists, and vLLM's table of supported hardware does not name it"
ABSENT = "not in vLLM's table of supported hardware"
# From 0.24 on compressed-tensors' layers are given to torch._scaled_mm where no capability is known
# (compressed_tensors.py: _check_scheme_supported; kernels/linear/scaled_mm/pytorch.py). The FP8
# kernels of scaled_mm/cpu.py and fused_moe/experts/cpu_moe.py (0.32) need AMX.
FP8_ON_CPU = "torch's scaled products, from vLLM 0.24 on; FP8 instructions need AMX-FP8"


def _weight_only(bits: int) -> dict[str, tuple[Rule, ...]]:
    rules: dict[str, tuple[Rule, ...]] = {
        "nvidia": (
            Rule("native", "Marlin kernels, which compute in 16 bits, from 8.0 on", 8.0),
            Rule("native", "Marlin kernels of a vLLM later than 0.15, in FP16", 7.5, 8.0),
            Rule(
                "no",
                "vLLM has no kernel for compressed-tensors' weights before 7.5; 4 and 8 bits in "
                "GPTQ's format (--format gptq) run with Exllama's kernels",
                7.0,
                7.5,
            ),
        ),
        "amd": (Rule("emulated", GENERIC),),
        "intel": (Rule("no", "vLLM's weight-only kernels for Intel GPUs take 4 bits only"),),
        "cpu": (Rule("no", "vLLM's weight-only kernels for CPUs take 4 bits only"),),
    }
    if bits == 4:
        own = Rule("native", "W4A16 kernels made for RDNA", chips=RDNA[0], who=RDNA[1])
        rules["amd"] = (own, rules["amd"][0]._replace(who=OTHER_AMD))
        rules["intel"] = (Rule("native", "GPTQ and AWQ are in vLLM's table for Intel GPUs"),)
        rules["cpu"] = (Rule("native", "GPTQ and AWQ are in vLLM's table for x86 CPUs"),)
    return rules


def _fp8_amd(emulated: bool = False) -> tuple[Rule, ...]:
    fnuz = Rule(
        "native", "FP8 matrix instructions, in FNUZ, to which vLLM converts", chips=("gfx94",),
        who=INSTINCT_FP8[1],
    )  # fmt: skip
    ocp = Rule(
        "native", "FP8 matrix instructions, in OCP's E4M3", chips=("gfx95",), who=INSTINCT_FP8[1]
    )
    rdna = Rule(
        "native", "FP8 matrix instructions, in OCP's E4M3", chips=RDNA_FP8[0], who=RDNA_FP8[1]
    )
    rest = Rule("no", "no FP8 in the chip, and vLLM has no weight-only kernel for FP8 on AMD")
    if emulated:
        rest = Rule("emulated", "FP8 converts in software before MI300", who=OTHER_AMD)
    return fnuz, ocp, rdna, rest


FP4_CORES = "FP4 tensor cores, by FlashInfer or CUTLASS, from 10.0 on"
MARLIN = "Marlin, weights only: FP4 tensor cores start at 10.0"
CDNA4 = (("gfx95",), "AMD from MI350")
MX_CORES = "microscaling matrix instructions of CDNA 4"
NVFP4: dict[str, tuple[Rule, ...]] = {
    "nvidia": (Rule("native", FP4_CORES, 10.0), Rule("emulated", MARLIN, 7.5, 10.0)),
    "amd": (Rule("emulated", "vLLM dequantises it for every product on AMD"),),
}
HUMMING: dict[str, tuple[Rule, ...]] = {
    "nvidia": (
        Rule("native", "Humming kernels, which compute in 16 bits (humming-kernels, 7.5 on)", 7.5),
    )
}


def _mx(bits: int) -> dict[str, tuple[Rule, ...]]:
    weights_only = f"Marlin, weights only: MXFP{bits} tensor cores start at 10.0"
    return {
        "nvidia": (
            Rule("native", f"MXFP{bits} tensor cores, by FlashInfer, from 10.0 on", 10.0),
            Rule("emulated", weights_only, 8.0, 10.0),
        ),
        "amd": (
            Rule("native", MX_CORES, chips=CDNA4[0], who=CDNA4[1]),
            Rule("emulated", "vLLM dequantises it for every product", who=OTHER_AMD),
        ),
        "intel": (Rule("emulated", UNNAMED),),
    }


# vLLM builds CompressedTensorsW4A4Mxfp4 for MXFP4 weights, whether or not inputs are quantised
# (compressed_tensors.py: _get_scheme_from_parts), from 8.0 on. Of its kernels in
# kernels/linear/mxfp4, Marlin's and Humming's leave inputs in 16 bits; FlashInfer's, AITER's and
# Intel's round them as well.
ROUNDED_TOO = "vLLM rounds activations to 4 bits, too"
MXFP4_A16: dict[str, tuple[Rule, ...]] = {
    "nvidia": (
        Rule("native", f"MXFP4 tensor cores, by FlashInfer, from 10.0 on: {ROUNDED_TOO}", 10.0),
        Rule("native", "Marlin kernels, which compute in 16 bits, from 8.0 on", 8.0, 10.0),
    ),
    "amd": (
        Rule("native", f"{MX_CORES}: {ROUNDED_TOO}", chips=CDNA4[0], who=CDNA4[1]),
        Rule("emulated", "vLLM dequantises it for every product", who=OTHER_AMD),
    ),
    "intel": (Rule("emulated", f"{UNNAMED}; {ROUNDED_TOO}"),),
}
GGUF_IN_VLLM = Rule(
    "emulated", "experimental in vLLM, through its GGUF plug-in; llama.cpp is made for it"
)
VLLM: dict[str, dict[str, tuple[Rule, ...]]] = {
    "bf16": {
        "nvidia": (
            Rule("native", "BF16 tensor cores, from 8.0 on", 8.0),
            Rule("emulated", "no BF16 before 8.0: vLLM computes in FP16 (--dtype half)", 7.0, 8.0),
        ),
        "amd": (Rule("native", "BF16 matrix instructions"),),
        "intel": (Rule("native", "BF16 on XMX engines"),),
        "gaudi": (Rule("native", "through the vLLM-Gaudi plug-in"),),
        "cpu": (Rule("native", "in vLLM's table for x86 CPUs"),),
    },
    "w4a16": _weight_only(4),
    "w8a16": _weight_only(8),
    "int8-w8a8": {
        "nvidia": (
            Rule("no", "vLLM has no INT8 kernels from 10.0 on (Blackwell); FP8 serves there", 10.0),
            Rule("native", "INT8 tensor cores, from 7.5 to 9.0", 7.5, 10.0),
        ),
        "amd": (Rule("emulated", GENERIC),),
        "intel": (Rule("emulated", UNNAMED),),
        "cpu": (Rule("native", "in vLLM's table for x86 CPUs"),),
    },
    "fp8-w8a8": {
        "nvidia": (
            Rule("native", "FP8 tensor cores, from 8.9 on", 8.9),
            Rule(
                "emulated",
                "no FP8 tensor cores before 8.9: Humming or Marlin, weights only",
                7.5,
                8.9,
            ),
        ),
        "amd": _fp8_amd(),
        "intel": (Rule("emulated", UNNAMED),),
        "gaudi": (Rule("native", "through the vLLM-Gaudi plug-in and Intel Neural Compressor"),),
        "cpu": (Rule("emulated", FP8_ON_CPU, who="CPUs"),),
    },
    "fp8-block": {
        "nvidia": (
            Rule("native", "FP8 tensor cores, by DeepGEMM or CUTLASS, from 9.0 on", 9.0),
            Rule(
                "emulated",
                "Humming or Marlin, weights only: FP8 tensor cores take blocks from 9.0 on",
                7.5,
                9.0,
            ),
        ),
        "amd": _fp8_amd(),
        "intel": (Rule("emulated", UNNAMED),),
        "cpu": (Rule("no", "vLLM's kernel for FP8 blocks on CPUs needs AMX"),),
    },
    "kv-fp8": {
        "nvidia": (
            Rule("native", "FP8 converts in hardware, from 8.9 on", 8.9),
            Rule(
                "emulated", "by FlashInfer; other attention kernels refuse FP8 before 8.9", 8, 8.9
            ),
            Rule("no", "attention kernels with an FP8 cache start at 8.0", 7.0, 8.0),
        ),
        "amd": _fp8_amd(emulated=True),
        "cpu": (Rule("no", "vLLM's attention on CPUs needs AVX-512 or AMX for an FP8 cache"),),
    },
    "nvfp4": NVFP4,
    "nvfp4-fp8": NVFP4,
    "nvfp4-a16": {
        "nvidia": (Rule("native", "Marlin kernels, which compute in 16 bits, from 7.5 on", 7.5),)
    },
    "mxfp4": _mx(4),
    "mxfp4-a16": MXFP4_A16,
    "mxfp8": _mx(8),
    "w4afp8": {
        "nvidia": (
            Rule("no", "vLLM's kernel runs on 9.0 (Hopper) only; use nvfp4 on this GPU", 10.0),
            Rule("native", "CUTLASS kernels of Hopper, 4-bit weights by FP8", 9.0, 10.0),
            Rule("no", "vLLM's kernel runs on 9.0 (Hopper) only; use w4a16 on this GPU", 7.0, 9.0),
        ),
    },
    **dict.fromkeys(("w2a16", "w3a16", "w5a16", "w6a16", "w7a16"), HUMMING),
    "gguf": {"nvidia": (GGUF_IN_VLLM._replace(since=7.0),), "amd": (GGUF_IN_VLLM,)},
}
PLATFORMS = {
    "nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel GPUs", "gaudi": "Gaudi", "cpu": "x86 CPUs",
}  # fmt: skip


ELSEWHERE = {"bitsandbytes": "GPUs that bitsandbytes runs on; vLLM has it before 0.28"}
"""The engine for other tools' methods that have no row above."""
RAREST = ("w2a16", "w3a16", "w5a16", "w6a16", "w7a16", "w8a16", "w4a16")


def format_of(recipe: AnyRecipe | None) -> str:
    """The format that a recipe produces, one of FORMATS; with None, the unquantised model."""
    if recipe is None:
        return "bf16"
    if isinstance(recipe, GGUFRecipe):
        return "gguf"
    found = [_key(part) for part in recipe.parts]
    if found[0].startswith("nvfp4") and any(key.startswith("fp8") for key in found):
        return "nvfp4-fp8"
    # With several widths, the one that the fewest devices have kernels for.
    return min(found, key=lambda key: RAREST.index(key) if key in RAREST else -1)


def _key(recipe: Recipe) -> str:
    weights = recipe.weights
    return runs_as(numbers.of(weights).tag, weights, recipe.input_activations)


def runs(gpu: GPU, format: str, engine: str = "vllm") -> Support:
    """How a device runs a format in an engine, and why."""
    if format not in FORMATS:
        raise UnknownName("format", format, FORMATS)
    if engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    if engine == "llama.cpp":
        return _llama_cpp(gpu, format)
    if gpu.vendor == "apple":
        return Support("no", "vLLM does not use Apple's GPUs; use a GGUF file and llama.cpp")
    if gpu.name.startswith(BOARDS):
        return Support(
            "no", "vLLM does not target boards such as this one; use a GGUF file and llama.cpp"
        )
    if gpu.capability is not None and gpu.capability < min(GENERATIONS):
        return Support("no", "vLLM needs compute capability 7.0 or later")
    platform = "gaudi" if gpu.generation == "Gaudi" else gpu.vendor
    unnamed = gpu.vendor in ("nvidia", "amd") and not gpu.compute_capability
    if platform not in PLATFORMS or unnamed:
        return Support("no", "its compute capability is unknown, and so is what vLLM runs on it")
    found = Support("no", _absent(platform, gpu))
    for rule in VLLM[format].get(platform, ()):
        if _holds(rule, gpu):
            found = Support(rule.how, rule.reason)
            break
    if gpu.vendor == "nvidia" and gpu.capability is not None and format in kernels.USUAL:
        return _by_kernels(format, gpu.capability, found)
    return found


def _by_kernels(format: str, capability: float, by_table: Support) -> Support:
    """The result of vLLM's own kernel choice; the wording is the table's where they agree."""
    chosen = kernels.usual(format, capability)
    how: How = "no" if chosen is None else "emulated" if chosen[1] else "native"
    if how == by_table.how:
        return by_table
    if chosen is None:
        return Support("no", f"vLLM has no kernel for it on compute capability {capability}")
    return Support(how, ": ".join(filter(None, chosen)))


def _holds(rule: Rule, gpu: GPU) -> bool:
    if gpu.vendor == "nvidia":
        return rule.since <= (gpu.capability or 0.0) < rule.before
    return not rule.chips or (gpu.compute_capability or "").startswith(rule.chips)


def _absent(platform: str, gpu: GPU) -> str:
    if platform == "nvidia":
        return f"vLLM has no kernel for it on compute capability {gpu.compute_capability}"
    if platform == "gaudi":
        return "not known of the vLLM-Gaudi plug-in"
    return f"{ABSENT} for {'CPUs' if platform == 'cpu' else PLATFORMS[platform]}"


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


def where(format: str) -> str:
    """Which devices run a format, in words: natively first, then those that only save memory."""
    if format == "gguf":
        return "any GPU or CPU except Gaudi, in llama.cpp"
    native, emulated = (_devices(format, how) for how in ("native", "emulated"))
    return f"{native}; emulated on {emulated}" if emulated else native


def _devices(format: str, how: How) -> str:
    named: list[str] = []
    for platform, rules in VLLM[format].items():
        mine = [rule for rule in rules if rule.how == how]
        if platform == "nvidia":
            named += _generations(mine)
        else:
            named += [rule.who or PLATFORMS[platform] for rule in mine]
    return ", ".join(dict.fromkeys(named))


def _generations(rules: Iterable[Rule]) -> list[str]:
    """NVIDIA's generations that rules cover, adjacent ranges merged."""
    spans: list[list[float]] = []
    for rule in sorted(rules, key=lambda rule: rule.since):
        if spans and spans[-1][1] == rule.since:
            spans[-1][1] = rule.before
        else:
            spans.append([rule.since, rule.before])
    return [_span(low, high) for low, high in spans]


def _span(low: float, high: float) -> str:
    first = f"{GENERATIONS[low]} ({low:.1f})"
    if high == LATEST:
        return f"NVIDIA from {first}"
    last = max(start for start in GENERATIONS if start < high)
    if last == low:
        return f"NVIDIA {GENERATIONS[low]}"
    return f"NVIDIA {first} to {GENERATIONS[last]}"
