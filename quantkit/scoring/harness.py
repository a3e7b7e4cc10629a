"""Runs lm-eval tasks on a loaded model, and adds what lm-eval leaves out.

lm-eval's perplexities are per word and per byte by its own count. The headline here is
`<task>/perplexity`, per token: exp of the mean negative log-likelihood over the texts' own tokens.
"""

import hashlib
import math
import time
from collections.abc import Sequence
from typing import Any

from quantkit import device as devices
from quantkit import metrics
from quantkit.errors import CheckpointError, ScoreError, UnknownName
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.foreign import ForeignCheckpoint, likeness
from quantkit.export.manifest import now, versions
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.progress import Progress, Silent
from quantkit.scoring import answers, lmeval, provenance
from quantkit.scoring.answers import Outcome, Text
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.following import Followed, Prompts
from quantkit.scoring.options import BACKENDS, Chat, ScoreOptions
from quantkit.scoring.scorecard import Provenance, Score, Scorecard, Settings
from quantkit.scoring.task_needs import Tokenizer


def score(
    target: ModelSource | Checkpoint,
    tasks: Sequence[str],
    limit: int | None = None,
    device: str = "auto",
    **more: Any,
) -> Scorecard:
    """The scores alone."""
    return evaluate(target, ScoreOptions(tuple(tasks), limit, **more), device).card


def evaluate(
    target: ModelSource | Checkpoint,
    asked: ScoreOptions,
    device: str = "auto",
    progress: Progress | None = None,
    trust_remote_code: bool = False,
) -> Evaluation:
    """Run tasks on a source model or on a checkpoint."""
    from quantkit.scoring import cache

    started = time.monotonic()
    progress = progress or Silent()
    if asked.backend not in BACKENDS:
        raise UnknownName("backend", asked.backend, BACKENDS)
    where = devices.choose(device)
    followed = asked.followed
    follows = asked.server is None and asked.backend == BACKENDS[0]
    if not follows and (unjudged := [p.name for p in followed if not p.judges]):
        raise ScoreError(
            f"{unjudged[0]} compares a model with its source's own answers, which needs --backend "
            "transformers; leave out --server and --backend, or give the rows a judge"
        )
    if isinstance(target, Checkpoint):
        require_sound(target)
    with lmeval.quiet():
        loaded = tasks_of(target, asked, trust_remote_code)
        folder = asked.cache or cache.default_folder()
        if asked.server is None and asked.backend == BACKENDS[0]:
            from quantkit.scoring.model import EvaluatedModel, How

            how = How(asked.max_length, asked.batch_size, asked.seed)
            lm: Any = EvaluatedModel(target, where, how, folder, progress, trust_remote_code)
            dtype, computed_on = str(lm.model.dtype).removeprefix("torch."), where
        else:
            from quantkit.scoring import connected_model

            if asked.server is None:
                lm = connected_model.here(target, asked, folder, progress, trust_remote_code)
            else:
                lm = connected_model.served(
                    target, asked, folder, where, progress, trust_remote_code
                )
            dtype, computed_on = "served" if asked.server else asked.backend, None
        try:
            results = lmeval.run(lm, loaded, asked.limit, asked.samples, asked.chat)
            written = {p.name: lm.follow(p) for p in followed} if follows else {}
            judged = {p.name: p.judged(lm.answer(p)) for p in followed if p.judges}
            if asked.server is not None:
                lm.confirm()
        finally:
            lm.close()
    progress.finish()
    if hits := getattr(lm, "cache_hits", ""):
        progress.note(hits)
    outcomes = answers.of_samples(results["samples"], lm.texts)
    scores = _scores(results, lm.texts)
    for prompts in followed:
        if prompts.name in written:
            text, answered = written[prompts.name]
            scores |= _of_text(prompts.name, text) | _of_answers(prompts.name, answered)
            outcomes += _losses(prompts, text)
        right = judged.get(prompts.name, [])
        scores |= _of_judges(prompts.name, right)
        outcomes += _judged(prompts, right)
    groups = _groups(results)
    card = Scorecard(
        **_identity(target),
        scores=scores,
        settings=Settings(
            tasks={
                task: str(results["versions"].get(task, ""))
                for task in (*lmeval.names(asked.tasks), *(p.name for p in followed))
            },
            limit=asked.limit,
            num_fewshot=asked.num_fewshot,
            max_length=lm.max_length,
            asked_length=asked.max_length,
            dtype=dtype,
            seed=asked.seed,
            data=_documents(outcomes),
            chat=None if asked.chat == Chat() else repr(asked.chat),
        ),
        groups=groups,
        served=getattr(lm, "served", None),
        cached=lm.cached.shares(groups),
        versions={**versions(), "lm_eval": lmeval.version()},
        device=devices.describe(computed_on) if computed_on else lm.where,
        seconds=time.monotonic() - started,
        created=now(),
    )
    return Evaluation(card, outcomes)


def _documents(outcomes: Sequence[answers.Outcome]) -> dict[str, str]:
    """A digest of all documents of each task, from lm-eval's own hashes."""
    seen: dict[str, set[str]] = {}
    for outcome in outcomes:
        seen.setdefault(outcome.task, set()).add(f"{outcome.doc_id} {outcome.doc_hash}")
    return {
        task: hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()[:16]
        for task, hashes in seen.items()
    }


def require_sound(checkpoint: Checkpoint) -> None:
    """Require that its files match its manifest, by which scores and answers are cached."""
    from quantkit.verification.checkpoint import file_faults

    if faults := list(file_faults(checkpoint.folder, checkpoint.manifest)):
        raise CheckpointError(
            f"{checkpoint.folder} does not match its manifest: {faults[0]}; run `quantkit verify`"
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
            "made": provenance.of_manifest(manifest),
        }
    alike = {"likeness": likeness(target)}
    if isinstance(target, ForeignCheckpoint):
        return shared | alike | _of_others(target)
    stored = Architecture.of(target.folder, target.trust_remote_code).stored(target)
    size = sum(spec.size_bytes for spec in stored)
    return shared | {
        "recipe": None,
        "format": "safetensors",
        "size_bytes": size,
        "bits_per_weight": 8 * size / sum(spec.n_elements for spec in stored),
        "source_fingerprint": target.fingerprint,
        **alike,
    }


def _of_others(target: ForeignCheckpoint) -> dict[str, Any]:
    """What is known of a checkpoint without a manifest."""
    declared = target.declared
    first = declared.parts[0]
    sizes = {part.weights.num_bits for part in declared.parts}
    files = {tensor.file for tensor in target.stored.values()}
    n_weights = sum(tensor.n_elements for tensor in target.tensors.values())
    return {
        "recipe": declared.words,
        "format": declared.method,
        "size_bytes": target.size_bytes,
        "bits_per_weight": 8 * target.size_bytes / n_weights,
        "source_fingerprint": target.original.fingerprint if target.original else "",
        "made": Provenance(
            method=declared.method,
            weight_bits=sizes.pop() if len(sizes) == 1 else None,
            weight_type=first.weights.type,
            weight_strategy=first.weights.strategy,
            activation_bits=first.inputs.num_bits if first.inputs is not None else None,
            runs_as=first.runs_as,
            recipe_digest=target.config_digest,
            engine=declared.maker or "unknown",
            disk_bytes=sum(file.stat().st_size for file in files),
            by_others=f"{declared.words}; made by {declared.maker or 'an unknown tool'}",
        ),
    }


def tasks_of(
    target: ModelSource | Checkpoint, asked: ScoreOptions, trust_remote_code: bool = False
) -> dict[str, Any]:
    """What a model is asked, refused where data, a package or a sandbox is missing.

    Read once for all models of a run, so this may also be called before anything slow begins.
    """
    measure = Tokenizer.of(target.folder, trust_remote_code)
    with lmeval.quiet():
        loaded = lmeval.load(asked.tasks, asked.data, asked.num_fewshot, asked.seed, measure)
        lmeval.allow_code(loaded, asked.allow_code)
    return loaded


def sizes_of(
    target: ModelSource | Checkpoint, asked: ScoreOptions, trust_remote_code: bool = False
) -> dict[str, int]:
    """Number of documents of every task, with groups expanded."""
    loaded = tasks_of(target, asked, trust_remote_code)
    return {name: len(task.eval_docs) for name, task in loaded["tasks"].items()}


def _groups(results: dict[str, Any]) -> dict[str, list[str]]:
    """Groups of tasks, and all tasks that they contain, directly or not."""
    inside = results.get("group_subtasks", {})

    def leaves(name: str) -> list[str]:
        members = inside.get(name) or []
        return [leaf for member in members for leaf in leaves(member)] if members else [name]

    return {name: leaves(name) for name, members in inside.items() if members}


def _scores(results: dict[str, Any], texts: dict[str, Text]) -> dict[str, Score]:
    scores: dict[str, Score] = {}
    for task, figures in results["results"].items():
        n = _n_samples(results, task)
        directions = results["higher_is_better"].get(task, {})
        for key, value in figures.items():
            metric, _, suffix = key.partition(",")
            if metric.endswith("_stderr") or not isinstance(value, float | int) or not suffix:
                continue
            if f"{task}/{metric}" in scores:  # a second way of reading the same answers
                continue
            stderr = figures.get(f"{metric}_stderr,{suffix}")
            scores[f"{task}/{metric}"] = Score(
                value=_finite(task, metric, float(value)),
                stderr=float(stderr) if isinstance(stderr, float) else None,
                n=n,
                higher_is_better=_more_is_better(metric, directions),
            )
        if task in texts:
            scores |= _of_text(task, texts[task])
    return scores


def _more_is_better(metric: str, directions: dict[str, Any]) -> bool:
    known = metrics.METRICS.get(metric)
    return known.more_is_better if known else bool(directions.get(metric, True))


def _n_samples(results: dict[str, Any], task: str) -> int:
    """Documents of a task, or of all tasks of a group."""
    if task in results["n-samples"]:
        return int(results["n-samples"][task]["effective"])
    members = results.get("group_subtasks", {}).get(task, [])
    return sum(_n_samples(results, member) for member in members)


def _of_text(task: str, text: Text) -> dict[str, Score]:
    """Perplexity per token, and the divergence from the source if there is one."""
    mean, error = ratio(text.losses, text.n_tokens)
    value = _finite(task, metrics.PERPLEXITY, math.exp(min(mean, 700)))
    spread = None if error is None else value * error
    n_tokens = sum(text.n_tokens)
    scores = {f"{task}/{metrics.PERPLEXITY}": Score(value=value, stderr=spread, n=n_tokens)}
    if text.kl is None or text.agrees is None:
        return scores
    n_compared = sum(len(part) for part in text.kl)
    for name, parts in ((metrics.KL_MEAN, text.kl), (metrics.TOP1_AGREEMENT, text.agrees)):
        sums = [float(part.double().sum()) for part in parts]
        mean, error = ratio(sums, [len(part) for part in parts])
        mean = _finite(task, name, mean)
        scores[f"{task}/{name}"] = Score(
            value=mean,
            stderr=error,
            n=n_compared,
            higher_is_better=metrics.of(name).more_is_better,
        )
    import torch

    whole = torch.cat(text.kl).double()
    for name, share in metrics.quantiles().items():
        value = _finite(task, name, float(whole.quantile(share)))
        scores[f"{task}/{name}"] = Score(value=value, stderr=None, n=n_compared)
    return scores


def _of_answers(task: str, answered: Followed) -> dict[str, Score]:
    """How long a model keeps to its source's answers."""
    found = answered.first_differences()
    if found is None:
        return {}
    same = [float(at == n) for at, n in zip(found, answered.lengths, strict=True)]
    scores = {}
    for name, values in (
        (metrics.SAME_ANSWERS, same),
        (metrics.FIRST_DIFFERENCE, list(map(float, found))),
    ):
        mean, error = ratio(values, [1.0] * len(values))
        scores[f"{task}/{name}"] = Score(
            value=mean, stderr=error, n=len(values), higher_is_better=True
        )
    return scores


def _of_judges(task: str, right: Sequence[tuple[int, str, bool]]) -> dict[str, Score]:
    """The share of right answers, by judge."""
    scores = {}
    for metric in dict.fromkeys(metric for _, metric, _ in right):
        values = [float(is_right) for _, name, is_right in right if name == metric]
        mean, error = ratio(values, [1.0] * len(values))
        scores[f"{task}/{metric}"] = Score(
            value=mean, stderr=error, n=len(values), higher_is_better=True
        )
    return scores


def _judged(prompts: Prompts, right: Sequence[tuple[int, str, bool]]) -> list[Outcome]:
    hashes = prompts.hashes
    return [
        Outcome(prompts.name, place, hashes[place], metric, float(is_right), 1.0)
        for place, metric, is_right in right
    ]


def _losses(prompts: Prompts, text: Text) -> list[Outcome]:
    """By prompt, the model's loss on the source's answer."""
    return [
        Outcome(prompts.name, place, name, answers.LOSS, loss, n_tokens)
        for place, (name, loss, n_tokens) in enumerate(
            zip(prompts.hashes, text.losses, text.n_tokens, strict=True)
        )
    ]


def ratio(sums: Sequence[float], weights: Sequence[float]) -> tuple[float, float | None]:
    """A mean over tokens and its standard error, with documents as the independent units.

    A ratio estimator: residuals of each document's sum from what its length predicts.
    """
    total = sum(weights)
    mean = sum(sums) / total
    n = len(sums)
    if n < 2:
        return mean, None
    squares = sum((part - mean * weight) ** 2 for part, weight in zip(sums, weights, strict=True))
    return mean, math.sqrt(squares * n / (n - 1)) / total


def _finite(task: str, metric: str, value: float) -> float:
    if not math.isfinite(value):
        raise ScoreError(f"{task}/{metric} is {value}: the model's outputs are not finite")
    return value
