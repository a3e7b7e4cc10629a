"""Write a checkpoint in another format, or mend one of another tool."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.calls import Tell, Work, early, silent

if TYPE_CHECKING:
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.progress import Progress
    from quantkit.repair import Repaired


@dataclass(frozen=True)
class Conversion:
    """One call of `convert`: the same numbers in other files."""

    folder: Path
    to: str
    out: Path | None = None
    """By default beside the old folder."""
    trust_remote_code: bool = False
    force: bool = False

    needs_hub = False
    needs_transformers = True

    def ready(self, tell: Tell = silent) -> "Work[Checkpoint]":
        """Refuse folders that quantkit did not write, and outputs that exist already."""
        from quantkit.export.manifest import Manifest

        Manifest.read(self.folder)
        if self.out is not None:
            early.new_folder(self.out, self.force)

        def work(progress: "Progress") -> "Checkpoint":
            from quantkit.conversion import convert

            trusting = self.trust_remote_code
            return convert(self.folder, self.to, self.out, self.force, progress, trusting)

        return work


@dataclass(frozen=True)
class Mending:
    """The same with `--repair`: a copy in which is right what can be put right mechanically."""

    folder: Path
    to: str
    out: Path | None = None
    allow_rounding: bool = False
    force: bool = False

    needs_hub = False
    needs_transformers = True

    def ready(self, tell: Tell = silent) -> "Work[Repaired]":
        """Refuse folders that are taken."""
        if self.out is not None:
            early.new_folder(self.out, self.force)

        def work(progress: "Progress") -> "Repaired":
            from quantkit.repair import repair

            rounding = self.allow_rounding
            return repair(self.folder, self.to, self.out, self.force, rounding, progress)

        return work
