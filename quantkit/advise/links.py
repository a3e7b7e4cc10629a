"""Communication time between GPUs that share a model."""

from quantkit.advise.efficiency import Efficiency
from quantkit.hardware.gpus import GPU

PCIE_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""One way."""
ASSUMED_PCIE = "4.0 x16"


def joins(gpu: GPU, n_gpus: int) -> bool:
    """Whether these GPUs have a link that connects this many; bridges connect two."""
    return bool(gpu.link_gb_s) and n_gpus <= (gpu.link_gpus or n_gpus)


def link_gb_s(gpu: GPU, n_gpus: int = 2) -> tuple[float, bool]:
    """One-way rate between this many GPUs, and whether it is PCIe.

    A ring is as slow as its slowest link: where bridges connect pairs, four GPUs talk over PCIe.
    """
    if gpu.link_gb_s and joins(gpu, n_gpus):
        return gpu.link_gb_s / 2, False
    return pcie_gb_s(gpu), True


def pcie_gb_s(gpu: GPU) -> float:
    """One-way rate between a GPU and its host."""
    generation, _, lanes = (gpu.pcie or ASSUMED_PCIE).partition(" x")
    return PCIE_LANE_GB_S[int(float(generation))] * int(lanes)


def reduce_seconds(gpu: GPU, n_gpus: int, size_bytes: float, end: Efficiency) -> float:
    """Time of one ring all-reduce over this many GPUs."""
    if n_gpus == 1:
        return 0.0
    moved = 2 * (n_gpus - 1) / n_gpus * size_bytes
    return _at_least(gpu, n_gpus, end) + moved / _rate(gpu, n_gpus, end)


def hand_on_seconds(gpu: GPU, n_gpus: int, size_bytes: float, end: Efficiency) -> float:
    """Time from one pipeline stage to the next, with this many GPUs in all."""
    return _at_least(gpu, n_gpus, end) + size_bytes / _rate(gpu, n_gpus, end)


def _rate(gpu: GPU, n_gpus: int, end: Efficiency) -> float:
    return link_gb_s(gpu, n_gpus)[0] * 1e9 * end.link


def _at_least(gpu: GPU, n_gpus: int, end: Efficiency) -> float:
    return end.reduce_seconds * (2 if link_gb_s(gpu, n_gpus)[1] else 1)
