"""Promises about the code itself: imports point one way, pages match what they describe."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "quantkit"
# Lower rows never import from higher ones.
LAYERS = [
    {"errors", "home", "progress", "hush", "launch", "lock", "offline", "registry", "specs"},
    {"engine", "__init__"},
    {"storage", "resources", "device", "doctor", "page"},
    {"recipe", "formats"},
    {"grid", "hardware"},
    {"model"},
    {"calibration"},
    {"gguf"},
    {"export"},
    {"quantize"},
    {"verify"},
    {"score"},
    {"bench", "proof"},
    {"report"},
    {"gate", "advise", "draft"},
    {"serving"},
    {"pipeline", "convert", "opening"},
    {"api"},
    {"sweep"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "quantkit":
                found |= {alias.name for alias in node.names if alias.name in LEVEL}
            elif node.module.startswith("quantkit."):
                found.add(node.module.split(".")[1])
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.name)
def test_imports_point_one_way(path):
    own = part_of(path)
    assert own in LEVEL, f"{own} has no place in LAYERS"
    for other in imported(path):
        if other != own:
            assert LEVEL[other] <= LEVEL[own], f"{own} imports {other}"


def test_every_module_says_what_it_is_for():
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_readme_tree_names_exactly_what_is_there():
    text = (ROOT / "README.md").read_text()
    tree = re.search(r"<!-- tree -->\n```\n(.*?)```", text, re.S).group(1)
    named, folders = set(), []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        name = line.split()[0]
        folders = [*folders[:depth], name.rstrip("/")]
        if not name.endswith("/"):
            named.add("/".join(folders))
        else:
            assert (ROOT / "/".join(folders)).is_dir(), line
    tracked = subprocess.run(
        ["git", "ls-files", "quantkit"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    python = {name for name in tracked if name.endswith(".py") and not name.endswith("__init__.py")}
    named_python = {name for name in named if name.startswith("quantkit/")}
    assert named_python == python
    for name in named - named_python:
        assert (ROOT / name).is_file(), name


def test_help_page_is_what_the_program_prints():
    import importlib.util

    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts/write_help_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/help.md").read_text() == module.page(), "run: make docs"


def test_command_table_of_the_readme_is_complete():
    from quantkit.cli.main import app

    text = (ROOT / "README.md").read_text()
    names = [c.name for c in app.registered_commands] + [g.name for g in app.registered_groups]
    for name in names:
        assert f"| `quantkit {name}" in text, name


def test_no_registry_hosts_or_machine_paths_in_tracked_files():
    listing = subprocess.run(
        ["git", "grep", "-nE", r"(^|[^a-z.])/(tmp|root|home)/[a-z]", "--", "quantkit", "docs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert listing.stdout == ""
