"""Thirty questions that teams ask, and the table of answers in docs/choosing.md."""

import json
from pathlib import Path

from quantkit.advise import words
from quantkit.advise.offload import Host
from quantkit.advise.question import Limits
from quantkit.advise.recommendation import Recommendation
from quantkit.hardware import gpus
from quantkit.serving import device
from quantkit.serving.questions import Answers, Drafting, Query, answer

MIXTURE = {"dtype": "bfloat16", "head_dim": 128, "num_experts_per_tok": 8, "num_experts": 128}
# From the config.json of each on the hub.
CONFIGS = {
    "Qwen3-30B-A3B": MIXTURE | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "Qwen3-235B-A22B": MIXTURE | {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4,
        "vocab_size": 151936, "max_position_embeddings": 40960,
    },
    "Mixtral-8x7B": {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "dtype": "bfloat16",
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 32000, "max_position_embeddings": 32768,
    },
}  # fmt: skip
GIB = 1 << 30
K = 1 << 10


def on(gpu: str, model: str, **more: object) -> Query:
    """A question on one kind of GPU."""
    found = device.cpu(64 * GIB) if gpu == "cpu" else gpus.find(gpu)
    return Query((model,), (found,), in_depth=False, **more)  # type: ignore[arg-type]


QUESTIONS: list[tuple[str, Query]] = [
    ("Chat with an 8B on a T4", on("T4", "8B")),
    ("Chat with an 8B on an RTX 4060, 8 GB", on("RTX 4060", "8B")),
    ("Chat with an 8B on an RTX 4090", on("RTX 4090", "8B")),
    ("An 8B for 32 users at 4k on an L4", on("L4", "8B", users=32, context=4 * K)),
    ("An 8B for 100 users at 4k on an L40S", on("L40S", "8B", users=100, context=4 * K)),
    ("Batches through an 8B on an A100", on("A100 SXM 80GB", "8B", objective="throughput")),
    ("Batches through an 8B on an H100", on("H100 SXM", "8B", objective="throughput")),
    ("An 8B with 128k of context on an A10G", on("A10G", "8B", context=128 * K)),
    ("An 8B for 8 users with 128k each on an H200", on("H200", "8B", users=8, context=128 * K)),
    ("20 users whose prompts share 6,000 tokens, 8B on an L4",
     on("L4", "8B", users=20, context=8 * K, shared_prefix=6000)),
    ("First token in 200 ms, 30 ms per token, 8B for 16 users on an L40S",
     on("L40S", "8B", users=16, context=4 * K, limits=Limits(0.2, 0.03))),
    ("Best quality of a 14B in 16 GB", on("RTX 4060 Ti 16GB", "14B", objective="quality")),
    ("A 24B on a 24 GB card", on("RTX 3090", "24B")),
    ("A 32B on one RTX 5090", on("RTX 5090", "32B")),
    ("A 70B on one RTX 4090", on("RTX 4090", "70B")),
    ("A 70B on one RTX 4090 with 64 GB of host memory",
     on("RTX 4090", "70B", host=Host(89.6, 64 * GIB))),
    ("A 70B on two RTX 3090", on("RTX 3090", "70B", count=2)),
    ("A 70B for 32 users on four L40S", on("L40S", "70B", count=4, users=32)),
    ("A 70B for 64 users on two H100", on("H100 SXM", "70B", count=2, users=64, context=4 * K)),
    ("A 70B with an 8B draft, 70% accepted, on two H100",
     on("H100 SXM", "70B", count=2, drafting=Drafting("8B", "0.7"))),
    ("Batches through a 70B on an MI300X", on("MI300X", "70B", objective="throughput")),
    ("A 70B on an M3 Ultra", on("M3 Ultra", "70B")),
    ("A 405B on eight H100", on("H100 SXM", "405B", count=8, users=16)),
    ("A 405B for 64 users on eight B200", on("B200", "405B", count=8, users=64)),
    ("Qwen3-30B-A3B on an RTX 5090", on("RTX 5090", "Qwen3-30B-A3B")),
    ("Mixtral-8x7B for 32 users on an A100", on("A100 SXM 80GB", "Mixtral-8x7B", users=32)),
    ("Qwen3-235B-A22B for 32 users on eight H100",
     on("H100 SXM", "Qwen3-235B-A22B", count=8, users=32)),
    ("A 3B on a Jetson Orin Nano", on("Jetson Orin Nano 8GB", "3B", context=4 * K)),
    ("An 8B on a desktop's CPU", on("cpu", "8B", context=4 * K)),
    ("A 1B on a Raspberry Pi 5", on("Raspberry Pi 5", "1B", context=2 * K)),
]  # fmt: skip


def arguments(asked: Query, models: str = "") -> list[str]:
    """A question as it is typed; `models` is the folder of those that are more than a size."""
    (model,), (gpu,) = asked.models, asked.gpus
    words = ["recommend", f"{models}/{model}" if models and model in CONFIGS else model]
    words += ["--gpu", "cpu", "--memory", _gib(gpu.usable_bytes)] if gpu.name == "a CPU" else []
    words += [] if gpu.name == "a CPU" else ["--gpu", gpu.name]
    host, drafting = asked.host, asked.drafting
    options = {
        "count": asked.count,
        "context": asked.context,
        "users": asked.users,
        "objective": asked.objective,
        "shared-prefix": asked.shared_prefix or None,
        "ttft": asked.limits.ttft,
        "tpot": asked.limits.tpot,
        "draft": drafting and drafting.text,
        "acceptance": drafting and drafting.acceptance,
        "host-memory": host and _gib(host.memory_bytes or 0),
        "host-bandwidth": host and f"{host.bandwidth_gb_s:g}GB/s",
    }
    for name, value in options.items():
        words += [] if value is None else [f"--{name}", str(value)]
    return words


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:g}GiB"


def prepare(folder: Path) -> None:
    """Configs of the models that are more than a size."""
    for name, config in CONFIGS.items():
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config))


def table(folder: Path) -> str:
    """All questions with their answers, as Markdown."""
    prepare(folder)
    lines = [
        "| | question | answer | first token | each user | all users | room | why, or what helps |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, (text, asked) in enumerate(QUESTIONS, start=1):
        (model,) = asked.models
        place = str(folder / model) if model in CONFIGS else model
        lines.append(f"| {number} | {text} | {' | '.join(_cells(_ask(asked, place)))} |")
    return "\n".join(lines)


def _ask(asked: Query, place: str) -> Answers:
    from dataclasses import replace

    found = answer(replace(asked, models=(place,)))
    if found.found[0].chosen is None:
        return answer(replace(asked, models=(place,), in_depth=True))
    return found


def _cells(answers: Answers) -> list[str]:
    (found,) = answers.found
    chosen = found.chosen
    if chosen is None:
        return ["nothing", "", "", "", "", "; ".join(r.says for r in found.remedies[:3])]
    speed = chosen.speed
    assert speed is not None
    first = words.seconds(speed.first_token.typical) if speed.first_token else ""
    return [
        chosen.format.name,
        first,
        f"{words.number(speed.each.typical)}/s",
        f"{words.number(speed.total.typical)}/s",
        f"{chosen.room:,}",
        _why(found, answers),
    ]


def _why(found: Recommendation, answers: Answers) -> str:
    chosen, question = found.chosen, found.question
    assert chosen is not None
    parts = []
    if chosen.count > 1 and chosen.format.engine == "vllm":
        parts.append(str(chosen.split))
    if chosen.size is not None and chosen.size.offload is not None:
        parts.append(chosen.size.offload.words)
    if chosen.speed is not None and chosen.speed.drafted:
        parts.append(f"{chosen.speed.gain:.2f} times as fast as without the draft")
    if chosen.load.cached:
        parts.append(f"{chosen.load.hit_rate:.0%} of prompt tokens cached")
    serving = [c for c in found.candidates if c.serves]
    parts.append(f"{words.BEST[question.objective]} of {len(serving)} formats that fit")
    return "; ".join(parts)
