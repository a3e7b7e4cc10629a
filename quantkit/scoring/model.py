"""A model as lm-eval sees it: its own tokenising and its own windows, our way of answering.

Answers are cached as they come, so a stopped run resumes. For texts that are scored whole, a
source's predictions are stored too, and a candidate is compared with them.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lm_eval import utils
from lm_eval.models.huggingface import HFLM

from quantkit import __version__
from quantkit.errors import ScoreError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.foreign import ForeignCheckpoint, is_source
from quantkit.model.shards import read_header, write_whole
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.progress import Progress
from quantkit.scoring import cache, divergence, loading
from quantkit.scoring.answering import Answer, Answerer, Observation, Request, truncated
from quantkit.scoring.answers import Text
from quantkit.scoring.following import Followed, Prompts
from quantkit.scoring.rules import Rules, keys_of
from quantkit.scoring.tokens import Encoder, batches, n_before_text
from quantkit.scoring.writing import Writer
from quantkit.storage import write_json

KEPT_AS = "3"
"""Version of the cache format. Answers in another format are ignored."""


@dataclass(frozen=True)
class _CachedText:
    """Results on the texts of a task, as cached."""

    losses: torch.Tensor
    """By window, for all its tokens."""
    beside: torch.Tensor
    """By window, for its tokens that are not text."""
    places: torch.Tensor
    """Tokens that were compared with the source's predictions; none without a source."""
    kl: torch.Tensor
    agrees: torch.Tensor

    def write(self, path: Path) -> None:
        write_whole(path, {field.name: getattr(self, field.name) for field in fields(self)})

    def by_document(
        self, counts: Sequence[int]
    ) -> tuple[list[torch.Tensor] | None, list[torch.Tensor] | None]:
        """Divergence and agreement by document, for documents of these lengths."""
        if not len(self.places):
            return None, None
        ends = torch.tensor(counts).cumsum(0)
        compared = torch.searchsorted(ends, self.places, right=True)
        sizes = torch.bincount(compared, minlength=len(ends)).tolist()
        return list(torch.split(self.kl, sizes)), list(torch.split(self.agrees, sizes))

    @classmethod
    def read(cls, path: Path) -> "_CachedText":
        stored = read_header(path)
        return cls(*(stored[field.name].read() for field in fields(cls)))


class _SpecialTokens:
    """Observes a model on tokens that are not text."""

    def __init__(self, is_text: torch.Tensor, counts: Sequence[int]) -> None:
        self._is_text = is_text
        self._windows = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        self.losses = torch.zeros(len(counts), dtype=torch.float64)

    def see(self, seen: Observation) -> None:
        at = (~self._is_text[seen.places]).nonzero()[:, 0]
        if len(at):
            values = seen.log_probabilities[at.to(seen.log_probabilities.device)].double().cpu()
            self.losses.index_add_(0, self._windows[seen.places[at]], -values)


@dataclass
class _Caches:
    """Where answers of this model, and predictions of its source, are cached."""

    folder: Path
    name: str
    source_name: str
    is_source: bool
    answers: cache.AnswerCache = field(init=False)

    def __post_init__(self) -> None:
        self.answers = cache.AnswerCache(self.folder, self.name)

    @classmethod
    def of(cls, target: ModelSource | Checkpoint, model: Any, folder: Path) -> "_Caches":
        import transformers

        facts = {
            "kept as": KEPT_AS,
            "device": model.device.type,
            "dtype": str(model.dtype),
            "quantkit": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        source = target.digest
        if isinstance(target, Checkpoint):
            source = target.manifest.source.fingerprint
        elif isinstance(target, ForeignCheckpoint) and target.original is not None:
            source = target.original.fingerprint
        return cls(
            folder,
            cache.identity(facts | {"model": target.digest}),
            cache.identity(facts | {"model": source}),
            is_source(target),
        )

    def whole(self, digest: str) -> Path:
        return self.folder / f"{self.name}-{digest}.text"

    def reference(self, digest: str) -> Path:
        return self.folder / f"{self.source_name}-{digest}.reference"

    def answers_of(self, name: str, prompts: Sequence[tuple[int, ...]], rules: Rules) -> Path:
        """The source's own answers."""
        digest = hashlib.sha256(b"".join(keys_of(prompts, rules))).hexdigest()[:32]
        return self.folder / f"{self.source_name}-{digest}.answers"

    @property
    def head(self) -> Path:
        return self.folder / f"{self.source_name}.head"


@dataclass(frozen=True)
class How:
    """How a model is asked."""

    max_length: int | None = None
    """Tokens per window; by default the model's context."""
    batch_size: int | None = None
    """Most sequences per batch; by default as many as fit."""
    seed: int = 0
    """Seed of sampled answers."""


class EvaluatedModel(HFLM):  # type: ignore[misc]
    """lm-eval's Hugging Face model, with our way of answering."""

    def __init__(
        self,
        target: ModelSource | Checkpoint,
        device: torch.device,
        how: How,
        folder: Path,
        progress: Progress,
        trust_remote_code: bool,
    ) -> None:
        model = loading.load(target, device, trust_remote_code)
        super().__init__(
            pretrained=model,
            tokenizer=load_tokenizer(target.folder, trust_remote_code),
            max_length=how.max_length,
        )
        self._label = target.label
        self._progress = progress
        self._encoder = Encoder(self)
        self._answerer = Answerer(model, self.max_length, how.batch_size)
        self._folder, self._cache, self._how = target.folder, folder, how
        self._kept = _Caches.of(target, model, folder)
        self._n_asked = self._n_kept = 0
        self._task = ""
        self.cached = cache.Cached()
        """How many answers were cached, by task."""
        self.texts: dict[str, Text] = {}
        """Results on texts that were scored whole, by task."""

    def close(self) -> None:
        """Write all answers to the cache."""
        self._kept.answers.close()

    @property
    def cache_hits(self) -> str:
        """Which answers came from which cache, in words; empty where none did."""
        if not self._n_kept:
            return ""
        if self._n_kept == self._n_asked:
            return f"{self._label}: all answers come from the cache {self._cache}"
        share = f"{self._n_kept / self._n_asked:.0%}"
        return f"{self._label}: {share} of the answers come from the cache {self._cache}"

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        self._progress.start(f"score {self._label}", len(requests), "options")
        parts = list(batches(requests))
        found: list[Answer] = []
        for part, asked in zip(parts, self._encoder.requests(parts), strict=True):
            self._task = part[0].task_name
            self._progress.status(self._task)
            found += self._answers(asked)
        return [(answer.log_probability, answer.greedy) for answer in found]

    def _answers(self, asked: list[Request]) -> list[Answer]:
        """Cached answers, and the model's for all others."""
        keys = cache.keys_of([truncated(request, self.max_length) for request in asked])
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
        totals = [0.0] * len(requests)
        for task, places in by_task.items():
            self._task = task
            found = self._text([requests[place].args[0] for place in places])
            self.texts[task] = found.text
            for place, loss in zip(places, found.losses, strict=True):
                totals[place] = -loss
        return totals

    def _text(self, documents: Sequence[str]) -> "_TextScores":
        windows, counts, n_tokens, is_text = [], [], [], []
        for ids in self._encoder.texts(documents):
            parts = self._windows(ids)
            windows += parts
            counts.append(len(parts))
            beside = n_before_text(ids, self.tokenizer)
            n_tokens.append(len(ids) - beside)
            is_text.append(torch.arange(len(ids)) >= beside)
        whole = self._whole(windows, torch.cat(is_text))
        losses = [float(part.sum()) for part in torch.split(whole.losses, counts)]
        beside_losses = [float(part.sum()) for part in torch.split(whole.beside, counts)]
        kl, agrees = whole.by_document([len(part) for part in is_text])
        own = [loss - other for loss, other in zip(losses, beside_losses, strict=True)]
        return _TextScores(losses, Text(own, n_tokens, kl, agrees))

    def _windows(self, ids: list[int]) -> list[Request]:
        rolling = utils.get_rolling_token_windows(
            token_list=ids,
            prefix_token=self.prefix_token_id,
            max_seq_len=self.max_length,
            context_len=1,
        )
        pairs = map(utils.make_disjoint_window, rolling)
        return [Request(tuple(context), tuple(more)) for context, more in pairs]

    def _whole(self, windows: list[Request], is_text: torch.Tensor) -> _CachedText:
        """Losses by window and divergence by position, from the cache where it is complete."""
        digest = divergence.tokens_digest(windows, is_text)
        kept, reference = self._kept.whole(digest), self._kept.reference(digest)
        has_source = reference.is_file() and self._kept.head.is_file()
        if kept.is_file() and has_source == bool(len((found := _CachedText.read(kept)).places)):
            self._count(len(windows), len(windows))
            return found
        self._count(len(windows), 0)
        counts = [len(window.continuation) for window in windows]
        beside = _SpecialTokens(is_text, counts)
        recorder = compared = None
        if self._kept.is_source:
            recorder = divergence.Recorder(is_text)
        elif has_source:
            compared = divergence.Divergence(
                divergence.Reference.read(reference, self._answerer.device),
                len(is_text),
                self._answerer,
                divergence.read_head(self._kept.head, self.model),
            )
        watchers = [watcher for watcher in (beside, recorder, compared) if watcher is not None]

        def watch(seen: Observation) -> None:
            for watcher in watchers:
                watcher.see(seen)

        self._progress.start(f"score {self._label}", len(is_text), "tokens")
        losses = torch.zeros(len(windows), dtype=torch.float64)
        for batch in self._answerer.answers(windows, watch):
            for place, answer in batch:
                losses[place] = -answer.log_probability
            self._progress.advance(sum(counts[place] for place, _ in batch))
        places, agrees = torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.bool)
        kl = torch.zeros(0)
        if recorder is not None:
            recorder.reference.write(reference)
            divergence.write_head(self._kept.head, self.model)
            # By its own predictions, so that a source has a divergence of zero.
            places = recorder.reference.places
            kl, agrees = torch.zeros(len(places)), torch.ones(len(places), dtype=torch.bool)
        elif compared is not None:
            places, kl, agrees = compared.places, compared.kl, compared.agrees
        whole = _CachedText(losses, beside.losses, places, kl, agrees)
        whole.write(kept)
        return whole

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        found = [""] * len(requests)
        by_rules: dict[tuple[str, Rules], list[int]] = {}
        for place, request in enumerate(requests):
            rules = self.writer.rules(request.task_name, request.args[1], self._how.seed)
            by_rules.setdefault((request.task_name, rules), []).append(place)
        self._progress.start(f"score {self._label}", len(requests), "answers")
        for (task, rules), places in by_rules.items():
            self._task = task
            self._progress.status(task)
            contexts = self._encoder.texts([requests[place].args[0] for place in places])
            prompts = [self.writer.fitting(task, ids, rules) for ids in contexts]
            texts, n_kept = self.writer.texts(prompts, rules, self._progress.advance)
            self._count(len(prompts), n_kept)
            for place, text in zip(places, texts, strict=True):
                found[place] = text
        return found

    def follow(self, asked: Prompts) -> tuple[Text, Followed]:
        """How this model predicts its source's answers; a source generates them first."""
        self._task = asked.name
        rules = self.writer.greedy(asked.max_new)
        encoded = asked.encoded(self.tokenizer)
        prompts = [self.writer.fitting(asked.name, ids, rules) for ids in encoded]
        kept = self._kept.answers_of(asked.name, prompts, rules)
        if self._kept.is_source:
            self._progress.start(f"{self._label} answers {asked.name}", len(prompts), "answers")
            written = self.writer.tokens(prompts, rules, self._progress.advance)
            write_json(kept, written)
        elif not kept.is_file():
            raise ScoreError(
                f"the source's own answers to {asked.name} are missing; score the source first, or "
                f"together with {self._label} in one command"
            )
        else:
            written = [tuple(tokens) for tokens in json.loads(kept.read_text())]
        windows = [Request(p, tokens) for p, tokens in zip(prompts, written, strict=True)]
        counts = [len(tokens) for tokens in written]
        whole = self._whole(windows, torch.ones(sum(counts), dtype=torch.bool))
        kl, agrees = whole.by_document(counts)
        text = Text(whole.losses.tolist(), counts, kl, agrees)
        return text, Followed(counts, agrees)

    def answer(self, asked: Prompts) -> list[str]:
        """This model's own greedy answers."""
        self._task = asked.name
        rules = self.writer.greedy(asked.max_new)
        encoded = asked.encoded(self.tokenizer)
        prompts = [self.writer.fitting(asked.name, ids, rules) for ids in encoded]
        self._progress.start(f"{self._label} answers {asked.name}", len(prompts), "answers")
        written = self.writer.tokens(prompts, rules, self._progress.advance)
        return [str(self.tok_decode(tokens)) for tokens in written]

    @cached_property
    def writer(self) -> Writer:
        """Created when the first answer is generated."""
        return Writer(self, self._folder, cache.TextCache(self._kept.answers), self._how.batch_size)


@dataclass(frozen=True)
class _TextScores:
    losses: list[float]
    """By document, for all tokens that lm-eval counts."""
    text: Text
