"""Flags of `llama-server`, as llama.cpp of autumn 2026 has them."""

from collections.abc import Iterator

from quantkit.advise.sizing import Size
from quantkit.engine import speculation
from quantkit.serving.draft import Draft
from quantkit.serving.plan import Demand, Flag
from quantkit.serving.target import Target
from quantkit.storage import gib

ALL_LAYERS = "999"
"""More than any model has; every version of llama.cpp takes that for all of them."""


def flags(target: Target, demand: Demand, size: Size) -> Iterator[Flag]:
    """Every flag that follows from the numbers."""
    on_gpu = demand.gpu.vendor != "cpu"
    yield Flag(("--alias", target.name), "what requests call the model")
    yield Flag(("--host", demand.host), "where it listens: 127.0.0.1 is this machine only")
    yield Flag(("--port", str(demand.port)), "where it listens")
    total = size.context * size.sequences
    cache = ""
    if size.fit is not None:
        cache = f", {gib(size.sequences * size.fit.user_bytes)} in all"
    yield Flag(("--parallel", str(size.sequences)), "requests at a time, a slot each")
    yield Flag(
        ("--ctx-size", str(total)),
        f"{size.sequences} slots of {size.context:,} tokens{cache}: memory is set aside at once",
    )
    yield Flag(
        ("--n-gpu-layers", ALL_LAYERS if on_gpu else "0"),
        "every layer on the GPU" if on_gpu else "every layer on the CPU",
    )
    if (n_gpus := size.split.n_gpus) > 1:
        yield Flag(("--split-mode", "layer"), f"whole layers on each of the {n_gpus} GPUs")
    yield Flag(
        ("--flash-attn", "on" if on_gpu else "auto"),
        "attention without the large matrix" + ("; a small cache needs it" if on_gpu else ""),
    )
    if size.kv_bits == 8:
        yield Flag(("--cache-type-k", "q8_0"), "keys in 8 bits: half the memory")
        yield Flag(("--cache-type-v", "q8_0"), "values in 8 bits: half the memory")
    yield Flag(("--metrics",), "figures for Prometheus at /metrics")
    for adapter in demand.adapters:
        yield Flag(("--lora", adapter.path), f"the adapter {adapter.name}")
    if demand.draft is not None:
        yield from _draft(demand.draft, on_gpu)


def _draft(draft: Draft, on_gpu: bool) -> Iterator[Flag]:
    why = {
        "--spec-type": "another model guesses the next tokens",
        "--model-draft": "the model that guesses",
        "--spec-draft-n-max": "tokens guessed at a time, at most",
    }
    if draft.kind == "ngram":
        why["--spec-type"] = "guesses from what stood after the same words before"
    for words in speculation.llama_cpp_flags(draft.kind, draft.model, draft.n_tokens):
        yield Flag(words, why[words[0]])
    if on_gpu and draft.kind != "ngram":
        yield Flag(("--spec-draft-ngl", ALL_LAYERS), "the guessing model on the GPU too")
