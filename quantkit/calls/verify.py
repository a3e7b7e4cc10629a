"""Check checkpoints: their files, in an engine, or by an engine's rules alone."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.calls import Notify, Work, hub, silent, validation
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.dispatch.prediction import Prediction
    from quantkit.model.source import ModelSource
    from quantkit.opening import Model
    from quantkit.progress import Progress
    from quantkit.proof.run import Engine, Proof
    from quantkit.verification.checkpoint import Verification


def _unseen(result: Any) -> None:
    """Ignores results as they come; they are read when all are complete."""


@dataclass(frozen=True)
class Checkpoints:
    """Folders, and the source if no manifest here names it."""

    folders: Sequence[Path]
    source: "Model | None" = None
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def needs_hub(self) -> bool:
        named = self.source is not None and not hub.is_local(self.source)
        return named or hub.any_named(self.folders)

    def check(self) -> list[Path]:
        """The folders, downloaded if given as hub ids; refused if missing."""
        from quantkit.model.source import placed

        found = [placed(folder) for folder in self.folders]
        validation.folders(found)
        return found

    def original(self) -> "ModelSource | Any":
        """The source, opened if it is named; a GGUF file once transformers is loaded."""
        if not isinstance(self.source, str | Path) or str(self.source).lower().endswith(".gguf"):
            return self.source
        from quantkit.model.source import ModelSource

        return ModelSource.open(
            str(self.source), self.revision, self.trust_remote_code, requantize=True
        )


@dataclass(frozen=True)
class FileCheck:
    """One call of `verify`: checks files against hashes, tensors against recipes, weights against
    the source.
    """

    checkpoints: Checkpoints
    read_weights: bool = True
    each: "Callable[[Verification], None]" = _unseen
    """Called with every folder's result as it comes."""

    needs_transformers = True

    @property
    def needs_hub(self) -> bool:
        return self.checkpoints.needs_hub

    def ready(self, notify: Notify = silent) -> "Work[list[Verification]]":
        """Validate before a tensor is read."""
        folders = self.checkpoints.check()
        original = self.checkpoints.original()

        def work(progress: "Progress") -> "list[Verification]":
            from contextlib import nullcontext
            from functools import partial

            from quantkit.opening import opened
            from quantkit.verification.folder import verify

            trusting, results = self.checkpoints.trust_remote_code, []
            given = partial(opened, original, None, None, trusting, requantize=True)
            with nullcontext() if original is None else given() as source:
                for folder in folders:
                    results.append(verify(folder, source, progress, trusting, self.read_weights))
                    self.each(results[-1])
            return results

        return work


@dataclass(frozen=True)
class Served:
    """The serving engine: a process to start, or a running server."""

    python: Path | None = None
    timeout: float = 600.0
    server: str | None = None
    model: str | None = None
    """The server's name for it."""

    def engine(self) -> "Engine":
        from quantkit.engine.vllm_job import Vllm
        from quantkit.proof.server import Server

        if self.server is None:
            return Vllm(self.python, self.timeout)
        return Server(self.server, self.model, os.environ.get("OPENAI_API_KEY"))


@dataclass(frozen=True)
class EngineCheck:
    """The same, then loads each in vLLM, generates, and compares with our own reference."""

    checkpoints: Checkpoints
    served: Served = field(default_factory=Served)
    level: str = "logprobs"
    prompts: int = 64
    dtype: str = "auto"
    jobs: int = 1
    device: str = "auto"
    each: "Callable[[Proof], None]" = _unseen

    needs_transformers = True

    @property
    def needs_hub(self) -> bool:
        return self.checkpoints.needs_hub

    def ready(self, notify: Notify = silent) -> "Work[list[Proof]]":
        """Refuse what no engine could answer."""
        served = self.served
        if served.server is not None:
            if served.python is not None or len(self.checkpoints.folders) != 1:
                raise UsageError("a server serves one checkpoint: give its folder, and no --python")
            if self.level == "config":
                raise UsageError(
                    "a running server has loaded its config already: use --level generate"
                )
        elif served.model is not None:
            raise UsageError("--model needs --server")
        folders = self.checkpoints.check()
        validation.program(served.python)
        original = self.checkpoints.original()

        def work(progress: "Progress") -> "list[Proof]":
            from quantkit.gguf.source import open_model
            from quantkit.proof.run import ProofOptions, prove

            source = original
            if isinstance(source, str | Path):
                source = open_model(str(source), requantize=True)
            trusting = self.checkpoints.trust_remote_code
            asked = ProofOptions(
                self.level, self.prompts, self.device, self.dtype, self.jobs, trusting
            )
            proofs = []
            for proof in prove(folders, served.engine(), asked, source, progress):
                proofs.append(proof)
                self.each(proof)
            return proofs

        return work


@dataclass(frozen=True)
class RuleCheck:
    """What an engine will do with checkpoints, by its own rules, from configs and headers."""

    folders: Sequence[Path]
    engine: str = "vllm"
    version: str | None = None
    gpu: str | None = None

    needs_transformers = False

    @property
    def needs_hub(self) -> bool:
        return hub.any_named(self.folders)

    def ready(self, notify: Notify = silent) -> "Work[list[Prediction]]":
        """Refuse a GPU that is not in the table."""
        from quantkit.hardware.gpus import find
        from quantkit.model.source import placed

        device = find(self.gpu) if self.gpu else None
        folders = [placed(folder) for folder in self.folders]

        def work(progress: "Progress") -> "list[Prediction]":
            from quantkit.dispatch.prediction import predict

            return [predict(folder, self.engine, self.version, device) for folder in folders]

        return work
