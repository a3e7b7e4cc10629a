"""Writes a result file with what every result needs: the commit and the date of the run.

Programs of this folder call `write` with what they measured, also in environments without quantkit.
A commit with `+` behind it had changes on top of it. Without git (a copy of the tree on another
machine) the commit is None, unless QUANTKIT_COMMIT names it.
"""

import datetime
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def write(path: Path, result: dict[str, Any]) -> None:
    """The result with `recorded` at its end."""
    text = json.dumps({**result, "recorded": recorded()}, indent=2, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8")


def begun(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """The result so far, if it is about the same; otherwise nothing."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return known if all(known.get(key) == value for key, value in about.items()) else {}


def tell(result: dict[str, Any], out: Path | None) -> None:
    """Print the result; with `out`, write it too."""
    print(json.dumps(result, indent=2, ensure_ascii=False))
    if out:
        write(out, result)


def recorded() -> dict[str, Any]:
    """Commit and date of this run."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"commit": os.environ.get("QUANTKIT_COMMIT") or commit(), "date": today}


def commit() -> str | None:
    """The commit of this tree, `+` behind it where code differs from that commit."""
    head = git("rev-parse", "--short", "HEAD")
    if not head:
        return None
    changed = git("status", "--porcelain", "--", "quantkit", "benchmarks/*.py", "recipes")
    return f"{head}+" if changed else head


def git(*arguments: str) -> str:
    """What git prints, or nothing where it fails or is missing."""
    try:
        answer = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return answer.stdout.strip()


def without_folders(words: str) -> str:
    """What a program said, less where it lay on the machine that measured."""
    return re.sub(r"(/[\w.+-]+){2,}/", "", words)
