"""Our memory and speed against what others published: logs of vLLM, llama-bench, tables of vendors.

    python benchmarks/published.py [--out FILE]

The figures and their sources are in published.yaml. Memory should be within 5%, speed at batch 1
within 25%.
"""

import argparse
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from quantkit.advise import efficiency, formats, memory, parallel, shape, speed, work
from quantkit.advise.shape import ModelShape
from quantkit.hardware import gpus
from quantkit.recipe import load

GIB = 1 << 30
DATA = Path(__file__).with_name("published.yaml")
MEMORY_WITHIN, SPEED_WITHIN = 0.05, 0.25
GRAPHS_COUNT_SINCE = (0, 21)
"""vLLM before this left CUDA graphs to what it had not been given."""
TODAY = (0, 15)
"""From here on logs are of engines that people still install."""
NEW_ENGINE = (0, 10)
"""From here on vLLM's second engine is the only one; the first took far longer between steps."""
KEYS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
)  # fmt: skip
NAMES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}  # fmt: skip
NOT_FORMATS = {"model", "gpu", "count", "seen"}


def shape_of(model: str, models: dict[str, list[Any]]) -> ModelShape:
    kind, *sizes = models[model]
    config = {
        "model_type": kind,
        "architectures": [NAMES[kind]],
        "dtype": "bfloat16",
        "tie_word_embeddings": "tied" in sizes,
        "max_position_embeddings": 131072,
        **dict(zip(KEYS, sizes, strict=False)),
    }
    if kind in ("mistral", "qwen3"):
        config["head_dim"] = 128
    return shape.from_config(config, model)


def version(text: str) -> tuple[int, int]:
    major, minor = str(text).split(".")[:2]
    return int(major), int(minor)


def compare_memory(log: dict[str, Any], models: dict[str, list[Any]]) -> dict[str, Any]:
    """Weights, and all that is not left for the cache; the engine as it was started."""
    gpu = replace(gpus.find(log["gpu"]), memory_bytes=int(log["saw"] * GIB), driver_bytes=0)
    recipe = load(log["format"]) if "format" in log else None
    is_large = gpu.usable_bytes >= memory.LARGE_BYTES
    engine = memory.VLLM if is_large else memory.VLLM_SMALL
    engine = replace(
        engine,
        batch_tokens=log.get("batch", engine.batch_tokens),
        n_logits=log.get("sequences", engine.n_logits),
        graph_bytes=engine.graph_bytes if version(log["vllm"]) >= GRAPHS_COUNT_SINCE else 0,
    )
    fit = memory.fits(
        shape_of(log["model"], models),
        recipe,
        gpu,
        log.get("count", 1),
        serving=memory.Serving(log["share"], engine=engine),
    )
    result = {**log, "our_weights": fit.weight_bytes / GIB}
    if "weights" in log:
        result["weights_off"] = fit.weight_bytes / GIB / log["weights"] - 1
    used = log.get("used") or ("cache" in log and log["saw"] * log["share"] - log["cache"])
    if used:
        ours = (fit.weight_bytes + fit.overhead_bytes) / GIB
        result |= {"used": used, "our_used": ours, "used_off": ours / used - 1}
    return result


def compare_rate(rate: dict[str, Any], models: dict[str, list[Any]]) -> dict[str, Any]:
    """Our slow end, typical value and fast end."""
    of_model = shape_of(rate["model"], models)
    form = formats.of(None if rate["format"] == formats.UNQUANTISED else load(rate["format"]))
    split = parallel.usual(form.recipe, rate.get("count", 1))
    case = speed.Case(of_model, work.of(of_model, form), form, gpus.find(rate["gpu"]), split)
    ends = efficiency.of(form.engine, case.gpu.vendor)
    slow, typical, fast = (1 / speed.step_seconds(case, 1, rate["depth"], end) for end in ends)
    return rate | {
        "slow": slow,
        "typical": typical,
        "fast": fast,
        "off": typical / rate["published"] - 1,
        "in_range": slow <= rate["published"] <= fast,
    }


def rates_of(page: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry for each format of each row of a page."""
    shared = {key: page[key] for key in ("source", "engine", "depth")}
    found = []
    for row in page["rows"]:
        about = {key: row[key] for key in row if key in NOT_FORMATS}
        figures = {key: row[key] for key in row if key not in NOT_FORMATS}
        found += [about | shared | {"format": f, "published": v} for f, v in figures.items()]
    return found


def compared(data: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Every log and every rate of the file, with ours beside it."""
    logs = [
        compare_memory({**row, **{k: page[k] for k in page if k != "rows"}}, data["models"])
        for page in data["memory"]
        for row in page["rows"]
    ]
    rates = [compare_rate(r, data["models"]) for page in data["speed"] for r in rates_of(page)]
    return logs, rates


def summed_up(logs: list[dict[str, Any]], rates: list[dict[str, Any]]) -> dict[str, Any]:
    used = [log for log in logs if "used_off" in log]
    today = [log for log in used if version(log["vllm"]) >= TODAY]
    fresh = [rate for rate in rates if not rate.get("seen")]
    vllm = [rate for rate in rates if rate["engine"].startswith("vLLM")]
    recent = [rate for rate in vllm if version(rate["engine"].split()[1]) >= NEW_ENGINE]

    def near(logs: list[dict[str, Any]]) -> int:
        return sum(abs(log["used_off"]) <= MEMORY_WITHIN for log in logs)

    def close(rates: list[dict[str, Any]]) -> int:
        return sum(abs(rate["off"]) <= SPEED_WITHIN for rate in rates)

    return {
        "weights": sum("weights_off" in log for log in logs),
        "weights_within": max(abs(log.get("weights_off", 0)) for log in logs),
        "memory_logs": len(used),
        "memory_within_5_percent": near(used),
        "memory_pairs": len({(log["model"], log["gpu"]) for log in used}),
        "memory_logs_since_0_15": len(today),
        "memory_since_0_15_within_5_percent": near(today),
        "memory_pairs_since_0_15": len({(log["model"], log["gpu"]) for log in today}),
        "speeds": len(rates),
        "speed_pairs": len({(rate["model"], rate["gpu"]) for rate in rates}),
        "speeds_within_25_percent": close(rates),
        "fresh_speeds": len(fresh),
        "fresh_speeds_within_25_percent": close(fresh),
        "speeds_of_vllm": len(vllm),
        "speeds_of_vllm_within_25_percent": close(vllm),
        "speeds_of_vllm_since_0_10": len(recent),
        "speeds_of_vllm_since_0_10_within_25_percent": close(recent),
        "speed_pairs_of_vllm_since_0_10": len({(rate["model"], rate["gpu"]) for rate in recent}),
        "speeds_in_range": sum(rate["in_range"] for rate in rates),
        "median_speed_off": statistics.median(abs(rate["off"]) for rate in rates),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    logs, rates = compared(yaml.safe_load(DATA.read_text(encoding="utf-8")))
    for log in logs:
        weights = f"{log['weights_off']:+6.1%}" if "weights_off" in log else ""
        used = f"{log['used_off']:+7.1%} of {log['used']:.2f} GiB" if "used" in log else ""
        print(f"{log['model']:12} {log.get('format', 'unquantised'):14} {log.get('count', 1)} x "
              f"{log['gpu']:15} {log['vllm']:7} weights {weights:6}  in use {used}")  # fmt: skip
    for rate in rates:
        print(f"{rate['model']:12} {rate['format']:14} {rate.get('count', 1)} x {rate['gpu']:15} "
              f"{rate['published']:7.1f} published, {rate['typical']:7.1f} ours "
              f"({rate['slow']:.1f} to {rate['fast']:.1f}) {rate['off']:+6.1%}"
              f"{' seen' if rate.get('seen') else ''}")  # fmt: skip
    summary = summed_up(logs, rates)
    for name, value in summary.items():
        print(f"{name:45} {value:.3f}" if isinstance(value, float) else f"{name:45} {value}")
    if args.out:
        from recording import write  # here, since a test loads this file from elsewhere

        write(args.out, {"summary": summary, "memory": logs, "speed": rates})


if __name__ == "__main__":
    main()
