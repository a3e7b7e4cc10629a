"""Loads a GPU's libraries and kernels while the main thread still reads text.

The first matrix product, factorisation, attention and kernel of a process take seconds between
them, to load what every later one finds in memory. Rounding a small matrix on a thread of its own
loads most of it.
"""

import threading

import torch

from quantkit.methods.contract import Linears
from quantkit.methods.gptq import ENOUGH, ColumnByColumn
from quantkit.methods.statistics import Statistics
from quantkit.schemes import WeightScheme

WIDTH = 256
HEAD_DIM = 128


def begin(device: torch.device) -> threading.Thread | None:
    """Join it before the main thread uses the GPU: two threads must not load one library.

    Not a daemon: Python cannot end while one is inside the driver.
    """
    if device.type != "cuda":
        return None
    thread = threading.Thread(target=_try, args=(device,), name="warm-up")
    thread.start()
    return thread


def _try(device: torch.device) -> None:
    """What fails here fails again, and is reported, where its result matters."""
    try:
        use(device)
    except Exception:
        return


@torch.no_grad()
def use(device: torch.device) -> None:
    """Round a small weight as GPTQ does, after a forward like that of a block."""
    with torch.cuda.device(device):
        states = torch.eye(WIDTH, dtype=torch.bfloat16, device=device)
        heads = states.new_zeros(1, 1, WIDTH, HEAD_DIM)
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        torch.nn.functional.linear(states, states)
        statistics = Statistics.zeros(WIDTH, device)
        for _ in range(ENOUGH):
            statistics.add(states)
        statistics.complete()
        scheme = WeightScheme(num_bits=4, strategy="group", group_size=128)
        options = {"sweeps": 1}
        ColumnByColumn().round(
            Linears(states.float(), states.dtype, scheme, options, statistics=statistics)
        )
