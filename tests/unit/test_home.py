"""Paths that begin with `~`, also where nobody is at home."""

from pathlib import Path

import pytest

from quantkit.errors import StorageError
from quantkit.home import expanded
from quantkit.scoring.cache import default_folder


def test_home_takes_the_place_of_a_tilde(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/models") == tmp_path / "models"
    assert expanded("a/~b") == Path("a/~b")


def test_a_user_without_a_home_is_told_what_to_do(monkeypatch):
    # As in a container that runs under a number that its system has no name for.
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(StorageError, match=r"~/.cache: unknown user; set HOME"):
        default_folder()
