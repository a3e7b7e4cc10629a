"""docs/choosing.md shows what the program prints."""

import json
import re
import shlex
from pathlib import Path

import pytest

from quantkit.advise import sizes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "choosing.md").read_text()
SHOWN = re.findall(r"```\n\$ quantkit (recommend [^\n]*)\n(.*?)```", PAGE, re.S)


def test_the_page_shows_several_decisions():
    assert len(SHOWN) >= 3


@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=lambda value: value[:40])
def test_the_page_shows_what_is_printed(run_cli, monkeypatch, tmp_path, command, shown):
    folder = tmp_path / "SmolLM2-135M"
    folder.mkdir()
    _, config = sizes.config_of(sizes.parse("135M"))
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    (tmp_path / "reports").symlink_to(ROOT / "reports")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    result = run_cli(shlex.split(command))
    assert result.code == shown.split("\n")[0].endswith("nothing serves it")
    assert words(result.stdout) == words(shown)


def words(text: str) -> list[str]:
    """Without line breaks and rules, which depend on the terminal."""
    return [word for word in text.split() if not set(word) <= {"─"}]
