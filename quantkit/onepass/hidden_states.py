"""The hidden states of one stream, by batch: on the device, or in pinned host memory.

Their location affects only speed and memory: the same batches, the same arithmetic.
"""

from collections.abc import Iterator

import torch


class HiddenStates:
    """Batches that are read in order, each replaced by a block's output for it."""

    def __init__(self, batches: list[torch.Tensor], device: torch.device) -> None:
        self._batches = list(batches)
        self._device = device
        self._side: torch.cuda.Stream | None = None
        self._shared = [True] * len(batches)
        """Host memory shared with another stream, so it must not be written."""

    def branch(self) -> "HiddenStates":
        """The same batches for another stream."""
        return HiddenStates(self._batches, self._device)

    def split(self, n_samples: int) -> "HiddenStates":
        """The same in batches of at most as many samples, for reading; nothing is copied."""
        if self.on_host:  # what was written last may still be in flight
            torch.cuda.current_stream(self._device).wait_stream(self._copies())
        return HiddenStates(
            [p for b in self._batches for p in torch.split(b, n_samples)], self._device
        )

    @property
    def batch_size(self) -> int:
        """Samples in the largest batch."""
        return max(map(len, self._batches), default=0)

    @property
    def on_host(self) -> bool:
        return bool(self._batches) and self._batches[0].device.type != self._device.type

    def to_host(self) -> None:
        """Move them off the device, from now on."""
        for place, batch in enumerate(self._batches):
            if batch.device.type == self._device.type:
                self._batches[place] = _pinned(batch)
                self._batches[place].copy_(batch)
                self._shared[place] = False

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Indices and batches on the device; the next is copied during the current computation."""
        if not self.on_host:
            yield from enumerate(self._batches)
            return
        compute = torch.cuda.current_stream(self._device)
        earlier: torch.cuda.Event | None = None
        ahead = self._fetch(0)
        for place in range(len(self._batches)):
            batch, arrived = ahead
            if place + 1 < len(self._batches):
                ahead = self._fetch(place + 1)
            compute.wait_event(arrived)
            batch.record_stream(compute)
            yield place, batch
            del batch
            # Stay at most two batches ahead of the device, or their memory adds up.
            if earlier is not None:
                earlier.synchronize()
            earlier = compute.record_event()

    def first(self, n_samples: int) -> torch.Tensor:
        """Some samples of the first batch, on the device."""
        if self.on_host:  # what was written last may still be in flight
            torch.cuda.current_stream(self._device).wait_stream(self._copies())
        return self._batches[0][:n_samples].to(self._device)

    def batch(self, place: int) -> torch.Tensor:
        """One batch, on the device."""
        if self.on_host:
            torch.cuda.current_stream(self._device).wait_stream(self._copies())
        return self._batches[place].to(self._device)

    def replace(self, place: int, batch: torch.Tensor) -> None:
        """Replace a batch by a block's output for it."""
        if not self.on_host:
            self._batches[place] = batch
            return
        if self._shared[place]:
            self._batches[place] = _pinned(batch)
            self._shared[place] = False
        side = self._copies()
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            self._batches[place].copy_(batch, non_blocking=True)
        batch.record_stream(side)

    def _fetch(self, place: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        side = self._copies()
        with torch.cuda.stream(side):
            batch = self._batches[place].to(self._device, non_blocking=True)
            return batch, side.record_event()

    def _copies(self) -> torch.cuda.Stream:
        # One stream for both directions: what was written last is read back in order.
        if self._side is None:
            self._side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        return self._side


def _pinned(batch: torch.Tensor) -> torch.Tensor:
    return torch.empty(batch.shape, dtype=batch.dtype, pin_memory=True)
