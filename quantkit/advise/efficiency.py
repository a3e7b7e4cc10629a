"""Share of a device's peak rates that engines reach: the assumptions of every speed estimate.

Each has a slow end, a typical value and a fast end. Sources:

- Bandwidth. Decoding Llama 3 8B in 16 bits, llama.cpp reads 15.0 GB per token 54.8 times per second
  on an RTX 4090, 47.4 times on an RTX 3090 and 18.8 times on an M1 Max: 0.82, 0.76 and 0.70 of peak
  (https://github.com/XiongjieDai/GPU-Benchmarks-on-LLM-Inference); on the two cards 0.9 once the
  time per layer (below) is subtracted.
- Unpacking. The same page has a 70B in Q4_K_M at 0.8 of peak on both cards, where layers are large,
  so blocks of fewer bits cost a tenth. Prompts of such files run there at 0.76 of the 16-bit speed.
  Apple's GPUs reach 0.41 to 0.46 of peak. vLLM's Marlin kernel stays close to the bandwidth bound
  where memory is slow (https://github.com/IST-DASLab/marlin).
- Unpacking in vLLM where memory is fast. On an H200 the 4-bit layers of an 8B take 2.3 ms per step
  whatever the memory could do (1.6 TB/s), and 3.4 ms for 64 users: multiplication adds to that
  (benchmarks/results/vllm-speed-h200.json). Newer GPUs are assumed to scale with their number of
  cores.
- Unpacking on data-centre GPUs, and layers. llama.cpp reads Q4_K_M files there no faster than
  arithmetic allows, and each layer adds 50 us: both are fitted to files of 1.8, 2.7, 5.7, 16.8 and
  18.3 GB with 26 to 64 layers on V100, A100, H100, H200 and B300, and reproduce all of them within
  a third, on Hopper within a fifth
  (https://pavlokhmel.com/llm_throughput_benchmark_on_13_gpus_and_10_models.html). AMD's are assumed
  to match NVIDIA's of the same generation; nothing was measured there.
- CPUs. A desktop's memory gives llama.cpp 0.6 of peak for Q4_K_M, and cores are near their limit
  with few users, in either engine. Assumed.
- Compute. On the first page prompts run at 0.55 (M2 Ultra) to 0.85 (RTX 4090) of the dense
  16-bit rate.
- Overhead per layer and per step: kernel launches, sampling, scheduling. Assumed; Llama-3.1-8B with
  vLLM 0.23 on an A100 agrees (benchmarks/published.py).
- Experts. vLLM sorts tokens by expert and launches several small kernels in each MoE layer: on an
  A100 Qwen3-30B-A3B took 9.6 ms per token for one user, of which reading explains 4 and other
  layers 1.3 (https://github.com/tenstorrent/tt-inference-server/issues/340, July 2025): 90 us per
  layer is the slow end. The typical value and the fast end are assumed for later versions.
  llama.cpp has that model in Q4_K_M at 196 tokens per second on an RTX 4090 and 167 on a 3090 Ti
  (https://runaihome.com/blog/qwen3-30b-a3b-local-ai-guide-2026/,
  https://smeltcore.com/recipes/qwen3-30b-a3b-rtx-3090-ti/): 10 us more per layer than without
  experts. The ends are assumed.
- Host time. vLLM 0.26 on an H200 decodes a 1B model no faster in fewer bits: 1.5 ms per step for
  one user and 2.2 ms for 64, in which its CPU prepares the next step
  (benchmarks/results/vllm-speed-small-h200.json). The ends are assumed, and so are the same growth
  for more users and llama.cpp's values.
- Batching. vLLM computes a step for all users. llama.cpp's throughput did not grow with the number
  of users on an H200 (https://developers.redhat.com/articles/2025/09/30/
  vllm-or-llamacpp-choosing-right-llm-inference-engine-your-use-case): that is its slow end.
- Links. The share of a link's one-way rate that all-reduces reach, and their minimum time. Assumed.
"""

from dataclasses import dataclass, replace

EVERYBODY = 1 << 30


@dataclass(frozen=True)
class Efficiency:
    """Slow end, typical value or fast end."""

    bandwidth: float
    """Share of peak bandwidth."""
    unpacking: float
    """Share of that bandwidth that weight-only formats reach."""
    compute: float
    """Share of the dense peak rate."""
    layer_seconds: float
    """Overhead per layer."""
    step_seconds: float
    """Overhead per step."""
    link: float
    """Share of a link's one-way rate."""
    reduce_seconds: float
    """Minimum time of an all-reduce over NVLink; twice that over PCIe."""
    together: int = EVERYBODY
    """Users whose tokens are computed in one step; more than that take turns."""
    host_seconds: float = 0.0
    """CPU time per step, in parallel to the GPU: no step is shorter."""
    host_user_seconds: float = 0.0
    """Additional CPU time per user."""
    expert_seconds: float = 0.0
    """Overhead per MoE layer."""
    packed_compute: float | None = None
    """Share of 16-bit compute that weight-only formats reach; None: the same as for bandwidth."""

    @property
    def unpacked_compute(self) -> float:
        return self.unpacking if self.packed_compute is None else self.packed_compute


SLOW, TYPICAL, FAST = 0, 1, 2
VLLM = (
    Efficiency(0.62, 0.70, 0.40, 40e-6, 2.0e-3, 0.35, 20e-6, EVERYBODY, 3e-3, 30e-6, 90e-6),
    Efficiency(0.80, 0.88, 0.60, 15e-6, 0.6e-3, 0.60, 10e-6, EVERYBODY, 1.45e-3, 11.5e-6, 50e-6),
    Efficiency(0.92, 1.00, 0.80, 5e-6, 0.1e-3, 0.85, 5e-6, EVERYBODY, 0.5e-3, 4e-6, 15e-6),
)
LLAMA_CPP = (
    Efficiency(0.68, 0.65, 0.35, 110e-6, 0.8e-3, 0.35, 20e-6, 1, 2e-3, 0.0, 50e-6, 0.55),
    Efficiency(0.90, 0.90, 0.60, 50e-6, 0.3e-3, 0.60, 10e-6, 4, 0.8e-3, 0.0, 10e-6, 0.76),
    Efficiency(0.97, 1.00, 0.85, 15e-6, 0.0, 0.85, 5e-6, 16, 0.3e-3, 0.0, 0.0, 0.95),
)
LLAMA_CPP_CPU = (
    Efficiency(0.62, 0.55, 0.35, 20e-6, 0.5e-3, 0.35, 20e-6, 1, 2e-3, 0.0, 70e-6),
    Efficiency(0.82, 0.76, 0.60, 5e-6, 0.1e-3, 0.60, 10e-6, 2, 0.8e-3, 0.0, 40e-6),
    Efficiency(0.92, 0.95, 0.85, 1e-6, 0.0, 0.85, 5e-6, 4, 0.3e-3, 0.0, 15e-6),
)
VLLM_CPU = (
    replace(VLLM[SLOW], together=1),
    replace(VLLM[TYPICAL], together=2),
    replace(VLLM[FAST], together=4),
)
LLAMA_CPP_APPLE = (
    Efficiency(0.55, 0.50, 0.35, 20e-6, 0.5e-3, 0.35, 20e-6, 1, 2e-3, 0.0, 70e-6),
    Efficiency(0.72, 0.66, 0.55, 5e-6, 0.1e-3, 0.60, 10e-6, 4, 0.8e-3, 0.0, 40e-6),
    Efficiency(0.85, 0.95, 0.75, 1e-6, 0.0, 0.85, 5e-6, 16, 0.3e-3, 0.0, 15e-6),
)


UNPACKED_GB_S = {
    "llama.cpp": {
        "7.0": 500.0, "8.0": 810.0, "9.0": 1560.0, "10.0": 1750.0, "10.3": 1750.0,
        "gfx90a": 810.0, "gfx942": 1560.0, "gfx950": 1750.0,
    },
    "vllm": {"9.0": 1600.0, "10.0": 1800.0, "10.3": 1800.0, "gfx942": 1600.0, "gfx950": 1800.0},
}  # fmt: skip
"""By compute capability: the fastest an engine reads packed weights; others have no limit."""


def of(engine: str, vendor: str) -> tuple[Efficiency, Efficiency, Efficiency]:
    """Slow end, typical value and fast end."""
    if engine == "vllm":
        return VLLM_CPU if vendor == "cpu" else VLLM
    return {"apple": LLAMA_CPP_APPLE, "cpu": LLAMA_CPP_CPU}.get(vendor, LLAMA_CPP)


def of_host(end: Efficiency) -> Efficiency:
    """What llama.cpp reaches in the memory of a GPU's host, at the same end as on the GPU."""
    return LLAMA_CPP_CPU[LLAMA_CPP.index(end)]
