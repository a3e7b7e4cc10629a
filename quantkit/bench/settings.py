"""Serving flags under one name for all engines, and the grid that a sweep covers.

max_num_seqs=64,256              most concurrent sequences max_num_batched_tokens=2048,8192 most
tokens per step kv_cache_dtype=auto,fp8          dtype of the KV cache prefix_caching=on,off
compute common prefixes once chunked_prefill=on,off           compute long prompts in chunks
gpu_memory_utilization=0.85,0.95 share of each GPU's memory that vLLM takes tensor_parallel=1,2
tensor-parallel size speculative=none,ngram:4,DIR:4   none, or a draft of `engine/speculation.py`
and tokens per step
"""

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from quantkit.engine import label, speculation
from quantkit.engine.speculation import Kind
from quantkit.errors import EngineError, UnknownName, UsageError

DRAFTED = 4
"""Default number of drafted tokens per step."""
Setting = Mapping[str, str]
_Flags = Callable[[str], list[str]]


def grid(sweeps: Iterable[str]) -> list[dict[str, str]]:
    """All combinations of the `NAME=A,B` lines; one empty setting if there are none."""
    axes: dict[str, list[str]] = {}
    for sweep in sweeps:
        name, _, values = sweep.partition("=")
        name = name.strip().replace("-", "_")
        found = [value.strip() for value in values.split(",") if value.strip()]
        if name not in VLLM:
            raise UsageError(f"--sweep {sweep}: {UnknownName('serving flag', name, VLLM)}")
        if not found:
            raise UsageError(f"--sweep {sweep}: name values, as in {name}=A,B")
        for value in found:
            VLLM[name](value)  # refuses invalid values
        axes[name] = list(dict.fromkeys([*axes.get(name, []), *found]))
    return [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]


def flags(setting: Setting, engine: str) -> list[str]:
    """A setting as the engine's own flags."""
    known = VLLM if engine == "vllm" else LLAMA_CPP
    found: list[str] = []
    for name, value in setting.items():
        if name not in known:
            raise EngineError(f"{label(engine)} has no flag for {name}; leave it out of the sweep")
        found += known[name](value)
    return found


def is_on(value: str) -> bool:
    """Value of a switch."""
    if value not in ("on", "off"):
        raise UsageError(f"'{value}' is neither on nor off")
    return value == "on"


def drafts(value: str) -> tuple[Kind, str, int] | None:
    """Kind, model and tokens per step of a speculative setting; None for `none`."""
    if value == "none":
        return None
    head, _, tail = value.rpartition(":")
    named, k = (head, int(tail)) if head and tail.isdecimal() else (value, DRAFTED)
    if k < 1:
        raise UsageError(f"'{value}' drafts {k} tokens per step; give at least 1")
    kind, place = speculation.parse(named)
    return kind, _folder(place) if place else "", k


def _folder(name: str) -> str:
    # Hub ids are kept; local folders get their full path, since an engine may start elsewhere.
    return str(Path(name).resolve()) if Path(name).exists() else name


def _number(flag: str) -> _Flags:
    def given(value: str) -> list[str]:
        if not value.isdecimal() or int(value) < 1:
            raise UsageError(f"{flag} takes a number, not '{value}'")
        return [flag, value]

    return given


def _share(flag: str) -> _Flags:
    def given(value: str) -> list[str]:
        try:
            share = float(value)
        except ValueError:
            share = 0.0
        if not 0 < share <= 1:
            raise UsageError(f"{flag} takes a share above 0 and up to 1, not '{value}'")
        return [flag, value]

    return given


def _switch(yes: str, no: str) -> _Flags:
    return lambda value: [yes if is_on(value) else no]


def speculative_config(value: str) -> dict[str, Any] | None:
    """vLLM's `speculative_config`; None for `none`."""
    wanted = drafts(value)
    if wanted is None:
        return None
    return speculation.vllm_config(*wanted)


def _vllm_speculative(value: str) -> list[str]:
    config = speculative_config(value)
    return [] if config is None else ["--speculative-config", json.dumps(config)]


def _llama_speculative(value: str) -> list[str]:
    wanted = drafts(value)
    if wanted is None:
        return []
    return [word for flag in speculation.llama_cpp_flags(*wanted) for word in flag]


VLLM: dict[str, _Flags] = {
    "max_num_seqs": _number("--max-num-seqs"),
    "max_num_batched_tokens": _number("--max-num-batched-tokens"),
    "kv_cache_dtype": lambda value: ["--kv-cache-dtype", value],
    "prefix_caching": _switch("--enable-prefix-caching", "--no-enable-prefix-caching"),
    "chunked_prefill": _switch("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    "gpu_memory_utilization": _share("--gpu-memory-utilization"),
    "tensor_parallel": _number("--tensor-parallel-size"),
    "speculative": _vllm_speculative,
}
LLAMA_CPP: dict[str, _Flags] = {
    "max_num_seqs": _number("--parallel"),
    "max_num_batched_tokens": _number("--batch-size"),
    "kv_cache_dtype": lambda value: ["--cache-type-k", value, "--cache-type-v", value],
    "prefix_caching": _switch("--cache-prompt", "--no-cache-prompt"),
    "speculative": _llama_speculative,
}
