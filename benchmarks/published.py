"""Our memory and speed against what others published: logs of vLLM, llama-bench, tables of vendors.

python benchmarks/published.py [--out FILE]

Memory should be within 5%, speed at batch 1 within 25%. Figures that were looked at when constants
of `quantkit.advise.efficiency` were chosen are marked; only the others are a test of them.
"""

import argparse
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.advise import efficiency, formats, gpus, memory, parallel, shape, speed, work
from quantkit.advise.shape import ModelShape
from quantkit.recipe import load
from quantkit.storage import write_json

GIB = 1 << 30
DAI = "https://github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference"
QWEN = "https://qwen.readthedocs.io/en/v2.0/benchmark/speed_benchmark.html"
VLLM = "https://github.com/vllm-project/vllm"
MEMORY_WITHIN, SPEED_WITHIN = 0.05, 0.25
KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
)  # fmt: skip
# From the config.json of each.
CONFIGS = {
    "Llama-3-8B": ("llama", 4096, 14336, 32, 32, 8, 128256),
    "Llama-3-70B": ("llama", 8192, 28672, 80, 64, 8, 128256),
    "Qwen2-7B": ("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "Qwen2.5-14B": ("qwen2", 5120, 13824, 48, 40, 8, 152064),
    "Qwen2.5-32B": ("qwen2", 5120, 27648, 64, 40, 8, 152064),
    "Qwen2-72B": ("qwen2", 8192, 29568, 80, 64, 8, 152064),
}
NAMES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}


@dataclass(frozen=True)
class Log:
    """What vLLM logged while it started: all in GiB, on each GPU."""

    model: str
    format: str
    gpu: str
    count: int
    total: float
    utilisation: float
    weights: float
    cache: float | None
    source: str
    note: str = ""


@dataclass(frozen=True)
class Rate:
    """Tokens a second of one user."""

    model: str
    format: str
    gpu: str
    count: int
    depth: int
    """Tokens in the cache, on average."""
    published: float
    source: str
    engine: str
    seen: bool = False
    """Looked at when constants were chosen."""


AS_IS = formats.AS_IT_IS
LOGS = (
    Log("Llama-3-8B", AS_IS, "H100 SXM", 1, 79.22, 0.9, 14.96, 53.29, f"{VLLM}/pull/10511"),
    Log("Llama-3-8B", AS_IS, "RTX 3090", 1, 23.58, 0.9, 14.99, 3.81, f"{VLLM}/issues/10517",
        "20,000 tokens at once"),
    Log("Llama-3-8B", AS_IS, "RTX 3090", 1, 23.58, 0.9, 14.99, 2.89, f"{VLLM}/issues/10517",
        "29,000 tokens at once, whose activations take more"),
    Log("Qwen2.5-32B", AS_IS, "L40S", 2, 44.42, 0.9, 30.71, 7.71, f"{VLLM}/issues/15815"),
    Log("Qwen2.5-14B", AS_IS, "RTX 4090", 2, 23.55, 0.98, 13.95, 8.69, f"{VLLM}/issues/13061",
        "before vLLM kept room for CUDA graphs"),
    Log("Qwen2-7B", "gptq-w4a16", "RTX 4060", 1, 8.0, 0.7, 5.20, None, f"{VLLM}/issues/13882",
        "weights alone: nothing was left for a cache"),
)  # fmt: skip
MUSGRAVE = "https://johnmusgrave.com/p/vllm-throughput-latency-sweep-on"
RATES = (
    *(
        Rate("Llama-3-8B", form, gpu, 1, 256, published, DAI, "llama.cpp, May 2024", seen)
        for gpu, form, published, seen in (
            ("RTX 4090", "gguf-q4_k_m", 130.58, True), ("RTX 4090", "gguf-bf16", 54.84, True),
            ("RTX 3090", "gguf-q4_k_m", 115.42, True), ("RTX 3090", "gguf-bf16", 47.40, True),
            ("M1 Max", "gguf-q4_k_m", 35.73, True), ("M1 Max", "gguf-bf16", 18.75, True),
            ("M2 Ultra", "gguf-q4_k_m", 78.81, True), ("M2 Ultra", "gguf-bf16", 36.90, False),
            ("M3 Max", "gguf-q4_k_m", 48.97, False), ("M3 Max", "gguf-bf16", 22.04, False),
            ("RTX 3070", "gguf-q4_k_m", 72.79, False), ("RTX 3080", "gguf-q4_k_m", 109.57, False),
            ("RTX 3080 Ti", "gguf-q4_k_m", 110.60, False),
            ("RTX 4070 Ti", "gguf-q4_k_m", 83.50, False),
            ("RTX 4080", "gguf-q4_k_m", 108.15, False), ("RTX 4080", "gguf-bf16", 40.58, False),
        )
    ),
    *(
        Rate("Llama-3-70B", form, gpu, count, 256, published, DAI, "llama.cpp, May 2024")
        for gpu, count, form, published in (
            ("RTX 4090", 2, "gguf-q4_k_m", 19.22), ("RTX 3090", 2, "gguf-q4_k_m", 16.57),
            ("RTX 4090", 8, "gguf-bf16", 6.47), ("RTX 3090", 6, "gguf-bf16", 5.85),
            ("M1 Max", 1, "gguf-q4_k_m", 4.34), ("M2 Ultra", 1, "gguf-q4_k_m", 12.48),
            ("M2 Ultra", 1, "gguf-bf16", 4.76), ("M3 Max", 1, "gguf-q4_k_m", 7.65),
        )
    ),
    Rate("Llama-3-8B", AS_IS, "A100 SXM 40GB", 1, 1088, 75.0, MUSGRAVE, "vLLM 0.23"),
    *(
        Rate(model, form, "A100 SXM 80GB", count, 1024, published, QWEN, "vLLM 0.4.2")
        for model, form, count, published in (
            ("Qwen2-7B", AS_IS, 1, 80.45), ("Qwen2-7B", "gptq-w8a16", 1, 114.32),
            ("Qwen2-7B", "gptq-w4a16", 1, 143.40), ("Qwen2-72B", AS_IS, 2, 17.68),
            ("Qwen2-72B", AS_IS, 4, 30.01), ("Qwen2-72B", "gptq-w8a16", 2, 27.56),
            ("Qwen2-72B", "gptq-w4a16", 1, 29.60), ("Qwen2-72B", "gptq-w4a16", 2, 42.82),
        )
    ),
)  # fmt: skip


def shape_of(model: str) -> ModelShape:
    kind, *sizes = CONFIGS[model]
    config = {
        "model_type": kind,
        "architectures": [NAMES[str(kind)]],
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "max_position_embeddings": 131072,
        **dict(zip(KEYS, sizes, strict=True)),
    }
    return shape.from_config(config, model)


def compare_memory(log: Log) -> dict[str, Any]:
    """Weights, and all that is not left for the cache."""
    gpu = gpus.GPU(log.gpu, "nvidia", log.total, 1.0, memory_bytes=int(log.total * GIB))
    recipe = None if log.format == AS_IS else load(log.format)
    fit = memory.fits(shape_of(log.model), recipe, gpu, log.count, utilisation=log.utilisation)
    result = asdict(log) | {
        "our_weights": fit.weight_bytes / GIB,
        "weights_off": fit.weight_bytes / GIB / log.weights - 1,
    }
    if log.cache is not None:
        used = log.total * log.utilisation - log.cache
        ours = (fit.weight_bytes + fit.overhead_bytes) / GIB
        result |= {"used": used, "our_used": ours, "used_off": ours / used - 1}
    return result


def compare_rate(rate: Rate) -> dict[str, Any]:
    """Our slow end, typical value and fast end."""
    of_model = shape_of(rate.model)
    form = formats.of(None if rate.format == AS_IS else load(rate.format))
    split = parallel.usual(form.recipe, rate.count)
    case = speed.Case(of_model, work.of(of_model, form), form, gpus.find(rate.gpu), split)
    ends = efficiency.of(form.engine, case.gpu.vendor)
    slow, typical, fast = (1 / speed.step_seconds(case, 1, rate.depth, end) for end in ends)
    return asdict(rate) | {
        "slow": slow,
        "typical": typical,
        "fast": fast,
        "off": typical / rate.published - 1,
        "in_range": slow <= rate.published <= fast,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logs = [compare_memory(log) for log in LOGS]
    rates = [compare_rate(rate) for rate in RATES]
    for log in logs:
        used = f"{log['used_off']:+7.1%} of {log['used']:.2f} GiB" if "used" in log else ""
        print(f"{log['model']:12} {log['format']:14} {log['count']} x {log['gpu']:14} "
              f"weights {log['weights_off']:+6.1%}  in use {used}")  # fmt: skip
    for rate in rates:
        print(f"{rate['model']:12} {rate['format']:14} {rate['count']} x {rate['gpu']:14} "
              f"{rate['published']:7.1f} published, {rate['typical']:7.1f} ours "
              f"({rate['slow']:.1f} to {rate['fast']:.1f}) {rate['off']:+6.1%}"
              f"{' seen' if rate['seen'] else ''}")  # fmt: skip
    used = [log["used_off"] for log in logs if "used_off" in log]
    fresh = [rate for rate in rates if not rate["seen"]]
    summary = {
        "weights_within": max(abs(log["weights_off"]) for log in logs),
        "memory_pairs": len(used),
        "memory_within_5_percent": sum(abs(off) <= MEMORY_WITHIN for off in used),
        "speeds": len(rates),
        "speeds_within_25_percent": sum(abs(r["off"]) <= SPEED_WITHIN for r in rates),
        "fresh_speeds": len(fresh),
        "fresh_speeds_within_25_percent": sum(abs(r["off"]) <= SPEED_WITHIN for r in fresh),
        "speeds_in_range": sum(r["in_range"] for r in rates),
        "median_speed_off": statistics.median(abs(r["off"]) for r in rates),
    }
    for name, value in summary.items():
        print(f"{name:32} {value:.3f}" if isinstance(value, float) else f"{name:32} {value}")
    if args.out:
        write_json(args.out, {"summary": summary, "memory": logs, "speed": rates})


if __name__ == "__main__":
    main()
