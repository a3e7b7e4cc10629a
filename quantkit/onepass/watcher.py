"""Somebody who watches the source's own stream through a pass, and keeps what it learns."""

from collections.abc import Container
from typing import Protocol

from quantkit.calibration.tokens import CalibrationTokens
from quantkit.model.blocks import Decoder
from quantkit.onepass.visit import Observation, Visit


class Watcher(Protocol):
    """What a pass asks of a watcher."""

    @property
    def modules(self) -> Container[str]:
        """Linear layers that it wants the statistics of."""

    @property
    def n_done(self) -> int:
        """Blocks that it knows already: their statistics are not gathered again."""

    @property
    def n_samples(self) -> int:
        """Inputs of each layer that it wants to see as they are."""

    def arrive(self, visit: Visit) -> None:
        """The stream is about to enter a block."""

    def see(self, visit: Visit, found: Observation) -> None:
        """A block's statistics."""

    def finish(self, decoder: Decoder, calibration: CalibrationTokens) -> None:
        """All blocks have been seen."""
