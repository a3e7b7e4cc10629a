"""Judge a report by a policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.calls import Notify, Work, hub, silent, validation
from quantkit.errors import ScoreError

if TYPE_CHECKING:
    from quantkit.gating.verdict import Verdict
    from quantkit.progress import Progress
    from quantkit.report.comparison import Report
    from quantkit.report.document import Document


@dataclass(frozen=True)
class Judging:
    """One call of `gate`."""

    report: "Path | Report | Document"
    """A report.json, or the folder that has one."""
    policy: Path | None = None
    """Rules; None: the default policy, by bits."""
    against: "Path | Report | Document | None" = None
    """The report of the last release."""
    checkpoints: Sequence[Path] = ()
    """Folders that must be what was scored."""

    needs_transformers = False

    @property
    def needs_hub(self) -> bool:
        return hub.any_named(self.checkpoints)

    def ready(self, notify: Notify = silent) -> "Work[Verdict]":
        """Refuse missing folders."""
        from quantkit.model.source import placed

        folders = [placed(one) for one in self.checkpoints]
        validation.folders(folders)

        def work(progress: "Progress") -> "Verdict":
            from quantkit.gating import policy as policies
            from quantkit.gating.identity import check_folder
            from quantkit.gating.judge import judge

            report = document(self.report)
            earlier = None if self.against is None else document(self.against)
            if self.policy is None:
                rules = policies.default(earlier is not None)
            else:
                rules = policies.load(self.policy)
            verdict = judge(report, rules, earlier)
            checks = [check_folder(report, one, verdict.unjudged) for one in folders]
            return verdict.with_checks(*checks)

        return work


def document(given: "Path | Report | Document") -> "Document":
    """The report to judge; read if it is a file or a folder."""
    from quantkit.gating.text import plain
    from quantkit.report.comparison import Report
    from quantkit.report.document import read

    if not isinstance(given, Path):
        return given.document if isinstance(given, Report) else given
    try:
        return read(given / "report.json" if given.is_dir() else given)
    except ScoreError as error:  # its keys are quoted, and may hold anything
        raise ScoreError(plain(str(error))) from error
