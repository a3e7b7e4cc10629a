"""Speculative decoding: what `--draft` means, and what the draft takes of the GPU.

DIR          a small model of the same family
ngram        what followed the same words before
eagle:DIR    a head trained for this model
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.advise import kv, parallel
from quantkit.advise.memory import Beside
from quantkit.engine import speculation
from quantkit.engine.speculation import Kind
from quantkit.errors import CheckpointError
from quantkit.parsing import parse_json
from quantkit.serving.target import Target, open_target

TOKENS = {"draft_model": 4, "ngram": 4, "eagle": 3, "eagle3": 3}
"""Tokens drafted at a time where nobody says; `quantkit draft` finds the best number."""


@dataclass(frozen=True)
class Draft:
    """A way to guess the next tokens."""

    kind: Kind
    n_tokens: int
    target: Target | None = None
    """The model that guesses; None for n-grams."""
    size_bytes: int = 0
    """Of a head's tensors."""

    @property
    def model(self) -> str:
        """Where the guessing model lies."""
        return "" if self.target is None else self.target.path

    def beside(self, count: int) -> Beside:
        """What it takes on each of the GPUs."""
        if self.target is None:
            return Beside()
        if self.target.shape is None:
            return Beside(draft_bytes=self.size_bytes)
        shape = self.target.shape
        fixed = parallel.bytes_per_gpu(shape, self.target.sized_by, count)
        return Beside(draft_bytes=fixed, token_bytes=kv.bytes_for(shape.config, 1, 16, count))

    def config(self, count: int) -> dict[str, Any]:
        """vLLM's `--speculative-config`."""
        return speculation.vllm_config(self.kind, self.model, self.n_tokens, count)


def parse(
    text: str | None,
    target: Target,
    n_tokens: int | None = None,
    opened: Callable[[str], Target] = lambda text: open_target(Path(text)),
) -> Draft | None:
    """What was asked for, checked against the model that it drafts for."""
    if text is None:
        return None
    if text == "ngram":
        return Draft("ngram", n_tokens or TOKENS["ngram"])
    if text.startswith("eagle:"):
        return _head(Path(text.removeprefix("eagle:")), target, n_tokens)
    draft = opened(text)
    if draft.is_gguf != target.is_gguf:
        theirs = "a GGUF file" if target.is_gguf else "a folder of safetensors"
        raise CheckpointError(f"{text} cannot draft for {target.path}: give {theirs}, as that is")
    if target.shape and draft.shape:
        ours, own = (s.config["vocab_size"] for s in (target.shape, draft.shape))
        if ours != own:
            raise CheckpointError(
                f"{text} cannot draft for {target.path}: its vocabulary has {own} tokens, "
                f"not {ours}; take a small model of the same family"
            )
    return Draft("draft_model", n_tokens or TOKENS["draft_model"], draft)


def _head(place: Path, target: Target, n_tokens: int | None) -> Draft:
    """A trained head, which is no model of its own."""
    if target.is_gguf:
        if place.suffix != ".gguf" or not place.is_file():
            raise CheckpointError(
                f"{place} is no GGUF file; llama.cpp takes heads as such: eagle:FILE.gguf"
            )
        # The only kind of head that llama.cpp has.
        return Draft("eagle3", n_tokens or TOKENS["eagle3"], open_target(place))
    try:
        config = parse_json((place / "config.json").read_bytes(), finite=False)
        files = [*place.glob("*.safetensors"), *place.glob("*.bin")]
        size = sum(file.stat().st_size for file in files)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{place} holds no head for drafting: {error}; eagle:DIR wants its config and weights"
        ) from error
    if not isinstance(config, dict) or size == 0:
        raise CheckpointError(f"{place} holds no head for drafting: no weights beside its config")
    kind = speculation.head_kind(place)
    head = Target(str(place), place.name, None, None, is_gguf=False)
    return Draft(kind, n_tokens or TOKENS[kind], head, size)
