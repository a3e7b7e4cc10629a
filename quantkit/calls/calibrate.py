"""Build a calibration set."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.calls import Notify, Work, hub, silent, validation
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.calibration.calibration_set import CalibrationSet
    from quantkit.calibration.spec import SetSpec
    from quantkit.progress import Progress


@dataclass(frozen=True)
class Build:
    """One call of `calibrate`: a set by name or file, or the user's own files."""

    model: str
    name: str | None = None
    files: Sequence[str] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `SetSpec` that override the set's file; None: as in the file."""
    out: Path | None = None
    tree: Path | None = None
    """Local datasets in place of a hub, in a folder tree like a hub's."""
    skip_bad: bool = False
    revision: str | None = None
    force: bool = False

    needs_transformers = True

    @property
    def needs_hub(self) -> bool:
        return not hub.is_local(self.model) or hub.sources_need(self._wanted[0], self.tree)

    def ready(self, notify: Notify = silent) -> "Work[CalibrationSet]":
        """Validate before a row is read."""
        from quantkit.calibration import lookup

        wanted, base = self._wanted
        if self.out is not None:
            validation.new_folder(self.out, self.force, lookup.FILE)
        validation.models([self.model], self.revision)
        for path in self.files:
            validation.calibration(path)
        validation.tasks(hub.avoided_tasks(wanted.avoid), self.tree)

        def work(progress: "Progress") -> "CalibrationSet":
            from quantkit.calibration import loading
            from quantkit.calibration.build import Vocabulary
            from quantkit.calibration.pool import Reading
            from quantkit.scoring import evaluation_text
            from quantkit.storage import claimed

            out = self.out
            with nullcontext() if out is None else claimed(out, self.force, lookup.FILE):
                made = loading.make(
                    self.name or ", ".join(self.files),
                    wanted,
                    Reading(base, self.skip_bad, self.tree),
                    Vocabulary.of(self.model, self.revision),
                    progress,
                    partial(evaluation_text.to_avoid_when_building, data=self.tree),
                )
                if out is not None:
                    made.write(out, self.force)
            return made

        return work

    @cached_property
    def _wanted(self) -> "tuple[SetSpec, Path]":
        """The set with the overrides applied, and the base folder of its paths."""
        from quantkit.calibration import lookup, spec
        from quantkit.calibration.reading.files import is_data

        if "" in self.files:
            raise UsageError("--from is empty: name a file, a folder or a pattern, or - for stdin")
        if self.name is None and not self.files:
            raise UsageError("give a set's name, its YAML file, or --from with data of your own")
        if self.name is not None and self.files:
            raise UsageError(f"give the set {self.name} or --from with data of your own, not both")
        found = lookup.find(self.name) if self.name else (spec.of_files(list(self.files)), Path())
        wanted, base = found
        changes = {key: value for key, value in self.changes.items() if value is not None}
        if base != Path() and "avoid" in changes:
            # Typed paths are relative to here; those in a set's file to that file.
            changes["avoid"] = [
                str(Path(one).absolute()) if is_data(one) else one for one in changes["avoid"]
            ]
        return spec.changed(wanted, changes, self.name or self.files[0]), base
