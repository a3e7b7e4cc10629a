"""Passes that end in the middle."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quantkit.onepass.finished_block import FinishedBlock

FULL = OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def stopping_at(index: int, error: BaseException) -> Iterator[None]:
    """A pass raises this instead of writing one block; the blocks before it are written."""
    deliver = FinishedBlock.deliver

    def until(finished: FinishedBlock, *rest: Any) -> None:
        if finished.index == index:
            raise error
        deliver(finished, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FinishedBlock, "deliver", until)
        yield
