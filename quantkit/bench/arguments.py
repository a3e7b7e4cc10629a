"""Parses command-line values into lists, durations, loads and workloads."""

from dataclasses import dataclass
from pathlib import Path

from quantkit.bench import workloads
from quantkit.bench.arrivals import Kind, Load
from quantkit.bench.record import Target
from quantkit.bench.workloads import Fixed, Recorded, Source
from quantkit.engine.durations import seconds
from quantkit.errors import UsageError
from quantkit.progress import Progress

ARRIVALS: tuple[Kind, ...] = ("poisson", "constant")


def counts(text: str, option: str) -> list[int]:
    """`1,8,32` as numbers."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} takes numbers such as 1,8,32, not '{text}'")
    return list(dict.fromkeys(map(int, parts)))


def rates(text: str) -> list[float]:
    """`0.5,2` as requests per second."""
    try:
        found = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or not all(0 < rate < float("inf") for rate in found):
        raise UsageError(f"--rate takes requests per second such as 0.5,2,8, not '{text}'")
    return list(dict.fromkeys(found))


def target(ttft: str | None, tpot: str | None, attain: float) -> Target | None:
    """The latency target, if one is given."""
    first, each = seconds(ttft, "--ttft"), seconds(tpot, "--tpot")
    if first is None and each is None:
        return None
    return Target(ttft_s=first, tpot_s=each, share=attain / 100)


def loads(
    concurrency: str | None, rate: str | None, arrivals: str, trace: Recorded | None, direct: bool
) -> list[Load]:
    """The requested loads; by default one user, or the trace's own times."""
    if arrivals not in ARRIVALS:
        raise UsageError(f"--arrivals is {' or '.join(ARRIVALS)}, not '{arrivals}'")
    found: list[Load] = []
    if concurrency:
        kind: Kind = "batch" if direct else "closed"
        found += [Load(kind, concurrency=n) for n in counts(concurrency, "--concurrency")]
    if rate:
        if direct:
            raise UsageError("--rate needs a server; an offline batch comes all at once")
        open_loop: Kind = "poisson" if arrivals == "poisson" else "constant"
        found += [Load(open_loop, rate=value) for value in rates(rate)]
    if found:
        return found
    if trace is not None and trace.has_times and not direct:
        return [Load("trace")]
    return [Load("batch" if direct else "closed", concurrency=1)]


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and answers as typed: `128,2048`."""

    prompt: str
    output: str
    shared_prefix: int = 0


@dataclass(frozen=True)
class Recording:
    """Recorded requests, in place of fixed lengths."""

    trace: Path | None = None
    calibration: str | None = None
    n_requests: int | None = None
    seed: int = 0


def sources(
    lengths: Lengths, recording: Recording, model: Path | None, progress: Progress
) -> list[Source]:
    """The workloads: a trace, calibration data, or all combinations of lengths."""
    trace, calibration = recording.trace, recording.calibration
    if trace is not None and calibration is not None:
        raise UsageError("a trace and a calibration set were named; measure with one at a time")
    if trace is not None:
        return [workloads.trace(trace, recording.seed)]
    outputs = counts(lengths.output, "--output")
    if calibration is not None:
        n = recording.n_requests
        return [_calibrated(calibration, tokens, model, n, progress) for tokens in outputs]
    return [
        Fixed(n_prompt, n_output, lengths.shared_prefix)
        for n_prompt in counts(lengths.prompt, "--prompt")
        for n_output in outputs
    ]


def _calibrated(
    name: str, n_output: int, model: Path | None, n_requests: int | None, progress: Progress
) -> Recorded:
    from quantkit.calibration.build import Vocabulary
    from quantkit.calibration.loading import load

    if model is None:
        raise UsageError("--calibration needs the model's tokenizer: name its folder, too")
    found = load(name, Vocabulary.of(str(model)), progress, n_requests)
    ends = (
        found.lengths.tolist()
        if found.lengths is not None
        else [found.ids.shape[1]] * len(found.ids)
    )
    samples = [ids[:end] for ids, end in zip(found.ids.tolist(), ends, strict=True)]
    return workloads.of_tokens(Path(found.name).stem, samples, n_output)
