"""GGUF files that do not fit on a GPU: which layers it holds, and how fast the rest is.

llama.cpp puts the output layer and the last layers on the GPU (--n-gpu-layers counts the output as
one) and computes the others in place, in the host's memory, caches included. For MoE models it can
keep everything on the GPU except the experts of the first layers (--n-cpu-moe), which pays more: a
token reads few of them. Prompts are computed on the GPU, for which everything in the host's memory
is copied over PCIe for every 512 tokens.
"""

from dataclasses import dataclass, replace

from quantkit.advise import efficiency, kv, links, memory, parallel, weights
from quantkit.advise import speed as speeds
from quantkit.advise.efficiency import Efficiency
from quantkit.advise.memory import Fit
from quantkit.advise.sizing import Size, SizingRequest, size_of, usable_share
from quantkit.advise.speed import Case, Load, Speed
from quantkit.advise.work import GGUF_EXPERT, Part
from quantkit.hardware import gpus
from quantkit.hardware.gpus import GPU
from quantkit.recipe import GGUFRecipe

UNIFIED = ("Jetson", "DGX Spark", "GH200", "GB200", "Ryzen")
"""Devices whose GPU shares the host's memory, or reaches it other than by PCIe."""
DESKTOP_BYTES = 33 << 30
"""GPUs up to this size are assumed to be in a desktop."""
DESKTOP, SERVER = "CPU 2 x DDR5-5600", "CPU 8 x DDR5-4800"
SPARE_BYTES = 2 << 30
"""Host memory reserved for the system and the engine's own data."""
NOTHING = Part()
HOPS = 2.0
"""Time of an activation transfer between GPU and host, in minimum all-reduce times."""


@dataclass(frozen=True)
class Host:
    """Memory of the machine that holds the GPU."""

    bandwidth_gb_s: float
    memory_bytes: int | None = None
    """None: unknown, and not checked."""
    name: str = "the host's memory"
    is_measured: bool = False
    """Whether its read bandwidth was measured, so that nothing is subtracted from it."""


@dataclass(frozen=True)
class Offload:
    """Layout of a file across a GPU and the host's memory."""

    host: Host
    n_layers: int
    on_gpu: int
    """Layers on the GPU, the last ones; all of them if only experts are offloaded."""
    n_cpu_moe: int = 0
    """Layers whose experts are in the host's memory, the first ones."""
    gpu_read: Part = NOTHING
    """Bytes on the GPU that a token may read, without the output layer."""
    host_read: Part = NOTHING
    host_values: int = 0
    """Numbers of one user's cache in the host's memory for a full context."""
    context: int = 1

    @property
    def n_gpu_layers(self) -> int:
        """As llama.cpp counts them, the output layer included."""
        return self.on_gpu + 1

    @property
    def words(self) -> str:
        """A short description."""
        if self.n_cpu_moe:
            return f"experts of {self.n_cpu_moe} of {self.n_layers} layers in host memory"
        return f"{self.on_gpu} of {self.n_layers} layers on the GPU"


def usual_host(gpu: GPU) -> Host:
    """The host assumed for such a GPU if none is given."""
    found = gpus.find(DESKTOP if gpu.usable_bytes < DESKTOP_BYTES else SERVER)
    return Host(found.bandwidth_gb_s, None, found.name.removeprefix("CPU "))


def is_possible(gpu: GPU) -> bool:
    """Whether a GPU has a host with separate memory."""
    return gpu.vendor not in ("apple", "cpu") and not gpu.name.startswith(UNIFIED)


def fitted(wanted: SizingRequest, host: Host) -> tuple[Size, Fit] | None:
    """As many layers on the GPU as fit beside the caches of all users.

    None if the host's memory has no room for the rest, or the GPU not even for the output layer.
    """
    if not isinstance(wanted.recipe, GGUFRecipe) or not is_possible(wanted.gpu):
        return None
    layout = _Layout(wanted)
    found = layout.by_experts() or layout.by_layers()
    if found is None:
        return None
    offload, gpu_bytes, gpu_user = found
    users, left = wanted.users or 1, layout.usable - layout.overhead - gpu_bytes
    host_user = offload.host_values * wanted.kv_bits // 8
    host_bytes = layout.total - gpu_bytes + (layout.table if layout.is_tied else 0)
    offload = replace(offload, host=host)
    room = left // max(1, gpu_user)
    if host.memory_bytes is not None:
        spare = host.memory_bytes - SPARE_BYTES - host_bytes
        if spare < users * host_user:
            return None
        room = min(room, spare // max(1, host_user))
    fit = Fit(
        fits=True, reason="", split=wanted.split, usable_bytes=layout.usable,
        weight_bytes=gpu_bytes, overhead_bytes=layout.overhead, kv_bytes=left,
        user_bytes=max(1, gpu_user), users=room, kv_tokens=room * wanted.context,
        model_bytes=gpu_bytes, draft_bytes=0, adapter_bytes=0, draft_user_bytes=0,
        host_bytes=host_bytes + users * host_user,
    )  # fmt: skip
    size = size_of(wanted)
    return replace(size, sequences=users, fit=fit, offload=offload), fit


class _Layout:
    """Bytes of a file's layers, and the GPU memory available for them."""

    def __init__(self, wanted: SizingRequest) -> None:
        shape, recipe = wanted.shape, wanted.recipe
        assert isinstance(recipe, GGUFRecipe)
        self.wanted = wanted
        n = int(shape.config["num_hidden_layers"])
        tensors = weights.gguf_tensors(shape, recipe)
        self.dense, self.experts, self.table, self.rest = [0] * n, [0] * n, 0, 0
        for name, size in tensors.items():
            if (layer := parallel.layer_of(name)) is not None:
                part = self.experts if GGUF_EXPERT.search(name) else self.dense
                part[layer] += size
            elif name == "token_embd.weight":
                self.table = size  # always looked up in the host's memory
            else:
                self.rest += size
        self.total = sum(tensors.values())
        self.is_tied = "output.weight" not in tensors
        if self.is_tied:  # which is then on the GPU a second time
            self.rest += self.table
        engine = memory.LLAMA_CPP
        pages = -(-wanted.context // engine.page_tokens) * engine.page_tokens
        kept = [layer.values(pages) for layer in kv.layers(shape.config)]
        self.values = kept + [0] * (n - len(kept))
        count = wanted.count
        share = usable_share(wanted.gpu, wanted.utilisation)
        self.usable = count * int(wanted.gpu.usable_bytes * share)
        self.overhead = count * memory.overhead_bytes(shape, engine, 1, by_layers=True)
        self.overhead += count * wanted.extras.fixed_bytes

    def _has_room(self, gpu_bytes: int, user: int) -> bool:
        users = self.wanted.users or 1
        return gpu_bytes + self.overhead + users * user <= self.usable

    def by_experts(self) -> tuple[Offload, int, int] | None:
        """Everything on the GPU except the experts of the first layers, of as few layers as
        possible.
        """
        n = len(self.dense)
        if not any(self.experts):
            return None
        user = sum(self.values) * self.wanted.kv_bits // 8
        for left_out in range(1, n + 1):
            held = sum(self.dense) + sum(self.experts[left_out:])
            if self._has_room(self.rest + held, user):
                offload = Offload(
                    Host(0.0), n, n, left_out,
                    gpu_read=Part(sum(self.dense), sum(self.experts[left_out:])),
                    host_read=Part(0, sum(self.experts[:left_out])),
                    context=self.wanted.context,
                )  # fmt: skip
                return offload, self.rest + held, user
        return None

    def by_layers(self) -> tuple[Offload, int, int] | None:
        """The last layers on the GPU, as many as fit."""
        n = len(self.dense)
        for first in range(1, n + 1):
            dense, experts = sum(self.dense[first:]), sum(self.experts[first:])
            user = sum(self.values[first:]) * self.wanted.kv_bits // 8
            if self._has_room(self.rest + dense + experts, user):
                offload = Offload(
                    Host(0.0), n, n - first,
                    gpu_read=Part(dense, experts),
                    host_read=Part(sum(self.dense[:first]), sum(self.experts[:first])),
                    host_values=sum(self.values[:first]),
                    context=self.wanted.context,
                )  # fmt: skip
                return offload, self.rest + dense + experts, user
        return None


def estimate(case: Case, load: Load, offload: Offload) -> Speed:
    """Speed of a file that is partly in the host's memory."""

    def rate(case: Case, users: int, depth: int, end: Efficiency) -> float:
        return step_seconds(case, users, depth, end, offload)

    def copying(case: Case, end: Efficiency, chunks: int) -> float:
        host = offload.host_read
        link = links.pcie_gb_s(case.gpu) * 1e9 * end.link
        return chunks * (host.dense + host.experts) / link

    found = speeds.estimate(case, load, rate, copying)
    return replace(found, bound="host memory")


def step_seconds(case: Case, users: int, depth: int, end: Efficiency, offload: Offload) -> float:
    """One token for every user: the GPU's layers, then the host's, once per user."""
    together = min(users, end.together)
    wanted = case.work.experts_needed(together)
    own = case.work.experts_needed(1)
    gpu, host = offload.gpu_read, offload.host_read
    bits = case.format.kv_bits / 8
    values = sum(n * layer.values(depth) for layer, n in case.layers)
    there = offload.host_values * depth / offload.context
    on_gpu = speeds.read_seconds(case, gpu.dense + gpu.experts * wanted, end)
    on_gpu += together * max(0.0, values - there) * bits / (case.gpu.bandwidth_gb_s * 1e9)
    on_gpu += speeds.head_seconds(case, together, end)
    own = speeds.own_seconds(case, end, offload.on_gpu)
    cpu = efficiency.of_host(end)
    rate = offload.host.bandwidth_gb_s * 1e9
    if not offload.host.is_measured:
        rate *= cpu.bandwidth
    packed = rate * (cpu.unpacking if case.is_unpacked else 1.0)
    # A CPU is near its limit with one user, so batching gains nothing.
    on_host = together * ((host.dense + host.experts * own) / packed + there * bits / rate)
    n_hops = 2 * offload.n_cpu_moe if offload.n_cpu_moe else 1
    hops = n_hops * HOPS * end.reduce_seconds
    return speeds.in_turns(case, users, end, own + on_gpu + on_host + hops, own)
