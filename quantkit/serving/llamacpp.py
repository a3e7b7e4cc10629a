"""Flags of `llama-server`, as llama.cpp of autumn 2026 has them."""

from collections.abc import Iterator

from quantkit.advise.sizing import Size
from quantkit.engine import speculation
from quantkit.serving.demand import Demand, Flag, reachable
from quantkit.serving.draft import Draft
from quantkit.serving.target import Target
from quantkit.storage import gib

ALL_LAYERS = "999"
"""More than any model has; every version of llama.cpp reads it as all of them."""


def flags(target: Target, demand: Demand, size: Size) -> Iterator[Flag]:
    """Every flag that follows from the plan's numbers."""
    on_gpu = demand.gpu.vendor != "cpu"
    yield Flag(("--alias", target.name), "the model's name in requests")
    yield Flag(("--host", demand.host), reachable(demand.host, "llama-server"))
    yield Flag(("--port", str(demand.port)), "where it listens")
    total = size.context * size.sequences
    cache = ""
    if size.fit is not None:
        cache = f", {gib(size.sequences * size.fit.user_bytes)} in all"
    yield Flag(("--parallel", str(size.sequences)), "concurrent requests, one slot each")
    slots = "1 slot" if size.sequences == 1 else f"{size.sequences} slots"
    yield Flag(
        ("--ctx-size", str(total)),
        f"{slots} of {size.context:,} tokens{cache}: memory is reserved up front",
    )
    yield from _layers(size, on_gpu)
    if (n_gpus := size.split.n_gpus) > 1:
        yield Flag(("--split-mode", "layer"), f"whole layers on each of the {n_gpus} GPUs")
    yield Flag(
        ("--flash-attn", "on" if on_gpu else "auto"),
        "flash attention" + (": faster, and an 8-bit cache requires it" if on_gpu else ""),
    )
    if size.kv_bits == 8:
        yield Flag(("--cache-type-k", "q8_0"), "keys in 8 bits: half the memory")
        yield Flag(("--cache-type-v", "q8_0"), "values in 8 bits: half the memory")
    yield Flag(("--metrics",), "Prometheus metrics at /metrics")
    for number, adapter in enumerate(demand.adapters):
        why = f"the adapter {adapter.name}: {request(number)} in a request adds it"
        yield Flag(("--lora", adapter.path), why)
    if demand.adapters:
        why = "requests without a `lora` field are answered by the model alone"
        yield Flag(("--lora-init-without-apply",), why)
    if demand.draft is not None:
        yield from _draft(demand.draft, on_gpu)


def request(number: int) -> str:
    """The request field that selects an adapter; adapters are numbered in order."""
    return f'"lora": [{{"id": {number}, "scale": 1}}]'


def _layers(size: Size, on_gpu: bool) -> Iterator[Flag]:
    if not on_gpu:
        yield Flag(("--n-gpu-layers", "0"), "every layer on the CPU")
    elif size.offload is None:
        yield Flag(("--n-gpu-layers", ALL_LAYERS), "every layer on the GPU")
    elif size.offload.n_cpu_moe:
        found = size.offload
        why = f"experts of the first {found.n_cpu_moe} of {found.n_layers} layers on the CPU"
        yield Flag(("--n-gpu-layers", ALL_LAYERS), "every layer on the GPU, except experts")
        yield Flag(("--n-cpu-moe", str(found.n_cpu_moe)), why)
    else:
        found = size.offload
        why = f"the output layer and {found.on_gpu} of {found.n_layers} layers on the GPU"
        yield Flag(("--n-gpu-layers", str(found.n_gpu_layers)), f"{why}; the CPU has the others")


def _draft(draft: Draft, on_gpu: bool) -> Iterator[Flag]:
    why = {
        "--spec-type": "speculative decoding: a draft model proposes the next tokens",
        "--model-draft": "the draft model",
        "--spec-draft-n-max": "most tokens drafted per step",
    }
    if draft.kind == "ngram":
        why["--spec-type"] = "speculative decoding: drafts by n-gram lookup in the text so far"
    if draft.kind == "mtp":
        why["--spec-type"] = "speculative decoding: the model's own draft layers (MTP)"
    why["--spec-draft-sampling"] = "how the draft model samples"
    for words in speculation.llama_cpp_flags(
        draft.kind, draft.model, draft.n_tokens, draft.sampling
    ):
        yield Flag(words, why[words[0]])
    if on_gpu and draft.target is not None:
        yield Flag(("--spec-draft-ngl", ALL_LAYERS), "the draft model on the GPU too")
