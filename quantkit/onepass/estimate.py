"""The cost of a calibrated pass, estimated from shapes before any weight is read.

Counts the tensors that are alive at once and the matrix products, and times one product on the
device to convert them to seconds. Meant to be right within a third; the manifest has the measured
values.
"""

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from quantkit import device as devices
from quantkit import families, methods
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import HardwareError
from quantkit.methods.contract import Cost
from quantkit.model.architecture import EXPERT, Architecture
from quantkit.onepass.calibrated import BATCHED, batch_bytes, batch_size, measuring_cost
from quantkit.onepass.collector import common_input
from quantkit.onepass.ranks import assign
from quantkit.plan.checkpoint import Plan
from quantkit.recipe import Recipe
from quantkit.storage import gib

TUNED_BYTES = 32
"""Per weight of a block in the gradient stage: its position, gradient, and intermediate results."""
TOKENS_PER_BATCH = {"cuda": 8192, "cpu": 2048}
MERGED_BYTES = {"cuda": 5 << 29, "cpu": 0}
"""Batches are merged while what runs of them stays within this, about what one batch of an 8B
takes: narrow blocks cost a GPU more in launches than in arithmetic."""
MERGED_SHARE = 16
"""And within this part of the GPU's memory, so that a model still fits on a small one."""
MOST_MERGED = 8
DISTILLED_BYTES = 9.0
"""Memory per weight where codes move: a position, a mean gradient, the weight, and some room."""
DISTILLED_SCALES_BYTES = 1.25
"""Memory per weight where only scales do: its code, and what one block takes in turn."""
OFFLOAD = ("auto", "always", "never")
"""When hidden states go to host memory."""
EFFICIENCY = 0.6
"""Share of the speed of one large product that a whole pass reaches."""
PROCESS_BYTES = 2 << 30
"""Memory of Python, torch and transformers themselves."""


@dataclass(frozen=True)
class Estimate:
    """The cost of one pass."""

    n_blocks: int
    n_tokens: int
    """Without padding, which costs time and memory too, but contributes no statistics."""
    n_streams: int
    hidden_bytes: int
    """Of all streams together."""
    working_bytes: int
    """On the device at the peak, without hidden states."""
    block_bytes: int
    seconds: float
    n_ranks: int = 1
    """Processes that share the samples; bytes are per process, seconds for all together."""
    n_local_ranks: int = 1
    """Those of them that share this machine's memory."""
    distilling_bytes: tuple[int, ...] = ()
    """On the device while all blocks are distilled, without hidden states: codes and scales, or
    scales alone.
    """
    experts_bytes: int = 0
    """Of `working_bytes`: what Gram matrices of every expert's own inputs take beyond a shared
    one.
    """
    shares_experts: bool = False
    """Experts of a block share the Gram matrix of their common input."""

    def with_distilling(self, free: int | None, on_host: bool) -> "Estimate":
        """With the memory of as much distillation as fits."""
        states = 0 if on_host else self.hidden_bytes
        shared = self.experts_bytes if self.shares_experts else 0
        for needed in self.distilling_bytes:
            if free is None or needed + states <= free:
                return replace(self, working_bytes=max(self.working_bytes, needed + shared))
        return self

    def device_bytes(self, on_host: bool) -> int:
        """Device memory, with or without hidden states on it."""
        shared = self.experts_bytes if self.shares_experts else 0
        return self.working_bytes - shared + (0 if on_host else self.hidden_bytes)

    def host_bytes(self, on_host: bool) -> int:
        """Memory of the process: two blocks, what is being written, hidden states if on the
        host.
        """
        return PROCESS_BYTES + 4 * self.block_bytes + (self.hidden_bytes if on_host else 0)


def estimate(
    architecture: Architecture,
    plans: Sequence[Plan],
    calibration: CalibrationTokens,
    device: torch.device,
    n_ranks: int = 1,
    speeds: tuple[float, float] | None = None,
    n_files: int | None = None,
) -> Estimate:
    """The cost of the pass that these calibrated recipes need, and GGUF files that learn from it:
    `n_files` by GPTQ, any others by importance; None: there are none.

    `speeds` are those of a device that is not present: operations per second of a large product in
    the compute dtype, and in float32.
    """
    block = _largest_block(architecture)
    n_samples, length = calibration.ids.shape
    n_positions = -(-n_samples // n_ranks) * length  # of the rank that has most
    n_tokens, padded = calibration.n_tokens, calibration.mask is not None
    stacked = stacked_linears(block)
    groups = list(stacked.values())
    parameters = sum(rows * columns for rows, columns in block.values())
    # What a token passes through, and how often a group's inputs are counted.
    met = {name: architecture.chosen_share if EXPERT.search(name) else 1.0 for name in stacked}
    passed = sum(met[name] * rows * columns for name, (rows, columns) in stacked.items())
    narrow = min(columns for _, columns in block.values())
    wide = max(columns for _, columns in block.values())
    bytes_each = 2 if device.type == "cuda" else 4
    own = [plan for plan in plans if plan.recipe.propagates]
    shared = len(own) < len(plans) or not plans or n_files is not None
    n_streams = len(own) + shared
    following = sum(plan.recipe.follows_source for plan in own)  # the source's states are kept too
    squares = n_streams if n_ranks > 1 else 1
    learnt = samples_per_batch(device, length) * length
    has_experts = any(map(EXPERT.search, stacked))
    batch = learnt * (1 if has_experts else n_merged(device, learnt, wide, narrow))
    n_blocks = _n_blocks(architecture)
    tallest = max(rows * columns for rows, columns in groups)
    solving = 4 * (4 * wide * wide + 4 * tallest)
    if device.type in BATCHED:
        experts = Counter(shape for name, shape in stacked.items() if EXPERT.search(name))
        batches = (min(n, batch_size(*shape)) * batch_bytes(*shape) for shape, n in experts.items())
        solving = max(solving, *batches, 0)
    running = running_bytes(device, batch, wide, narrow) + bytes_each * batch * padded * wide
    if any(plan.recipe.tuning_steps for plan in plans):
        running = max(running, 2 * running * learnt // batch) + TUNED_BYTES * parameters
    distilled = [plan.recipe.distilling_passes for plan in own if plan.recipe.distilling_passes]
    resident: tuple[int, ...] = ()
    if distilled:  # all blocks, and the input of each for the backward pass
        inputs = n_blocks * bytes_each * learnt * narrow + 2 * running
        resident = tuple(
            int(n_blocks * parameters * each + inputs)
            for each in (DISTILLED_BYTES, DISTILLED_SCALES_BYTES)
        )
    working = (
        2 * parameters * bytes_each
        # Several ranks solve all streams of a block at once.
        + 4 * sum(columns * columns for _, columns in groups) * squares
        + max(solving, running)
    )
    costs = [solving_cost(plan.recipe, *group) for plan in plans for group in groups]
    by_gptq = methods.find("gptq")
    costs += [by_gptq.cost(*group) for _ in range(n_files or 0) for group in groups]
    most = _longest_share(costs, n_ranks)
    products, solves = most.fast, most.slow
    forwards: float = n_streams + len(own) + following
    forwards += sum(3 * plan.recipe.tuning_steps * learnt / n_positions for plan in own)
    forwards += 4 * sum(distilled)  # forward, and backward from every block's input
    products += 2.0 * passed * n_positions * forwards
    seen = n_tokens if n_ranks == 1 else n_positions
    counted = sum(met[name] * columns**2 for name, (_, columns) in stacked.items())
    products += 1.15 * seen * n_streams * counted
    fast, slow = speeds or measured_speeds(device)
    seconds = n_blocks * (products / fast + solves / slow) / EFFICIENCY
    return Estimate(
        n_blocks,
        n_tokens,
        n_streams,
        int((n_streams + following) * n_positions * narrow * bytes_each),
        working,
        2 * parameters,
        seconds,
        n_ranks,
        distilling_bytes=resident,
        experts_bytes=_experts_bytes(stacked) * squares,
    )


def samples_per_batch(device: torch.device, length: int) -> int:
    """How many samples of this length are one batch: to learn by gradients from, or to merge."""
    return max(1, TOKENS_PER_BATCH[device.type] // length)


def n_merged(device: torch.device, batch: int, wide: int, narrow: int) -> int:
    """How many batches of as many tokens go through a block at once, by the most and the fewest
    columns of its linears.
    """
    each, room = running_bytes(device, batch, wide, narrow), MERGED_BYTES[device.type]
    if device.type == "cuda" and torch.cuda.is_available():
        room = min(room, torch.cuda.get_device_properties(device).total_memory // MERGED_SHARE)
    fitting = [n for n in (2, 4, MOST_MERGED) if n * each <= room]
    return max(fitting, default=1)


def running_bytes(device: torch.device, tokens: int, wide: int, narrow: int) -> int:
    """What a block takes while as many tokens go through it."""
    return (2 if device.type == "cuda" else 4) * tokens * (6 * wide + 12 * narrow)


def _experts_bytes(stacked: dict[str, tuple[int, int]]) -> int:
    """Bytes of all Gram matrices that experts of a block could share, but for one of each kind."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for name, (_, columns) in stacked.items():
        if common := common_input(name):
            sizes.setdefault(common, []).append(4 * columns * columns)
    return sum(sum(found[1:]) for found in sizes.values())


def fitting(cost: Estimate, device: torch.device, offload: str) -> Estimate:
    """The same, with a shared Gram matrix for experts where memory forbids one for each."""
    if device.type == "cuda":
        # Not what is free just now: the same machine must choose the same when a run is resumed.
        available: int | None = torch.cuda.mem_get_info(device)[1]
        needed = cost.device_bytes(on_host=offload != "never")
    else:
        available = devices.available_host_bytes()
        needed = cost.n_local_ranks * (cost.device_bytes(on_host=False) + PROCESS_BYTES)
    forbids = available is not None and needed > available
    return replace(cost, shares_experts=forbids and cost.experts_bytes > 0)


def require_room(cost: Estimate, device: torch.device, offload: str) -> bool:
    """Whether hidden states go to host memory; stops if it does not fit either way."""
    if device.type != "cuda":
        available = devices.available_host_bytes()
        needed = cost.n_local_ranks * (cost.device_bytes(on_host=False) + PROCESS_BYTES)
        if available is not None and needed > available:
            raise HardwareError(
                f"this needs about {gib(needed)} of memory but {gib(available)} is available; "
                "use fewer --samples, a shorter --length or fewer recipes at a time"
            )
        return False
    free, total = torch.cuda.mem_get_info(device)
    on_host = offload == "always" or (offload == "auto" and cost.device_bytes(False) > free)
    needed = cost.device_bytes(on_host)
    if needed > total:
        hint = "use a shorter --length or --device cpu" if on_host else "use --offload auto"
        raise HardwareError(
            f"this needs about {gib(needed)} of GPU memory but {device} has {gib(total)}; {hint}"
        )
    available = devices.available_host_bytes()
    on_one_host = cost.n_local_ranks * cost.host_bytes(on_host)
    if available is not None and on_one_host > available:
        raise HardwareError(
            f"this needs about {gib(on_one_host)} of host memory but "
            f"{gib(available)} is available; use fewer --samples or fewer recipes at a time"
        )
    return on_host


def _largest_block(architecture: Architecture) -> dict[str, tuple[int, int]]:
    blocks: dict[str, dict[str, tuple[int, int]]] = {}
    for name, shape in architecture.linears.items():
        if found := re.match(r"(.*?\.\d+)\.(.*)", name):
            blocks.setdefault(found[1], {})[found[2]] = shape
    return max(blocks.values(), key=lambda block: sum(r * c for r, c in block.values()))


def _n_blocks(architecture: Architecture) -> int:
    return len({m[1] for n in architecture.linears if (m := re.match(r"(.*?\.\d+)\.", n))})


def stacked_linears(block: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Rows and columns of the linears of a block, those that read one input stacked."""
    stacked: dict[str, tuple[int, int]] = {}
    for name, (rows, columns) in block.items():
        parent, _, last = name.rpartition(".")
        leader = next((parts[0] for parts in families.fused() if last in parts), last)
        before = stacked.get(f"{parent}.{leader}", (0, columns))
        stacked[f"{parent}.{leader}"] = (before[0] + rows, columns)
    return stacked


def solving_cost(recipe: Recipe, rows: int, columns: int) -> Cost:
    """Cost of rounding linears that read one input, and of measuring the error."""
    return methods.find(recipe.method).cost(rows, columns) + measuring_cost(rows, columns)


def _longest_share(costs: Sequence[Cost], n_ranks: int) -> Cost:
    """The share of the rank with the most to solve."""
    owners = assign([cost.fast + cost.slow for cost in costs], n_ranks)
    shares = [Cost() for _ in range(n_ranks)]
    for owner, cost in zip(owners, costs, strict=True):
        shares[owner] += cost
    return max(shares, key=lambda share: share.fast + share.slow)


@cache
def measured_speeds(device: torch.device) -> tuple[float, float]:
    """Operations per second of a product in the compute dtype, and in float32.

    Measured once: a process that makes many checkpoints would spend more on this than on some of
    them.
    """
    # A larger product finds the same speed of a few threads, and keeps many of them busy.
    size = 4096 if device.type == "cuda" else 512 if torch.get_num_threads() <= 8 else 1024
    types = (torch.bfloat16, torch.float32) if device.type == "cuda" else (torch.float32,)
    speeds = []
    for dtype in types:
        matrix = torch.randn(size, size, device=device, dtype=dtype)
        for repeats in (2, 5):  # the first run is slow
            started = time.perf_counter()
            for _ in range(repeats):
                product = matrix @ matrix
            product[0, 0].item()
            seconds = (time.perf_counter() - started) / repeats
        speeds.append(2 * size**3 / seconds)
    return speeds[0], speeds[-1]
