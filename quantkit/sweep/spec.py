"""What a sweep is: one YAML file of models, recipes, calibration sets, tasks and resources.

models: [demo]
recipes: [gptq-w4a16, fp8-dynamic]
calibration: [python-docs]
tasks: [python_docs, python_quiz]

Unknown keys are refused, and all problems of a file are listed at once.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from quantkit.errors import SweepError
from quantkit.scoring.suites import DEFAULT, DEMO
from quantkit.specs import problems, read_yaml, suggestion

KINDS = ("calibrate", "quantize", "verify", "score", "report")
"""Steps, in pipeline order."""
COMPUTING = ("quantize", "score")
"""Those that use a GPU where there is one."""
UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
LABEL = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"


class _Strict(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")


class ModelSpec(_Strict):
    """A model to quantise; in a file its name alone is enough."""

    model: str = Field(min_length=1)
    """A folder, a hub id or `demo`."""
    name: str = Field(default="", pattern=f"{LABEL}|^$", max_length=80)
    """Its name in tables; by default the last part of the model's own name."""
    revision: str | None = None
    trust_remote_code: bool = False
    after: list[str] = []
    """Models, by their names here, that must be done first: small ones before large ones."""

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.name or Path(self.model).name or self.model


class SetChoice(_Strict):
    """A calibration set; in a file its name alone is enough."""

    set: str = Field(min_length=1)
    """A set's name, its YAML file, a folder that was built, or a file of data."""
    name: str = Field(default="", pattern=f"{LABEL}|^$", max_length=80)
    samples: int | None = Field(default=None, gt=0)
    length: int | None = Field(default=None, gt=1)

    @property
    def label(self) -> str:
        """Its name in tables."""
        if self.name:
            return self.name
        words = re.sub(r"[^A-Za-z0-9._+-]+", "-", Path(self.set).name or self.set).strip("-.")
        size = [str(n) for n in (self.samples, self.length) if n is not None]
        return "-".join([re.sub(r"\.ya?ml$", "", words), *size])


class Resources(_Strict):
    """What one step needs of a machine."""

    gpus: int | None = Field(default=None, ge=0, le=1024)
    """By default one where there are any, for steps that can use it."""
    cpus: float = Field(default=1, gt=0)
    memory: int | None = None
    """Bytes, or words such as `64GiB`; by default nothing is reserved."""

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        found = re.fullmatch(r"\s*([\d.]+)\s*([kmgt]?)(i?)b\s*", value, re.IGNORECASE)
        if not found or found[1].count(".") > 1 or found[1] == "." or len(found[1]) > 20:
            raise ValueError(f"'{value}' is not an amount of memory; write it like 64GiB")
        return int(float(found[1]) * (1024 if found[3] else 1000) ** UNITS[found[2].lower()])

    @field_validator("memory")
    @classmethod
    def _enough(cls, value: int | None) -> int | None:
        if value is not None and value < 1 << 20:
            raise ValueError(f"{value} bytes are too little for any step; write it like 64GiB")
        return value


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class SweepSpec(_Strict):
    """Everything that is to be made and compared."""

    models: list[ModelSpec] = Field(min_length=1)
    recipes: list[str] = Field(min_length=1)
    """Names, or paths relative to this file."""
    calibration: list[SetChoice] = []
    """Every recipe that needs data is made once for each."""
    tasks: list[str] = Field(default=list(DEFAULT), min_length=1)
    """What models are scored on: lm-eval's tasks, or quantkit's."""
    limit: int | None = Field(default=None, gt=0)
    """Only the first documents of each task."""
    max_length: int | None = Field(default=None, gt=1)
    policy: str | None = None
    """A gate's policy: `default`, or a YAML file; without one, nothing is judged."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    split: Literal["task", "subject"] = "task"
    """On a cluster, what one scoring job holds: a task, or one subject of a group such as MMLU."""
    attempts: int = Field(default=3, ge=1, le=100)
    """How often a step is tried before it is given up."""
    gpu: str = "H200"
    """The GPU that `--dry-run` assumes; `quantkit gpus` lists names."""
    resources: dict[Literal["calibrate", "quantize", "verify", "score", "report"], Resources] = {}
    environment: dict[str, Any] = {}
    """For Ray's runtime environment on a cluster, such as `pip` and `env_vars`."""

    @field_validator("models", mode="before")
    @classmethod
    def _models(cls, value: Any) -> Any:
        return _long(value, "model")

    @field_validator("calibration", mode="before")
    @classmethod
    def _sets(cls, value: Any) -> Any:
        return _long(value, "set")

    @model_validator(mode="before")
    @classmethod
    def _own_tasks(cls, given: Any) -> Any:
        """The demo alone is scored on tasks that need no hub, unless the file names others."""
        if not isinstance(given, Mapping) or "tasks" in given:
            return given
        models = given.get("models")
        names = [m.get("model") if isinstance(m, Mapping) else m for m in _listed(models)]
        return {**given, "tasks": list(DEMO)} if set(map(str, names)) == {"demo"} else given

    @model_validator(mode="after")
    def _consistent(self) -> "SweepSpec":
        wrong = [*self._twice(), *self._orders(), *self._contradictions()]
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    def of(self, kind: str) -> Resources:
        """What a step of a kind needs."""
        return next((r for name, r in self.resources.items() if name == kind), Resources())

    def _twice(self) -> Iterator[str]:
        for what, names in (
            ("models", [m.label for m in self.models]),
            ("recipes", self.recipes),
            ("calibration", [c.label for c in self.calibration]),
            ("tasks", self.tasks),
        ):
            for name in sorted({n for n in names if names.count(n) > 1}):
                hint = "" if what in ("recipes", "tasks") else "; give one of them a `name`"
                yield f"{what}: {name} is listed twice{hint}"

    def _orders(self) -> Iterator[str]:
        waits = {model.label: model.after for model in self.models}
        for label, others in waits.items():
            for other in others:
                if other not in waits:
                    hint = suggestion(other, waits)
                    yield f"models: {label} comes after {other}, which is not a model here; {hint}"
        if found := cycle(waits):
            yield f"models: {' comes after '.join(found)}: none of them can start"

    def _contradictions(self) -> Iterator[str]:
        for kind, wanted in self.resources.items():
            if wanted.gpus and kind not in COMPUTING:
                yield f"resources.{kind}: gpus: {wanted.gpus}, but {kind} uses none"
            if wanted.gpus and self.device == "cpu":
                yield f"resources.{kind}: gpus: {wanted.gpus} contradicts device: cpu"
            if wanted.gpus == 0 and kind in COMPUTING and self.device == "cuda":
                yield f"resources.{kind}: gpus: 0 contradicts device: cuda"
            if kind == "score" and (wanted.gpus or 0) > 1:
                yield (
                    f"resources.score: gpus: {wanted.gpus}, but scoring one model uses one GPU; "
                    "write 1, and other scores take the rest"
                )


def cycle(waits: Mapping[str, list[str]]) -> list[str]:
    """Names that wait for each other in a circle, with the first repeated at the end."""
    done: set[str] = set()
    for start in waits:
        path: list[str] = []
        stack = [(start, iter(waits[start]))] if start not in done else []
        path += [start] if stack else []
        while stack:
            name, rest = stack[-1]
            following = next((n for n in rest if n in waits and n not in done), None)
            if following is None:
                done.add(name)
                stack.pop()
                path.pop()
            elif following in path:
                return [*path[path.index(following) :], following]
            else:
                stack.append((following, iter(waits[following])))
                path.append(following)
    return []


def read(path: Path) -> SweepSpec:
    """A sweep from its file; all problems are reported at once."""
    data = read_yaml(path, SweepError)
    if not isinstance(data, dict):
        raise SweepError(f"{path} is not a sweep: it has no lines such as `models: [demo]`")
    if _refers_to_itself(data):
        raise SweepError(f"{path} refers to itself: an alias is inside what it names")
    return validated(data, path)


def validated(data: dict[str, Any], where: str | Path) -> SweepSpec:
    """A sweep from plain data."""
    try:
        return SweepSpec.model_validate(data)
    except ValidationError as error:
        words = {"model_type": "a name, or lines such as `key: value`"}
        lines = "\n".join(f"  {line}" for line in problems(error, SweepSpec, words=words))
        raise SweepError(f"{where} is not a valid sweep:\n{lines}") from error


def _long(value: Any, key: str) -> Any:
    """A list with shorthand names expanded."""
    if not isinstance(value, list):
        return value
    return [{key: item} if isinstance(item, str) else item for item in value]


def _refers_to_itself(data: Any, above: Annotated[tuple[int, ...], "ids"] = ()) -> bool:
    if not isinstance(data, dict | list):
        return False
    if id(data) in above:
        return True
    parts = data.values() if isinstance(data, dict) else data
    return any(_refers_to_itself(part, (*above, id(data))) for part in parts)
