"""What a built wheel carries."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_wheel_carries_recipes_sets_tasks_and_the_demo_model(tmp_path):
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("quantkit_llm-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder in ("recipes", "calibration"):
        for path in (ROOT / folder).glob("*.yaml"):
            assert f"quantkit/_data/{folder}/{path.name}" in names
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        assert f"quantkit/_data/demo-model/{name}" in names
    for task in ("python_docs", "python_quiz"):
        assert f"quantkit/scoring/tasks/{task}/{task}.yaml" in names
    for path in (ROOT / "quantkit/page/templates").iterdir():
        assert f"quantkit/page/templates/{path.name}" in names
    assert not [name for name in names if name.startswith(("recipes/", "calibration/", "tests/"))]
