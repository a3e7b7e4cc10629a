"""YAML files that users write: reading and validation, with faults in plain words.

A problem is one line: the field's path, what it must be, what it is, and for a misspelt key the
likely intended one.
"""

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

# Whoever imports this has a file to read and has loaded its model.
import yaml
from pydantic import AfterValidator, BaseModel, ValidationError

from quantkit.errors import QuantkitError
from quantkit.parsing import parse_yaml

LONGEST_SHOWN = 40
MOST_NAMES = 20
LINES = "lines such as `key: value`"
"""A mapping as users write it in YAML."""
NAME = "a name of letters, digits and . _ + -"
WANTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing_size": "a smaller number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_pattern_mismatch": NAME,
    "list_type": "a list, such as [a, b]",
    "tuple_type": "a list, such as [a, b]",
    "dict_type": LINES,
    "mapping_type": LINES,
    "model_type": LINES,
    "model_attributes_type": LINES,
}
"""What a field must be, by pydantic's name for the fault."""


Record = TypeVar("Record", bound=BaseModel)


def as_record(model: type[Record], data: Any) -> Record:
    """Parsed JSON as a record, strictly: "1" is text, not a number or boolean; a number is not a
    date.

    Goes through JSON again, since pydantic's strict mode accepts text for other types only there.
    """
    return model.model_validate_json(json.dumps(data), strict=True)


def plain_name(name: str) -> str:
    """A name from a file that becomes a file or folder name: never a path elsewhere."""
    strange = any(letter in "/\\" or not letter.isprintable() for letter in name)
    if strange or name in (".", "..") or not 0 < len(name.encode()) <= 200:
        raise ValueError(f"{name[:LONGEST_SHOWN]!r} cannot be a file's name")
    return name


def plain_path(path: str) -> str:
    """The same for a file below a folder: plain names separated by slashes."""
    for name in path.split("/"):
        plain_name(name)
    return path


PlainName = Annotated[str, AfterValidator(plain_name)]
PlainPath = Annotated[str, AfterValidator(plain_path)]


def read_yaml(path: Path, wrong: type[QuantkitError], is_ours: bool = False) -> Any:
    """The content of a YAML file; duplicate keys are refused, since YAML would keep only one.

    Files that ship with quantkit are read by libyaml, where PyYAML has it: ten times as fast, but
    nesting can exhaust its stack.
    """
    base = getattr(yaml, "CSafeLoader", yaml.SafeLoader) if is_ours else yaml.SafeLoader

    class Loader(base):  # type: ignore[misc, valid-type]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for key, _ in node.value:
                name = getattr(key, "value", None)
                if isinstance(name, str) and name != "<<" and name in seen:
                    line = key.start_mark.line + 1
                    raise wrong(f"{path}: {_key(name)} appears twice, again in line {line}")
                seen.add(name if isinstance(name, str) else None)
            return super().construct_mapping(node, deep)

    try:
        return parse_yaml(path.read_bytes(), Loader)
    except OSError as error:
        raise wrong(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        words = str(error).removeprefix("it ")
        # JSON is YAML too, and whoever wrote JSON should read about JSON.
        words = words.replace("YAML", "JSON") if path.suffix == ".json" else words
        raise wrong(f"{path} {words}") from error


def problems(
    error: ValidationError,
    kind: type[BaseModel],
    unseen: Sequence[str] = (),
    words: Mapping[str, str] = {},
) -> list[str]:
    """Everything wrong with data for a model, one line each.

    `unseen` are keys that we inserted between those of the file; `words` replace entries of
    `WANTED`.
    """
    wanted: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    lines: list[tuple[str, str]] = []  # path and message; "" stands for `wanted`
    for fault in error.errors():
        place, model = _place(fault["loc"], kind)
        path = ".".join(part for part in place if part not in unseen).replace(".#", " #")
        sort, context = fault["type"], fault.get("ctx", {})
        if sort in ("extra_forbidden", "invalid_key"):  # a number is not a field name either
            lines.append((path, f"unknown key; {suggestion(place[-1], _keys(model))}"))
        elif sort == "missing":
            lines.append((path, "is missing"))
        elif sort == "union_tag_not_found":
            key = str(context["discriminator"]).strip("'")
            lines.append((f"{path}.{key}", f"is missing; {_tags(kind, place)}"))
        elif sort == "union_tag_invalid":
            key, tag = str(context["discriminator"]).strip("'"), str(context["tag"])
            tags = [part.strip(" '") for part in str(context["expected_tags"]).split(",")]
            problem = f"must be {_choice(tags)}, not {shown(tag)}{_near(tag, tags)}"
            lines.append((f"{path}.{key}", problem))
        elif sort in ("value_error", "assertion_error"):
            message = fault["msg"].removeprefix("Value error, ")
            lines += [(path, line) for line in message.split("\n")]
        else:
            wanted.setdefault(path, []).append(words.get(fault["type"]) or _wanted(fault))
            given[path] = shown(fault["input"]) + _hint(fault)
            lines.append((path, ""))
    sentences = []
    for path, line in lines:
        problem = line or f"must be {' or '.join(dict.fromkeys(wanted[path]))}, not {given[path]}"
        sentences.append(f"{path}: {problem}" if path else problem)
    return list(dict.fromkeys(sentences))


def json_problem(error: ValidationError, kind: type[BaseModel]) -> str:
    """The first fault of a JSON file, in JSON's terms."""
    return problems(error, kind)[0].replace(LINES, "a JSON object")


def suggestion(name: str, known: Iterable[str]) -> str:
    """A hint at the name that was probably meant."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"choose from: {', '.join(names)}"


def shown(value: Any) -> str:
    """What the user wrote, shortened to one line."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return LINES if value else "{}"
    if isinstance(value, list | tuple):
        return "a list" if value else "[]"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 1]}…"


def _key(name: str) -> str:
    """A key as one visible line, whatever it holds."""
    return name if name.isprintable() else repr(name)


def _wanted(fault: Any) -> str:
    """What a field must be."""
    sort, context = fault["type"], fault.get("ctx", {})
    if sort in WANTED:
        return WANTED[sort]
    if sort in ("literal_error", "enum"):
        return _choice(_literals(context))
    bounds = {
        "greater_than": ("gt", "above {}"),
        "greater_than_equal": ("ge", "{} or more"),
        "less_than": ("lt", "below {}"),
        "less_than_equal": ("le", "{} or less"),
        "string_too_short": ("min_length", "text"),
        "string_too_long": ("max_length", "at most {} letters long"),
        "too_long": ("max_length", "a list of at most {}"),
    }
    if sort in bounds:
        key, words = bounds[sort]
        return words.format(_figure(context[key]))
    if sort == "too_short":
        n = context["min_length"]
        return "a list of at least one" if n == 1 else f"a list of at least {n}"
    # Pydantic's own words, for faults that none of our models has so far.
    return str(fault["msg"]).removeprefix("Input should be ")


def _figure(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)


def _hint(fault: Any) -> str:
    if fault["type"] == "string_type" and not isinstance(fault["input"], dict | list | None):
        return "; put it into quotes"
    if fault["type"] not in ("literal_error", "enum") or not isinstance(fault["input"], str):
        return ""
    return _near(fault["input"], _literals(fault["ctx"]))


def _near(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _literals(context: Any) -> list[str]:
    words = str(context["expected"]).replace(" or ", ", ").split(", ")
    return [word.strip("'") for word in words]


def _choice(names: Sequence[str]) -> str:
    if len(names) < 2 or len(names) > MOST_NAMES:
        return ", ".join(names[:MOST_NAMES])
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _keys(model: type[BaseModel] | None) -> list[str]:
    fields = {} if model is None else model.model_fields
    return [field.alias or name for name, field in fields.items()]


def _place(
    location: Sequence[int | str], kind: type[BaseModel]
) -> tuple[list[str], type[BaseModel] | None]:
    """A fault's path as written in the file, and the model that its last part belongs to.

    Pydantic's own path also names branches of unions, which do not appear in the file.
    """
    place: list[str] = []
    owner: type[BaseModel] | None = kind
    kinds: list[Any] = [kind]
    for part in location:
        name = _key(str(part))
        models = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        holder = next((m for m in models if _field(m, part) is not None), None)
        if holder is not None:
            kinds = _branches(_field(holder, part))
        elif isinstance(part, int) and any(get_origin(k) in (list, tuple) for k in kinds):
            kinds = [b for k in kinds for inner in get_args(k) for b in _branches(inner)]
            name = f"#{part + 1}"  # people count from one
        elif len(kinds) > 1 and (
            (tagged := [m for m in models if part in _tag_of(m)]) or _names_branch(part, kinds)
        ):
            kinds = tagged or kinds
            continue
        elif part == "[key]":
            continue
        else:  # a key of a mapping, or an unknown one
            inside = [get_args(k)[1] for k in kinds if len(get_args(k)) == 2]
            kinds = [b for inner in inside for b in _branches(inner)]
        place.append(name)
        owner = holder or (models[0] if models else None)
    return place, owner


def _field(model: type[BaseModel], part: int | str) -> Any:
    """The type of a field, by its name in the file."""
    for name, field in model.model_fields.items():
        if part in (name, field.alias):
            return field.annotation
    return None


def _branches(kind: Any) -> list[Any]:
    """The alternatives of a type."""
    if get_origin(kind) is Annotated:
        return _branches(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [branch for part in get_args(kind) for branch in _branches(part)]
    return [kind]


def _tag_of(model: type[BaseModel]) -> list[Any]:
    """Values of single-valued fields, which discriminate the branches of a union."""
    kinds = [field.annotation for field in model.model_fields.values()]
    return [value for k in kinds if get_origin(k) is Literal for value in get_args(k)]


def _names_branch(part: int | str, kinds: Sequence[Any]) -> bool:
    """Whether a part of a path only names the branch of a union that was tried."""
    if not isinstance(part, str):
        return False
    head = part.partition("[")[0]
    names = {getattr(k, "__name__", str(k)) for k in kinds} | {"constrained-int", "literal"}
    return head in names | {str(get_origin(k).__name__) for k in kinds if get_origin(k)}


def _tags(kind: type[BaseModel], place: Sequence[str]) -> str:
    kinds: list[Any] = [kind]
    for part in place:
        models = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        found = [_field(m, part) for m in models if _field(m, part) is not None]
        inner = found or [i for k in kinds for i in get_args(k)]
        kinds = [b for one in inner for b in _branches(one)]
    tags = [str(t) for k in kinds if isinstance(k, type) for t in _tag_of(k)]
    return f"choose from: {', '.join(dict.fromkeys(tags))}"
