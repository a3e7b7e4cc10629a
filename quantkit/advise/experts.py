"""Load imbalance between GPUs that hold whole experts: the fullest makes the others wait."""

import math


def unevenness(n_needed: float, n_experts: int | None, n_gpus: int) -> float:
    """Work of the fullest GPU relative to an even share.

    `n_needed` of `n_experts` are needed, or that many tokens each need one expert (None), and any
    GPU is equally likely to hold it. The expected maximum of several sums lies at most sqrt(2 ln n)
    deviations above their mean, and near it. With all experts needed, GPUs differ only by the
    remainder of the division.
    """
    if n_gpus == 1 or n_needed <= 0:
        return 1.0
    even, wanted, most, rest = n_needed / n_gpus, n_needed, n_needed, 1.0
    if n_experts is not None:
        held = -(-n_experts // n_gpus)
        # As if all GPUs were as full as the fullest, so that all experts are needed in the end.
        wanted = n_needed * held * n_gpus / n_experts
        most, rest = min(float(held), wanted), 1 - wanted / (held * n_gpus)
    variance = wanted / n_gpus * (1 - 1 / n_gpus) * max(0.0, rest)
    fullest = wanted / n_gpus + math.sqrt(2 * math.log(n_gpus) * variance)
    return min(fullest, most) / even
