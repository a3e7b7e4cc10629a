"""The interface for observing the source's own stream during a pass."""

from collections.abc import Container
from typing import Protocol

from quantkit.calibration.tokens import CalibrationTokens
from quantkit.model.blocks import Decoder
from quantkit.onepass.visit import Observation, Visit


class Watcher(Protocol):
    """What a pass expects of a watcher."""

    @property
    def modules(self) -> Container[str]:
        """Linear layers whose statistics it needs."""

    @property
    def n_done(self) -> int:
        """Blocks that it knows already: their statistics are not gathered again."""

    @property
    def n_samples(self) -> int:
        """Raw inputs that it needs per layer."""

    def arrive(self, visit: Visit) -> None:
        """The stream is about to enter a block."""

    def see(self, visit: Visit, found: Observation) -> None:
        """A block's statistics."""

    def finish(self, decoder: Decoder, calibration: CalibrationTokens) -> None:
        """All blocks have been seen."""
