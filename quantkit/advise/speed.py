"""Speed of a format on GPUs: a roofline estimate, given as a range.

A layer takes as long as the slower of reading weights and multiplying; attention as long as the
slower of reading the KV cache and multiplying. Weight-only formats multiply in 16 bits after
unpacking; 8-bit formats at their own rate if the device has it. No step is shorter than the CPU
takes to prepare it. Tensor-parallel GPUs share a step and communicate twice per layer. Pipeline
stages compute one after the other: a token takes as long as all of them together, while other
users' tokens keep the other stages busy. llama.cpp's GPUs take turns.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from quantkit.advise import efficiency, experts, kv, links
from quantkit.advise.efficiency import Efficiency
from quantkit.advise.formats import RATES, Format
from quantkit.advise.shape import ModelShape
from quantkit.advise.split import ONE, Split, stages
from quantkit.advise.work import Work
from quantkit.families import geometry
from quantkit.hardware.gpus import GPU
from quantkit.hardware.support import runs
from quantkit.recipe import Recipe

CHUNK_TOKENS = {"vllm": 2048, "llama.cpp": 512}
"""Prompt tokens per chunk; weights are read once per chunk."""
PAGE_TOKENS = 16
"""Tokens per page of vLLM's cache; prefixes are shared by whole pages."""
HANDED_ON = 2
"""Vectors of hidden size that a vLLM stage passes on per token: the hidden state and the residual.
"""


@dataclass(frozen=True)
class Span:
    """A range; `low` and `high` are its ends as numbers, whichever of them is better."""

    low: float
    typical: float
    high: float


@dataclass(frozen=True)
class Load:
    """What users request: each has a prompt of `context - answer` tokens, then an answer."""

    context: int
    answer: int
    users: int = 1
    shared: int = 0
    """Length of the prefix shared by all prompts: computed once, then in the prefix cache."""

    @property
    def prompt(self) -> int:
        return self.context - self.answer

    @property
    def cached(self) -> int:
        """Prompt tokens that are not recomputed: whole pages, and never the last token."""
        return min(self.shared, max(0, self.prompt - 1)) // PAGE_TOKENS * PAGE_TOKENS

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache."""
        return self.cached / self.prompt if self.prompt else 0.0


@dataclass(frozen=True)
class Speed:
    """Times under a load; None where the device's compute rate is unknown."""

    first_token: Span | None
    """Seconds from a prompt to its first token, with no other load on the GPU."""
    step: Span
    """Seconds between two tokens while all users are served, other users' prompts in between."""
    answer: Span
    """Seconds for a whole answer: both together."""
    total: Span
    """Answer tokens per second of all users together, prompts computed in between."""
    bound: str
    """What dominates a step: weights, cache, compute, attention, links or the host; or `measured`.
    """
    is_measured: bool = False
    prompt: Span | None = None
    """GPU seconds per prompt, while others wait; None if unknown."""
    decode: Span | None = None
    """Seconds between two tokens with no prompt in between; None if unknown."""
    drafted: int = 0
    """Tokens that a draft proposes per step; 0 without one."""
    gain: float = 1.0
    """Typical factor by which the draft multiplies the tokens of an undisturbed step."""

    @classmethod
    def measured(cls, first_token: float, step: float, total: float, answer: int) -> "Speed":
        """A load generator's results: seconds, seconds, tokens per second, tokens per answer."""
        whole = first_token + answer * step
        first, between, both, rate = (Span(v, v, v) for v in (first_token, step, whole, total))
        return cls(first, between, both, rate, "measured", is_measured=True)

    @property
    def each(self) -> Span:
        """Tokens per second that one user sees."""
        return Span(1 / self.step.high, 1 / self.step.typical, 1 / self.step.low)


@dataclass(frozen=True)
class Case:
    """A format of a model on GPUs, with everything that determines its times."""

    shape: ModelShape
    work: Work
    format: Format
    gpu: GPU
    split: Split = ONE

    @property
    def shared(self) -> int:
        """GPUs that work on a token at the same time."""
        return self.split.tensor

    @property
    def n_stages(self) -> int:
        """Pipeline stages that work at the same time, on different tokens."""
        return 1 if self.format.engine == "llama.cpp" else self.split.pipeline

    @cached_property
    def stage_shares(self) -> tuple[float, float]:
        """Share of all layers in the longest stage before the last, and in the last."""
        n_layers = int(self.shape.config["num_hidden_layers"])
        sizes = [len(row) / n_layers for row in stages(n_layers, self.n_stages)]
        return max(sizes[:-1], default=0.0), sizes[-1]

    @cached_property
    def layers(self) -> list[tuple[kv.Layer, int]]:
        """Cache layers on each GPU, and how many are alike."""
        made, key = self.shape.cache, ("layers", self.shared)
        if key not in made:
            made[key] = list(Counter(kv.layers(self.shape.config, self.shared)).items())
        return list(made[key])

    @cached_property
    def steps(self) -> dict[tuple[int, int, Efficiency, int], Mapping[str, float]]:
        """Cache of `_step_parts`, by its arguments."""
        return {}

    def pairs(self, depth: int) -> int:
        """Tokens that a token attends to, over all layers."""
        return sum(n * layer.attended(depth) for layer, n in self.layers)

    def prompt_pairs(self, prompt: int) -> float:
        """The same for all tokens of a prompt together, with causal attention."""
        total = 0.0
        for layer, n in self.layers:
            seen = min(prompt, layer.window or prompt)
            total += n * (seen * prompt - seen**2 / 2)  # until the window is full, half of it
            if layer.n_compressed:
                total += n * prompt**2 / 2 / layer.rate
        return total

    @cached_property
    def own_tflops(self) -> float | None:
        """The rate of the layers that the format quantises."""
        plain = self.gpu.fp16_tflops
        if runs(self.gpu, self.format.key, self.format.engine).how != "native":
            return plain
        rate = RATES.get(self.format.key)
        return (rate and getattr(self.gpu, rate)) or plain

    @cached_property
    def is_unpacked(self) -> bool:
        """Whether weights must be expanded to 16 bits before they are multiplied."""
        if self.format.key == "bf16":
            return False
        if self.format.key == "gguf":
            return self.format.is_blocks
        how = runs(self.gpu, self.format.key, self.format.engine).how
        return not self.format.has_own_arithmetic or how == "emulated"


Times = tuple[float, float, float]
"""At one end: seconds to a first token, how long others wait for that, seconds per token."""
Rate = Callable[[Case, int, int, Efficiency], float]
"""Seconds per token for users at a depth, at one end."""


Copying = Callable[[Case, Efficiency, int], float]
"""Additional seconds for prompts, by the number of chunks they are computed in."""


def estimate(
    case: Case, load: Load, rate: Rate | None = None, copying: Copying | None = None
) -> Speed:
    """The speed of a case under a load.

    `rate` replaces the model of seconds per token; `copying` is additional waiting time for
    prompts.
    """
    depth = load.prompt + load.answer // 2
    knows_compute = case.gpu.fp16_tflops is not None
    again = rate or step_seconds
    chunks = _chunks(case, load.prompt - load.cached)

    def times(end: Efficiency) -> Times:
        first = turn = 0.0
        if knows_compute:
            more = copying(case, end, chunks) if copying else 0.0
            first, turn = prompt_seconds(case, load.prompt, end, load.cached)
            first, turn = first + more, turn + more
        return first, turn, again(case, load.users, depth, end)

    slow, typical, fast = map(times, efficiency.of(case.format.engine, case.gpu.vendor))
    return _under(load, (fast, typical, slow), knows_compute, _bound(case, load.users, depth))


def _under(load: Load, ends: tuple[Times, Times, Times], knows_compute: bool, bound: str) -> Speed:
    """What users see, from the times at the fast end, the middle and the slow end."""
    # While a user is served, everybody else's next prompt is computed once.
    others = load.users - 1
    first = Span(*(once for once, _, _ in ends))
    step = Span(*(again + others / load.answer * turn for _, turn, again in ends))
    answer = Span(*(once + others * turn + load.answer * again for once, turn, again in ends))
    tokens = load.users * load.answer
    total = Span(tokens / answer.high, tokens / answer.typical, tokens / answer.low)
    return Speed(
        first if knows_compute else None,
        step,
        answer,
        total,
        bound,
        prompt=Span(*(turn for _, turn, _ in ends)) if knows_compute else None,
        decode=Span(*(again for _, _, again in ends)),
    )


def step_seconds(case: Case, users: int, depth: int, end: Efficiency) -> float:
    """One token for every user, each of whom has `depth` tokens in the cache."""
    return pass_seconds(case, users, 1, depth, end)


def pass_seconds(case: Case, users: int, n_tokens: int, depth: int, end: Efficiency) -> float:
    """Several tokens of every user at once, as when a target checks a draft's proposals."""
    together = min(users, end.together)
    on_gpu = gpu_seconds(case, together, n_tokens, depth, end)
    return in_turns(case, users, end, on_gpu, own_seconds(case, end))


def in_turns(case: Case, users: int, end: Efficiency, longest: float, own: float) -> float:
    """A pass of all users, from the time of one batch, of which `own` is fixed."""
    together = min(users, end.together)
    turns = users / together
    return max(own + (longest - own) * turns, host_seconds(case, together, end) * turns)


def gpu_seconds(case: Case, users: int, n_tokens: int, depth: int, end: Efficiency) -> float:
    """GPU time of a pass for one batch of users.

    In a pipeline, users are spread over as many batches as there are stages. A batch goes through
    all stages, and its next round begins when it has, and when the longest stage is done with all
    the batches.
    """
    n_batches = min(case.n_stages, users)
    batch = -(-users // n_batches)
    parts = _step_parts(case, batch, depth, end, n_tokens)
    # Reads overlap with multiplication; with few tokens not where vLLM unpacks in between.
    waits = case.is_unpacked and case.format.engine == "vllm"
    layers = (sum if waits else max)((parts["weights"], parts["compute"]))
    layers += max(parts["cache"], parts["attention"])
    head = head_seconds(case, batch * n_tokens, end)
    all_stages = layers + head + parts["links"] + own_seconds(case, end)
    longest = max(
        (all_stages - head) * share + (head if is_last else 0.0)
        for share, is_last in zip(case.stage_shares, (False, True), strict=True)
    )
    return max(all_stages, n_batches * longest)


def prefill_seconds(case: Case, prompt: int, end: Efficiency) -> float:
    """A prompt of one user, until its first token."""
    return prompt_seconds(case, prompt, end)[0]


def prompt_seconds(
    case: Case, prompt: int, end: Efficiency, cached: int = 0
) -> tuple[float, float]:
    """Time of a prompt until its first token, and how long others wait for it; the first `cached`
    tokens are in the cache.

    In a pipeline its chunks follow each other: the first goes through all stages, and the others
    add only the longest stage. Other users wait for the longest stage alone.
    """
    chunks = _chunks(case, prompt - cached)
    whole = _prefill_seconds(case, prompt, end, cached)
    turn = whole * max(case.stage_shares)
    return (whole - turn) / max(1, chunks) + turn, turn


def least_first_token(plain: Case, count: int, load: Load) -> float:
    """A lower bound for the typical time to a first token in any format on `count` GPUs, from the
    unquantised model on one: all compute at their highest rate, and nothing is read.
    """
    gpu, own = plain.gpu, load.prompt - load.cached
    if gpu.fp16_tflops is None or own < 1:
        return 0.0
    rates = (getattr(gpu, rate) for rate in RATES.values())
    fastest = max(filter(None, (gpu.fp16_tflops, *rates)))
    ends = (efficiency.of(engine, gpu.vendor)[efficiency.TYPICAL] for engine in CHUNK_TOKENS)
    end = max(ends, key=lambda end: end.compute)
    pairs = plain.prompt_pairs(load.prompt) - plain.prompt_pairs(load.cached)
    layers = _layers_seconds(plain, own, end) * gpu.fp16_tflops / fastest
    return (layers + _attention(plain, pairs, end)) / count


def _chunks(case: Case, prompt: int) -> int:
    return -(-prompt // CHUNK_TOKENS[case.format.engine])


def _prefill_seconds(case: Case, prompt: int, end: Efficiency, cached: int = 0) -> float:
    """A prompt through all stages, one chunk after the other."""
    own = prompt - cached
    if own < 1:
        return 0.0
    chunks = _chunks(case, own)
    together = min(own, CHUNK_TOKENS[case.format.engine])
    # Cached tokens are attended to, but do not attend themselves.
    pairs = case.prompt_pairs(prompt) - case.prompt_pairs(cached)
    return (
        max(chunks * _reading(case, together, end), _layers_seconds(case, own, end))
        + chunks * head_seconds(case, 1, end)  # for each chunk's last token only
        + _attention(case, pairs, end)
        + _talking(case, own, end, chunks)
        + chunks * own_seconds(case, end)
    )


def _step_parts(
    case: Case, users: int, depth: int, end: Efficiency, n_tokens: int = 1
) -> Mapping[str, float]:
    """Seconds of a step without the head, by component; overlapping components in full."""
    key = users, depth, end, n_tokens
    if key not in case.steps:
        case.steps[key] = _parts_of_step(case, users, depth, end, n_tokens)
    return case.steps[key]


def _parts_of_step(
    case: Case, users: int, depth: int, end: Efficiency, n_tokens: int
) -> dict[str, float]:
    tokens = users * n_tokens
    kept = sum(n * layer.values(depth) for layer, n in case.layers)
    cache = users * kept * case.format.kv_bits / 8
    return {
        "weights": _reading(case, tokens, end),
        "compute": _layers_seconds(case, tokens, end),
        # Not packed, so it is read as fast as the memory allows.
        "cache": cache / (case.gpu.bandwidth_gb_s * 1e9 * end.bandwidth),
        "attention": _attention(case, tokens * case.pairs(depth), end),
        "links": _talking(case, tokens, end),
    }


def _reading(case: Case, tokens: int, end: Efficiency) -> float:
    """Seconds to read the layer weights that this many tokens need, on the fullest GPU."""
    work = case.work
    wanted = work.experts_needed(tokens)
    dense, spread = work.read.dense - work.head_bytes, work.read.experts * wanted
    if case.split.has_whole_experts:
        spread *= experts.unevenness(wanted * work.n_experts, work.n_experts, case.shared)
    return read_seconds(case, (dense + spread) / case.shared, end)


def read_seconds(case: Case, size_bytes: float, end: Efficiency) -> float:
    """Seconds in which one GPU reads this many bytes of layers."""
    return size_bytes / _bandwidth(case, end, case.is_unpacked)


def _bandwidth(case: Case, end: Efficiency, is_unpacked: bool) -> float:
    """Bytes per second at which one GPU reads weights."""
    reached = case.gpu.bandwidth_gb_s * end.bandwidth
    if is_unpacked:
        reached *= end.unpacking
        reached = min(reached, _unpacked_at_most(case, end))
    return reached * 1e9


def _unpacked_at_most(case: Case, end: Efficiency) -> float:
    """Upper bound for packed weights in GB per second, whatever the memory bandwidth."""
    engine, recipe = case.format.engine, case.format.recipe
    limit = efficiency.UNPACKED_GB_S[engine].get(case.gpu.compute_capability or "", float("inf"))
    if isinstance(recipe, Recipe):  # the limit is per weight, measured with 4 bits
        limit *= recipe.weights.num_bits / 4
    typical = efficiency.of(engine, case.gpu.vendor)[efficiency.TYPICAL]
    return limit * end.unpacking / typical.unpacking


def _layers_seconds(case: Case, tokens: int, end: Efficiency) -> float:
    """Seconds of the matrix products of all layers, for that many tokens."""
    own, plain, work = _own_tflops(case, end), _plain_tflops(case, end), case.work
    if plain is None or own is None:
        return 0.0  # a note beside the answer says so
    even = work.own.dense / own + work.plain.dense / plain
    spread = (work.own.experts / own + work.plain.experts / plain) * work.n_chosen / work.n_experts
    if case.split.has_whole_experts:
        spread *= experts.unevenness(tokens * work.n_chosen, None, case.shared)
    return 2.0 * tokens * (even + spread) / (1e12 * end.compute) / case.shared


def head_seconds(case: Case, tokens: int, end: Efficiency) -> float:
    """Seconds of the output head, read once, for that many tokens to sample."""
    rate = _own_tflops(case, end) if case.work.is_head_own else _plain_tflops(case, end)
    is_unpacked = case.is_unpacked and case.work.head_bytes < 2 * case.work.head
    reading = case.work.head_bytes / case.shared / _bandwidth(case, end, is_unpacked)
    if rate is None:
        return reading
    return max(reading, 2.0 * tokens * case.work.head / (rate * 1e12 * end.compute) / case.shared)


def _own_tflops(case: Case, end: Efficiency) -> float | None:
    """Rate of matrix products in the format's own arithmetic, if the GPU has it."""
    return _plain_tflops(case, end) if case.is_unpacked else case.own_tflops


def _plain_tflops(case: Case, end: Efficiency) -> float | None:
    """Rate of matrix products in 16 bits."""
    rate = case.gpu.fp16_tflops
    return rate if rate is None or not case.is_unpacked else rate * end.unpacked_compute


def _attention(case: Case, pairs: float, end: Efficiency) -> float:
    """Seconds of the products of queries with keys and of weights with values, in 16 bits."""
    if case.gpu.fp16_tflops is None:
        return 0.0
    config = case.shape.config
    heads = int(config["num_attention_heads"])
    width = geometry.head_dim(config)
    return 4.0 * heads * width * pairs / (case.gpu.fp16_tflops * 1e12 * end.compute) / case.shared


def _talking(case: Case, tokens: int, end: Efficiency, chunks: int = 1) -> float:
    """Seconds of all-reduces (two per layer, one 16-bit hidden state per token each) and of
    transfers between stages.
    """
    config = case.shape.config
    size = tokens * int(config["hidden_size"]) * 2
    n_reduces = 2 * int(config["num_hidden_layers"])
    each = links.reduce_seconds(case.gpu, case.shared, size, end)
    if case.n_stages == 1:
        return n_reduces * each
    handed = chunks * links.hand_on_seconds(
        case.gpu, case.split.n_gpus, HANDED_ON * size / chunks, end
    )
    return n_reduces * each + (case.n_stages - 1) * handed


def host_seconds(case: Case, users: int, end: Efficiency) -> float:
    """CPU time to prepare a pass for users who are computed together, batch by batch."""
    return min(case.n_stages, users) * end.host_seconds + end.host_user_seconds * users


def own_seconds(case: Case, end: Efficiency, n_layers: int | None = None) -> float:
    """Overhead of a step besides reading and multiplying, for all layers or `n_layers`."""
    each = end.layer_seconds + (end.expert_seconds if case.work.n_experts > 1 else 0.0)
    n = int(case.shape.config["num_hidden_layers"]) if n_layers is None else n_layers
    return end.step_seconds + each * n


def _bound(case: Case, users: int, depth: int) -> str:
    end = efficiency.of(case.format.engine, case.gpu.vendor)[efficiency.TYPICAL]
    together = min(users, end.together)
    batch = -(-together // case.n_stages)
    parts = dict(_step_parts(case, batch, depth, end))
    parts["weights"] += head_seconds(case, batch, end)
    if gpu_seconds(case, together, 1, depth, end) < host_seconds(case, together, end):
        return "host"
    return max(parts, key=lambda name: parts[name])
