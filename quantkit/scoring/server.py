"""A served model as lm-eval sees it: the same windows and answers as its Hugging Face model.

This scores the engine that will serve the model, with its own kernels.
"""

import hashlib
from array import array
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, Protocol

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import has_bos_prefix
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from quantkit.errors import ScoreError
from quantkit.scoring import rules
from quantkit.scoring.answers import Text
from quantkit.scoring.cache import Cached, TextCache
from quantkit.scoring.endpoint import Echo, Endpoint
from quantkit.scoring.following import Prompts
from quantkit.scoring.rules import Rules
from quantkit.scoring.tokens import n_before_text

# Tokenizers disagree on at least one of these.
PROBE = "The naïve café paid 3,141.59 €…\n\n    def f(x):\treturn x ** 2  # 你好"

Answers = MutableMapping[str, tuple[float, bool]]


class Engine(Protocol):
    """What answers: a server at an address, or an engine in this process."""

    url: str
    model: str
    max_model_len: int | None

    def facts(self) -> dict[str, str] | None:
        """What determines its answers, apart from the model; None where that cannot be learned."""

    def echo_text(self, text: str) -> Echo:
        """A text as tokenised by the engine."""

    def echo_all(
        self,
        prompts: Sequence[list[int]],
        n_scored: Sequence[int],
        keep: Callable[[int, Echo], None],
    ) -> None:
        """Log-probabilities of prompts, at least of their last tokens."""

    def write_all(
        self,
        prompts: Sequence[tuple[int, ...]],
        rules: Rules,
        keep: Callable[[int, str], None],
    ) -> None:
        """Answers to prompts, as text."""


class ServedModel(TemplateLM):  # type: ignore[misc]
    """Log-likelihoods from a server.

    `answers` stores every answer under a hash of model name and tokens, as soon as it arrives; what
    it contains is not asked again. `advance` is called with the number of continuation tokens
    answered.
    """

    def __init__(
        self,
        served: "str | Engine",
        tokenizer: Any,
        max_length: int | None = None,
        answers: Answers | None = None,
        advance: Callable[[int], None] = lambda n_tokens: None,
        written: TextCache | None = None,
    ) -> None:
        super().__init__()
        self._written: Any = _Unkept() if written is None else written
        self._usual = Rules(0)
        endpoint = Endpoint(served) if isinstance(served, str) else served
        self.endpoint = endpoint
        self.tokenizer = tokenizer
        self._answers: Answers = {} if answers is None else answers
        self._advance = advance
        self._asked: set[str] = set()
        self._were_kept: list[bool] = []
        self.cached = Cached()
        """How many answers were already cached, by task."""
        self.texts: dict[str, Text] = {}
        """Results on texts that were scored whole, by task."""
        self._max_length = _windows(endpoint, max_length)
        if not endpoint.echo_text(PROBE).is_of(self.tok_encode(PROBE)):
            raise ScoreError(
                f"{endpoint.url} tokenises text differently from {tokenizer.name_or_path}; it "
                "serves another model"
            )

    @property
    def max_length(self) -> int:
        """Tokens that a window predicts, each from those before it, as lm-eval counts."""
        return self._max_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that a text's first token is predicted from."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """A name for lm-eval's own caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Token ids, as from lm-eval's Hugging Face model: never two BOS tokens."""
        if add_special_tokens is None and has_bos_prefix(
            string, self.tokenizer.decode(self.prefix_token_id)
        ):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **special))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as text."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def loglikelihood(
        self, requests: list[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Of continuations after contexts, and whether greedy decoding would produce them."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        for request, was_kept in zip(requests, self._were_kept, strict=True):
            self.cached.count(request.task_name, 1, was_kept)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Of whole texts, in windows that do not overlap."""
        owners: list[int] = []
        windows = []
        for i, request in enumerate(requests):
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, rolling):
                owners.append(i)
                windows.append((None, *window))
        totals = [0.0] * len(requests)
        for i, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[i] += value
        for i, was_kept in zip(owners, self._were_kept, strict=True):
            self.cached.count(requests[i].task_name, 1, was_kept)
        by_task: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_task.setdefault(request.task_name, []).append(i)
        encoded = [self.tok_encode(request.args[0]) for request in requests]
        marks = [tuple(ids[: n_before_text(ids, self.tokenizer)]) for ids in encoded]
        beside = self._after_nothing({mark for mark in marks if mark})
        for task, places in by_task.items():
            n_tokens = [len(encoded[i]) - len(marks[i]) for i in places]
            losses = [beside.get(marks[i], 0.0) - totals[i] for i in places]
            self.texts[task] = Text(losses, n_tokens, None, None)
        return totals

    def _after_nothing(self, marks: set[tuple[int, ...]]) -> dict[tuple[int, ...], float]:
        """Log-likelihoods of what a tokenizer prepends to texts: included only in lm-eval's
        sums.
        """
        if not marks:
            return {}
        ordered = sorted(marks)
        asked = [(None, [self.prefix_token_id], list(mark)) for mark in ordered]
        values = (value for value, _ in self._loglikelihood_tokens(asked))
        return dict(zip(ordered, values, strict=True))

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        keys: list[str] = []
        self._were_kept = []
        asked: dict[str, tuple[list[int], int]] = {}
        for _, context, continuation in requests:
            n = len(continuation)
            if not context or not 0 < n <= self.max_length:
                raise ScoreError(
                    f"a task asks for {n} tokens after {len(context)}, which does not fit into a "
                    f"window of {self.max_length}; score with a larger maximum length"
                )
            tokens = (context + continuation)[-(self.max_length + 1) :]
            keys.append(self._key(tokens, n))
            self._were_kept.append(keys[-1] not in self._asked and keys[-1] in self._answers)
            if keys[-1] in self._answers or keys[-1] in asked:
                self._advance(n)
            else:
                asked[keys[-1]] = tokens, n
        waiting = list(asked.items())
        self._asked.update(asked)

        def keep(i: int, echo: Echo) -> None:
            key, (_, n) = waiting[i]
            self._answers[key] = echo.tail(n)
            self._advance(n)

        prompts = [tokens for _, (tokens, _) in waiting]
        self.endpoint.echo_all(prompts, [n for _, (_, n) in waiting], keep)
        return [(value, greedy) for value, greedy in map(self._answers.__getitem__, keys)]

    def _key(self, tokens: list[int], n_continuation: int) -> str:
        digest = hashlib.sha256(self.endpoint.model.encode())
        digest.update(array("q", [n_continuation, *tokens]).tobytes())
        return digest.hexdigest()

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer where a task does not say, as in lm-eval's own models."""
        return 256

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some tokens."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Answers that the engine generates, cut where lm-eval cuts them."""
        found = [""] * len(requests)
        by_rules: dict[tuple[str, Rules], list[int]] = {}
        for place, request in enumerate(requests):
            how = rules.of_task(request.task_name, request.args[1], self, self._usual)
            by_rules.setdefault((request.task_name, how), []).append(place)
        for (task, how), places in by_rules.items():
            encoded = [self.tok_encode(requests[place].args[0]) for place in places]
            for place, text in zip(places, self._texts(task, encoded, how), strict=True):
                found[place] = text
        return found

    def answer(self, asked: Prompts) -> list[str]:
        """The engine's own greedy answers."""
        how = Rules(
            asked.max_new, ends=self._usual.ends, repetition_penalty=self._usual.repetition_penalty
        )
        return self._texts(asked.name, asked.encoded(self.tokenizer), how)

    def _texts(self, task: str, encoded: Sequence[Sequence[int]], how: Rules) -> list[str]:
        """Answers to prompts, using those of an earlier run."""
        from lm_eval.models.utils import postprocess_generated_text

        prompts = [rules.fitting(task, ids, how, self.max_length) for ids in encoded]
        keys = rules.keys_of(prompts, how)
        kept = [self._written.get(key) for key in keys]
        waiting = [number for number, text in enumerate(kept) if text is None]
        self.cached.count(task, len(prompts), len(prompts) - len(waiting))
        self._advance(len(prompts) - len(waiting))

        def keep(i: int, text: str) -> None:
            number = waiting[i]
            kept[number] = cut = postprocess_generated_text(text, list(how.stops), None)
            self._written.put(keys[number], cut)
            self._advance(1)

        self.endpoint.write_all([prompts[number] for number in waiting], how, keep)
        return [text or "" for text in kept]


class _Unkept:
    """For texts of an engine that may be another one tomorrow."""

    def get(self, key: bytes) -> str | None:
        return None

    def put(self, key: bytes, text: str) -> None:
        """Discard."""


def _windows(endpoint: "Engine", asked: int | None) -> int:
    """The window length: the first token is extra, and the server generates one of its own."""
    if endpoint.max_model_len is None:
        if asked is None:
            raise ScoreError(f"{endpoint.url} does not report its context; give --max-length")
        return asked
    most = endpoint.max_model_len - 2
    if asked is not None and asked > most:
        raise ScoreError(
            f"{endpoint.url} takes at most {endpoint.max_model_len} tokens, and windows of {asked} "
            f"need two more; serve with --max-model-len {asked + 2}, or score with {most}"
        )
    return asked or most
