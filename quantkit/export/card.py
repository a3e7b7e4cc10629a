"""The model card of a checkpoint folder, its README.md.

The card belongs to whoever edits it; ours is the text between two marks, and those metadata keys
that nobody has changed since. The manifest does not hash it.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quantkit.errors import CheckpointError
from quantkit.export import card_facts, card_text, front_matter, verified
from quantkit.export.card_facts import Scored
from quantkit.export.manifest import Manifest
from quantkit.model.description import README
from quantkit.parsing import parse_json
from quantkit.storage import lasting_name, write_text

BEGIN = "<!-- quantkit:begin -->"
END = "<!-- quantkit:end -->"
KEYS = "<!-- quantkit:keys "
HINT = "<!-- `quantkit card` rewrites what is between these marks; write above or below them. -->"
# Whole lines only: a name inside the text cannot pass for a mark.
MARK = re.compile(r"^(?:<!-- quantkit:(?P<kind>begin|end) -->)[ \t]*\r?$", re.M)
REMEMBERED = re.compile(rf"^{re.escape(KEYS)}(?P<json>\{{.*\}}) -->[ \t]*\r?$", re.M)


def existing(folder: Path) -> str | None:
    """A folder's existing card, or None; one that could not be updated is refused."""
    path = folder / README
    try:
        # As bytes, so that line endings are preserved.
        text = path.read_bytes().decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text; convert or remove it") from error
    front, rest = front_matter.split(text)
    front_matter.load(front, path)
    _block(rest, path)
    return text


def write(
    folder: Path, manifest: Manifest, scored: Sequence[Scored] = (), old: str | None = None
) -> None:
    """Write the card, merged into `old` if there is one."""
    write_text(folder / README, text_of(folder, manifest, scored, old))


def refresh(
    folder: Path, manifest: Manifest, scored: Sequence[Scored] = (), out: Path | None = None
) -> bool:
    """Update a finished checkpoint's card, in place or in `out`; returns whether it changed."""
    place = out or folder
    return renew(folder, place, lambda old: text_of(folder, manifest, scored, old, place))


def renew(folder: Path, out: Path, text: Callable[[str | None], str]) -> bool:
    """Write a card based on the existing one or the checkpoint's; returns whether it changed."""
    here = existing(out)
    new = text(existing(folder) if here is None else here)
    if new != here:
        out.mkdir(parents=True, exist_ok=True)
        write_text(out / README, new)
    return new != here


def text_of(
    folder: Path,
    manifest: Manifest,
    scored: Sequence[Scored] = (),
    old: str | None = None,
    place: Path | None = None,
) -> str:
    """The card of a checkpoint, with hand-written parts of the old one; `place` is where it goes
    if that is another folder.
    """
    proven, name = verified.current(folder, manifest), lasting_name(place or folder)
    return compose(
        old,
        card_facts.metadata(manifest, scored),
        card_text.body(manifest, scored, _has_chat(folder), proven, name),
        folder / README,
    )


def compose(old: str | None, ours: Mapping[str, object], body: str, where: object) -> str:
    """A card from our keys and text, and from the existing card."""
    front, rest = front_matter.split(old or "")
    found = _block(rest, where)
    before = _remembered(rest[slice(*found)]) if found else {}
    merged = front_matter.merge(front, ours, before, where)
    remembered = json.dumps(front_matter.fingerprints(ours))
    block = "\n".join([BEGIN, HINT, f"{KEYS}{remembered} -->", "", body, "", END])
    if found:
        text = rest[: found[0]] + block + rest[found[1] :]
    else:
        text = f"{rest.rstrip()}\n\n{block}\n" if rest.strip() else f"\n{block}\n"
    front = front_matter.updated(front, merged, where)
    ends = "" if not front or front.endswith("\n") else "\n"
    return f"---\n{front}{ends}---\n{text}"


def has_scores(text: str | None) -> bool:
    """Whether a card has scores written by quantkit."""
    rest = front_matter.split(text or "")[1]
    found = _block(rest, README)
    return found is not None and "model-index" in _remembered(rest[slice(*found)])


def _block(rest: str, where: object) -> tuple[int, int] | None:
    """Start and end of our part of a card."""
    marks = list(MARK.finditer(rest))
    if not marks:
        return None
    if [mark["kind"] for mark in marks] != ["begin", "end"]:
        raise CheckpointError(
            f"{where} must have one line {BEGIN} and below it one line {END}; repair them, or "
            "remove them all to get a new part at the end"
        )
    return marks[0].start(), marks[1].end()


def _remembered(block: str) -> dict[str, str]:
    found = REMEMBERED.search(block)
    try:
        keys = parse_json(found["json"]) if found else {}
    except ValueError:
        return {}  # then every key counts as hand-written
    return keys if isinstance(keys, dict) else {}


def _has_chat(folder: Path) -> bool:
    """Whether the model has a chat template."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        config = parse_json((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))
