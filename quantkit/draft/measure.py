"""Run a target and its draft on real prompts and measure acceptance and speed-up."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quantkit import device as devices
from quantkit.calibration import loading
from quantkit.calibration.build import Vocabulary
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.draft import acceptance, speedup
from quantkit.draft.acceptance import MOST_DRAFTED, Chances, Steps
from quantkit.draft.speedup import Costs
from quantkit.errors import DataError, SourceError
from quantkit.export.checkpoint import Checkpoint
from quantkit.model.source import ModelSource, context_of, read_config
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.progress import Progress, Silent
from quantkit.scoring import loading as models

Target = ModelSource | Checkpoint
LOGITS_BYTES = 256 << 20
WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Chances]] = {
    "greedy": acceptance.greedy,
    "temperature-0": acceptance.temperature_zero,
    "sampled": acceptance.sampled,
}


@dataclass(frozen=True)
class DraftOptions:
    """How much text to measure on, and of which kind."""

    calibration: str
    n_samples: int = 32
    n_prompt: int = 64
    """Tokens of each sample that serve as the prompt."""
    n_tokens: int = 64
    """Tokens that the target generates after it."""
    temperature: float = 1.0
    """Temperature of the target, and of sampled drafts."""
    on_text: bool = False
    """Use the set's own text as the continuation, and generate nothing."""
    seed: int = 0
    evaluation: loading.Evaluation | None = None


@dataclass(frozen=True)
class DraftMode:
    """Results for one drafting mode."""

    acceptance: float
    """Probability that a proposal after the target's own text is accepted."""
    stderr: float | None
    steps: tuple[Steps, ...]
    """One entry each for k = 1, 2, ..."""
    speedups: tuple[float, ...]
    best_k: int
    """0 if the target is faster alone."""

    @property
    def best_speedup(self) -> float:
        return self.speedups[self.best_k - 1] if self.best_k else 1.0


@dataclass(frozen=True)
class Draft:
    """What a draft is worth to a target."""

    target: str
    draft: str
    calibration: str
    digest: str
    """Digest of the calibration tokens."""
    n_rows: int
    n_tokens: int
    temperature: float
    on_text: bool
    target_bytes: int
    """Bytes read in one pass."""
    draft_bytes: int
    ways: dict[str, DraftMode]
    gpu: str | None = None
    """GPU whose roofline the speed-ups are based on; None: based on the bytes that both models
    read.
    """
    users: int = 1

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        for name, way in self.ways.items():
            data["ways"][name]["best_speedup"] = way.best_speedup
        return data


def measure(
    target: Target,
    draft: Target,
    asked: DraftOptions,
    device: str = "auto",
    progress: Progress | None = None,
    trust_remote_code: bool = False,
    costs: Costs | None = None,
) -> Draft:
    """Expected acceptance, tokens per step and speed-ups; `costs` of both models are optional."""
    progress = progress or Silent()
    where = devices.choose(device)
    _require_one_vocabulary(target, draft, trust_remote_code)
    prompts, tokens = prompts_of(target, asked, trust_remote_code)
    big = models.load(target, where, trust_remote_code)
    small = models.load(draft, where, trust_remote_code)
    chances = _chances(big, small, prompts.to(where), asked, progress)
    read = _bytes_read(target, big), _bytes_read(draft, small)
    costs = costs or Costs(speedup.reading(read[0]), speedup.reading(read[1]))
    ways = {}
    for name, found in chances.items():
        # On text from elsewhere the next token does not show what the target would accept.
        along = found.taken if asked.on_text else found.followed
        steps = tuple(acceptance.follow(along, k) for k in range(1, MOST_DRAFTED + 1))
        gains = speedup.speedups([step.tokens for step in steps], costs)
        ways[name] = DraftMode(found.rate, found.stderr, steps, tuple(gains), speedup.best(gains))
    return Draft(
        target=target.label,
        draft=draft.label,
        calibration=tokens.name,
        digest=tokens.digest,
        n_rows=len(prompts),
        n_tokens=len(prompts) * asked.n_tokens,
        temperature=asked.temperature,
        on_text=asked.on_text,
        target_bytes=read[0],
        draft_bytes=read[1],
        ways=ways,
    )


def _require_one_vocabulary(target: Target, draft: Target, trust_remote_code: bool) -> None:
    """Refuse a draft with a different vocabulary: the target could not read its proposals."""
    words = load_tokenizer(target.folder, trust_remote_code)
    theirs = load_tokenizer(draft.folder, trust_remote_code)
    sizes = [int(read_config(m.folder).get("vocab_size") or 0) for m in (target, draft)]
    if words.get_vocab() != theirs.get_vocab():
        raise SourceError(
            f"{draft.label} has another vocabulary than {target.label}; use a draft of the same "
            "family"
        )
    if sizes[0] != sizes[1]:
        raise SourceError(
            f"{draft.label} has logits for {sizes[1]:,} tokens and {target.label} for "
            f"{sizes[0]:,}, which vLLM refuses; take a draft with the same vocab_size"
        )


def prompts_of(
    target: Target, asked: DraftOptions, trust_remote_code: bool = False
) -> tuple[torch.Tensor, CalibrationTokens]:
    """Samples [rows, tokens] long enough for a prompt and its continuation."""
    length = asked.n_prompt + asked.n_tokens
    config = read_config(target.folder)
    words = load_tokenizer(target.folder, trust_remote_code)
    model = Vocabulary(target.label, words, context_of(config), int(config["vocab_size"]))
    # Silently: the note about few samples concerns statistics, not prompts.
    found = loading.load(
        asked.calibration, model, Silent(), asked.n_samples, length, asked.evaluation
    )
    long = found.ids if found.lengths is None else found.ids[found.lengths >= length]
    if asked.n_tokens <= MOST_DRAFTED:
        raise DataError(f"continue by more than {MOST_DRAFTED} tokens, which one step may draft")
    if not len(long):
        raise DataError(
            f"{found.name} has no sample of {length} tokens; ask for fewer with --prompt and "
            "--tokens, or take another set"
        )
    return long, found


@torch.no_grad()
def _chances(
    big: Any, small: Any, samples: torch.Tensor, asked: DraftOptions, progress: Progress
) -> dict[str, Chances]:
    """Acceptance probabilities of every mode, each on the text it is defined for."""
    heats = {0.0 if name == "temperature-0" else asked.temperature for name in WAYS}
    progress.start("draft", len(samples) * (0 if asked.on_text else len(heats)), "texts")
    texts: dict[float, torch.Tensor] = {}
    found = {}
    for name, way in WAYS.items():
        heat = 0.0 if name == "temperature-0" else asked.temperature
        if asked.on_text:
            texts[heat] = samples
        elif heat not in texts:
            generator = torch.Generator(samples.device).manual_seed(asked.seed)
            prompts = samples[:, : asked.n_prompt]
            texts[heat] = write(big, prompts, asked.n_tokens, heat, generator)
            progress.advance(len(samples))
        found[name] = _of_text(big, small, texts[heat], asked.n_tokens, heat or 1.0, way)
    progress.finish()
    return found


def write(
    model: Any, prompts: torch.Tensor, n_tokens: int, temperature: float, generator: torch.Generator
) -> torch.Tensor:
    """The model's continuations of prompts [rows, tokens]; the end-of-text token does not stop
    them.
    """
    ids, cache, fresh = prompts, None, prompts
    for _ in range(n_tokens):
        output = model(input_ids=fresh, past_key_values=cache, use_cache=True)
        cache, last = output.past_key_values, output.logits[:, -1].float()
        if temperature == 0:
            fresh = last.argmax(-1, keepdim=True)
        else:
            fresh = (last / temperature).softmax(-1).multinomial(1, generator=generator)
        ids = torch.cat([ids, fresh], 1)
    return ids


def _of_text(
    big: Any,
    small: Any,
    ids: torch.Tensor,
    n_tokens: int,
    temperature: float,
    way: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Chances],
) -> Chances:
    """Logits for a few rows at a time, so that large vocabularies take little memory."""
    vocabulary = int(big.get_output_embeddings().weight.shape[0])
    rows = max(1, LOGITS_BYTES // (4 * vocabulary * ids.shape[1]))
    parts = []
    for part in torch.split(ids, rows):
        p, q = (
            model(input_ids=part, use_cache=False).logits[:, -n_tokens - 1 : -1].float()
            / temperature
            for model in (big, small)
        )
        found = way(p, q, part[:, -n_tokens:])
        parts.append((found.taken.cpu(), found.followed.cpu()))
    taken, followed = (torch.cat(column) for column in zip(*parts, strict=True))
    return Chances(taken, followed)


def _bytes_read(target: Target, model: Any) -> int:
    """Bytes of all weights except an embedding table, of which a pass reads only a few rows."""
    size = target.manifest.size_bytes if isinstance(target, Checkpoint) else target.size_bytes
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    if table is head:
        return size
    stored = next(
        (t.size_bytes for t in _tensors(target).values() if t.shape == tuple(table.shape)), 0
    )
    return size - stored


def _tensors(target: Target) -> Any:
    return {} if isinstance(target, Checkpoint) and target.is_gguf else target.tensors
