"""Write what `quantkit recommend` prints into docs/choosing.md, below each command shown there, and
the table of thirty questions.

python scripts/write_choosing_page.py
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import questions

from quantkit.advise import sizes

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "choosing.md"
SHOWN = re.compile(r"```\n\$ quantkit (recommend [^\n]*)\n(.*?)```", re.S)


TABLE = re.compile(r"(<!-- questions -->\n).*?(\n<!-- /questions -->)", re.S)


def prepare(folder: Path) -> None:
    """What the commands of the page read: a model's config and the reports of this repository."""
    model = folder / "SmolLM2-135M"
    model.mkdir()
    n_weights = sizes.parse("135M")
    assert n_weights is not None
    _, config = sizes.config_of(n_weights)
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    (folder / "reports").symlink_to(ROOT / "reports")


def printed(command: str, folder: Path) -> str:
    """What a command prints; exit code 1 means that nothing serves, which is an answer, too."""
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-m", "quantkit", *shlex.split(command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode not in (0, 1):
        raise SystemExit(f"quantkit {command}: {answer.stderr}")
    return answer.stdout.rstrip()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        text = SHOWN.sub(
            lambda found: f"```\n$ quantkit {found[1]}\n{printed(found[1], folder)}\n```",
            PAGE.read_text(encoding="utf-8"),
        )
        answers = questions.table(folder)
        text = TABLE.sub(lambda found: f"{found[1]}{answers}{found[2]}", text)
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
