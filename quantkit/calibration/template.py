"""A model's chat template, rendered in a child process with limits.

A template is a program that came with the model. jinja's sandbox keeps it away from the machine but
lets it loop forever and build strings of any length, even at compile time. So it runs in a child
with limits on time and memory; if it breaks the child, that is an error of one row. The child is
forked once and renders many rows, each in a fraction of a millisecond.
"""

import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 10.0
"""Per conversation; the slowest real template takes a few milliseconds."""
EXTRA_BYTES = 1 << 30
"""Memory it may allocate beyond what the process had."""
MOST_CHARACTERS = 1 << 26


class TemplateFault(Exception):
    """The template refuses a conversation, or exceeds its limits."""


class Template:
    """The template of one tokenizer, used by one thread at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._pipe: Connection | None = None
        self._child = 0

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any], is_open: bool
    ) -> str:
        """A conversation as text; with `is_open` the assistant's next turn is opened."""
        pipe = self._pipe or self._start()
        try:
            pipe.send((list(messages), list(tools) or None, is_open))
            if not pipe.poll(SECONDS):
                raise TemplateFault(f"it takes longer than {SECONDS:g} s")
            text, fault = pipe.recv()
        except (EOFError, OSError, TemplateFault) as error:
            self.close()
            if isinstance(error, TemplateFault):
                raise
            raise TemplateFault("it ended the process that it ran in") from error
        if fault is not None:
            raise TemplateFault(fault)
        return str(text)

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            # The child runs only the template, so no other thread's lock is in its way.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child = os.fork()
        if self._child == 0:
            ours.close()
            _serve(self._tokenizer, theirs)
        theirs.close()
        self._pipe = ours
        return ours

    def close(self) -> None:
        """Stop the child."""
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._child, signal.SIGKILL)
                os.waitpid(self._child, 0)

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()


def _serve(tokenizer: Any, pipe: Connection) -> None:
    """Serve requests until the parent is gone; never returns."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        limit = _mapped_bytes() + EXTRA_BYTES
        with suppress(ValueError, OSError):  # a lower limit is already set
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        while True:
            pipe.send(_answered(tokenizer, *pipe.recv()))
    except BaseException:  # including interrupts: the parent handles its own
        os._exit(0)


def _answered(
    tokenizer: Any, messages: list[Any], tools: list[Any] | None, is_open: bool
) -> tuple[str | None, str | None]:
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=is_open, tokenize=False
        )
        if len(text) > MOST_CHARACTERS:
            return None, f"it writes {len(text):,} characters"
        text.encode()
    except MemoryError:
        return None, f"it takes more than {EXTRA_BYTES >> 30} GiB of memory"
    except RecursionError:
        return None, "it recurses without end"
    except Exception as error:  # untrusted program
        return None, next(iter(str(error).splitlines()), "")[:300] or type(error).__name__
    return text, None


def _mapped_bytes() -> int:
    with open("/proc/self/statm") as stream:  # noqa: PTH123
        return int(stream.read().split()[0]) * resource.getpagesize()
