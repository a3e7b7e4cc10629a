"""Runs that several processes share, on CPUs: forked from a server that has its libraries loaded.

Every rank is told its place as torchrun tells it, and calls what the command line calls.
"""

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRELOADED = ("torch", "torch.distributed", "transformers", "quantkit.quantize.run", "ranks")


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(n_ranks: int, function: Callable[..., Any], *arguments: Any) -> "list[Any]":
    """Processes that call `function(ranks, device, *arguments)`, and a queue of what it gave."""
    context, port = _context(), free_port()
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, n_ranks, port, results, function, arguments))
        for rank in range(n_ranks)
    ]
    for process in processes:
        process.start()
    return [results, *processes]


def run(n_ranks: int, function: Callable[..., Any], *arguments: Any, seconds: float = 60) -> Any:
    """What the function gave on every rank, by rank; all must end well."""
    results, *processes = start(n_ranks, function, *arguments)
    found = dict(results.get(timeout=seconds) for _ in processes)
    codes = end(processes, seconds)
    errors = [value for value in found.values() if isinstance(value, str) and "Error" in value]
    assert codes == [0] * n_ranks, errors
    return [found[rank] for rank in range(n_ranks)]


def end(processes: "list[Any]", seconds: float) -> list[int | None]:
    """Exit codes, of all that end in time."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.exitcode is None:
            process.kill()
    return codes


def _rank(
    rank: int, n_ranks: int, port: int, results: Any, function: Callable[..., Any], arguments: Any
) -> None:
    import torch

    from quantkit import launch
    from quantkit.errors import QuantkitError
    from quantkit.quantize.together import joined

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(n_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    place = launch.place()
    assert place is not None
    try:
        with joined(place, "cpu") as ranks:
            value = function(ranks, *arguments)
    except QuantkitError as error:
        results.put((rank, f"{type(error).__name__}: {error} (told: {error.told})"))
        results.close()
        results.join_thread()
        os._exit(3)
    results.put((rank, value))


def quantize(
    ranks: Any,
    model: Path,
    text: Path,
    out: Path,
    names: list[str],
    n_samples: int = 8,
    stop: tuple[int, int] | None = None,
) -> dict[str, str] | None:
    """Quantise, and give the digests of what was written; `stop` is a rank and where it is killed.

    `ranks` is None for a run of one process that knows of no others.
    """
    import signal

    from quantkit import recipe
    from quantkit.model.source import ModelSource
    from quantkit.quantize import onepass
    from quantkit.quantize.prepare import CalibrationChoice
    from quantkit.quantize.run import quantize as whole

    if stop is not None and ranks.rank == stop[0]:
        observe = onepass.Visit.observe

        def until(visit: Any, *rest: Any) -> Any:
            if visit.index == stop[1]:
                os.kill(os.getpid(), signal.SIGKILL)
            return observe(visit, *rest)

        onepass.Visit.observe = until  # type: ignore[method-assign]
    made = whole(
        ModelSource.open(str(model)),
        [recipe.load(name) for name in names],
        out,
        device="cpu",
        calibration=CalibrationChoice(str(text), n_samples, 64),
        ranks=ranks,
    )
    return {checkpoint.label: checkpoint.digest for checkpoint in made}
