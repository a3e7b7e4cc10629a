"""What models are asked, and how: the settings of scoring, without loading torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quantkit.scoring import following, suites
from quantkit.scoring.following import Prompts

BACKENDS = ("transformers", "llama.cpp", "vllm")
"""The last is started by the caller, who gives its server: see `calls.score`."""


@dataclass(frozen=True)
class Chat:
    """Whether and how questions are put as a conversation."""

    template: bool = False
    multiturn: bool = False
    """Few-shot examples as separate turns."""
    system: str | None = None


@dataclass(frozen=True)
class ScoreOptions:
    """How a model is scored."""

    tasks: tuple[str, ...]
    limit: int | None = None
    num_fewshot: int | None = None
    max_length: int | None = None
    batch_size: int | None = None
    """Most sequences per batch; by default as many as fit."""
    seed: int = 0
    data: Path | None = None
    """A folder tree like a hub's, for tasks whose data cannot be downloaded."""
    cache: Path | None = None
    """Where answers are cached; by default in the user's own cache."""
    samples: dict[str, list[int]] | None = None
    """Only these documents, by task."""
    server: str | None = None
    """The address of an engine that serves the model; then nothing is loaded here."""
    backend: str = "transformers"
    """The local engine: one of `BACKENDS`."""
    python: Path | None = None
    """Python of vLLM's environment, where that is the backend."""
    engine_args: tuple[str, ...] = ()
    """Further flags of vLLM, passed through unchanged."""
    is_started: bool = False
    """Whether the server was started for this run with just these flags."""
    prompts: Path | None = None
    """A file of prompts: candidates are compared with the source's own answers to them."""
    judge: str | None = None
    """How answers to them are judged, where rows do not say; one of `judging.METRICS`."""
    chat: Chat = Chat()
    allow_code: bool = False
    """Whether tasks may run code that the model wrote, in a sandbox."""

    @classmethod
    def of(cls, tasks: Sequence[str] | None, models: Sequence[Any], **more: Any) -> Self:
        """With the given tasks, or the default ones for these models."""
        if tasks is None and more.get("prompts") is not None:
            tasks = ()
        if tasks is None:
            follows = more.get("server") is None and more.get("backend") in (None, BACKENDS[0])
            tasks = suites.by_default([str(model) for model in models], follows)
        return cls(suites.with_code(tasks) if more.get("allow_code") else tuple(tasks), **more)

    @property
    def followed(self) -> list[Prompts]:
        """Prompts whose source answers candidates are compared with."""
        own = [following.python_prompts()] if suites.FOLLOWED in suites.expanded(self.tasks) else []
        more = []
        if self.prompts is not None:
            more.append(following.of_file(self.prompts, judge=self.judge))
        return [asked.first(self.limit) for asked in own + more]
