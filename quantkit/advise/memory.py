"""Whether a model in a format fits on GPUs, and how many concurrent users it then serves.

Weights and KV cache are exact. The engine's own overhead is from its logs, as far as there are any;
it is in `Engine`, its instances and the constants below them.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from quantkit.advise import kv, links, parallel
from quantkit.advise.shape import ModelShape
from quantkit.advise.split import Split, stages
from quantkit.advise.work import CHOSEN
from quantkit.hardware.gpus import GPU
from quantkit.recipe import AnyRecipe, GGUFRecipe, Recipe
from quantkit.storage import gib

GIB = 1 << 30


@dataclass(frozen=True)
class Engine:
    """What an engine takes on each GPU besides weights and KV cache."""

    fixed_bytes: int
    """CUDA context and library workspaces."""
    talk_bytes: int
    """More of it if GPUs share a model: communication buffers."""
    graph_bytes: int
    """Captured CUDA graphs."""
    batch_tokens: int
    """Most tokens per batch."""
    n_logits: int
    """Most sequences sampled together."""
    page_tokens: int
    """Tokens per cache page."""


# Outside of torch, vLLM logs 0.13 to 0.25 GiB on one GPU (benchmarks/published.yaml). Graphs took
# 1 GiB on an H200 (benchmarks/results/kv_capacity-h200.json), where 0.26 counted none of it, and
# 0.21 about 1 GiB on an H100: half of it is the middle. Batches are its server defaults, from
# 70 GiB on and below (get_batch_defaults in engine/arg_utils.py).
VLLM = Engine(GIB // 4, GIB // 2, GIB // 2, batch_tokens=8192, n_logits=1024, page_tokens=16)
VLLM_SMALL = replace(VLLM, batch_tokens=2048, n_logits=256)
NVLINK_TALK_BYTES = int(1.85 * GIB)
"""What vLLM 0.19 logs for tensor-parallel H100s over NVLink; assumed for Blackwell as well."""
DRAWN_BYTES = 2 + 4 + 4 + 4
"""Per logit during sampling, by the logs of 0.19; 0.26 takes about half of it."""
LARGE_BYTES = 70 * GIB
# llama.cpp computes 512 tokens at a time (-ub), keeps room for the logits of all of them, and
# rounds the context up to 256 tokens.
LLAMA_CPP = Engine(GIB // 2, 0, 0, batch_tokens=512, n_logits=512, page_tokens=256)


@dataclass(frozen=True)
class Extras:
    """What else occupies each GPU."""

    draft_bytes: int = 0
    """Weights of a draft model or head."""
    token_bytes: int = 0
    """Its own keys and values per token of context."""
    adapter_bytes: int = 0
    """LoRA adapters, one per slot."""
    shared_tokens: int = 0
    """Length of the prefix that all contexts share; vLLM keeps its keys and values once."""

    @property
    def fixed_bytes(self) -> int:
        return self.draft_bytes + self.adapter_bytes


@dataclass(frozen=True)
class Fit:
    """Memory use of a model on GPUs; bytes are those of the fullest GPU, which decides.

    In a pipeline that is the one with room for the fewest users: vLLM gives no GPU a larger cache
    than it needs for those.
    """

    fits: bool
    """Whether the requested number of users can be served."""
    reason: str
    """Why not; empty if it fits."""
    split: Split
    usable_bytes: int
    """What the engine may use in total."""
    weight_bytes: int
    """All weights: `model_bytes`, `draft_bytes` and `adapter_bytes` together."""
    overhead_bytes: int
    """From its logs: activations, graphs, communication buffers, the engine itself."""
    kv_bytes: int
    """What is left for keys and values; 0 if nothing is."""
    user_bytes: int
    """Cache bytes of one user's context."""
    users: int
    """Concurrent users with a full context."""
    kv_tokens: int
    """Tokens of such contexts that the cache holds, all GPUs together."""
    model_bytes: int
    """The model's own part of the weights."""
    draft_bytes: int
    """The draft model's or head's part of the weights; 0 without one."""
    adapter_bytes: int
    """The LoRA adapters' part of the weights; 0 without any."""
    draft_user_bytes: int
    """The draft model's own keys and values in `user_bytes`."""
    shared_bytes: int = 0
    """Keys and values of the shared prefix, which are stored once."""
    host_bytes: int = 0
    """Bytes in the host's memory, if not all layers fit on the GPU."""

    @property
    def parts(self) -> dict[str, int]:
        """Components of the weights by name, without the empty ones."""
        named = {
            "weights": self.model_bytes,
            "draft model": self.draft_bytes,
            "LoRA adapters": self.adapter_bytes,
        }
        return {name: size for name, size in named.items() if size or name == "weights"}

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"n_gpus": self.split.n_gpus}


@dataclass(frozen=True)
class Serving:
    """Server settings besides the request itself."""

    utilisation: float = 0.9
    """Share of memory it may use, near vLLM's own default."""
    kv_bits: int | None = None
    """By default those of the recipe."""
    engine: Engine | None = None
    """By default the one that suits GPU and format."""
    extras: Extras = field(default_factory=Extras)
    split: Split | None = None
    """By default the usual one for that many GPUs."""


def fits(
    shape: ModelShape,
    recipe: AnyRecipe | None,
    gpu: GPU,
    count: int = 1,
    context: int = 8192,
    users: int = 1,
    serving: Serving | None = None,
) -> Fit:
    """Memory use of a model in a recipe's format, or unquantised, on `count` such GPUs."""
    serving = serving or Serving()
    utilisation, kv_bits, engine = serving.utilisation, serving.kv_bits, serving.engine
    extras, split = serving.extras, serving.split
    if min(count, context, users) < 1 or not 0 < utilisation <= 1:
        raise ValueError("GPUs, context and users must be at least 1, utilisation in (0, 1]")
    if kv_bits is None:
        kv_bits = 8 if isinstance(recipe, Recipe) and recipe.kv_cache is not None else 16
    by_layers = isinstance(recipe, GGUFRecipe)
    split = split or parallel.usual(recipe, count)
    total = gpu.usable_bytes
    # Just above the limit the larger batch takes more memory than is gained: the smaller one is
    # then the better choice.
    choices = [(LLAMA_CPP, total)] if by_layers else [(VLLM_SMALL, min(total, LARGE_BYTES - 1))]
    if engine is not None:
        choices = [(engine, total)]
    elif not by_layers and total >= LARGE_BYTES:
        choices.append((VLLM, total))
    engine, usable = max(
        ((engine, int(memory * utilisation)) for engine, memory in choices),
        key=lambda choice: choice[1] - overhead_bytes(shape, choice[0], split.tensor, by_layers),
    )
    talk = talk_bytes(engine, gpu, split)
    # llama.cpp's slots share nothing.
    shared = 0 if by_layers else min(extras.shared_tokens, context - 1)
    shared -= shared % engine.page_tokens
    own = context - shared
    pages = -(-own // engine.page_tokens) * engine.page_tokens
    users_bytes = user_bytes(shape, pages, kv_bits, split, by_layers)
    shared_bytes = user_bytes(shape, shared, kv_bits, split, by_layers)
    last = len(users_bytes) - 1
    room = []
    for stage, weights in enumerate(parallel.stage_bytes(shape, recipe, split)):
        held = weights + extras.fixed_bytes
        taken = overhead_bytes(shape, engine, split.tensor, by_layers, has_head=stage == last)
        taken += talk
        # Next to nothing if all layers reuse other layers' keys.
        user = max(1, users_bytes[stage] + pages * extras.token_bytes)
        once = shared_bytes[stage] + shared * extras.token_bytes
        room.append((max(0, usable - held - taken - once), user, held, taken, once))
    left, user, weights, overhead, once = min(
        room, key=lambda one: (one[0] / one[1], -one[2] - one[3])
    )
    served = left // user
    problem = parallel.obstacle(shape, recipe, split)
    if not problem and weights + overhead + once > usable:
        named = {"draft model": extras.draft_bytes, "LoRA adapters": extras.adapter_bytes}
        named["shared prefix"] = once
        more = "".join(f", the {name} {n / GIB:.1f} GiB" for name, n in named.items() if n)
        problem = (
            f"weights take {(weights - extras.fixed_bytes) / GIB:.1f} GiB{more} and the engine "
            f"{overhead / GIB:.1f} GiB of the {usable / GIB:.1f} GiB that it may use"
        )
    elif not problem and served < users:
        problem = (
            f"there is room for {served:,} of {users:,} users, since each context takes "
            f"{gib(user)} of the {gib(left)} left for the KV cache"
        )
    return Fit(
        fits=not problem,
        reason=problem,
        split=split,
        usable_bytes=usable,
        weight_bytes=weights,
        overhead_bytes=overhead,
        kv_bytes=left,
        user_bytes=user,
        users=served,
        kv_tokens=shared + left * own // user,
        model_bytes=weights - extras.fixed_bytes,
        draft_bytes=extras.draft_bytes,
        adapter_bytes=extras.adapter_bytes,
        draft_user_bytes=pages * extras.token_bytes,
        shared_bytes=once,
    )


def talk_bytes(engine: Engine, gpu: GPU, split: Split) -> int:
    """Communication buffers between GPUs."""
    if split.n_gpus == 1:
        return 0
    has_nvlink = links.joins(gpu, split.tensor) and (gpu.capability or 0) >= 9
    is_much = engine.talk_bytes and has_nvlink and split.tensor > 1
    return NVLINK_TALK_BYTES if is_much else engine.talk_bytes


def overhead_bytes(
    shape: ModelShape, engine: Engine, tensor: int, by_layers: bool = False, has_head: bool = True
) -> int:
    """Bytes that an engine takes besides weights, KV cache and communication buffers.

    Activations in 16 bits: the residual stream twice, plus the largest temporary. That is the MLP's
    gate, up and product (in an MoE model for all experts that a token chooses, whose outputs are
    added up last) or, on the GPU with the head, sampling: logits in 16 and in 32 bits,
    probabilities and noise. llama.cpp reserves both, with logits in 32 bits only.
    """
    config = shape.config
    hidden = int(config["hidden_size"])
    inner = int(config.get("intermediate_size") or 4 * hidden)
    wide = 3 * -(-inner // tensor)
    if n_chosen := next((int(config[key]) for key in CHOSEN if config.get(key)), 0):
        one = int(config.get("moe_intermediate_size") or inner)
        wide = max(wide, n_chosen * (3 * -(-one // tensor) + hidden))
    residual = engine.batch_tokens * 2 * hidden * 2
    inside = engine.batch_tokens * wide * 2
    n_drawn = engine.n_logits * int(config["vocab_size"]) if has_head else 0
    most = inside + n_drawn * 4 if by_layers else max(inside, n_drawn * DRAWN_BYTES)
    return engine.fixed_bytes + engine.graph_bytes + residual + most


def user_bytes(
    shape: ModelShape, tokens: int, kv_bits: int, split: Split, by_layers: bool = False
) -> list[int]:
    """Keys and values of one user on a GPU of each stage; for llama.cpp, on the fullest."""
    key = "kv", tokens, split.tensor, split.pipeline, by_layers
    if key not in shape.cache:
        sizes = [layer.values(tokens) for layer in kv.layers(shape.config, split.tensor)]
        rows = stages(int(shape.config["num_hidden_layers"]), split.pipeline)
        shape.cache[key] = (
            [parallel.fullest(sizes, split.pipeline)]
            if by_layers
            else [sum(sizes[row.start : row.stop]) for row in rows]
        )
    return [values * kv_bits // 8 for values in shape.cache[key]]
