"""One report on a whole sweep: every candidate of every model, and what was given up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.parsing import parse_json
from quantkit.report.document import Document
from quantkit.sweep.graph import Graph, Step
from quantkit.sweep.place import Place
from quantkit.sweep.result import CHECKPOINT, FOLDER, Record
from quantkit.sweep.worker import LOGS

PAGE = "report.html"
DATA = "report.json"
PAGES = "reports"
"""The report of each model, in a folder of its name."""
FILES = ("report.html", "report.json", "report.md", "gate.json")


@dataclass(frozen=True)
class ModelReport:
    """The result for one model."""

    label: str
    document: Document
    gate: Mapping[str, Any] | None
    checkpoints: Mapping[str, str]
    """Where each candidate's files are, by name."""

    def answer(self, candidate: str) -> str:
        """The gate's verdict on a candidate; empty where there is no gate."""
        if self.gate is None:
            return ""
        answers = [c["answer"] for c in self.gate["checks"] if c["candidate"] == candidate]
        worst = [a for a in ("fail", "cannot tell", "pass") if a in answers]
        return worst[0] if worst else ""


@dataclass(frozen=True)
class GivenUp:
    """A step that failed, or that needs one that did."""

    step: str
    title: str
    error: str
    log: str


@dataclass(frozen=True)
class Spent:
    """Steps of one kind, and the time they took."""

    kind: str
    n_steps: int
    n_done: int
    seconds: float


@dataclass(frozen=True)
class Overview:
    """All results of a sweep."""

    models: tuple[ModelReport, ...]
    given_up: tuple[GivenUp, ...]
    spent: tuple[Spent, ...]

    @property
    def exit_code(self) -> int | None:
        """That of the strictest gate; None where there was none."""
        codes = [m.gate["exit_code"] for m in self.models if m.gate is not None]
        return next((code for code in (1, 3, 0) if code in codes), None)

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "schema": 1,
            "models": [
                {
                    "name": model.label,
                    "gate": model.gate and model.gate["outcome"],
                    "checkpoints": dict(model.checkpoints),
                    "report": model.document.to_json(),
                }
                for model in self.models
            ],
            "given_up": [vars(lost) for lost in self.given_up],
            "spent": [vars(spent) for spent in self.spent],
        }


def gather(
    place: Place, graph: Graph, records: Mapping[str, Record], errors: Mapping[str, str]
) -> Overview:
    """Read the results that exist."""
    made = {r.identity: r for r in records.values() if r.kind == "quantize"}
    models = [
        _model(place, step, records[step.name], made)
        for step in graph.of_kind("report")
        if step.name in records
    ]
    given_up = [
        GivenUp(name, f"{step.kind} {step.title}", errors[name], _last_log(place, name))
        for name, step in graph.steps.items()
        if name in errors
    ]
    kinds = dict.fromkeys(step.kind for step in graph.steps.values())
    spent = []
    for kind in kinds:
        names = [step.name for step in graph.of_kind(kind)]
        done = [records[name].seconds for name in names if name in records]
        spent.append(Spent(kind, len(names), len(done), sum(done)))
    return Overview(tuple(models), tuple(given_up), tuple(spent))


def _model(place: Place, step: Step, record: Record, made: Mapping[str, Record]) -> ModelReport:
    base = f"{FOLDER}/{step.name}/{record.folder}"
    document = Document.model_validate_json(place.read(f"{base}/report.json") or b"")
    gate = place.read(f"{base}/gate.json") if "gate.json" in record.files else None
    checkpoints = {}
    for entry in document.candidates:
        if (found := made.get(entry.digest)) is not None:
            where = f"{FOLDER}/{found.step}/{found.folder}/{CHECKPOINT}"
            checkpoints[entry.name] = place.path_of(where)
    return ModelReport(step.title, document, parse_json(gate) if gate else None, checkpoints)


def _last_log(place: Place, step: str) -> str:
    logs = sorted(place.names(f"{LOGS}/{step}"), key=lambda name: (len(name), name))
    return place.path_of(f"{LOGS}/{step}/{logs[-1]}") if logs else ""
