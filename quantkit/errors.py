"""Every error that a user can cause, and the exit code of each outcome.

    QuantkitError
      UsageError          an option's value, or options that do not go together; exit code 2
      RecipeError         the file is wrong; lists all problems at once
      UnknownName         a recipe, task, set or device that does not exist; shows near matches
      SourceError         the source model is missing, damaged or of an unsupported kind
      ShardError          a safetensors file is truncated or corrupt
      CheckpointError     a quantised folder is not what its manifest and recipe say
      Faulty              the same, as the answer of `verify`; exit code 1
      StorageError        the disk is full, not writable, or the output exists already
      MissingDependency   an optional package; names the extra that brings it
      HardwareError       no such device, or too little memory, with the numbers
      RankLost            the same of another process that shares the run: it ended or failed
      DataError           text for calibration or scoring is missing or too short
      MethodError         a method could not do its work on a tensor
      ScoreError          an evaluation could not be run or read
      EngineError         a serving engine would not start, died, hung or answered wrongly
      PolicyError         a gate's policy is wrong or does not fit its report; all problems at once
      AdviceError         a question for a recommendation that cannot be answered as it is put
      SweepError          a sweep's file is wrong, or steps of it were given up; names all of them
      Interrupted         the user pressed Ctrl-C; says what was kept

A message says what happened, to which thing, and what to do next.
"""

import difflib
import re
from collections.abc import Iterable, Sequence

EXIT_OK = 0
EXIT_GATE = 1
EXIT_USAGE = 2
EXIT_ERROR = 3
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_UNREAD = 141
EXIT_TERMINATED = 143
EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_GATE: "the answer is no",
    EXIT_USAGE: "wrong usage",
    EXIT_ERROR: "failed",
    EXIT_BUG: "internal error",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_UNREAD: "output not read",
    EXIT_TERMINATED: "terminated",
}
"""What every command means by them, in short; `docs/ci.md` has the same as a table."""
MOST_SHOWN = 32
MOST_NEAR = 4
"""Names that a message lists at most."""


class QuantkitError(Exception):
    """Base of everything that is reported without a traceback."""

    exit_code = EXIT_ERROR
    told = False
    """Another process of the run says it, so that this one need not."""


class UsageError(QuantkitError):
    """The command line is wrong, in a way that only shows when its values are read."""

    exit_code = EXIT_USAGE


class RecipeError(QuantkitError):
    """A recipe file is wrong."""


def near_matches(name: str, known: Sequence[str]) -> list[str]:
    """What a name may stand for, the likeliest first: spelt nearly so, or with it as a part.

    Case and punctuation do not count.
    """
    plain = {one: re.sub(r"[^a-z0-9]", "", one.lower()) for one in known}
    asked = re.sub(r"[^a-z0-9]", "", name.lower())
    if not asked:
        return []
    begin = [one for one in known if plain[one].startswith(asked)]
    within = [one for one in known if len(asked) >= 3 and asked in plain[one]]
    close = difflib.get_close_matches(asked, list(plain.values()), n=3, cutoff=0.6)
    spelt = [one for found in close for one in known if plain[one] == found]
    likeliest = begin if len(asked) >= 2 else []
    return list(dict.fromkeys([*likeliest, *spelt, *within]))[:MOST_NEAR]


class UnknownName(QuantkitError):
    """A name that stands for nothing here."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = sorted(known)
        near = near_matches(name, known)
        parts = [f"unknown {kind} '{name}'."]
        if near:
            parts.append(f"Did you mean {' or '.join(near)}?")
        elif known and len(known) <= MOST_SHOWN:
            parts.append(f"There are: {', '.join(known)}.")
        if hint:
            parts.append(hint)
        super().__init__(" ".join(parts))


class SourceError(QuantkitError):
    """A source model cannot be read or is of an unsupported kind."""


class ShardError(QuantkitError):
    """A safetensors file is truncated or corrupt."""


class CheckpointError(QuantkitError):
    """A quantised folder is not what it should be."""


class Faulty(CheckpointError):
    """`verify` found something wrong, which is an answer, not a failure to answer."""

    exit_code = EXIT_GATE


class StorageError(QuantkitError):
    """Files cannot be written where they were asked for."""


class MissingDependency(QuantkitError):
    """An optional package is not installed."""


class HardwareError(QuantkitError):
    """A device is missing or too small."""


class RankLost(HardwareError):
    """Another process of a run that several share is gone."""


class DataError(QuantkitError):
    """Calibration or evaluation text is missing or unusable."""


class MethodError(QuantkitError):
    """A quantisation method failed on a tensor."""


class ScoreError(QuantkitError):
    """An evaluation could not be run or read."""


class EngineError(QuantkitError):
    """A serving engine would not start, died, hung, or answered what it should not."""


class PolicyError(QuantkitError):
    """A gate's policy is wrong, or does not fit the report."""


class AdviceError(QuantkitError):
    """A question that contradicts itself, or is about something else than its report."""


class SweepError(QuantkitError):
    """A sweep's file is wrong, or its steps cannot be run."""


class Interrupted(QuantkitError):
    """The user pressed Ctrl-C."""
