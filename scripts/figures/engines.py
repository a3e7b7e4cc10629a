"""Checkpoints in real engines: do they load, agree, draft (benchmarks/vllm_*.py)."""

from collections.abc import Iterable
from typing import Any

from figures.regions import (
    count,
    gib,
    items,
    link,
    paragraph,
    percent,
    region,
    result,
    seconds,
    span,
    table,
)
from quantkit.engine.vllm_program import VERSION


def checkpoints(models: dict[str, Any]) -> dict[str, Any]:
    """All but the source."""
    return {name: found for name, found in models.items() if name != "source"}


def ratio(found: dict[str, Any]) -> float:
    """Difference from float32 in the engine, over what rounding alone explains."""
    return found["read"]["mean"] / found["read"]["noise_mean"]


def proof_summary() -> tuple[str, str]:
    """How many checkpoints were asked, and what came of it."""
    run = result("vllm-proof-h200")
    found = checkpoints(run["models"])
    agree = sum(one["ok"] for one in found.values())
    told = "all agree" if agree == len(found) else f"{count(agree)} agree"
    return count(len(found)), told


def engine(models: dict[str, Any]) -> str:
    """`vLLM 0.26`, from what the engine said of itself."""
    version = next(iter(models.values()))["version"]
    return f"vLLM {'.'.join(version.split('.')[:2])}"


@region
def vllm_versions() -> str:
    """The one statement of which versions were measured; other pages link to it."""
    names = "vllm-h200", "vllm-cpu"
    found = [result(name)["vllm"].split()[-1].split(".") for name in names]
    on_gpu, on_cpu = (".".join(version[:2]) for version in found)
    return paragraph(
        f"Measured with vLLM {on_gpu} on an H200 and with vLLM {on_cpu} on CPUs. Where a page "
        "names another version, it is what a format needs or what others published. Deployment "
        f"files name images of vLLM {VERSION}."
    )


@region
def proof() -> str:
    run = result("vllm-proof-h200")
    rows = [
        [
            name if name == "source" else f"`{name}`",
            "yes" if found["ok"] else "no",
            f"{found['read']['mean']:.4f}",
            f"{found['read']['noise_mean']:.4f}",
            f"{ratio(found):.2f}",
        ]
        for name, found in run["models"].items()
    ]
    head = ["", "agrees", "engine from float32:", "our own rounding from float32:", "ratio:"]
    return table(head, rows)


@region
def proof_summed_up() -> str:
    run = result("vllm-proof-h200")
    n_made, told = proof_summary()
    found = run["models"].values()
    return paragraph(
        f"{n_made.capitalize()} checkpoints of {run['model']} and the source itself, in "
        f"{engine(run['models'])} on an H200: {told} with our reference, at "
        f"{span(map(ratio, found), lambda x: f'{x:.2f} times')} the difference that rounding alone "
        "makes. Mean absolute differences of log-probabilities per token, in nats:"
    )


@region
def proof_again() -> str:
    """A later run of the same checkpoints, cut off before the source's own row."""
    run = result("vllm-proof-again-h200")
    found = run["models"]
    agree = sum(one["ok"] for one in found.values())
    return paragraph(
        f"A later run ({link('measured', 'vllm-proof-again-h200')}): {agree} of {len(found)} "
        f"agree, at {span(map(ratio, found.values()), lambda x: f'{x:.2f} times')} the difference "
        "that rounding makes; it ended before the source's own row."
    )


@region
def formats_served() -> str:
    """FP4, 8-bit MX, mixed ones and integers of few bits; NVFP4 with rounded inputs is emulated."""
    run, emulated = result("vllm-formats-h200"), result("vllm-formats-emulated-h200")
    found = run["models"] | {
        f"{name} (emulated)": one for name, one in checkpoints(emulated["models"]).items()
    }
    rows = [
        [
            name if name == "source" else f"`{name}`",
            "yes" if one["ok"] else "no",
            f"{one['read']['mean']:.4f}",
            f"{one['read']['noise_mean']:.4f}",
            "" if name == "source" else f"{one['attribution']['power']:.3f}",
        ]
        for name, one in found.items()
    ]
    head = ["", "agrees", "engine from float32:", "our own rounding:", "power:"]
    caught = sum(one["sources_caught"] for one in (run, emulated))
    made = checkpoints(found)
    text = paragraph(
        f"{count(len(made)).capitalize()} checkpoints of the demo model in {engine(found)} on an "
        f"H200 ({link('measured', 'vllm-formats-h200')}): "
        f"{sum(one['ok'] for one in made.values())} agree. When the unquantised source was served "
        f"in their place, the test noticed it {caught} times; `power` is the estimated probability "
        "of that."
    )
    return f"{text}\n\n{table(head, rows)}"


@region
def experts_speed() -> str:
    """Blocks of a large MoE model."""
    run = result("moe_speed-h200")
    told = [
        f"{one['n_blocks']} blocks at {seconds(one['seconds_a_block'])} each, "
        f"{gib(one['peak_device_bytes'])} of GPU and {gib(one['peak_host_bytes'])} of host memory"
        for one in run["by_size"]
    ]
    more = "Other measurements shared the GPU, more of them in the longer run."
    if "times_as_long" in run:
        more = (
            f"{run['times_the_blocks']:g} times the blocks take {run['times_as_long']:.2f} times "
            f"as long and {run['times_the_host_memory']:.2f} times the host memory."
        )
    if killed := run.get("killed_and_resumed"):
        same = "the same bytes" if killed["same_bytes"] else "OTHER BYTES"
        more += (
            f" A run of {killed['n_blocks']} blocks that was killed half way resumed with "
            f"{killed['tensors_taken_up']:,} finished tensors and ended in {same}."
        )
    return paragraph(
        f"GPTQ of blocks of Qwen3-30B-A3B's shape with {run['samples']} x {run['length']:,} tokens "
        f"({link('measured', 'moe_speed-h200')}): {'; '.join(told)}. {more}"
    )


@region
def serving_proof() -> str:
    """The shortest table that shows every kind of number."""
    run = result("vllm-proof-h200")
    kinds = {
        "source": "source, bfloat16",
        "int8-w8a8": "INT8 W8A8",
        "fp8-dynamic": "FP8 dynamic",
        "awq-gptq-w4a16": "4 bits, W4A16",
    }
    rows = [
        [
            what,
            f"{run['models'][name]['read']['mean']:.4f}",
            f"{run['models'][name]['read']['noise_mean']:.4f}",
            f"{ratio(run['models'][name]):.2f}",
        ]
        for name, what in kinds.items()
    ]
    text = paragraph(
        f"{engine(run['models'])} on an H200, {run['model']}, mean difference per token in nats "
        "([all checkpoints](measured.md#checkpoints-in-vllm)):"
    )
    head = ["", "engine against float32:", "our rounding against float32:", "ratio:"]
    return f"{text}\n\n{table(head, rows)}"


@region
def experts() -> str:
    run = result("vllm-experts-h200")
    rows = []
    for family, found in run["families"].items():
        made = checkpoints(found["models"])
        rows.append(
            [
                family.split(",")[0],
                ", ".join(f"`{name}`" for name in made),
                f"{sum(one['ok'] for one in made.values())} of {len(made)}",
                spanned(made.values()),
                f"{ratio(found['models']['source']):.2f}",
            ]
        )
    head = ["MoE family", "checkpoints", "agree:", "ratio to rounding:", "the source's:"]
    return table(head, rows)


def spanned(found: Iterable[dict[str, Any]]) -> str:
    return span(map(ratio, found), lambda x: f"{x:.2f}")


def generating(file: str) -> tuple[list[str], list[str]]:
    """Names of checkpoints that generate, and of those that the engine refused."""
    models = checkpoints(result(file)["models"])
    refused = [name for name, found in models.items() if "refused" in found]
    return [name for name in models if name not in refused], refused


@region
def generation() -> str:
    texts = []
    for file, what in (
        ("vllm-h200", "SmolLM2-135M-Instruct on an H200"),
        ("vllm-demo-h200", "The demo model, and a MoE made of it by the second engine, on an H200"),
        ("vllm-cpu", "The demo model on a CPU"),
    ):
        made, refused = generating(file)
        told = f"{what}: {count(len(made))} checkpoints generate in {where(file)} ("
        told += ", ".join(f"`{name}`" for name in made) + ")."
        if refused:
            told += f" No kernel there for {', '.join(f'`{name}`' for name in refused)}."
        texts.append(told)
    return items(*texts)


def where(file: str) -> str:
    """The engine of a run, as `vLLM 0.26`."""
    name, version = result(file)["vllm"].split()
    build = " for CPU" if name.endswith("-cpu") else ""
    return f"vLLM {'.'.join(version.split('.')[:2])}{build}"


@region
def draft() -> str:
    ways = {"temperature-0": "temperature 0", "greedy": "temperature 1, greedy drafts"}
    rows = [
        [
            f"{ways[row['way']]}, {row['k']} tokens drafted per step",
            percent(row["predicted"]),
            percent(row["measured"]),
            f"{row['points_off']:.1f}",
        ]
        for row in result("vllm-draft-h200")["rows"]
    ]
    return table(["accepted", "predicted:", "measured:", "points off (aim 5):"], rows)
