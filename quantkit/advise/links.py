"""What it takes GPUs to talk to each other while they share a model."""

from quantkit.advise.efficiency import Efficiency
from quantkit.hardware.gpus import GPU

PCIE_LANE_GB_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""One way."""
ASSUMED_PCIE = "4.0 x16"


def link_gb_s(gpu: GPU) -> tuple[float, bool]:
    """One way between two such GPUs, and whether that is over PCIe."""
    if gpu.link_gb_s:
        return gpu.link_gb_s / 2, False
    generation, _, lanes = (gpu.pcie or ASSUMED_PCIE).partition(" x")
    return PCIE_LANE_GB_S[int(float(generation))] * int(lanes), True


def reduce_seconds(gpu: GPU, n_gpus: int, size_bytes: float, end: Efficiency) -> float:
    """One all-reduce over so many GPUs, as a ring does it."""
    if n_gpus == 1:
        return 0.0
    return _at_least(gpu, end) + 2 * (n_gpus - 1) / n_gpus * size_bytes / _rate(gpu, end)


def hand_on_seconds(gpu: GPU, size_bytes: float, end: Efficiency) -> float:
    """From one stage of a pipeline to the next."""
    return _at_least(gpu, end) + size_bytes / _rate(gpu, end)


def _rate(gpu: GPU, end: Efficiency) -> float:
    return link_gb_s(gpu)[0] * 1e9 * end.link


def _at_least(gpu: GPU, end: Efficiency) -> float:
    return end.reduce_seconds * (2 if link_gb_s(gpu)[1] else 1)
