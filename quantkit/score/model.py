"""A model as lm-eval sees it: its own tokenising and its own windows, our way of answering.

Answers are kept as they come, so that a run that was stopped goes on where it was. For texts that
are scored whole, a source's predictions are kept too, and a candidate is compared with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.models.huggingface import HFLM

from quantkit import __version__
from quantkit.errors import ScoreError
from quantkit.export.checkpoint import Checkpoint
from quantkit.model.shards import read_header, write_whole
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.progress import Progress
from quantkit.score import cache, divergence, loading
from quantkit.score.answering import Answer, Answerer, Request, Watcher
from quantkit.score.answers import Text
from quantkit.score.tokens import Encoder, batches


@dataclass(frozen=True)
class _Whole:
    """The same as it is kept: by window and by token."""

    losses: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor

    def write(self, path: Path) -> None:
        write_whole(path, {"losses": self.losses, "kl": self.kl, "agrees": self.agrees})

    @classmethod
    def read(cls, path: Path) -> "_Whole":
        stored = read_header(path)
        return cls(*(stored[name].read() for name in ("losses", "kl", "agrees")))


@dataclass
class _Kept:
    """Where answers of this model, and predictions of its source, are kept."""

    folder: Path
    name: str
    source_name: str
    is_source: bool
    answers: cache.AnswerCache = field(init=False)

    def __post_init__(self) -> None:
        self.answers = cache.AnswerCache(self.folder, self.name)

    @classmethod
    def of(cls, target: ModelSource | Checkpoint, dtype: torch.dtype, folder: Path) -> "_Kept":
        import transformers

        facts = {
            "dtype": str(dtype),
            "quantkit": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        source = target.digest
        if isinstance(target, Checkpoint):
            source = target.manifest.source.fingerprint
        return cls(
            folder,
            cache.identity(facts | {"model": target.digest}),
            cache.identity(facts | {"model": source}),
            isinstance(target, ModelSource),
        )

    def whole(self, digest: str) -> Path:
        return self.folder / f"{self.name}-{digest}.text"

    def reference(self, digest: str) -> Path:
        return self.folder / f"{self.source_name}-{digest}.reference"


class EvaluatedModel(HFLM):  # type: ignore[misc]
    """Hugging Face's model of lm-eval, with tokens answered by us."""

    def __init__(
        self,
        target: ModelSource | Checkpoint,
        device: torch.device,
        max_length: int | None,
        batch_size: int | None,
        folder: Path,
        progress: Progress,
        trust_remote_code: bool,
    ) -> None:
        model = loading.load(target, device, trust_remote_code)
        super().__init__(
            pretrained=model,
            tokenizer=load_tokenizer(target.folder, trust_remote_code),
            max_length=max_length,
        )
        self._label = target.label
        self._progress = progress
        self._encoder = Encoder(self)
        self._answerer = Answerer(model, self.max_length, batch_size)
        self._kept = _Kept.of(target, model.dtype, folder)
        self._n_asked = self._n_kept = 0
        self._task = ""
        self.cached = cache.Cached()
        """How many answers were kept from before, by task."""
        self.texts: dict[str, Text] = {}
        """What was found on texts that were scored whole, by task."""

    def close(self) -> None:
        """Keep all answers."""
        self._kept.answers.close()

    @property
    def kept(self) -> str:
        """Which answers were there before, in words; empty where none was."""
        if not self._n_kept:
            return ""
        share = "all" if self._n_kept == self._n_asked else f"{self._n_kept / self._n_asked:.0%}"
        return f"{self._label}: {share} of the answers were kept from before"

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        self._progress.start(f"score {self._label}", len(requests), "questions")
        parts = list(batches(requests))
        found: list[Answer] = []
        for part, asked in zip(parts, self._encoder.requests(parts), strict=True):
            self._task = part[0].task_name
            self._progress.status(self._task)
            found += self._answers(asked)
        return [(answer.log_probability, answer.greedy) for answer in found]

    def _answers(self, asked: list[Request]) -> list[Answer]:
        """Those that are kept, and the model's for all others."""
        keys = cache.keys_of(asked)
        found = [self._kept.answers.get(key) for key in keys]
        open_places = [place for place, answer in enumerate(found) if answer is None]
        n_kept = len(asked) - len(open_places)
        self._count(len(asked), n_kept)
        self._progress.advance(n_kept)
        for batch in self._answerer.answers([asked[place] for place in open_places]):
            for number, answer in batch:
                place = open_places[number]
                found[place] = answer
                self._kept.answers.put(keys[place], answer)
            self._progress.advance(len(batch))
        return [answer for answer in found if answer is not None]

    def _count(self, n_asked: int, n_kept: int) -> None:
        self._n_asked += n_asked
        self._n_kept += n_kept
        self.cached.count(self._task, n_asked, n_kept)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        by_task: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            by_task.setdefault(request.task_name, []).append(place)
        losses = [0.0] * len(requests)
        for task, places in by_task.items():
            self._task = task
            self.texts[task] = text = self._text([requests[place].args[0] for place in places])
            for place, loss in zip(places, text.losses, strict=True):
                losses[place] = -loss
        return losses

    def _text(self, documents: Sequence[str]) -> Text:
        windows, counts, n_tokens = [], [], []
        for ids in self._encoder.texts(documents):
            parts = self._windows(ids)
            windows += parts
            counts.append(len(parts))
            n_tokens.append(len(ids))
        whole = self._whole(windows)
        by_window = torch.split(whole.losses, counts)
        lengths = [sum(len(w.continuation) for w in part) for part in _parts(windows, counts)]
        return Text(
            [float(part.sum()) for part in by_window],
            n_tokens,
            list(torch.split(whole.kl, lengths)) if len(whole.kl) else None,
            list(torch.split(whole.agrees, lengths)) if len(whole.agrees) else None,
        )

    def _windows(self, ids: list[int]) -> list[Request]:
        rolling = utils.get_rolling_token_windows(
            token_list=ids,
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        pairs = map(utils.make_disjoint_window, rolling)
        return [Request(tuple(context), tuple(more)) for context, more in pairs]

    def _whole(self, windows: list[Request]) -> _Whole:
        """Losses by window and divergence by token, from what is kept where it is complete."""
        digest = divergence.tokens_digest(windows)
        kept, reference = self._kept.whole(digest), self._kept.reference(digest)
        if kept.is_file() and reference.is_file() == bool(len((found := _Whole.read(kept)).kl)):
            self._count(len(windows), len(windows))
            return found
        self._count(len(windows), 0)
        n_tokens = sum(len(window.continuation) for window in windows)
        watcher: Watcher | None = None
        recorded = compared = None
        if self._kept.is_source and not reference.is_file():
            recorded = divergence.Reference.empty(n_tokens, self.device)
            watcher = recorded.record
        elif reference.is_file():
            compared = divergence.Divergence(divergence.Reference.read(reference), self.device)
            watcher = compared.see
        self._progress.start(f"score {self._label}", n_tokens, "tokens")
        losses = torch.zeros(len(windows), dtype=torch.float64)
        for batch in self._answerer.answers(windows, watcher):
            for place, answer in batch:
                losses[place] = -answer.log_probability
            self._progress.advance(sum(len(windows[place].continuation) for place, _ in batch))
        if recorded is not None:
            recorded.write(reference)
            # By its own predictions, so that a source has a divergence of nothing.
            whole = _Whole(losses, torch.zeros(n_tokens), torch.ones(n_tokens, dtype=torch.bool))
        elif compared is not None:
            whole = _Whole(losses, compared.kl, compared.agrees)
        else:
            whole = _Whole(losses, torch.zeros(0), torch.zeros(0, dtype=torch.bool))
        whole.write(kept)
        return whole

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        raise ScoreError(
            f"task {requests[0].task_name} lets the model write freely; scores here come from "
            "log-probabilities only: choose another task"
        )


def _parts(windows: list[Request], counts: list[int]) -> list[list[Request]]:
    parts, start = [], 0
    for count in counts:
        parts.append(windows[start : start + count])
        start += count
    return parts
