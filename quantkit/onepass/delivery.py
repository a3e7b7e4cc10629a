"""Writes finished blocks to disk, in the background and in order.

Meanwhile the device continues with the next block. A disk error is raised at the next call.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from quantkit.model.shards import to_host

SMALL = 512 << 20
"""Bytes that jobs may hold while they wait, however many they are."""


class Delivery:
    """Runs jobs one after the other; at most `depth` of them wait, which bounds host memory.

    More do where they are small: the recipes of one stream finish a block at the same time, and a
    device should not wait for a disk then.
    """

    def __init__(self, depth: int = 2) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._depth = depth
        self._failed = False

    def submit(self, job: Callable[[], None], n_bytes: int) -> None:
        """Queue a job that holds so many bytes; blocks while too many are waiting."""
        while self._waiting and (self._waiting[0][0].done() or self._is_full(n_bytes)):
            self._waiting.popleft()[0].result()
        self._waiting.append((self._pool.submit(self._do, job), n_bytes))

    def _is_full(self, n_bytes: int) -> bool:
        held = n_bytes + sum(size for _, size in self._waiting)
        return len(self._waiting) >= self._depth and held > SMALL

    def _do(self, job: Callable[[], None]) -> None:
        if self._failed:  # nothing after a block that was not written
            return
        try:
            job()
        except BaseException:
            self._failed = True
            raise

    def __enter__(self) -> "Delivery":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for job, _ in self._waiting:
                job.result()


class Parcel:
    """Tensors being copied to host memory, without synchronising before they are needed."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = {name: to_host(t, wait=False) for name, t in tensors.items()}
        on_device = any(t.device.type == "cuda" for t in tensors.values())
        self._arrived = torch.cuda.current_stream().record_event() if on_device else None

    @property
    def n_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def opened(self) -> dict[str, torch.Tensor]:
        """The tensors, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors
