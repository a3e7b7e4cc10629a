"""Score models, and compare them with their source."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.calls import Notify, Work, hub, silent, validation
from quantkit.errors import QuantkitError, ScoreError, StorageError, UsageError
from quantkit.scoring import suites
from quantkit.scoring.options import Chat as Chat
from quantkit.scoring.options import ScoreOptions as ScoreOptions

if TYPE_CHECKING:
    from quantkit.bench.engines import Program
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.model.source import ModelSource
    from quantkit.opening import Model
    from quantkit.progress import Progress
    from quantkit.report.comparison import Report
    from quantkit.scoring.evaluation import Evaluation

LAST_WORDS_S = 5.0
"""For an engine that no longer answers to end, so that its log has the reason."""


@dataclass(frozen=True)
class Models:
    """What is scored: sources, checkpoints, and models in memory."""

    models: "Sequence[Model | Checkpoint]"
    source: "Model | None" = None
    """The source of other tools' checkpoints, if it is not among them."""
    revision: str | None = None
    tokenizer: Any = None
    trust_remote_code: bool = False

    @property
    def everything(self) -> list[Any]:
        """All of them, including the source."""
        return [*self.models, *([self.source] if self.source is not None else [])]

    def check(self) -> None:
        """Refuse folders and names without a model."""
        named = [str(model) for model in self.everything if isinstance(model, str | Path)]
        validation.models(named, self.revision if self.source is None else None)

    @contextmanager
    def opened(self) -> "Iterator[tuple[list[ModelSource | Checkpoint], ModelSource | None]]":
        """All models, and the source that was named separately."""
        from quantkit.opening import opened, scorables

        with ExitStack() as stack:
            original = None
            if self.source is not None:
                opening = opened(self.source, self.tokenizer, None, self.trust_remote_code)
                original = stack.enter_context(opening)
            given = scorables(
                self.models, self.tokenizer, self.revision, self.trust_remote_code, original
            )
            yield stack.enter_context(given), original


@dataclass(frozen=True)
class Scored:
    """The result."""

    evaluations: "list[Evaluation]"
    before: "Evaluation | None" = None
    """Scores of the source from an earlier call."""


@dataclass(frozen=True)
class Scoring:
    """One call of `score`."""

    models: Models
    asked: ScoreOptions
    out: Path | None = None
    baseline: Path | None = None
    until: float | None = None
    """Sample questions at random until intervals are this narrow, as a fraction."""
    device: str = "auto"

    needs_transformers = True

    @property
    def needs_hub(self) -> bool:
        return needs_hub(self.models, self.asked)

    def ready(self, notify: Notify = silent) -> "Work[Scored]":
        """Validate before a model is loaded."""
        if self.asked.server is not None and len(self.models.models) != 1:
            raise UsageError("a server serves one model: give that model alone")
        self.models.check()
        check(self.asked)
        validation.output(self.out)
        for suite in suites.WITH_CODE.keys() & set(self.asked.tasks):
            notify(f"{suite} without code: --allow-code adds humaneval, run in a sandbox")
        before = None
        if self.baseline is not None:
            from quantkit.scoring.evaluation import Evaluation

            before = Evaluation.read(self.baseline)

        def work(progress: "Progress") -> Scored:
            from quantkit.opening import paired
            from quantkit.storage import output_folder

            holding = output_folder(self.out) if self.out is not None else nullcontext()
            with self.models.opened() as (found, original):
                targets = paired(found, original)
                refuse_same_names(targets)
                refuse_damaged(targets)
                with holding:
                    return Scored(self._evaluate(targets, progress), before)

        return work

    def _evaluate(
        self, targets: "list[ModelSource | Checkpoint]", progress: "Progress"
    ) -> "list[Evaluation]":
        from quantkit.scoring.harness import sizes_of
        from quantkit.scoring.sample_size import score_until

        def run(asked: ScoreOptions) -> "list[Evaluation]":
            trusting = self.models.trust_remote_code
            return evaluated(targets, asked, self.device, progress, trusting, self.out)

        if self.until is None:
            return run(self.asked)
        sizes = sizes_of(targets[0], self.asked, self.models.trust_remote_code)
        reached = score_until(run, self.asked, sizes, self.until, progress.note)
        progress.note(reached.words(self.until))
        return reached.evaluations


@dataclass(frozen=True)
class Comparison:
    """One call of `compare` with models: scores them and reports."""

    models: Models
    asked: ScoreOptions
    out: Path
    device: str = "auto"
    force: bool = False
    """An earlier report and its scores may be replaced."""

    needs_transformers = True

    @property
    def needs_hub(self) -> bool:
        return needs_hub(self.models, self.asked)

    def ready(self, notify: Notify = silent) -> "Work[Report]":
        """Validate before a model is loaded."""
        validation.new_report(self.out, self.force)
        self.models.check()
        validation.source_among(map(str, self.models.everything))
        check(self.asked)
        validation.output(self.out)

        def work(progress: "Progress") -> "Report":
            from quantkit.model.source import ModelSource
            from quantkit.opening import comparable, find, find_all
            from quantkit.report import files
            from quantkit.report.comparison import Report
            from quantkit.storage import output_folder

            trusting, source = self.models.trust_remote_code, self.models.source
            given = None if source is None else find(str(source), None, trusting)
            original = given if isinstance(given, ModelSource) else None
            names = [str(name) for name in self.models.models]
            targets = comparable(find_all(names, self.models.revision, trusting, original), given)
            refuse_same_names(targets)
            refuse_damaged(targets)
            scores = self.out / "scores"
            with output_folder(self.out):
                validation.new_report(self.out, self.force)  # another run may have finished it
                others = other_scores(scores, targets)
                if others and not self.force:
                    raise StorageError(
                        f"{scores} has scores of {others[0].stem}, which is not compared here; use "
                        "--force to replace them, or another --out"
                    )
                report = Report.of(
                    evaluated(targets, self.asked, self.device, progress, trusting, scores)
                )
                files.write(report, self.out)
                for file in others:
                    file.with_name(f"{file.stem}.answers.parquet").unlink(missing_ok=True)
                    file.unlink()
            return report

        return work


def other_scores(folder: Path, targets: "Sequence[ModelSource | Checkpoint]") -> list[Path]:
    """Score files in a folder that belong to none of these models."""
    names = score_names(targets)
    return [file for file in sorted(folder.glob("*.json")) if file.stem not in names]


def needs_hub(models: Models, asked: ScoreOptions) -> bool:
    """Whether models or tasks have to be downloaded."""
    away = not all(map(hub.is_local, models.everything))
    return away or hub.tasks_need(asked.tasks, asked.data)


def check(asked: ScoreOptions) -> None:
    """Refuse missing names and files, and conflicting options."""
    if asked.judge is not None and asked.prompts is None:
        raise UsageError("--judge is for answers to --prompts: give a file of them")
    if asked.python is not None and asked.backend != "vllm":
        raise UsageError("--python names vLLM's environment: add --backend vllm")
    if asked.engine_args and asked.backend != "vllm":
        raise UsageError("--engine-args are vLLM's flags: add --backend vllm")
    if asked.backend == "vllm":
        if asked.server is not None:
            raise UsageError("--backend vllm starts a server of its own: leave out --server")
        _vllm(asked)
    validation.tasks(asked.tasks, asked.data, asked.prompts)


def evaluated(
    targets: "Sequence[ModelSource | Checkpoint]",
    asked: ScoreOptions,
    device: str,
    progress: "Progress",
    trust_remote_code: bool,
    out: Path | None,
) -> "list[Evaluation]":
    """The scores of every target, each written as soon as it is complete."""
    from quantkit.scoring.harness import evaluate

    made = []
    for target in targets:
        with answering(target, asked, progress, trust_remote_code) as here:
            made.append(evaluate(target, here, device, progress, trust_remote_code))
        if out is not None:
            made[-1].write(out)
    return made


@contextmanager
def answering(
    target: "ModelSource | Checkpoint", asked: ScoreOptions, progress: "Progress", trust: bool
) -> Iterator[ScoreOptions]:
    """How this model is evaluated: with the backend vllm, through a server that runs meanwhile."""
    if asked.backend != "vllm":
        yield asked
        return
    from quantkit.bench import engines
    from quantkit.scoring.harness import tasks_of

    tasks_of(target, asked, trust)  # a task that lacks its data is refused before vLLM starts
    program = _vllm(asked, trust)
    progress.note(f"{target.label}: starting vLLM")
    with engines.started(program, target.folder, target.label, {}) as running:
        progress.note(f"{target.label}: vLLM is ready after {running.cold_start_s:.0f} s")
        try:
            at = running.address.url
            yield replace(asked, server=at, backend="transformers", is_started=True)
        except QuantkitError as error:
            if running.child is not None and running.child.is_over(LAST_WORDS_S):
                raise running.child.failure(
                    f"vLLM stopped while it answered for {target.label}; its answers are kept, "
                    "and the same command resumes"
                ) from error
            raise


def _vllm(asked: ScoreOptions, trust_remote_code: bool = False) -> "Program":
    from quantkit.bench.engines import Program

    python = None if asked.python is None else str(asked.python)
    flags = [*(["--trust-remote-code"] if trust_remote_code else []), *asked.engine_args]
    return Program.find("vllm", python, arguments=flags)


def refuse_damaged(targets: "Sequence[ModelSource | Checkpoint]") -> None:
    """Notice a missing, truncated or changed file before the first model is scored.

    Every checkpoint's hashes are compared when its turn comes; here only those of files that are
    newer than their manifest, since reading all weights takes a while.
    """
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.scoring.harness import require_sound

    checkpoints = [target for target in targets if isinstance(target, Checkpoint)]
    for one in checkpoints:
        one.manifest.require_whole(one.folder)
    for one in checkpoints if len(targets) > 1 else []:
        if one.manifest.is_older(one.folder):
            require_sound(one)


def refuse_same_names(targets: "Sequence[ModelSource | Checkpoint]") -> None:
    """Two results of one name would overwrite each other, and no report could tell them apart."""
    from quantkit.scoring.scorecard import SOURCE_NAME

    names = score_names(targets)
    if twice := [name for name in names if names.count(name) > 1]:
        if twice[0] == SOURCE_NAME:
            raise ScoreError(
                "two source models in one call: score one model and its checkpoints at a time"
            )
        raise ScoreError(
            f"two checkpoints in one call are called {twice[0]}: compare each with the source in a "
            "call of its own; `quantkit gate REPORT --against REPORT` compares the two reports"
        )


def score_names(targets: "Sequence[ModelSource | Checkpoint]") -> list[str]:
    """What their score files are called."""
    from quantkit.export.foreign import is_source
    from quantkit.scoring.scorecard import SOURCE_NAME

    return [SOURCE_NAME if is_source(target) else target.label for target in targets]
