"""The status of a sweep: from its folder alone, whether or not somebody drives it now."""

import time
from dataclasses import asdict, dataclass
from typing import Any

from quantkit.sweep import lease, result
from quantkit.sweep.driver import read_plan
from quantkit.sweep.place import Place
from quantkit.sweep.schedule import look, read_state
from quantkit.sweep.worker import log_name


@dataclass(frozen=True)
class Line:
    """How many steps of a kind are in each state."""

    kind: str
    n_steps: int
    done: int
    running: int
    given_up: int
    seconds: float

    @property
    def waiting(self) -> int:
        return self.n_steps - self.done - self.running - self.given_up


@dataclass(frozen=True)
class Status:
    """A sweep at one moment."""

    lines: tuple[Line, ...]
    driver: str
    """Who drives it; empty when nobody does."""
    running: dict[str, float]
    """Seconds since each running step was started."""
    given_up: dict[str, str]
    """Why, by step."""
    logs: dict[str, str]
    """The last log of each step that failed itself."""
    faults: tuple[str, ...]
    """Results that do not match their records."""

    @property
    def is_done(self) -> bool:
        return all(line.done == line.n_steps for line in self.lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": [{**asdict(line), "waiting": line.waiting} for line in self.lines],
            "driver": self.driver or None,
            "running": self.running,
            "given_up": self.given_up,
            "logs": self.logs,
            "faults": list(self.faults),
            "done": self.is_done,
        }


def status(place: Place, check: bool = False) -> Status:
    """Read the status of a sweep; `check` hashes every file, however large."""
    graph, _ = read_plan(place)
    plan = look(graph, place)
    faults = list(plan.remade.values())
    if check:
        for record in plan.records.values():
            faults += result.faults(place, record, largest=None)
    holder = lease.holder_of(place)
    state = read_state(place)
    done = plan.finished(graph, state.get("errors", {}))
    now = time.time()
    alive = holder is not None
    running = {
        name: now - since
        for name, since in state.get("running", {}).items()
        if alive and name not in done
    }
    given_up = {n: why for n, why in state.get("errors", {}).items() if n not in done}
    lines = []
    for kind in dict.fromkeys(step.kind for step in graph.steps.values()):
        names = [step.name for step in graph.of_kind(kind)]
        lines.append(
            Line(
                kind,
                len(names),
                sum(name in done for name in names),
                sum(name in running for name in names),
                sum(name in given_up for name in names),
                sum(done[name].seconds for name in names if name in done),
            )
        )
    logs = {}
    for name in state.get("failed", []):
        if name in given_up:
            number = state.get("tries", {}).get(name, 1)
            logs[name] = place.path_of(log_name(name, number))
    return Status(
        tuple(lines), holder.description() if holder else "", running, given_up, logs, tuple(faults)
    )
