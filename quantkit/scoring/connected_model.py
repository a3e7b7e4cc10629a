"""A model that an engine serves, ready to be scored: connected, checked against its folder, cached.

Answers are cached for the next run under everything that determines them. For a server that
includes the start of its process, unless the run started it itself and knows its flags; where a
server does not report its start, its answers are kept for this run only.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.engine.http import without_password
from quantkit.errors import ScoreError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.foreign_gguf import ForeignGGUF
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.progress import Progress
from quantkit.scoring import cache, server_identity
from quantkit.scoring.endpoint import Endpoint
from quantkit.scoring.following import Prompts
from quantkit.scoring.llamacpp import LlamaCpp
from quantkit.scoring.server import Engine, ServedModel

if TYPE_CHECKING:
    from quantkit.scoring.options import ScoreOptions
    from quantkit.scoring.scorecard import Served


class ConnectedModel(ServedModel):
    """The same with progress, and with answers on disk where they may be cached."""

    def __init__(
        self,
        target: ModelSource | Checkpoint,
        engine: Engine,
        facts: dict[str, str] | None,
        folder: Path,
        progress: Progress,
        max_length: int | None,
        trust_remote_code: bool,
    ) -> None:
        self._label, self._progress = target.label, progress
        self.process = facts
        """The engine's own facts, while it is the same."""
        self._kept = None
        if facts is not None:
            self._kept = cache.AnswerCache(folder, cache.identity(_all_facts(target, facts)))
        super().__init__(
            engine,
            load_tokenizer(target.folder, trust_remote_code),
            max_length,
            answers=None if self._kept is None else cache.ByName(self._kept),
            advance=progress.advance,
            written=None if self._kept is None else cache.TextCache(self._kept),
        )
        self.served: Served | None = None
        self.where = "llama.cpp, on this host"

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        self._begin([r.args[1] for r in requests])
        return super().loglikelihood(requests)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        self._begin([r.args[0] for r in requests])
        return super().loglikelihood_rolling(requests)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        self._progress.start(f"score {self._label}", len(requests), "answers")
        return super().generate_until(requests)

    def answer(self, asked: Prompts) -> list[str]:
        self._progress.start(f"{self._label} answers {asked.name}", len(asked.rows), "answers")
        return super().answer(asked)

    def _begin(self, texts: list[str]) -> None:
        total = sum(len(self.tok_encode(text)) for text in texts)
        self._progress.start(f"score {self._label}", total, "tokens")

    def confirm(self) -> None:
        """Refuse scores of two engines: what answered must be what was checked against the
        folder.
        """
        if self.endpoint.facts() != self.process:
            raise ScoreError(
                f"{self.endpoint.url} was restarted while it was scored; score it again"
            )

    def close(self) -> None:
        """Store all answers that may be cached."""
        if self._kept is not None:
            self._kept.close()


def here(
    target: ModelSource | Checkpoint,
    asked: "ScoreOptions",
    folder: Path,
    progress: Progress,
    trust_remote_code: bool,
) -> ConnectedModel:
    """A GGUF file in llama.cpp, in this process."""
    if isinstance(target, ForeignGGUF):
        file = target.file
    elif isinstance(target, Checkpoint) and target.is_gguf:
        file = target.gguf
    else:
        raise ScoreError(
            f"--backend llama.cpp runs GGUF files, and {target.label} is not one; "
            "score it without --backend"
        )
    metadata = file.metadata
    context = metadata.get(f"{metadata['general.architecture']}.context_length")
    engine = LlamaCpp(file.path, int(str(context or 2048)), asked.max_length)
    return ConnectedModel(
        target, engine, engine.facts(), folder, progress, asked.max_length, trust_remote_code
    )


def served(
    target: ModelSource | Checkpoint,
    asked: "ScoreOptions",
    folder: Path,
    device: torch.device,
    progress: Progress,
    trust_remote_code: bool,
) -> ConnectedModel:
    """The model at an address, once it is known to be this one."""
    assert asked.server is not None
    server = Endpoint(asked.server)
    facts = server.facts()
    kept_by = determining(facts, asked)
    model = ConnectedModel(
        target, server, kept_by, folder, progress, asked.max_length, trust_remote_code
    )
    model.process = facts
    model.where = f"served at {without_password(asked.server)}"
    known = None
    if facts is not None:
        known = folder / f"{cache.identity(_all_facts(target, facts))}.held.json"
        model.served = server_identity.read(known)
    else:
        progress.note(
            f"{server.url} does not report when its process started (/metrics), so its answers "
            "are not kept for the next run"
        )
    if model.served is None:
        try:
            model.served = server_identity.hold(
                target, server, device, progress, trust_remote_code, asked.max_length
            )
        except BaseException:
            model.close()
            raise
        if known is not None:
            server_identity.write(known, model.served)
    return model


def determining(facts: dict[str, str] | None, asked: "ScoreOptions") -> dict[str, str] | None:
    """What determines a server's answers.

    One that the run started itself answers as any other start with the same flags would, at
    whatever address; so an interrupted run resumes.
    """
    if facts is None or not asked.is_started:
        return facts
    same = {key: facts[key] for key in ("model", "max_model_len", "version")}
    return same | {"engine": "vllm", "flags": shlex.join(asked.engine_args)}


def _all_facts(target: ModelSource | Checkpoint, facts: dict[str, str]) -> dict[str, str]:
    return {"checkpoint": target.digest, **facts}
