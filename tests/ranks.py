"""Runs that several processes share, on CPUs: forked from a server that has its libraries loaded.

Every rank is told its place as torchrun tells it, and calls what the command line calls.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from processes import free_port

PRELOADED = (
    "quantkit.onepass.run",
    "quantkit.onepass.distributed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)


def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def start(n_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """A queue of what `function(ranks, *arguments)` gives, and the processes that call it."""
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


def end(processes: list[Any], seconds: float) -> list[int | None]:
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
    from quantkit import launch
    from quantkit.errors import QuantkitError
    from quantkit.onepass.distributed import joined

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
        results.put((rank, f"{type(error).__name__}: {error} (reported: {error.is_reported})"))
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
    """Quantise, and give the digests of what was written.

    `ranks` is None for a run of one process that knows of no others. `stop` is a rank, and the
    block at which it is killed, once the first block is on disk.
    """
    import signal

    from quantkit import recipe
    from quantkit.model.source import ModelSource
    from quantkit.onepass import onepass
    from quantkit.onepass.prepare import CalibrationChoice, Run
    from quantkit.onepass.run import quantize as whole

    if stop is not None and ranks.rank == stop[0]:
        observe = onepass.Visit.observe

        def until(visit: Any, *rest: Any) -> Any:
            if visit.index == stop[1]:
                while len(list(out.glob(".*/journal/00000.json"))) < len(names):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            return observe(visit, *rest)

        onepass.Visit.observe = until  # type: ignore[method-assign]
    made = whole(
        ModelSource.open(str(model)),
        [recipe.load(name) for name in names],
        out,
        device="cpu",
        calibration=CalibrationChoice(str(text), n_samples, 64),
        run=Run() if ranks is None else Run(ranks=ranks),
    )
    return {checkpoint.label: checkpoint.digest for checkpoint in made}


def observe(ranks: Any, model: Path, n_samples: int) -> list[dict[str, Any]]:
    """The statistics of every group of every block, on random tokens of different lengths."""
    from quantkit import recipe
    from quantkit.calibration.tokens import CalibrationTokens
    from quantkit.model.architecture import Architecture
    from quantkit.model.blocks import Decoder
    from quantkit.model.source import ModelSource
    from quantkit.onepass import onepass
    from quantkit.onepass.ranks import Ranks
    from quantkit.onepass.streams import streams_of
    from quantkit.onepass.visit import Visit
    from quantkit.plan import checkpoint as plan

    source = ModelSource.open(str(model))
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 4096, (n_samples, 64), generator=generator)
    lengths = torch.randint(9, 65, (n_samples,), generator=generator)
    tokens = CalibrationTokens("random", ids, lengths).longest_first()
    architecture = Architecture.of(source.folder)
    made = plan.make(architecture, architecture.stored(source), recipe.load("awq-w4a16+kv-fp8"))
    ranks = ranks or Ranks()
    found = []
    with torch.no_grad():
        decoder = Decoder.open(source, torch.device("cpu"))
        hidden, arguments, padding = onepass._begin(decoder, tokens, ranks)
        (stream,) = streams_of([made], hidden, None)
        for index in range(len(decoder.blocks)):
            state = decoder.read(index)
            visit = Visit(decoder, index, state, stream, arguments[index], padding, ranks)
            seen = visit.observe([made], [0])
            for leader, statistics in seen.collector.statistics.items():
                found.append(
                    {
                        "members": [leader, *seen.collector.groups[leader]],
                        "gram": statistics.gram.numpy(),
                        "total": statistics.total.numpy(),
                        "max_abs": statistics.max_abs.numpy(),
                        "n_tokens": statistics.n_tokens,
                        "samples": seen.samples.numpy(),
                        "keys": {k: float(v.max()) for k, v in seen.cached.keys.items()},
                        "feeder": seen.feeders.get(leader),
                    }
                )
    return found


def faulty(ranks: Any) -> Any:
    from quantkit.errors import MethodError

    ranks.share("all are here")
    if ranks.rank == 1:
        raise MethodError("this tensor is no good")
    ranks.share(None, owner=1)


def slow(ranks: Any) -> Any:
    from quantkit.onepass import distributed

    distributed.PATIENCE_SECONDS = 0.5
    ranks.share(0)
    if ranks.rank == 1:
        time.sleep(1.5)
        return
    ranks.share(None, owner=1)


def shared(ranks: Any) -> Any:
    from quantkit.onepass.ranks import Job

    state = {
        "numbers": torch.arange(5, dtype=torch.int64) * (1 + ranks.rank),
        "small": torch.tensor(0.5, dtype=torch.bfloat16),
        "fp8": torch.ones(3, 2).to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 4),
        "turned": torch.arange(6).view(2, 3).t(),
        "words": ["rank", ranks.rank],
    }
    found = ranks.share(state, owner=1)
    total, largest = torch.ones(3) * ranks.rank, torch.tensor([float(ranks.rank), float("nan")])
    ranks.sum_([total])
    ranks.max_([largest])
    samples = ranks.first_samples(5, lambda n: torch.arange(9)[ranks.rank :: ranks.size][:n])
    taken: list[Any] = []
    jobs = [Job(cost, lambda c=cost: (c, ranks.rank), taken.append) for cost in (1, 5, 2, 2)]
    ranks.spread(jobs)
    plain = {k: v.float().tolist() if k != "words" else v for k, v in found.items()}
    return plain, total.tolist(), largest.tolist(), samples.tolist(), taken
