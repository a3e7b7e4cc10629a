"""The plan of a server: the engine, its flags, and the reason for each.

Nothing here loads torch or starts anything, so a plan can be made before a checkpoint exists.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from quantkit import resources
from quantkit.advise import offload, parallel, sizing
from quantkit.advise.memory import Extras
from quantkit.advise.profiles import Profile, find, is_large
from quantkit.advise.shape import ModelShape
from quantkit.advise.sizing import Size
from quantkit.advise.split import ANY, Split
from quantkit.engine import label
from quantkit.errors import EngineError, HardwareError, UnknownName
from quantkit.hardware import support
from quantkit.hardware.gpus import GPU
from quantkit.mixed.candidates import mixes_for
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe
from quantkit.serving import adapters as loras
from quantkit.serving.adapters import Loras
from quantkit.serving.demand import Demand as Demand
from quantkit.serving.demand import Flag as Flag
from quantkit.serving.draft import Draft
from quantkit.serving.target import Target
from quantkit.storage import gib

Engine = Literal["vllm", "llama.cpp"]
PROGRAMS: dict[Engine, tuple[str, ...]] = {
    "vllm": ("vllm", "serve"),
    "llama.cpp": ("llama-server", "-m"),
}
DEFAULT_CONTEXT = 8192
LEAST_CONTEXT = 1024


@dataclass(frozen=True)
class Plan:
    """How to serve a model."""

    engine: Engine
    target: Target
    demand: Demand
    size: Size
    flags: tuple[Flag, ...]
    notes: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """What it is planned for, in words."""
        gpu, count = self.demand.gpu.name, self.size.split.n_gpus
        devices = gpu if count == 1 else f"{count} x {gpu}"
        return f"{devices} and {self.size.profile.name} traffic"

    @property
    def arguments(self) -> list[str]:
        """All flags as one list."""
        return [word for flag in self.flags for word in flag.words]

    def value(self, *names: str) -> str | None:
        """A flag's value in the command, by any of its names; the last one counts."""
        found = None
        for flag in self.flags:
            name, _, value = flag.name.partition("=")
            if name in names:
                found = value or next(iter(flag.words[1:]), None)
        return found

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        return self.value("--served-model-name", "--alias", "-a") or self.target.name

    @property
    def address(self) -> tuple[str, int]:
        """Host and port, also where the user's own flags set them."""
        port = self.value("--port") or str(self.demand.port)
        if not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise EngineError(f"--port {port} is not a port; give a number from 1 to 65535")
        return self.value("--host") or self.demand.host, int(port)

    def command(self, program: Sequence[str] | None = None) -> list[str]:
        """The whole command; `program` ends where the model's path follows."""
        return [*(program or PROGRAMS[self.engine]), self.target.path, *self.arguments]

    def shell(self, program: Sequence[str] | None = None) -> str:
        """The command for a terminal, one flag per line."""
        first = shlex.join([*(program or PROGRAMS[self.engine]), self.target.path])
        return " \\\n  ".join([first, *(shlex.join(flag.words) for flag in self.flags)])

    def with_extra(self, extra: Sequence[str]) -> "Plan":
        """With the user's own flags, which replace ours."""
        if not extra:
            return self
        flags = [word.partition("=")[0] for word in extra if word.startswith("-")]
        named = {flag.removeprefix("--no-").lstrip("-").replace("_", "-") for flag in flags}
        kept = [f for f in self.flags if f.name.removeprefix("--no-").lstrip("-") not in named]
        own = [Flag(tuple(words), "as you asked") for words in _by_flag(extra)]
        return replace(self, flags=(*kept, *own))

    def with_note(self, note: str) -> "Plan":
        """With one more note."""
        return replace(self, notes=(*self.notes, note))

    def to_json(self, program: Sequence[str] | None = None) -> dict[str, Any]:
        fit = self.size.fit
        return {
            "engine": self.engine,
            "model": self.target.path,
            "served_name": self.served_name,
            "gpu": self.demand.gpu.name,
            "count": self.demand.count,
            "tensor_parallel": self.size.split.tensor,
            "pipeline_parallel": self.size.split.pipeline,
            "expert_parallel": self.size.split.has_whole_experts,
            "profile": self.size.profile.name,
            "context": self.size.context,
            "sequences": self.size.sequences,
            "kv_bits": self.size.kv_bits,
            "kv_tokens": None if fit is None else fit.kv_tokens,
            "full_contexts": None if fit is None else fit.users,
            "memory": None if fit is None else fit.to_json(),
            "command": self.command(program),
            "flags": [{"words": list(f.words), "why": f.why} for f in self.flags],
            "notes": list(self.notes),
        }


def make(target: Target, demand: Demand, size: Size | None = None) -> Plan:
    """The plan for a model on GPUs; raises where they cannot serve it.

    `size` is used unchanged: what a recommendation compared is what is served.
    """
    from quantkit.serving import llamacpp, vllm

    if min(demand.count, demand.users or 1, demand.context or 1) < 1:
        raise EngineError("GPUs, users and context start at 1")
    if not 0 < demand.utilisation <= 1:
        raise EngineError(
            f"a GPU's utilisation must be above 0 and at most 1, not {demand.utilisation}"
        )
    engine: Engine = "llama.cpp" if target.is_gguf else "vllm"
    notes = _refuse_unsupported(target.recipe, demand, engine)
    size = _size(target, demand) if size is None else _explained(target, demand, size)
    asked, fit = demand.users, size.fit
    if asked and fit and fit.users < asked:
        notes.append(f"{fit.reason}; {size.sequences} requests run at once, the others wait")
    if fit is None:
        notes.append("the memory need of this model is unknown, so it was not checked")
    elif demand.context is None and size.context < _allowed(target, DEFAULT_CONTEXT):
        notes.append(f"the context was cut to {size.context:,} tokens, which is what fits")
    if size.offload is not None and fit is not None:
        notes.append(
            f"it does not fit on the GPU: {size.offload.words}, {gib(fit.host_bytes)} in host "
            "memory, which limits the speed"
        )
    if left := demand.count - size.split.n_gpus:
        are = "is" if left == 1 else "are"
        why = f": {size.why_split}" if size.why_split else ""
        notes.append(f"{left} of the {demand.count} GPUs {are} left idle{why}")
    if size.is_reduced:
        notes.append(
            f"{size.batch_tokens:,} tokens per batch, fewer than {demand.profile} traffic "
            "would use: more would leave too little room for the KV cache"
        )
    make_flags = llamacpp.flags if engine == "llama.cpp" else vllm.flags
    flags = tuple(make_flags(target, demand, size))
    return Plan(engine, target, demand, size, flags, tuple(notes))


def extras(
    shape: ModelShape, draft: Draft | None, adapters: Loras, split: Split, kv_bits: int = 16
) -> Extras:
    """Memory of a draft and adapters on each of the GPUs that share a model."""
    taken = Extras() if draft is None else draft.extras(split.tensor, kv_bits)
    return replace(taken, adapter_bytes=loras.size_bytes(shape, adapters, split))


def _refuse_unsupported(recipe: AnyRecipe | None, demand: Demand, engine: Engine) -> list[str]:
    gpu, notes = demand.gpu, []
    weights = support.format_of(recipe)
    formats = {weights: recipe.name.partition("+")[0] if recipe else weights}
    if demand.kv_bits == 8 and engine == "vllm":
        formats["kv-fp8"] = "kv-fp8"
    for format, name in formats.items():
        how, reason = support.runs(gpu, format, engine)
        if how == "no" and gpu.vendor == "cpu":
            notes.append(f"{name}: {reason}; it may still run")
        elif how == "no":
            raise HardwareError(
                f"{gpu.name} does not run {name} in {label(engine)}: {reason}; "
                f"{_remedy(recipe, format, gpu)}"
            )
        elif how == "emulated":
            notes.append(f"{name} is emulated on {gpu.name}: {reason}")
    return notes


def _remedy(recipe: AnyRecipe | None, format: str, gpu: GPU) -> str:
    """What to do about a format that a GPU does not run."""
    is_mixed = isinstance(recipe, Recipe) and len(recipe.parts) > 1
    is_ours = recipe is not None and recipe.name in resources.names("recipes")
    mixes = mixes_for(gpu) if is_mixed and not is_ours and format != "kv-fp8" else []
    if mixes:
        return f"choose from formats that it runs: `quantize --formats {mixes[0]}`"
    return f"`quantkit gpus '{gpu.name}'` shows what it runs"


def _allowed(target: Target, context: int) -> int:
    """A context that the model allows."""
    if target.shape is None:
        return min(context, target.longest or context)
    return min(context, int(target.shape.config["max_position_embeddings"]))


def _size(target: Target, demand: Demand) -> Size:
    profile = find(demand.profile)
    if demand.context and (longest := _allowed(target, demand.context)) < demand.context:
        raise EngineError(
            f"{target.name} allows contexts of {longest:,} tokens, not {demand.context:,}; "
            "shorten --context"
        )
    contexts = [demand.context or _allowed(target, DEFAULT_CONTEXT)]
    while demand.context is None and contexts[-1] // 2 >= LEAST_CONTEXT:
        contexts.append(contexts[-1] // 2)
    splits, why = _splits(target, demand)
    for context in contexts:
        tried = [
            _size_at(target, demand, profile, context, reduced, split)
            for reduced in (False, True)
            for split in splits
        ]
        if found := sizing.first_fitting(tried):
            is_usual = found.split == parallel.usual(target.recipe, demand.count)
            return replace(found, why_split="" if is_usual else why)
    size = tried[0]
    assert size.fit is not None
    if partly := _partly(target, demand, profile, contexts[-1]):
        return partly
    raise HardwareError(
        f"{target.name} does not fit on {demand.count} x {demand.gpu.name} with a context of "
        f"{size.context:,} tokens: {size.fit.reason}; shorten --context, use more or larger GPUs, "
        "or take a smaller format"
    )


def _partly(target: Target, demand: Demand, profile: Profile, context: int) -> Size | None:
    """A GGUF file with some layers in this machine's host memory."""
    if target.shape is None or not target.is_gguf:
        return None
    own = _wanted(target, demand, profile, context, parallel.usual(target.recipe, demand.count))
    found = offload.fitted(own, offload.usual_host(demand.gpu))
    return None if found is None else found[0]


def _splits(target: Target, demand: Demand) -> tuple[list[Split], str]:
    """Ways to share the model, of which the first that fits is used, and why not the usual one."""
    usual = parallel.usual(target.recipe, demand.count)
    if target.shape is None:
        return [demand.split or usual], ""
    why = parallel.obstacle(target.shape, target.sized_by, usual)
    if demand.split is not None:
        return [demand.split], why
    ways = parallel.ways_to_share(target.shape, target.sized_by, demand.count, ANY)
    if target.is_gguf or usual in ways or not ways:
        return [usual], why
    return ways, why


def _explained(target: Target, demand: Demand, size: Size) -> Size:
    """Numbers computed elsewhere, with the reason for how GPUs share the model."""
    is_usual = size.split == parallel.usual(target.recipe, demand.count)
    return replace(size, why_split="" if is_usual else _splits(target, demand)[1])


def _size_at(
    target: Target, demand: Demand, profile: Profile, context: int, reduced: bool, split: Split
) -> Size:
    kv_bits = demand.kv_bits or _own_kv_bits(target.recipe)
    if target.shape is None:
        slots = demand.users or profile.slots
        large = is_large(demand.gpu) and not reduced
        return Size(profile, context, slots, profile.batch_tokens[large], kv_bits, None, split)
    return sizing.size_of(_wanted(target, demand, profile, context, split), reduced)


def _wanted(
    target: Target, demand: Demand, profile: Profile, context: int, split: Split
) -> sizing.SizingRequest:
    kv_bits = demand.kv_bits or _own_kv_bits(target.recipe)
    assert target.shape is not None
    return sizing.SizingRequest(
        target.shape,
        target.sized_by,
        demand.gpu,
        demand.count,
        context,
        demand.users,
        profile,
        split,
        kv_bits,
        target.is_gguf,
        demand.utilisation,
        extras(target.shape, demand.draft, demand.adapters, split, kv_bits),
    )


def kv_bits(text: str) -> int | None:
    """Bits of keys and values from their notation; None leaves it to the checkpoint."""
    known = {"auto": None, "16": 16, "bf16": 16, "fp16": 16, "8": 8, "fp8": 8, "q8_0": 8}
    if text.lower() not in known:
        raise UnknownName("KV cache type", text, ("auto", "16", "8"))
    return known[text.lower()]


def _own_kv_bits(recipe: AnyRecipe | None) -> int:
    has_scales = not isinstance(recipe, GGUFRecipe) and recipe and recipe.kv_cache
    return 8 if has_scales else 16


def _by_flag(words: Sequence[str]) -> list[list[str]]:
    """Words of a command line, each flag with its values."""
    found: list[list[str]] = []
    for word in words:
        if found and not word.startswith("-"):
            found[-1].append(word)
        else:
            found.append([word])
    return found
