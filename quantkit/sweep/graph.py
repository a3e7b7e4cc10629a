"""Steps, their dependencies, and the digests that identify finished ones.

A step's digest covers everything that determines its result: its own settings and the digests of
what it needs. So a changed recipe is another step, and so is everything that depends on it, while
the rest stays the same.
"""

import hashlib
import heapq
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quantkit import __version__
from quantkit.errors import SweepError
from quantkit.sweep.spec import cycle


@dataclass(frozen=True)
class Step:
    """One piece of work with one result."""

    kind: str
    """`calibrate`, `quantize`, `verify`, `score` or `report`."""
    title: str
    """What it is about, such as `demo gptq-w4a16 python-docs`."""
    work: Mapping[str, Any]
    """Everything that a worker has to know to do it, as plain data ..."""
    digest: str
    """... and a hash of the part that determines the result."""
    needs: tuple[str, ...] = ()
    """Names of the steps whose results it takes."""
    whatever: bool = False
    """Runs with what is available when a step that it needs was given up."""
    after: tuple[str, ...] = ()
    """Names of steps that must end first, though it takes no result from them."""
    together: str = ""
    """Steps with the same value here share work, and are best done at once."""

    @cached_property
    def name(self) -> str:
        """Its folder: readable, and different for every digest."""
        words = re.sub(r"[^A-Za-z0-9._+-]+", "-", f"{self.kind} {self.title}").strip("-")
        return f"{words[:120]}-{self.digest[:12]}"


def digest_of(kind: str, decisive: Mapping[str, Any], needs: Iterable[str] = ()) -> str:
    """A hash of what determines a step's result."""
    facts = {"quantkit": __version__, "kind": kind, "needs": list(needs), **decisive}
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Graph:
    """All steps of a sweep, in dependency order."""

    steps: Mapping[str, Step]
    """By name."""
    followers: Mapping[str, tuple[str, ...]] = field(repr=False)
    """Steps that wait for a step, by its name."""

    @classmethod
    def of(cls, steps: Iterable[Step]) -> "Graph":
        """Sort steps; duplicates are merged."""
        named = {step.name: step for step in steps}
        missing: Counter[str] = Counter()
        followers: dict[str, list[str]] = {name: [] for name in named}
        for name, step in named.items():
            for other in dict.fromkeys((*step.needs, *step.after)):
                if other not in named:
                    raise SweepError(f"{name} needs {other}, which is not a step of this sweep")
                followers[other].append(name)
                missing[name] += 1
        listed = {name: number for number, name in enumerate(named)}
        ready = [listed[name] for name in named if not missing[name]]  # a heap: it is sorted
        names, order = list(named), []
        while ready:  # in the listed order where possible, for readability
            order.append(name := names[heapq.heappop(ready)])
            for follower in followers[name]:
                missing[follower] -= 1
                if not missing[follower]:
                    heapq.heappush(ready, listed[follower])
        if len(order) < len(named):
            stuck = {n: [*s.needs, *s.after] for n, s in named.items() if missing[n]}
            circle = " needs ".join(cycle(stuck))
            raise SweepError(f"steps need each other in a circle: {circle}")
        return cls(
            {name: named[name] for name in order},
            {name: tuple(found) for name, found in followers.items()},
        )

    def of_kind(self, kind: str) -> list[Step]:
        """Steps of one kind."""
        return [step for step in self.steps.values() if step.kind == kind]
