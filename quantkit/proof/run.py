"""From checkpoint folders to `verified.json`: our own checks, the engine, the comparison.

Our own checks come first. An engine silently loads a folder with a missing scale or swapped
weights, so a faulty folder never reaches one.
"""

import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from quantkit import device as devices
from quantkit.engine import vllm_job
from quantkit.engine.vllm_job import Answer, Job
from quantkit.errors import EngineError, QuantkitError, UnknownName
from quantkit.export import manifest, verified
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.verified import Verified
from quantkit.model.source import ModelSource, context_of, read_config
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.progress import Progress, Silent
from quantkit.quiet import only_errors
from quantkit.scoring import agreement, attribution, prompts
from quantkit.scoring.expected import Reference, references
from quantkit.scoring.prompts import N_SCORED, Prompts
from quantkit.verification.checkpoint import Verification, source_of, verify

OURS = threading.Lock()
"""Held while building a model here, which changes torch and transformers for all threads."""


class Engine(Protocol):
    """Anything that answers jobs: a separate process, or a server."""

    max_model_len: int | None
    """The context length it was started with; None where the job sets it."""

    def ask(self, job: Job) -> Answer:
        """May be called from several threads."""

    def stop(self) -> None:
        """Called when nobody waits for answers any more."""


@dataclass(frozen=True)
class ProofOptions:
    """How thorough the check is, and its settings."""

    level: str = "logprobs"
    n_prompts: int = N_SCORED
    device: str = "auto"
    """Where our own reference is computed."""
    dtype: str = "auto"
    """The engine's compute dtype; by default its own choice."""
    jobs: int = 1
    """Concurrent engines."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Proof:
    """The result for one folder; without `verified`, `problem` says why no engine could
    check it.
    """

    folder: Path
    checks: Verification
    verified: Verified | None = None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        return self.checks.ok and self.verified is not None and self.verified.ok

    def to_json(self) -> dict[str, Any]:
        engine = None if self.verified is None else self.verified.to_json()
        return {
            **self.checks.to_json(),
            "ok": self.ok,
            "engine": engine,
            "problem": self.problem,
        }


def prove(
    folders: Sequence[Path],
    engine: Engine,
    asked: ProofOptions,
    source: ModelSource | None = None,
    progress: Progress | None = None,
) -> Iterator[Proof]:
    """Each folder's result, in order; `verified.json` is written into each.

    One at a time, an engine never shares a GPU with our reference; several at a time do.
    """
    listener = progress or Silent()
    if asked.level not in vllm_job.LEVELS:
        raise UnknownName("level", asked.level, vllm_job.LEVELS)
    sources = Sources(source)
    if asked.jobs == 1:
        for folder in folders:
            one = _begin(folder, engine, asked, source, listener)
            yield _finish(one, asked, sources, listener)
        return
    with _pool(asked.jobs, engine) as pool:
        # Progress bars of several threads would overwrite each other.
        begun = [pool.submit(_begin, f, engine, asked, source, Silent()) for f in folders]
        for future in begun:
            yield _finish(future.result(), asked, sources, listener)


class Sources:
    """References of the models that checkpoints were made from, each computed once."""

    def __init__(self, given: ModelSource | None = None) -> None:
        self._given = given
        self._known: dict[tuple[str, str, torch.dtype], Reference] = {}

    def reference(
        self, checkpoint: Checkpoint, made: Prompts, asked: ProofOptions, dtype: torch.dtype
    ) -> Reference | None:
        """The reference for the prompts that were read; None where the source is not available."""
        manifest = checkpoint.manifest
        source = self._given or source_of(manifest, asked.trust_remote_code)
        if source is None or source.fingerprint != manifest.source.fingerprint:
            return None
        key = source.fingerprint, made.digest, dtype
        if key not in self._known:
            where = devices.choose(asked.device)
            (self._known[key],) = references(
                source, [made.score], where, dtype, asked.trust_remote_code
            )
        return self._known[key]


@dataclass(frozen=True)
class _Started:
    """A folder after our own checks, and after the engine if these found nothing."""

    folder: Path
    checks: Verification
    asking: "EngineAnswer | None" = None
    problem: str | None = None


def _begin(
    folder: Path,
    engine: Engine,
    asked: ProofOptions,
    source: ModelSource | None,
    progress: Progress,
) -> _Started:
    with OURS:
        checks = verify(folder, source, progress, asked.trust_remote_code)
    if not checks.ok:
        return _Started(folder, checks)
    progress.note(f"{folder.name}: files are sound; starting the engine")
    try:
        return _Started(folder, checks, ask(Checkpoint.open(folder), engine, asked))
    except QuantkitError as error:
        return _Started(folder, checks, problem=str(error))


def _finish(begun: _Started, asked: ProofOptions, sources: Sources, progress: Progress) -> Proof:
    folder, checks = begun.folder, begun.checks
    if begun.asking is None:
        return Proof(folder, checks, problem=begun.problem)
    try:
        record = compare(begun.asking, asked, progress, sources)
    except QuantkitError as error:
        return Proof(folder, checks, problem=str(error))
    verified.write(folder, record)
    return Proof(folder, checks, record)


@dataclass(frozen=True)
class EngineAnswer:
    """What was asked about which model, and the answer."""

    target: ModelSource | Checkpoint
    prompts: Prompts
    answer: Answer


def ask(target: ModelSource | Checkpoint, engine: Engine, asked: ProofOptions) -> EngineAnswer:
    """Put the questions of a level to an engine; what cannot be compared is refused first."""
    settings: dict[str, Any] = {}
    if isinstance(target, Checkpoint):
        if target.is_gguf:
            raise EngineError(
                f"{target.folder} is a GGUF file, which vLLM reads through a plugin only; "
                "score it in llama.cpp with `quantkit score --backend llama.cpp`"
            )
        if target.manifest.weights_recipe.kv_cache is not None:
            settings["kv_cache_dtype"] = "fp8"
    config = read_config(target.folder)
    with OURS, only_errors("transformers"):  # long documents are truncated, which it cannot know
        tokenizer = load_tokenizer(target.folder, asked.trust_remote_code)
        context = min(context_of(config), engine.max_model_len or sys.maxsize)
        made = prompts.make(tokenizer, context, target.folder, asked.n_prompts)
    settings |= {"dtype": asked.dtype, "max_model_len": made.longest, "enforce_eager": True}
    settings |= {"enable_prefix_caching": False, "trust_remote_code": asked.trust_remote_code}
    job = Job(
        str(target.folder.resolve()),
        asked.level,
        made.generate,
        made.max_tokens,
        made.score if asked.level == "logprobs" else [],
        asked.jobs > 1,
        settings,
    )
    return EngineAnswer(target, made, engine.ask(job))


def compare(
    asking: EngineAnswer, asked: ProofOptions, progress: Progress, sources: Sources | None = None
) -> Verified:
    """Judge an answer; without `sources`, whether the source is being served is not checked."""
    answer, made, target = asking.answer, asking.prompts, asking.target
    generated = asked.level != "config"
    found = (
        agreement.shape_faults(answer.texts, answer.tokens, answer.token_logprobs, made)
        if generated
        else []
    )
    if asked.level == "logprobs":
        found += agreement.prompt_faults(answer.prompt_logprobs, made)
    written = read = whose = None
    if asked.level == "logprobs" and not found:
        progress.note(f"{target.folder.name}: the engine has answered; computing the reference")
        dtype = answer.dtype or str(read_config(target.folder).get("dtype") or "bfloat16")
        where, kind = devices.choose(asked.device), getattr(torch, dtype)
        texts = [a + b for a, b in zip(made.generate, answer.tokens, strict=True)]
        original = None
        with OURS:
            texts_expected, expected = references(
                target, [texts, made.score], where, kind, asked.trust_remote_code
            )
            if sources is not None and isinstance(target, Checkpoint):
                original = sources.reference(target, made, asked, kind)
        # Both kinds of tokens: generation uses other kernels than prefill.
        ends = texts_expected.last(made.max_tokens)
        written = agreement.compare(answer.token_logprobs, ends)
        read = agreement.compare(answer.prompt_logprobs, expected)
        found += agreement.faults("prompts", read) + agreement.faults("generated tokens", written)
        found += [known for known in [_known(target, answer)] if found and known]
        if original is not None:
            whose = attribution.attribute(
                answer.prompt_logprobs, expected, original, len(made.score)
            )
            found += [words for words in [attribution.fault(whose)] if words]
    return Verified(
        ok=not found,
        digest=target.digest,
        engine="vllm",
        version=answer.version,
        device=answer.device,
        dtype=answer.dtype,
        quantization=answer.quantization,
        level=asked.level,  # type: ignore[arg-type]
        faults=found,
        n_generated=len(answer.texts),
        texts=answer.texts,
        written=written,
        n_scored=len(answer.prompt_logprobs),
        read=read,
        attribution=whose,
        prompts_digest=made.digest if generated else None,
        seconds={name: round(spent, 3) for name, spent in answer.seconds.items()},
        versions=manifest.versions(),
        created=manifest.now(),
    )


def _known(target: ModelSource | Checkpoint, answer: Answer) -> str | None:
    """Why an engine may differ on purpose, where that is known."""
    if isinstance(target, ModelSource) or not answer.device.startswith("cpu"):
        return None
    recipe = target.manifest.weights_recipe
    if recipe.weights.num_bits != 4 or recipe.input_activations is not None:
        return None
    return (
        "on processors with AMX vLLM rounds the inputs of 4-bit layers to 8 bits, which the format "
        "does not ask for; VLLM_CPU_INT4_W4A8=0 turns that off"
    )


@contextmanager
def _pool(jobs: int, engine: Engine) -> Iterator[ThreadPoolExecutor]:
    """Threads that wait for engines; after an error none is started, and running ones are
    stopped.
    """
    pool = ThreadPoolExecutor(jobs)
    try:
        yield pool
    except BaseException:
        engine.stop()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
