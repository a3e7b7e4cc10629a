"""An event loop whose clock jumps to whatever is due next: hours of waiting in no time, exactly."""

import asyncio
import selectors


class _Selector(selectors.DefaultSelector):
    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        if timeout is not None and timeout > 0:
            self.now += timeout
        return super().select(0)


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self):
        self._turned = _Selector()
        super().__init__(self._turned)

    def time(self):
        return self._turned.now


def run(coroutine):
    """What a coroutine returns, without waiting."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(coroutine)
