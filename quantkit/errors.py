"""Every error a user can cause, and the exit code of each outcome.

    QuantkitError
      UsageError          an option's value, or options that do not go together; exit code 2
      RecipeError         a recipe file is wrong; lists all problems at once
      UnknownName         a recipe, task, set or device that does not exist; shows near matches
      SourceError         the source model is missing, damaged or of an unsupported kind
      ShardError          a safetensors file is truncated or corrupt
      CheckpointError     a quantised folder does not match its manifest and recipe
      Faulty              the same, as the answer of `verify`; exit code 1
      StorageError        the disk is full, not writable, or the output exists already
      MissingDependency   an optional package is missing; names the extra that installs it
      HardwareError       no such device, or too little memory, with the numbers
      RankLost            another process of a distributed run ended or failed
      DataError           text for calibration or scoring is missing or too short
      MethodError         a method failed on a tensor
      ScoreError          an evaluation could not be run or read
      EngineError         a serving engine would not start, died, hung or answered wrongly
      PolicyError         a gate's policy is wrong or does not fit its report; all problems at once
      AdviceError         a request for a recommendation that cannot be answered as put
      SweepError          a sweep's file is wrong, or some steps were given up; names all of them
      Interrupted         the user pressed Ctrl-C; reports what was kept

A message says what happened, to which object, and what to do next.
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
"""What the exit codes mean for every command, in short; `docs/ci.md` has the full table."""
MOST_SHOWN = 32
MOST_NEAR = 4
"""Most names that a message lists."""


class QuantkitError(Exception):
    """Base of every error that is reported without a traceback."""

    exit_code = EXIT_ERROR
    is_reported = False
    """Another process of the run has reported the error, so this one stays silent."""


class UsageError(QuantkitError):
    """The command line is wrong in a way that only shows once its values are read."""

    exit_code = EXIT_USAGE


class RecipeError(QuantkitError):
    """A recipe file is wrong."""


def near_matches(name: str, known: Sequence[str]) -> list[str]:
    """Names similar to a misspelt one, likeliest first: close spellings, or names that contain it.

    Case and punctuation are ignored.
    """
    plain = {one: re.sub(r"[^a-z0-9]", "", one.lower()) for one in known}
    asked = re.sub(r"[^a-z0-9]", "", name.lower())
    if not asked:
        return []
    begin = [one for one in known if plain[one].startswith(asked)]
    within = [one for one in known if len(asked) >= 3 and asked in plain[one]]
    cutoff = 0.5 if len(asked) == 2 and not begin else 0.6  # L5 has half of L4's letters
    close = difflib.get_close_matches(asked, list(plain.values()), n=3, cutoff=cutoff)
    spelt = [one for found in close for one in known if plain[one] == found]
    likeliest = begin if len(asked) >= 2 else []
    return list(dict.fromkeys([*likeliest, *spelt, *within]))[:MOST_NEAR]


def either(names: Sequence[str]) -> str:
    """Alternatives as one phrase: a, b or c."""
    return " or ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])


class UnknownName(QuantkitError):
    """A name that does not exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        known = sorted(known)
        near = near_matches(name, known)
        parts = [f"unknown {kind} '{name}'."]
        if near:
            parts.append(f"Did you mean {either(near)}?")
        elif known and len(known) <= MOST_SHOWN:
            parts.append(f"Choose from: {', '.join(known)}.")
        if hint:
            parts.append(hint)
        super().__init__(" ".join(parts))


class SourceError(QuantkitError):
    """A source model cannot be read or is of an unsupported kind."""


class ShardError(QuantkitError):
    """A safetensors file is truncated or corrupt."""


class CheckpointError(QuantkitError):
    """A quantised folder is invalid."""


class Faulty(CheckpointError):
    """`verify` found faults, which is an answer, not a failure to answer."""

    exit_code = EXIT_GATE


class StorageError(QuantkitError):
    """Output cannot be written where it should go."""


class MissingDependency(QuantkitError):
    """An optional package is not installed."""


class HardwareError(QuantkitError):
    """A device is missing or too small."""


class RankLost(HardwareError):
    """Another process of a distributed run is gone."""


class DataError(QuantkitError):
    """Calibration or evaluation text is missing or unusable."""


class MethodError(QuantkitError):
    """A quantisation method failed on a tensor."""


class ScoreError(QuantkitError):
    """An evaluation could not be run or read."""


class EngineError(QuantkitError):
    """A serving engine would not start, died, hung, or gave a wrong answer."""


class PolicyError(QuantkitError):
    """A gate's policy is wrong, or does not fit the report."""


class AdviceError(QuantkitError):
    """A request that contradicts itself or does not match its report."""


class SweepError(QuantkitError):
    """A sweep's file is wrong, or its steps cannot be run."""


class Interrupted(QuantkitError):
    """The user pressed Ctrl-C."""
