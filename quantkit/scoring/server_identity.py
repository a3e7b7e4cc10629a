"""Checks that the model at an address is the one in this folder, before anything is scored.

A server may serve anything under any name, and the same address may be another engine tomorrow. So
it gets the prompts that `verify --backend vllm` uses, and must return the folder's
log-probabilities within the rounding of its format; for a checkpoint, also its own rather than
those of the unquantised source. The result is valid, and cached, as long as the process runs.
"""

from pathlib import Path

import torch

from quantkit.errors import ScoreError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.verified import Agreement, Attribution
from quantkit.model.source import ModelSource, context_of, read_config
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.parsing import parse_json
from quantkit.progress import Progress
from quantkit.quiet import only_errors
from quantkit.scoring import agreement, attribution, prompts
from quantkit.scoring.endpoint import Echo, Endpoint
from quantkit.scoring.expected import Reference, references
from quantkit.scoring.scorecard import Served
from quantkit.specs import as_record
from quantkit.storage import write_json
from quantkit.verification.checkpoint import source_of

N_PROMPTS = (16, prompts.N_SCORED)
"""Few at first; as many as `verify` uses where they cannot distinguish a checkpoint from its
source.
"""


def hold(
    target: ModelSource | Checkpoint,
    server: Endpoint,
    device: torch.device,
    progress: Progress,
    trust_remote_code: bool = False,
    max_length: int | None = None,
) -> Served:
    """Refuse a server of another model; `max_length` is for one that does not report its
    context.
    """
    found = _Holding(target, server, device, trust_remote_code, max_length)
    progress.note(f"{server.url}: asking whether it serves {target.label}")
    agreed, whose = found.compared(N_PROMPTS[0])
    if whose is not None and whose.nearer is None:
        agreed, whose = found.compared(N_PROMPTS[1])
    faults = agreement.faults("prompts", agreed)
    told_apart = whose is None or whose.nearer is not None
    if whose is not None and told_apart and not faults:
        faults = [words for words in [attribution.fault(whose)] if words]
    if faults:
        raise ScoreError(
            f"{server.url} serves '{server.model}', which is not the model in {target.folder}: "
            f"{faults[0]}; serve that folder, or score the one that is served"
        )
    if whose is not None and not told_apart:
        progress.note(f"{server.url}: {attribution.UNDECIDED} with {whose.n_tokens:,} positions")
    facts = server.facts() or {}
    return Served(
        url=server.url,
        model=server.model,
        root=server.root,
        version=server.version(),
        max_model_len=server.max_model_len,
        started=float(facts["started"]) if facts else None,
        agreement=agreed,
        attribution=whose,
    )


class _Holding:
    """One server against one folder, with as many prompts as it takes."""

    def __init__(
        self,
        target: ModelSource | Checkpoint,
        server: Endpoint,
        device: torch.device,
        trust_remote_code: bool,
        max_length: int | None,
    ) -> None:
        self._target, self._server, self._device = target, server, device
        self._trust = trust_remote_code
        config = read_config(target.folder)
        self._dtype = getattr(torch, str(config.get("dtype") or "bfloat16"))
        limit = server.max_model_len or (max_length + 2 if max_length else None)
        context = context_of(config)
        self._context = min(context, limit) if limit else context
        with only_errors("transformers"):  # long documents are truncated, which it cannot know
            self._tokenizer = load_tokenizer(target.folder, trust_remote_code)

    def compared(self, n_prompts: int) -> tuple[Agreement, Attribution | None]:
        folder = self._target.folder
        asked = prompts.make(self._tokenizer, self._context, folder, n_prompts).score
        read: dict[int, list[float]] = {}

        def keep(number: int, echo: Echo) -> None:
            read[number] = echo.own

        self._server.echo_all(asked, [len(ids) for ids in asked], keep)
        logprobs = [read[number] for number in range(len(asked))]
        expected = self._reference(self._target, asked)
        agreed = agreement.compare(logprobs, expected)
        if not isinstance(self._target, Checkpoint):
            return agreed, None
        source = source_of(self._target.manifest, self._trust)
        if source is None:
            return agreed, None
        original = self._reference(source, asked)
        return agreed, attribution.attribute(logprobs, expected, original, n_prompts)

    def _reference(self, model: ModelSource | Checkpoint, asked: list[list[int]]) -> Reference:
        try:
            (found,) = references(model, [asked], self._device, self._dtype, self._trust)
        except torch.OutOfMemoryError:  # a server on the same GPU takes all memory
            cpu = torch.device("cpu")
            (found,) = references(model, [asked], cpu, self._dtype, self._trust)
        return found


def read(path: Path) -> Served | None:
    """The cached result for the same process."""
    try:
        return as_record(Served, parse_json(path.read_bytes()))
    except (OSError, ValueError):
        return None


def write(path: Path, found: Served) -> None:
    """Cache the result for as long as the process runs."""
    write_json(path, found.model_dump(mode="json"))
