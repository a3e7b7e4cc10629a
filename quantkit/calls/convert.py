"""Write a checkpoint in another format, dequantise it, or repair another tool's."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.calls import Notify, Work, silent, validation
from quantkit.errors import CheckpointError
from quantkit.formats import NEED_MORE
from quantkit.nearby import similar
from quantkit.storage import DEQUANTIZED

if TYPE_CHECKING:
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.progress import Progress
    from quantkit.repair import Repaired
    from quantkit.to_plain import Plain


@dataclass(frozen=True)
class Conversion:
    """One call of `convert`: the same numbers in other files."""

    folder: Path
    to: str
    out: Path | None = None
    """By default a sibling of the old folder."""
    trust_remote_code: bool = False
    force: bool = False

    needs_hub = False
    needs_transformers = True

    def ready(self, notify: Notify = silent) -> "Work[Checkpoint]":
        """Refuse folders that quantkit did not write, and existing outputs."""
        from quantkit.export.manifest import Manifest

        Manifest.read(self.folder)
        if self.out is not None:
            validation.new_folder(self.out, self.force)

        def work(progress: "Progress") -> "Checkpoint":
            from quantkit.conversion import convert

            trusting = self.trust_remote_code
            made = convert(self.folder, self.to, self.out, self.force, progress, trusting)
            if self.to in NEED_MORE:
                progress.note(
                    f"vLLM reads {self.to} directly; plain transformers needs optimum or gptqmodel "
                    "to load it"
                )
            return made

        return work


@dataclass(frozen=True)
class Dequantization:
    """One call of `convert` to plain floats: dequantises a GGUF file or a quantised folder."""

    path: Path
    to: str
    out: Path | None = None
    trust_remote_code: bool = False
    force: bool = False

    needs_transformers = True

    @property
    def needs_hub(self) -> bool:
        return not self.path.exists()

    def ready(self, notify: Notify = silent) -> "Work[Plain]":
        """Refuse existing outputs."""
        from quantkit.model.source import hub_file

        if (file := hub_file(str(self.path))) is not None:
            out = self.out or Path(f"{file.stem}-{self.to}")  # not into the hub's cache
            return replace(self, path=file, out=out).ready(notify)
        if not self.path.exists():
            raise CheckpointError(
                f"there is no folder or file {self.path}; name a quantised folder or a GGUF file"
                f"{similar(self.path, files=True)}"
            )
        if self.out is not None:
            validation.new_folder(self.out, self.force, DEQUANTIZED)

        def work(progress: "Progress") -> "Plain":
            from quantkit.to_plain import convert

            trusting = self.trust_remote_code
            return convert(self.path, self.to, self.out, self.force, progress, trusting)

        return work


@dataclass(frozen=True)
class Repair:
    """One call of `convert --repair`: a copy with all mechanical faults fixed."""

    folder: Path
    to: str
    out: Path | None = None
    allow_rounding: bool = False
    force: bool = False

    needs_hub = False
    needs_transformers = True

    def ready(self, notify: Notify = silent) -> "Work[Repaired]":
        """Refuse existing outputs."""
        if self.out is not None:
            validation.new_folder(self.out, self.force)

        def work(progress: "Progress") -> "Repaired":
            from quantkit.repair import repair

            rounding = self.allow_rounding
            return repair(self.folder, self.to, self.out, self.force, rounding, progress)

        return work
