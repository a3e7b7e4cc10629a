"""Runs lm-eval tasks on a loaded model, and adds what lm-eval leaves out.

lm-eval's perplexities are per word and per byte of its own counting. The headline here is
`<task>/perplexity`, per token: exp of the mean negative log-likelihood over the tokens of the
same requests.
"""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any

from quantkit import device as devices
from quantkit.errors import MissingDependency, ScoreError, UnknownName
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import now, versions
from quantkit.hush import hushed
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.progress import Progress, Silent
from quantkit.score.scorecard import Score, Scorecard, Settings

OWN_TASKS = Path(__file__).parent / "tasks"
LOGITS_BYTES = 2 << 30
BOOTSTRAP_ITERATIONS = 100  # with none, lm-eval leaves out all standard errors
MAX_BATCH = 16
MAX_CPU_BATCH = 2  # more only spills out of the caches


def score(
    target: ModelSource | Checkpoint,
    tasks: Sequence[str],
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int | None = None,
    max_length: int | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Scorecard:
    """Run tasks on a source model or on one of our checkpoints."""
    started = time.monotonic()
    progress = progress or Silent()
    where = devices.choose(device)
    with _quiet():
        manager = _task_manager(tasks)
        model = _Model(target, where, batch_size, max_length, progress, trust_remote_code)
        results = _evaluate(model, manager, tasks, limit, num_fewshot, seed)
    progress.finish()
    identity = _identity(target)
    return Scorecard(
        **identity,
        scores=_scores(results, model),
        settings=Settings(
            tasks={task: str(results["versions"].get(task, "")) for task in tasks},
            limit=limit,
            num_fewshot=num_fewshot,
            max_length=model.lm.max_length,
            asked_length=max_length,
            dtype=str(model.lm.model.dtype).removeprefix("torch."),
            seed=seed,
        ),
        versions={**versions(), "lm_eval": _lm_eval_version()},
        device=devices.describe(where),
        seconds=time.monotonic() - started,
        created=now(),
    )


def _identity(target: ModelSource | Checkpoint) -> dict[str, Any]:
    shared = {"name": target.label, "digest": target.digest}
    if isinstance(target, Checkpoint):
        manifest = target.manifest
        return shared | {
            "recipe": manifest.recipe.name,
            "format": manifest.format,
            "size_bytes": manifest.size_bytes,
            "bits_per_weight": manifest.bits_per_weight,
            "source_fingerprint": manifest.source.fingerprint,
        }
    stored = Architecture.of(target.folder, target.trust_remote_code).stored(target)
    size = sum(spec.size_bytes for spec in stored)
    return shared | {
        "recipe": None,
        "format": "safetensors",
        "size_bytes": size,
        "bits_per_weight": 8 * size / sum(spec.n_elements for spec in stored),
        "source_fingerprint": target.fingerprint,
    }


class _Model:
    """A loaded model as lm-eval sees it, with progress."""

    def __init__(
        self,
        target: ModelSource | Checkpoint,
        device: Any,
        batch_size: int | None,
        max_length: int | None,
        progress: Progress,
        trust_remote_code: bool,
    ) -> None:
        from lm_eval.models.huggingface import HFLM

        from quantkit.score import loading

        class ReportingHFLM(HFLM):  # type: ignore[misc]
            def _loglikelihood_tokens(self, requests: Any, **options: Any) -> Any:
                options["disable_tqdm"] = True
                answers = super()._loglikelihood_tokens(requests, **options)
                progress.advance(sum(len(tokens) for _, _, tokens in requests))
                return answers

            def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
                total = sum(len(self.tok_encode(r.args[0])) for r in requests)
                progress.start(f"score {name}", total, "tokens")
                return super().loglikelihood_rolling(requests, disable_tqdm=True)

            def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
                total = sum(len(self.tok_encode(r.args[1])) for r in requests)
                progress.start(f"score {name}", total, "tokens")
                return super().loglikelihood(requests, disable_tqdm=True)

        name = target.label
        model = loading.load(target, device, trust_remote_code)
        context = max_length or _context(model.config)
        most = MAX_BATCH if device.type == "cuda" else MAX_CPU_BATCH
        room = LOGITS_BYTES // (4 * model.config.vocab_size * context)
        self.lm = ReportingHFLM(
            pretrained=model,
            tokenizer=loading.tokenizer(target.folder, trust_remote_code),
            batch_size=batch_size or max(1, min(most, room)),
            max_length=max_length,
        )


def _context(config: Any) -> int:
    return int(getattr(config, "max_position_embeddings", 2048))


@cache
def _all_tasks() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(OWN_TASKS))


def _task_manager(tasks: Sequence[str]) -> Any:
    manager = _all_tasks()
    for task in tasks:
        if task not in manager.all_tasks:
            raise UnknownName("task", task, _few(task, manager.all_tasks))
    return manager


def check_tasks(tasks: Sequence[str]) -> None:
    """Refuse unknown tasks, before anything that takes long."""
    with _quiet():
        _task_manager(tasks)


def _few(task: str, known: Sequence[str]) -> list[str]:
    """Near matches and our own tasks: lm-eval has thousands."""
    import difflib

    near = difflib.get_close_matches(task, known, n=3, cutoff=0.6)
    return near or ["python_docs", "wikitext", "mmlu"]


def _evaluate(
    model: _Model,
    manager: Any,
    tasks: Sequence[str],
    limit: int | None,
    num_fewshot: int | None,
    seed: int,
) -> dict[str, Any]:
    import lm_eval

    # Not `simple_evaluate`: it also collects facts about the machine, for longer than small
    # models take to score, and asks git about the working directory.
    try:
        loaded = manager.load(list(tasks))
        for task in loaded["tasks"].values():
            default = task.get_config("num_fewshot")
            if num_fewshot is not None and default != 0:
                task.set_config(key="num_fewshot", value=num_fewshot)
            elif default is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=seed)
        results = lm_eval.evaluate(
            lm=model.lm,
            task_dict=loaded,
            limit=limit,
            bootstrap_iters=BOOTSTRAP_ITERATIONS,
            log_samples=True,
        )
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"a task of {', '.join(tasks)} needs the package {error.name}; "
            f"install it: pip install {error.name}"
        ) from error
    except (ConnectionError, FileNotFoundError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
        raise ScoreError(
            f"the data of {', '.join(tasks)} cannot be reached: {first}; connect to the hub once, "
            "or run where a folder of the dataset's name holds it"
        ) from error
    assert results is not None
    return dict(results)


def _scores(results: dict[str, Any], model: _Model) -> dict[str, Score]:
    scores: dict[str, Score] = {}
    for task, figures in results["results"].items():
        n = _n_samples(results, task)
        directions = results["higher_is_better"].get(task, {})
        samples = results["samples"].get(task, [])
        for key, value in figures.items():
            metric, _, suffix = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, float | int) or not suffix:
                continue
            stderr = figures.get(f"{metric}_stderr,{suffix}")
            scores[f"{task}/{metric}"] = Score(
                value=_finite(task, metric, float(value)),
                stderr=float(stderr) if isinstance(stderr, float) else None,
                n=n,
                higher_is_better=bool(directions.get(metric, True)),
            )
        if results["configs"].get(task, {}).get("output_type") == "loglikelihood_rolling":
            scores[f"{task}/perplexity"] = _per_token(task, samples, model)
    return scores


def _n_samples(results: dict[str, Any], task: str) -> int:
    """Documents of a task, or of all tasks of a group."""
    if task in results["n-samples"]:
        return int(results["n-samples"][task]["effective"])
    members = results.get("group_subtasks", {}).get(task, [])
    return sum(_n_samples(results, member) for member in members)


def _per_token(task: str, samples: list[dict[str, Any]], model: _Model) -> Score:
    """Perplexity per token; its error treats documents as the independent units."""
    pairs = []
    for sample in samples:
        ((text,),) = sample["arguments"]
        ((loglikelihood,),) = sample["resps"]
        pairs.append((float(loglikelihood), len(model.lm.tok_encode(text))))
    n_tokens = sum(tokens for _, tokens in pairs)
    mean = -sum(loglikelihood for loglikelihood, _ in pairs) / n_tokens
    value = _finite(task, "perplexity", math.exp(min(mean, 700)))
    stderr = None
    if len(pairs) > 1:
        # Ratio estimator: residuals of each document's loss from what its length predicts.
        squares = sum((-ll - mean * tokens) ** 2 for ll, tokens in pairs)
        spread = math.sqrt(squares * len(pairs) / (len(pairs) - 1)) / n_tokens
        stderr = value * spread
    return Score(value=value, stderr=stderr, n=n_tokens, higher_is_better=False)


def _finite(task: str, metric: str, value: float) -> float:
    if not math.isfinite(value):
        raise ScoreError(f"{task}/{metric} is {value}: the model's outputs are not finite")
    return value


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's and its neighbours' own bars and notices off the screen."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with (
        hushed("lm_eval", "transformers", "datasets"),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        yield


def _lm_eval_version() -> str:
    from importlib.metadata import version

    return version("lm_eval")
