"""A GGUF file in real llama.cpp, asked token by token: the engine that will serve it, if slowly.

llama.cpp reports the log-probability of the token that it chooses. So a bias makes it choose every
requested token; the bias does not enter what is reported. The tokens before it stay in llama.cpp's
cache from one request to the next.
"""

from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from quantkit import resources
from quantkit.engine import http
from quantkit.errors import MissingDependency, ScoreError
from quantkit.parsing import parse_json
from quantkit.scoring.endpoint import Echo, written_text
from quantkit.scoring.rules import Rules

CERTAIN = 1000
"""A bias that makes any token the choice."""
MAX_CONTEXT = 4096
SHORT = "score with a shorter --max-length"


class LlamaCpp:
    """One file, loaded in this process."""

    def __init__(self, path: Path, context: int, max_length: int | None) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise MissingDependency(
                "--backend llama.cpp needs the package xllamacpp; "
                f"install it: {resources.install('llamacpp')}"
            ) from error
        self.url = str(path)
        self.model = path.name
        self._name = f"llama.cpp with {path.name}"
        self.max_model_len: int | None = min(context, (max_length or MAX_CONTEXT) + 2)
        wanted = xllamacpp.CommonParams()
        wanted.model.path = str(path)
        wanted.n_ctx = self.max_model_len
        wanted.n_parallel = 1
        wanted.warmup = False
        wanted.verbosity = -1
        try:
            self._server = xllamacpp.Server(wanted)
        except RuntimeError as error:
            raise ScoreError(
                f"llama.cpp does not load {path}: {error}; run `quantkit verify`"
            ) from error

    def facts(self) -> dict[str, str] | None:
        """What determines its answers, besides the file."""
        version = metadata.version("xllamacpp")
        return {"engine": "llama.cpp", "version": version, "context": str(self.max_model_len)}

    def echo_text(self, text: str) -> Echo:
        """A text as tokenised by llama.cpp."""
        body = {"content": text, "add_special": True, "parse_special": True}
        url = f"{self._server.listening_address}/tokenize"
        _, content = http.ask("POST", url, body, timeout_s=60)
        ids = parse_json(content)["tokens"]
        return Echo([f"token_id:{number}" for number in ids], [], [])

    def echo_all(
        self,
        prompts: Sequence[list[int]],
        n_scored: Sequence[int],
        keep: Callable[[int, Echo], None],
    ) -> None:
        """Ask for the last tokens of every prompt, those with a common prefix consecutively."""
        for i in sorted(range(len(prompts)), key=lambda i: prompts[i]):
            tokens, n = prompts[i], n_scored[i]
            found = [
                self._ask(tokens[:at], tokens[at]) for at in range(len(tokens) - n, len(tokens))
            ]
            keep(i, Echo([], [own for own, _ in found], [best for _, best in found]))

    def write_all(
        self,
        prompts: Sequence[tuple[int, ...]],
        rules: Rules,
        keep: Callable[[int, str], None],
    ) -> None:
        """Answers one after another, those with a common prefix consecutively."""
        for i in sorted(range(len(prompts)), key=lambda i: prompts[i]):
            asked: dict[str, Any] = {
                "prompt": list(prompts[i]),
                "n_predict": rules.max_new,
                "temperature": rules.temperature,
                "stop": list(rules.stops),
                "repeat_penalty": rules.repetition_penalty,
                "cache_prompt": True,
            }
            if rules.temperature:
                asked |= {"seed": rules.seed + i, "top_k": rules.top_k or 0, "min_p": 0.0}
                asked["top_p"] = rules.top_p or 1.0
            keep(i, written_text(self._answer(asked), rules.max_new, self._name, SHORT))

    def _answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: Any = self._server.handle_completions(asked)
        except (RuntimeError, ValueError) as error:
            raise ScoreError(
                f"{self._name} stopped: {error}; its answers are kept, and the same command resumes"
            ) from error
        if not isinstance(answer, dict) or not answer.get("choices"):
            n_tokens = len(asked["prompt"])
            raise ScoreError(f"{self._name} refuses {n_tokens} tokens: {str(answer)[:300]}")
        return answer

    def _ask(self, before: list[int], token: int) -> tuple[float, float]:
        """Log-probabilities of a token and of the likeliest one."""
        entry = self._complete(before, [token, CERTAIN], 1)
        if entry is not None and entry["id"] == token:
            return entry["logprob"], entry["top_logprobs"][0]["logprob"]
        # An incomplete character is missing from the answer: then ask for all tokens, after a
        # letter.
        entry = self._complete(before, ["a", CERTAIN], 1 << 20)
        every = {} if entry is None else {e["id"]: e["logprob"] for e in entry["top_logprobs"]}
        if token not in every:
            raise ScoreError(f"llama.cpp returns no probability for token {token} of {self.model}")
        return every[token], max(every.values())

    def _complete(self, before: list[int], bias: list[Any], n_probs: int) -> dict[str, Any] | None:
        answer = self._answer(
            {
                "prompt": before,
                "n_predict": 1,
                "n_probs": n_probs,
                "temperature": 0,
                "cache_prompt": True,
                "logit_bias": [bias],
            }
        )
        try:
            logprobs = answer["choices"][0]["logprobs"]
            first: dict[str, Any] | None = logprobs["content"][0] if logprobs else None
        except (KeyError, TypeError, IndexError) as error:
            raise ScoreError(f"{self._name} answered in an unknown form; run again") from error
        return first
