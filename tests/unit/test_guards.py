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
    {"errors", "home", "progress", "quiet", "launch", "lock", "offline", "parsing"}
    | {"registry", "specs"},
    {"families", "metrics", "numbers", "tensorspec"},
    {"engine", "__init__"},
    {"storage", "resources", "device", "doctor", "page"},
    {"schemes"},
    {"formats", "grid"},
    {"methods"},
    {"recipe"},
    {"model", "hardware"},
    {"calibration"},
    {"gguf"},
    {"export"},
    {"plan"},
    {"onepass"},
    {"verification"},
    {"scoring"},
    {"bench", "proof"},
    {"report"},
    {"gating", "advise", "draft"},
    {"serving"},
    {"pipeline", "conversion", "opening"},
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
    if path == PACKAGE / "__init__.py":  # exports the API, which it loads on first use
        return
    own = part_of(path)
    assert own in LEVEL, f"{own} has no place in LAYERS"
    for other in imported(path):
        if other != own:
            assert LEVEL[other] <= LEVEL[own], f"{own} imports {other}"


def loaded_by(path: Path, modules: set[str]) -> set[str]:
    """Modules of ours that are loaded when this one is."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quantkit."):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & modules) or ({node.module} & modules)
    return found


def test_no_module_is_loaded_by_what_it_loads():
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    waits = {name: loaded_by(path, set(paths)) - {name} for name, path in paths.items()}
    while free := [name for name, others in waits.items() if not others & waits.keys()]:
        for name in free:
            del waits[name]
    assert not waits, f"in a circle: {', '.join(sorted(waits))}"


def test_every_module_says_what_it_is_for():
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_readme_tree_names_every_package():
    text = (ROOT / "README.md").read_text()
    tree = re.search(r"<!-- tree -->\n```\n(.*?)```", text, re.S).group(1)
    named, folders = set(), []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        folders = [*folders[:depth], line.split()[0].rstrip("/")]
        assert (ROOT / "/".join(folders)).exists(), line
        named.add("/".join(folders))
    packages = {f"quantkit/{path.parent.name}" for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= named


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
