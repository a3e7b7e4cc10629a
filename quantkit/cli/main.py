"""The app, and the one place where an error becomes an exit code."""

import gc
import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn

import typer

from quantkit import __version__, launch, threads
from quantkit.cli.wrapping import fitted, keep_hyphens
from quantkit.device import out_of_memory
from quantkit.errors import (
    EXIT_BUG,
    EXIT_CODES,
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_UNREAD,
    EXIT_USAGE,
    HardwareError,
    Interrupted,
    QuantkitError,
)

COMMANDS = (
    "demo", "run", "quantize", "sensitivity", "convert", "verify", "score", "report", "compare",
    "sweep", "gate", "bench", "card", "push", "serve", "draft", "calibrate", "recipes",
    "recommend", "gpus", "doctor",
)  # fmt: skip
"""Commands in the order of the help, each in the file of its name."""
GROUPS = ("sweep", "calibrate", "recipes")
"""Commands with subcommands."""
ANSWERS = ("gate", "recipes", "recommend", "gpus")
"""Commands that only read small files."""
SPARE_BYTES = 4 << 20
"""Enough to report that memory has run out."""


def build_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """The app with these commands: running one need not import the others."""
    app = typer.Typer(
        name="quantkit",
        help="Quantise language models and measure what it costs.",
        no_args_is_help=True,
        epilog="Exit codes: "
        + ", ".join(f"{code} {text}" for code, text in EXIT_CODES.items())
        + ".",
        rich_markup_mode=None,  # rich help costs more time than everything else together
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        callback=_root,
    )
    for name in names:
        module = importlib.import_module(f"quantkit.cli.{name}")
        if name in GROUPS:
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(module.command)
    return app


@contextmanager
def _without_collector(is_quick: bool) -> Iterator[None]:
    """Disable garbage collection for quick commands, which it would slow down by a tenth."""
    was_on = gc.isenabled()
    if is_quick:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _spare_memory() -> Iterator[None]:
    """Reserve memory while a command runs, so that there is some left to report that it ran out."""
    spare = [bytearray(SPARE_BYTES)]
    try:
        yield
    finally:
        spare.clear()


def __getattr__(name: str) -> Any:
    if name == "app":
        return build_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version(value: bool) -> None:
    if value:
        typer.echo(f"quantkit {__version__}")
        raise typer.Exit


SHARES_WORK = ("quantize",)
"""Commands that run distributed."""


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    place, name = launch.place(), context.invoked_subcommand
    if place is not None and place.size > 1 and name not in SHARES_WORK:
        error = HardwareError(
            f"quantkit {name} works in one process, and torchrun started {place.size}; run it "
            "without torchrun"
        )
        error.is_reported = place.rank > 0
        raise error


def main(arguments: list[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    with _without_collector(_is_quick(given)):
        return _answered(given)


def _is_quick(given: list[str]) -> bool:
    name = given[0] if given else ""
    return name in ANSWERS or name not in COMMANDS


def _answered(given: list[str]) -> int:
    signal.signal(signal.SIGTERM, _terminate)
    _open_closed_streams()
    threads.settle()
    try:
        with _spare_memory():
            app = build_app(given[:1] if given[:1] and given[0] in COMMANDS else COMMANDS)
            command = keep_hyphens(typer.main.get_command(app))
            result = command(given, standalone_mode=False, prog_name="quantkit")
        if result == EXIT_INTERRUPTED:  # Typer's own exit on Ctrl-C
            return _interrupted("finished work is kept; run the same command again to resume")
        return result if isinstance(result, int) else 0
    except Interrupted as error:
        return _interrupted(str(error))
    except QuantkitError as error:
        return error.exit_code if error.is_reported else _fail(str(error), error.exit_code)
    except SystemExit as stop:
        # Typer and rich exit with 1 on a closed pipe, as with `head`: that would mean "no".
        if isinstance(stop.__context__, BrokenPipeError):
            return EXIT_UNREAD
        raise
    except OSError as error:  # an error of the system, not a bug
        return _fail(f"{error.strerror or error}: {error.filename or ''}".strip(" :"), EXIT_ERROR)
    except Exception as error:
        # Typer bundles its own copy of click, whose errors know how to show themselves.
        if hasattr(error, "format_message"):
            if launch.is_first():  # the same in every process
                _show_usage(error)
            return EXIT_USAGE
        if (lacking := out_of_memory(error)) is not None:
            return _fail(lacking, EXIT_ERROR)
        # Python's own exit code for this is 1, which means that a gate failed.
        traceback.print_exc()
        return _fail("this is a bug in quantkit; please report it with the lines above", EXIT_BUG)


def _show_usage(error: Any) -> None:
    """Show what is wrong with a command line in the format of all other errors."""
    context, message = getattr(error, "ctx", None), error.format_message()
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return
    if context is not None:
        typer.echo(f"{context.get_usage()}\nTry '{context.command_path} -h' for help.\n", err=True)
    message = re.sub(r"^Invalid value: ", "", message)
    message = re.sub(r"^Invalid value for '?([^':]+)'?: ", r"\1: ", message)
    message = re.sub(r"is not a valid (int|integer)( range)?\.$", "is not a whole number", message)
    message = re.sub(r"is not in the range x>=([^ ]+)\.$", r"is below \1", message)
    message = re.sub(r"is not in the range (.+)<=x<=(.+)\.$", r"is not in \1 to \2", message)
    message = re.sub(r"is not a valid float( range)?\.$", "is not a number", message)
    message = _with_option(message, context)
    if message[1:2].islower():  # not the name of an argument
        message = message[0].lower() + message[1:]
    _fail(message, EXIT_USAGE)


def _with_option(message: str, context: Any) -> str:
    """The same, and the option of an argument that is a recipe's name."""
    extra = re.search(r"unexpected extra argument(?:\(s\)|s)? \((.+)\)", message)
    options = [] if context is None else [o for p in context.command.params for o in p.opts]
    if extra is None or "-r" not in options:
        return message
    from quantkit import resources

    named = [word for word in extra[1].split() if word in resources.names("recipes")]
    return f"{message}; a recipe needs -r: -r {' -r '.join(named)}" if named else message


def _interrupted(message: str) -> int:
    if not launch.is_first():
        return EXIT_INTERRUPTED
    return _fail(f"interrupted: {message}", EXIT_INTERRUPTED)


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # the exit code counts even if stderr is closed
        typer.echo(fitted(f"quantkit: {message}", sys.stderr), err=True)
    return code


def _open_closed_streams() -> None:
    """Reopen streams that the caller closed.

    Their descriptors would be reused for the next files opened, and output of C libraries would end
    up in those.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115


def _terminate(number: int, frame: object) -> NoReturn:
    """Unwind as on an error, so that scratch folders are removed."""
    raise SystemExit(128 + number)


def entry() -> NoReturn:
    """The console script."""
    if _is_quick(sys.argv[1:]):
        gc.disable()  # for good: enabled again, it would scan everything at once
    code = main()
    # Where Ctrl-C met Python compiling a dataclass, `python -m` would exit by a signal all the
    # same: it notes an interrupt that leaves `exec`, and forgets it only at the next one.
    exec("")
    gc.freeze()  # otherwise the interpreter scans all objects once more before it exits
    sys.exit(code)
