"""Flags of `vllm serve`, as vLLM 0.26 to 0.32 have them."""

import json
from collections.abc import Iterator

from quantkit.advise import parallel
from quantkit.advise.sizing import Size
from quantkit.advise.split import stages
from quantkit.hardware.gpus import GPU
from quantkit.recipe import Recipe
from quantkit.serving import adapters as loras
from quantkit.serving.demand import Demand, Flag, reachable
from quantkit.serving.draft import Draft
from quantkit.serving.target import Target
from quantkit.storage import gib


def flags(target: Target, demand: Demand, size: Size) -> Iterator[Flag]:
    """Every flag that follows from the plan's numbers; the rest are vLLM's defaults."""
    yield Flag(("--served-model-name", target.name), "the model's name in requests")
    yield Flag(("--host", demand.host), reachable(demand.host, "vLLM"))
    yield Flag(("--port", str(demand.port)), "where it listens")
    yield from _where(target, demand, size)
    yield from _batches(demand, size)
    yield from _cache(target, demand, size)
    if demand.adapters:
        yield from _adapters(demand)
    if demand.draft is not None:
        config = json.dumps(demand.draft.config(size.split.tensor))
        yield Flag(("--speculative-config", config), _why_draft(demand.draft))


def _where(target: Target, demand: Demand, size: Size) -> Iterator[Flag]:
    gpu = demand.gpu
    if gpu.vendor == "cpu":
        # On a CPU, compiling takes longer than it saves.
        yield Flag(("--enforce-eager",), "no compilation, to start in seconds")
        return
    yield from _split(target, size)
    yield Flag(("--gpu-memory-utilization", f"{demand.utilisation:g}"), _why_memory(gpu, size))
    if gpu.capability is not None and gpu.capability < 8 and _is_bf16(target):
        yield Flag(("--dtype", "half"), f"{gpu.name} has no BF16")


def _split(target: Target, size: Size) -> Iterator[Flag]:
    split = size.split
    on = "each" if split.pipeline == 1 else "the fullest"
    weights = f" ({gib(size.fit.model_bytes)} of weights on {on})" if size.fit else ""
    since = f": {size.why_split}" if size.why_split else ""
    if split.tensor > 1:
        why = f"tensor parallel over {'the ' if not since else ''}{split.tensor} GPUs"
        yield Flag(("--tensor-parallel-size", str(split.tensor)), f"{why}{weights}{since}")
    if split.pipeline > 1:
        layers = ""
        if target.shape is not None:
            rows = stages(int(target.shape.config["num_hidden_layers"]), split.pipeline)
            layers = f", {', '.join(str(len(row)) for row in rows)} layers"
        why = f"pipeline parallel over {split.pipeline} x {split.tensor} GPUs{layers}"
        if split.tensor == 1:
            why = f"pipeline parallel over {split.pipeline} GPUs{layers}{weights}{since}"
        yield Flag(("--pipeline-parallel-size", str(split.pipeline)), why)
    if split.has_whole_experts and target.shape is not None:
        n_experts = parallel.n_experts(target.shape)
        held = -(-n_experts // split.tensor)
        why = (
            f"expert parallel: {held} of {n_experts} whole experts per GPU; tensor parallel for "
            "the other layers"
        )
        yield Flag(("--enable-expert-parallel",), why)


def _why_memory(gpu: GPU, size: Size) -> str:
    if size.fit is None:
        return f"of the {gib(gpu.usable_bytes)} of {gpu.name} that programs see"
    fit = size.fit
    held = ", ".join(f"{gib(taken)} {name}" for name, taken in fit.parts.items())
    whose = "the GPU" if fit.split.n_gpus == 1 else "each GPU"
    return (
        f"{gib(fit.usable_bytes)} of {whose}: {held}, about {gib(fit.overhead_bytes)} for the "
        f"engine, {gib(fit.kv_bytes)} KV cache"
    )


def _batches(demand: Demand, size: Size) -> Iterator[Flag]:
    room = ""
    if size.fit is not None and demand.gpu.vendor != "cpu":
        room = f"; the cache holds about {size.fit.kv_tokens:,} tokens in all"
    yield Flag(("--max-model-len", str(size.context)), f"prompt and answer together{room}")
    yield Flag(
        ("--max-num-seqs", str(size.sequences)),
        f"concurrent requests: {size.profile.why_sequences}",
    )
    yield Flag(("--max-num-batched-tokens", str(size.batch_tokens)), size.profile.why_tokens)


def _cache(target: Target, demand: Demand, size: Size) -> Iterator[Flag]:
    if demand.gpu.vendor == "cpu":
        if size.fit is not None:
            # Otherwise vLLM would take half of the machine's memory for it.
            wanted = size.sequences * size.fit.user_bytes
            why = f"KV cache of {size.sequences} full contexts"
            yield Flag(("--kv-cache-memory-bytes", str(max(wanted, 1 << 26))), why)
        return
    if size.kv_bits == 8:
        own = isinstance(target.recipe, Recipe) and target.recipe.kv_cache is not None
        scales = "with the checkpoint's scales" if own else "without scales: check the quality"
        yield Flag(("--kv-cache-dtype", "fp8"), f"half the memory per token, {scales}")
    yield Flag(
        ("--enable-prefix-caching",),
        "a prefix seen before is not computed again; nearly free otherwise",
    )
    why = f"prompts longer than {size.batch_tokens:,} tokens are read in several steps"
    if size.batch_tokens >= size.context:
        why = "prefill and decode share a batch"
    yield Flag(("--enable-chunked-prefill",), why)


def _adapters(demand: Demand) -> Iterator[Flag]:
    names = ", ".join(adapter.name for adapter in demand.adapters)
    yield Flag(("--enable-lora",), "LoRA adapters")
    places = [f"{adapter.name}={adapter.path}" for adapter in demand.adapters]
    yield Flag(("--lora-modules", *places), f"requests choose by the model's name: {names}")
    slots, n = demand.adapters.slots, len(demand.adapters)
    why = "all of them can be used in one batch"
    if slots < n:
        why = f"{slots} of the {n} have a slot on the GPU; requests for others wait for one"
    yield Flag(("--max-loras", str(slots)), why)
    if slots < n:
        held = demand.adapters.on_host
        why = f"{held} stay in host memory, to fill slots from"
        yield Flag(("--max-cpu-loras", str(held)), why)
    rank = loras.max_rank(demand.adapters)
    yield Flag(("--max-lora-rank", str(rank)), "the largest rank, rounded up to what vLLM accepts")


def _why_draft(draft: Draft) -> str:
    source = {
        "draft_model": "a draft model proposes",
        "ngram": "n-gram lookup proposes",
        "suffix": "suffix decoding (needs arctic-inference) proposes",
        "mtp": "the model's own draft layers (MTP) propose",
        "eagle": "a trained head proposes",
        "eagle3": "a trained head proposes",
        "medusa": "trained heads propose",
    }[draft.kind]
    drawn = "; sampled from its distribution" if draft.sampling == "probabilistic" else ""
    tokens = f"{draft.n_tokens} token{'s' * (draft.n_tokens > 1)} at a time"
    return f"{source} {tokens}{drawn}; pays off at low concurrency"


def _is_bf16(target: Target) -> bool:
    config = {} if target.shape is None else target.shape.config
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    return named.endswith("bfloat16")
