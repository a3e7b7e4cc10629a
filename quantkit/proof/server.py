"""The same questions to a server that is already running."""

from pathlib import Path
from typing import Any

from quantkit.engine.vllm_job import Answer, Job
from quantkit.errors import EngineError
from quantkit.scoring.endpoint import Echo, Endpoint

ID = "token_id:"


class Server(Endpoint):
    """An OpenAI-compatible server that reports token ids, as vLLM does."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        super().__init__(url, model, api_key=api_key)
        self._is_named = model is not None

    def _require(self, folder: Path) -> None:
        """Refuse a server of another model: its answers would be recorded for this one."""
        is_it = folder.name == Path(self.model).name or self.root == str(folder)
        if not is_it and not self._is_named:
            raise EngineError(
                f"{self.url} serves {self.model}, not {folder.name}; if that is the same "
                f"checkpoint, say so with --model {self.model}"
            )

    def ask(self, job: Job) -> Answer:
        """Answer a job as our own engine process would."""
        self._require(Path(job.model))
        tokens, logprobs, texts = self._generate(job)
        read: dict[int, list[float]] = {}

        def keep(number: int, echo: Echo) -> None:
            read[number] = echo.own

        if job.level == "logprobs":
            self.echo_all(job.score, [len(ids) for ids in job.score], keep)
        return Answer(
            version=self.version() or "unknown",
            device=f"the server at {self.url}",
            dtype=None,
            texts=texts,
            tokens=tokens,
            token_logprobs=logprobs,
            prompt_logprobs=[read[i] for i in sorted(read)],
        )

    def stop(self) -> None:
        """Called when nobody waits for answers any more."""
        self._cut()

    def _generate(self, job: Job) -> tuple[list[list[int]], list[list[float]], list[str]]:
        body = {
            "model": self.model,
            "prompt": job.generate,
            "max_tokens": job.max_tokens,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
        }
        try:
            answer: Any = self._send("POST", "/completions", body)
        finally:
            self._hang_up()
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            named = [[str(token) for token in c["logprobs"]["tokens"]] for c in choices]
            logprobs = [[float(v) for v in c["logprobs"]["token_logprobs"]] for c in choices]
            texts = [str(choice["text"]) for choice in choices]
            tokens = [[int(token.removeprefix(ID)) for token in row] for row in named]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"{self.url} does not return the ids and log-probabilities of what it generates; "
                "use a server that does, such as vLLM"
            ) from error
        return tokens, logprobs, texts
