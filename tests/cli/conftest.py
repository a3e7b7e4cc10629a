"""What tests of the command line share: a run that must be refused cleanly, edits of a model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def refused(run_cli: Callable[..., Any], out: Path) -> Callable[..., str]:
    """Quantise what cannot be: one message on stderr, which is returned, and nothing on disk."""

    def run(model: Path | str, *more: str, recipe: str = "rtn-w4a16", code: int = 3) -> str:
        before = sorted(out.parent.iterdir())
        result = run_cli(["quantize", model, "-r", recipe, "-o", out, "--quiet", *more])
        assert result.code == code
        assert result.stdout == ""
        assert result.stderr.startswith("quantkit: ")
        assert result.stderr.count("quantkit: ") == 1
        assert "Traceback" not in result.stderr
        assert [p for p in sorted(out.parent.iterdir()) if p not in (*before, out)] == []
        assert not out.exists() or list(out.iterdir()) == []
        return result.stderr.removeprefix("quantkit: ").rstrip()

    return run


@pytest.fixture
def edit_config() -> Callable[..., Path]:
    """Set keys of a model's config; None removes one."""

    def edit(folder: Path, **keys: Any) -> Path:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | keys
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return folder

    return edit


@pytest.fixture
def edit_tensors() -> Callable[..., Path]:
    """Replace or add tensors of a model in one file; None removes one."""

    def edit(folder: Path, tensors: dict[str, Any]) -> Path:
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        # Cloned, for the file that they are mapped from is written anew.
        stored = {name: tensor.clone() for name, tensor in load_file(path).items()} | tensors
        path.unlink()
        save_file({n: t for n, t in stored.items() if t is not None}, path, {"format": "pt"})
        return folder

    return edit
