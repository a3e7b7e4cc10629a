"""The YAML at the top of a model card, shared with whoever edits the card.

A hash of each value we write is stored, so that next time our values can be told from hand-written
ones.
"""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

import yaml

from quantkit.errors import CheckpointError
from quantkit.model.description import FRONT
from quantkit.parsing import parse_yaml

DEEPEST = 20


class _Loader(yaml.SafeLoader):
    """As the hub reads it: only true and false are booleans, and `no` is Norwegian."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if not tag.endswith(":bool")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)


def dump(data: Mapping[str, Any]) -> str:
    """YAML that any reader accepts, whatever the texts hold."""
    found = yaml.safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=10_000)
    return str(found)


def split(text: str) -> tuple[str, str]:
    """The YAML of a card, without its dashes, and everything below."""
    found = FRONT.match(text)
    return (found["front"], text[found.end() :]) if found else ("", text)


def load(front: str, where: object) -> dict[str, Any]:
    """The keys of a card; refuses invalid YAML."""
    try:
        data = parse_yaml(front, _Loader)
    except ValueError as error:
        mark = getattr(error.__cause__, "problem_mark", None)
        line = f" (line {mark.line + 2})" if mark else ""
        raise CheckpointError(
            f"the metadata at the top of {where} is not valid YAML{line}; repair or remove it"
        ) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise CheckpointError(
            f"the metadata at the top of {where} must be `key: value` lines; repair or remove it"
        )
    return data


def fingerprints(ours: Mapping[str, Any]) -> dict[str, str]:
    """Hashes of our values."""
    return {key: _fingerprint(value) for key, value in ours.items()}


def _fingerprint(value: Any) -> str:
    plain = repr(_normal(value))
    return hashlib.sha256(plain.encode()).hexdigest()[:12]


def _normal(value: Any, depth: int = 0) -> Any:
    """A canonical form: equal for equal YAML, whatever its keys and nesting."""
    if depth > DEEPEST:  # an anchor may contain itself
        return "…"
    if isinstance(value, Mapping):
        items = [(str(key), _normal(item, depth + 1)) for key, item in value.items()]
        return sorted(items, key=lambda item: item[0])
    if isinstance(value, list | tuple | set):
        return [_normal(item, depth + 1) for item in value]
    return str(value)


def merge(
    front: str, ours: Mapping[str, Any], before: Mapping[str, str], where: object
) -> dict[str, Any]:
    """All keys: hand-written ones unchanged, ours updated.

    A key that somebody changed or removed since we wrote it (`before`) is theirs.
    """
    current = load(front, where)
    kept = {
        key: value
        for key, value in current.items()
        if before.get(str(key)) != _fingerprint(value) or key in ours
    }
    for key, value in ours.items():
        if key not in current:
            if key not in before or not current:
                kept[key] = value
        elif before.get(key) == _fingerprint(current[key]):
            kept[key] = value
        elif key == "tags" and key not in before and isinstance(current[key], list):
            kept[key] = list(dict.fromkeys([*current[key], *value]))
    return kept


def updated(front: str, merged: Mapping[str, Any], where: object) -> str:
    """The YAML text with these keys; preserves the original text, comments included, where
    possible.
    """
    current = load(front, where)
    if merged == current:
        return front
    if all(key in merged and merged[key] == value for key, value in current.items()):
        added = {key: value for key, value in merged.items() if key not in current}
        longer = front + ("" if not front or front.endswith("\n") else "\n") + dump(added)
        try:
            if load(longer, where) == merged:
                return longer
        except CheckpointError:
            pass  # such as `{a: 1}`, to which no lines can be added
    return dump(merged)
