"""Speculative decoding: what `--draft` means, and the memory that the draft takes.

`engine/speculation.py` has the kinds and their notation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantkit.advise import formats, kv, parallel, speed, work
from quantkit.advise.efficiency import Efficiency
from quantkit.advise.formats import Format
from quantkit.advise.memory import Extras
from quantkit.advise.speed import Case
from quantkit.advise.split import Split
from quantkit.engine import speculation
from quantkit.engine.speculation import HEADS, Kind
from quantkit.errors import CheckpointError
from quantkit.parsing import parse_json
from quantkit.serving.target import Target, open_target, planned

TOKENS: dict[Kind, int] = {
    "draft_model": 4, "ngram": 4, "suffix": 16, "mtp": 1, "eagle": 3, "eagle3": 3, "medusa": 3,
}  # fmt: skip
"""Default number of draft tokens per step; `quantkit draft` finds the best number."""
DRAFT_FOLDER = "out/draft"
"""Where a draft that does not exist yet will be written."""
OWN_HEADS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Config keys for the number of a model's own draft layers."""


@dataclass(frozen=True)
class Draft:
    """A way to draft the next tokens."""

    kind: Kind
    n_tokens: int
    target: Target | None = None
    """The draft model; None where there is none besides the model."""
    size_bytes: int = 0
    """Size of a head's tensors."""
    sampling: str | None = None
    """How it proposes, one of `speculation.SAMPLINGS`; None: the engine's default."""

    @property
    def model(self) -> str:
        """Path of the draft model."""
        return "" if self.target is None else self.target.path

    def extras(self, count: int, kv_bits: int = 16) -> Extras:
        """Its memory per GPU; vLLM keeps its cache in the target's dtype."""
        if self.target is None:
            return Extras()
        if self.target.shape is None:
            return Extras(draft_bytes=self.size_bytes)
        shape = self.target.shape
        fixed = parallel.bytes_per_gpu(shape, self.target.sized_by, count)
        return Extras(draft_bytes=fixed, token_bytes=kv.bytes_for(shape.config, 1, kv_bits, count))

    def pass_seconds(self, case: Case, users: int, depth: int, end: Efficiency) -> float:
        """Seconds to propose one token for each of the target's users."""
        if self.kind in ("ngram", "suffix"):
            return 0.0  # looked up by the CPU while it prepares the step
        if self.target is not None and self.target.shape is not None:
            shape, recipe = self.target.shape, self.target.sized_by
            # A llama.cpp file is made from the draft as from the target.
            same = case.format.engine == "llama.cpp" and not self.target.is_gguf
            own = case.format if same else formats.of(recipe)
            key = f"draft {own.name}"
            if key not in shape.cache:
                shape.cache[key] = work.of(shape, own)
            drafting = Case(shape, shape.cache[key], own, case.gpu, Split(case.split.tensor))
            return speed.gpu_seconds(drafting, users, 1, depth, end)
        # A head is about one layer, and samples through the model's own output layer.
        layer = case.work.read.dense / max(1, int(case.shape.config["num_hidden_layers"]))
        size = (self.size_bytes or layer) / case.shared
        passes = TOKENS["medusa"] if self.kind == "medusa" else 1  # of which all heads make one
        head = speed.head_seconds(case, users, end)
        return (size / (case.gpu.bandwidth_gb_s * 1e9 * end.bandwidth) + head) / passes

    def made_for(self, format: Format) -> "Draft":
        """The draft of a target in a format: llama.cpp takes both as GGUF files."""
        guess = self.target
        if format.engine != "llama.cpp" or guess is None or guess.shape is None or guess.is_gguf:
            return self
        folder = f"{DRAFT_FOLDER}/{format.name}"
        return replace(self, target=planned(guess.shape, format.recipe, folder, guess.path))

    def config(self, count: int) -> dict[str, Any]:
        """vLLM's `--speculative-config`."""
        return speculation.vllm_config(self.kind, self.model, self.n_tokens, count, self.sampling)


def parse(
    text: str | None,
    target: Target,
    n_tokens: int | None = None,
    opened: Callable[[str], Target] = lambda text: open_target(Path(text)),
    sampling: str | None = None,
) -> Draft | None:
    """The requested draft, checked against the model that it drafts for."""
    if text is None:
        return None
    kind, place = speculation.parse(text)
    n = n_tokens or TOKENS[kind]
    if kind == "mtp":
        _require_own_head(target)
    if kind in speculation.WITHOUT_MODEL:
        return Draft(kind, n, sampling=sampling)
    if kind in HEADS:
        return _head(kind, Path(place), target, n_tokens, sampling)
    draft = opened(text)
    if draft.is_gguf != target.is_gguf:
        theirs = "a GGUF file" if target.is_gguf else "a folder of safetensors"
        raise CheckpointError(f"{text} cannot draft for {target.path}: give {theirs}, as that is")
    if target.shape and draft.shape:
        ours, own = (s.config["vocab_size"] for s in (target.shape, draft.shape))
        if ours != own:
            raise CheckpointError(
                f"{draft.shape.described} cannot draft for {target.shape.described}: its "
                f"vocabulary has {own} tokens, not {ours}; take a small model of the same family"
            )
    return Draft(kind, n, draft, sampling=sampling)


def _require_own_head(target: Target) -> None:
    """Draft layers are part of the model, or there are none."""
    if target.shape is None or target.is_gguf:
        return
    if not any(target.shape.config.get(key) for key in OWN_HEADS):
        raise CheckpointError(
            f"{target.shape.described} has no layers for drafting (its config has no "
            f"{OWN_HEADS[0]}); take ngram, a small model or eagle:DIR"
        )


def _head(
    kind: Kind, place: Path, target: Target, n_tokens: int | None, sampling: str | None
) -> Draft:
    """A trained head, which is not a complete model."""
    if target.is_gguf:
        if kind == "medusa":
            raise CheckpointError("llama.cpp has no Medusa heads; take eagle:FILE.gguf or ngram")
        if place.suffix != ".gguf" or not place.is_file():
            raise CheckpointError(
                f"{place} is not a GGUF file; llama.cpp needs heads as GGUF files: eagle:FILE.gguf"
            )
        # The only kind of head that llama.cpp supports.
        return Draft("eagle3", n_tokens or TOKENS["eagle3"], open_target(place))
    try:
        config = parse_json((place / "config.json").read_bytes(), finite=False)
        files = [*place.glob("*.safetensors"), *place.glob("*.bin"), *place.glob("*.pt")]
        size = sum(file.stat().st_size for file in files)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{place} has no draft head: {error}; {kind}:DIR needs its config and weights"
        ) from error
    if not isinstance(config, dict) or size == 0:
        raise CheckpointError(f"{place} has no draft head: no weights next to its config")
    head = Target(str(place), place.name, None, None, is_gguf=False)
    return Draft(kind, n_tokens or TOKENS[kind], head, size, sampling)
