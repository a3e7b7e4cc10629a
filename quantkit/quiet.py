"""Keeps other libraries' notices off the screen while we call them."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def only_errors(*libraries: str) -> Iterator[None]:
    """Let only errors of the named loggers through."""
    loggers = [logging.getLogger(name) for name in libraries]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
