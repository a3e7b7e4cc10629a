"""How fast a format is on GPUs: a roofline, given as a range, never as a promise.

Layers take as long as the slower of two, reading weights or multiplying, and attention likewise,
reading the KV cache or multiplying. Weight-only formats multiply in 16 bits; 8-bit formats at their
own rate where the device has it. Several GPUs share a step in vLLM (tensor parallel) and talk twice
a layer; in llama.cpp they take turns.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from quantkit.advise import efficiency, kv
from quantkit.advise.efficiency import Efficiency
from quantkit.advise.formats import Format
from quantkit.advise.gpus import GPU
from quantkit.advise.shape import ModelShape
from quantkit.advise.support import runs
from quantkit.advise.work import Work

CHUNK_TOKENS = {"vllm": 2048, "llama.cpp": 512}
"""Tokens of a prompt that are computed together; weights are read once for each such chunk."""
PCIE_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""One way."""
ASSUMED_PCIE = "4.0 x16"


@dataclass(frozen=True)
class Span:
    """A range; `low` and `high` are its ends as numbers, whichever of them is better."""

    low: float
    typical: float
    high: float


@dataclass(frozen=True)
class Load:
    """What users ask for: each has a prompt of `context - answer` tokens, then an answer."""

    context: int
    answer: int
    users: int = 1

    @property
    def prompt(self) -> int:
        return self.context - self.answer


@dataclass(frozen=True)
class Speed:
    """Times under a load; None where the device's compute rate is not known."""

    first_token: Span | None
    """Seconds from a prompt to its first token, with nobody else on the GPU."""
    step: Span
    """Seconds between two tokens while all users are answered, others' prompts in between."""
    answer: Span
    """Seconds for a whole answer: both together."""
    total: Span
    """Tokens of answers a second, all users together, prompts computed in between."""
    bound: str
    """What most of a step goes to: weights, cache, compute, attention or links; or `measured`."""
    is_measured: bool = False

    @classmethod
    def measured(cls, first_token: float, step: float, total: float, answer: int) -> "Speed":
        """What a load generator saw: seconds, seconds, tokens a second, tokens of an answer."""
        whole = first_token + answer * step
        first, between, both, rate = (Span(v, v, v) for v in (first_token, step, whole, total))
        return cls(first, between, both, rate, "measured", is_measured=True)

    @property
    def each(self) -> Span:
        """Tokens a second that one user sees."""
        return Span(1 / self.step.high, 1 / self.step.typical, 1 / self.step.low)


@dataclass(frozen=True)
class Case:
    """A format of a model on GPUs, with everything that its times follow from."""

    shape: ModelShape
    work: Work
    format: Format
    gpu: GPU
    count: int = 1

    @property
    def shared(self) -> int:
        """GPUs that work on a token at the same time."""
        return 1 if self.format.engine == "llama.cpp" else self.count

    @cached_property
    def layers(self) -> list[tuple[kv.Layer, int]]:
        """What layers keep on each GPU, and how many are alike."""
        return list(Counter(kv.layers(self.shape.config, self.shared)).items())

    def pairs(self, depth: int) -> int:
        """Tokens that a token attends to, all layers together."""
        return sum(n * min(depth, layer.window or depth) for layer, n in self.layers)

    def prompt_pairs(self, prompt: int) -> float:
        """The same of all tokens of a prompt together; nobody attends to what comes later."""
        total = 0.0
        for layer, n in self.layers:
            seen = min(prompt, layer.window or prompt)
            total += n * (seen * prompt - seen**2 / 2)  # until the window is full, half of it
        return total

    @property
    def own_tflops(self) -> float | None:
        """The rate of the layers that the format is about."""
        plain = self.gpu.fp16_tflops
        if runs(self.gpu, self.format.key, self.format.engine).how != "native":
            return plain
        rates = {
            "int8-w8a8": self.gpu.int8_tops,
            "fp8-w8a8": self.gpu.fp8_tflops,
            "fp8-block": self.gpu.fp8_tflops,
        }
        return rates.get(self.format.key) or plain

    @property
    def is_unpacked(self) -> bool:
        """Whether weights of fewer bits have to become 16 bits before they are multiplied."""
        if self.format.key == "bf16":
            return False
        if self.format.key == "gguf":
            return self.format.is_blocks
        how = runs(self.gpu, self.format.key, self.format.engine).how
        return not self.format.has_own_arithmetic or how == "emulated"


def estimate(case: Case, load: Load) -> Speed:
    """The times that a case takes under a load."""
    depth = load.prompt + load.answer // 2
    knows_compute = case.gpu.fp16_tflops is not None
    slow, typical, fast = (
        (
            prefill_seconds(case, load.prompt, end) if knows_compute else 0.0,
            step_seconds(case, load.users, depth, end),
        )
        for end in efficiency.of(case.format.engine, case.gpu.vendor)
    )
    # While a user is answered, everybody else's next prompt is computed once.
    others = (load.users - 1) / load.answer
    first = Span(*(once for once, _ in (fast, typical, slow)))
    step = Span(*(again + others * once for once, again in (fast, typical, slow)))
    answer = Span(
        *(load.users * once + load.answer * again for once, again in (fast, typical, slow))
    )
    tokens = load.users * load.answer
    total = Span(tokens / answer.high, tokens / answer.typical, tokens / answer.low)
    return Speed(
        first if knows_compute else None, step, answer, total, _bound(case, load.users, depth)
    )


def step_seconds(case: Case, users: int, depth: int, end: Efficiency) -> float:
    """One token for every user, each of whom has `depth` tokens in the cache."""
    return pass_seconds(case, users, 1, depth, end)


def pass_seconds(case: Case, users: int, n_tokens: int, depth: int, end: Efficiency) -> float:
    """Several tokens of every user at once, as when a target checks what a draft proposed."""
    together = min(users, end.together)
    parts = _step_parts(case, together, depth, end, n_tokens)
    linears = max(parts["weights"], parts["compute"])
    attention = max(parts["cache"], parts["attention"])
    once = linears + attention + parts["links"] + _own_time(case, end)
    return once * users / together


def prefill_seconds(case: Case, prompt: int, end: Efficiency) -> float:
    """A prompt of one user, until its first token is there."""
    if prompt < 1:
        return 0.0
    together = CHUNK_TOKENS[case.format.engine]
    chunks = -(-prompt // together)
    reading = chunks * case.work.bytes_read(min(prompt, together))
    return (
        max(reading / case.shared / _bandwidth(case, end), _linears(case, prompt, end))
        + _attention(case, case.prompt_pairs(prompt), end)
        + _talking(case, prompt, end)
        + chunks * _own_time(case, end)
    )


def _step_parts(
    case: Case, users: int, depth: int, end: Efficiency, n_tokens: int = 1
) -> dict[str, float]:
    """Seconds of a step by what they go to; of what overlaps, all of it."""
    tokens = users * n_tokens
    kept = sum(n * layer.values(depth) for layer, n in case.layers)
    cache = users * kept * case.format.kv_bits / 8
    return {
        "weights": case.work.bytes_read(tokens) / case.shared / _bandwidth(case, end),
        "compute": _linears(case, tokens, end),
        # In no packed form, so that it is read as fast as the memory allows.
        "cache": cache / (case.gpu.bandwidth_gb_s * 1e9 * end.bandwidth),
        "attention": _attention(case, tokens * case.pairs(depth), end),
        "links": _talking(case, tokens, end),
    }


def _bandwidth(case: Case, end: Efficiency) -> float:
    """Bytes a second at which one GPU reads weights."""
    reached = case.gpu.bandwidth_gb_s * end.bandwidth
    if case.is_unpacked:
        reached *= end.unpacking
        most = efficiency.UNPACKED_GB_S.get(case.gpu.capability or 0.0)
        if case.format.engine == "llama.cpp" and most is not None:
            reached = min(reached, most)
    return reached * 1e9


def _linears(case: Case, tokens: int, end: Efficiency) -> float:
    """Seconds of the products with all weights, for that many tokens."""
    plain, own, work = case.gpu.fp16_tflops, case.own_tflops, case.work
    if plain is None or own is None:
        return 0.0  # a note beside the answer says so
    slowed = end.unpacking if case.is_unpacked else 1.0
    operations = work.flops(work.own) / own + work.flops(work.plain) / (plain * slowed)
    return tokens * operations / (1e12 * end.compute) / case.shared


def _attention(case: Case, pairs: float, end: Efficiency) -> float:
    """Seconds of the products of queries with keys and of weights with values, in 16 bits."""
    if case.gpu.fp16_tflops is None:
        return 0.0
    config = case.shape.config
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return 4.0 * heads * width * pairs / (case.gpu.fp16_tflops * 1e12 * end.compute) / case.shared


def _talking(case: Case, tokens: int, end: Efficiency) -> float:
    """Seconds of all-reduces: two a layer, of one hidden state a token in 16 bits."""
    n = case.shared
    if n == 1:
        return 0.0
    config = case.shape.config
    size = tokens * int(config["hidden_size"]) * 2
    one_way, is_pcie = link_gb_s(case.gpu)
    each = 2 * (n - 1) / n * size / (one_way * 1e9 * end.link)
    at_least = end.reduce_seconds * (2 if is_pcie else 1)
    return 2 * int(config["num_hidden_layers"]) * (at_least + each)


def link_gb_s(gpu: GPU) -> tuple[float, bool]:
    """One way between two such GPUs, and whether that is over PCIe."""
    if gpu.link_gb_s:
        return gpu.link_gb_s / 2, False
    generation, _, lanes = (gpu.pcie or ASSUMED_PCIE).partition(" x")
    return PCIE_LANE_GB_S[int(float(generation))] * int(lanes), True


def _own_time(case: Case, end: Efficiency) -> float:
    return end.step_seconds + end.layer_seconds * int(case.shape.config["num_hidden_layers"])


def _bound(case: Case, users: int, depth: int) -> str:
    end = efficiency.of(case.format.engine, case.gpu.vendor)[efficiency.TYPICAL]
    parts = _step_parts(case, min(users, end.together), depth, end)
    return max(parts, key=lambda name: parts[name])
