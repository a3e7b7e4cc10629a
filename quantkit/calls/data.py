"""The calibration data of a call: a set's name, the user's own data, or a set in memory."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.calls import Notify, hub, validation

if TYPE_CHECKING:
    from quantkit.calibration.calibration_set import CalibrationSet
    from quantkit.onepass.prepare import CalibrationChoice


@dataclass(frozen=True)
class Data:
    """The calibration data; samples and length default to those of the set."""

    calibration: "str | Path | CalibrationSet | None" = None
    samples: int | None = None
    length: int | None = None

    @property
    def is_given(self) -> bool:
        return self.calibration is not None

    @property
    def needs_hub(self) -> bool:
        return hub.set_needs(self.calibration)

    def check(self) -> None:
        """Refuse a set or file that does not exist."""
        if isinstance(self.calibration, str | Path):
            validation.calibration(str(self.calibration))

    def or_default(self, model: Any, notify: Notify) -> "Data":
        """With one of the built-in sets if none was named."""
        if self.is_given:
            return self
        chosen = default_set(model)
        notify(f"Calibrating on the set {chosen}; --calibration names another.")
        return replace(self, calibration=chosen)

    def choice(self) -> "CalibrationChoice | None":
        """The choice for a pass; sets may avoid what models are scored on."""
        from quantkit.onepass.prepare import CalibrationChoice

        if self.calibration is None:
            return None
        if isinstance(self.calibration, str | Path):
            from quantkit.scoring import evaluation_text

            name, avoid = str(self.calibration), evaluation_text.to_avoid
            return CalibrationChoice(name, self.samples, self.length, avoid)
        given = self.calibration
        return CalibrationChoice(given.manifest.name, self.samples, self.length, given=given)


def default_set(model: Any) -> str:
    """The built-in set that suits a model."""
    return "python-docs" if str(model) == "demo" else "general"
