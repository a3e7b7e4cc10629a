"""Promises about the code itself: imports point one way, pages match what they describe."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import quantkit

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "quantkit"
# Lower rows never import from higher ones.
LAYERS = [
    {"errors", "home", "nearby", "progress", "quiet", "launch", "lock", "offline", "parsing"}
    | {"registry", "schema", "specs", "threads"},
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
    {"dispatch"},
    {"export"},
    {"plan"},
    {"onepass"},
    {"mixed"},
    {"verification"},
    {"scoring"},
    {"bench", "proof"},
    {"report"},
    {"gating", "advise", "draft"},
    {"serving", "to_gguf", "to_plain"},
    {"pipeline", "conversion", "opening", "repair"},
    {"calls"},
    {"api"},
    {"sweep"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


@cache
def tree_of(path: Path) -> ast.Module:
    """Read once for all promises, which leave it as it is."""
    return ast.parse(path.read_text())


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(tree_of(path)):
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


def outside_types(node: ast.AST) -> Iterator[ast.AST]:
    """All below a node but what is for type checkers alone."""
    yield node
    for below in ast.iter_child_nodes(node):
        if not (isinstance(below, ast.If) and ast.unparse(below.test) == "TYPE_CHECKING"):
            yield from outside_types(below)


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Modules of ours that this one loads, at once or when a function is called; not for types."""
    found = set()
    for node in outside_types(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("quantkit."):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules
            if names - modules:
                found |= {node.module} & modules
    return found


def test_no_module_needs_what_needs_it():
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    waits = {name: imports_of(path, set(paths)) - {name} for name, path in paths.items()}
    while free := [name for name, others in waits.items() if not others & waits.keys()]:
        for name in free:
            del waits[name]
    assert not waits, f"in a circle, or behind one: {', '.join(sorted(waits))}"


def defined(path: Path) -> set[str]:
    """Names that a module of ours has."""
    found = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


def test_programs_beside_the_package_import_what_there_is():
    """Nobody runs all of them after every change."""
    wrong = []
    for path in [*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.ImportFrom):
                continue
            if (node.module or "").split(".")[0] != "quantkit":
                continue
            place = ROOT.joinpath(*node.module.split("."))
            module = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
            names = defined(module) if module.is_file() else set()
            for alias in node.names:
                inside = place / alias.name
                if alias.name in names or inside.is_dir() or inside.with_suffix(".py").is_file():
                    continue
                if node.module == "quantkit" and alias.name in quantkit.__all__:
                    continue
                wrong.append(f"{path.name}: from {node.module} import {alias.name}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is_for():
    for path in PACKAGE.rglob("*.py"):
        assert ast.get_docstring(tree_of(path)), path


def test_trees_in_the_docs_name_what_there_is():
    def named(page: str, root: Path) -> set[str]:
        tree = re.search(r"<!-- tree -->\n```\n(.*?)```", (ROOT / page).read_text(), re.S)
        names = {line.split()[0].rstrip("/") for line in tree.group(1).splitlines()}
        assert all((root / name).exists() for name in names), names
        return names

    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    folders = {path.split("/")[0] for path in listed if "/" in path and path[0] != "."}
    assert "tests" in folders
    assert folders <= named("README.md", ROOT)
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert packages <= named("docs/design.md", PACKAGE)


def test_help_page_is_what_the_program_prints():
    import importlib.util

    spec = importlib.util.spec_from_file_location("page", ROOT / "scripts/write_help_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs/help.md").read_text() == module.page(), "run: make docs"


@pytest.mark.parametrize("name", ["models", "formats", "recipes"])
def test_generated_pages_are_up_to_date(name):
    import importlib.util

    path = ROOT / f"scripts/write_{name}_page.py"
    spec = importlib.util.spec_from_file_location("page", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / f"docs/{name}.md").read_text() == module.page(), "run: make docs"


def test_command_table_of_the_readme_is_complete():
    from quantkit.cli.main import app

    text = (ROOT / "README.md").read_text()
    names = [c.name for c in app.registered_commands] + [g.name for g in app.registered_groups]
    for name in names:
        assert f"| `quantkit {name}" in text, name


@pytest.mark.parametrize(
    ("pattern", "places"),
    [
        (r"(^|[^a-z.])/(tmp|root|home)/[a-z]", ["quantkit", "docs"]),
        (r"^(<<<<<<<|>>>>>>>) ", ["."]),
    ],
    ids=["machine paths", "conflict markers"],
)
def test_no_machine_paths_or_conflict_markers_in_tracked_files(pattern, places):
    listing = subprocess.run(
        ["git", "grep", "-nE", pattern, "--", *places],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert listing.stdout == ""


MOST_PARAMETERS = 7
MOST_ENTRY_POINTS = 5


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    return len(names) + (given.vararg is not None) + (given.kwarg is not None)


def test_options_that_travel_together_are_one_object():
    """Apart from kernels and their torch twins, Typer's commands, and five calls of the API."""
    commands, entry_points, long = typer_commands(), [], []
    twins = {
        node.name
        for path in PACKAGE.rglob("kernels/*.py")
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef)
    }
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tree = tree_of(path)
        public = {id(node) for node in tree.body}
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if parameters(node) <= MOST_PARAMETERS or "kernels" in name:
                continue
            if node.name in twins and name.startswith("quantkit.methods."):
                continue
            if id(node) in public and (name, node.name) in commands:
                continue
            if id(node) in public and name == "quantkit.api" and not node.name.startswith("_"):
                entry_points.append(node.name)
                continue
            long.append(f"{name}: {node.name} has {parameters(node)} parameters")
    assert not long, "\n".join(long)
    assert len(entry_points) <= MOST_ENTRY_POINTS, entry_points


FACES = {
    "calibrate",
    "card",
    "compare",
    "convert",
    "demo",
    "draft",
    "gate",
    "quantize",
    "recommend",
}
FACES |= {"push", "report", "run", "score", "sensitivity", "serve", "verify"}
ROOMS_OF_FACES = {"calls", "cli", "errors", "launch", "registry"}


@pytest.mark.parametrize("name", sorted(FACES))
def test_commands_of_stages_parse_call_and_print(name):
    """They import calls, views and options; work is asked for once, and nothing else is opened."""
    tree = ast.parse((PACKAGE / "cli" / f"{name}.py").read_text())
    commands = {function for module, function in typer_commands() if module.endswith(f".{name}")}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    asking = 0
    for command in commands:
        function = functions[command]
        nodes = [node for node in ast.walk(function) if isinstance(node, ast.ImportFrom)]
        rooms = {
            found
            for node in nodes
            for found in (
                [alias.name for alias in node.names]
                if node.module == "quantkit"
                else [node.module.removeprefix("quantkit.").split(".")[0]]
            )
        }
        calls = [ast.unparse(n.func) for n in ast.walk(function) if isinstance(n, ast.Call)]
        if {"start.run", "start.ask"} & set(calls):
            asking += 1
            assert rooms <= ROOMS_OF_FACES, f"{command} of cli/{name}.py imports {rooms}"
            assert {"console.progress", "open"}.isdisjoint(calls)
    assert asking == 1


def test_options_are_declared_once():
    """What two commands declare alike belongs into cli/options.py."""
    found: dict[str, str] = {}
    for path in sorted((PACKAGE / "cli").glob("*.py")):
        for node in ast.walk(tree_of(path)):
            for given in node.args.args if isinstance(node, ast.FunctionDef) else []:
                if given.annotation is None or "typer." not in ast.unparse(given.annotation):
                    continue
                declared = f"{given.arg}: {ast.unparse(given.annotation)}"
                if "typer.Context" in declared:
                    continue
                where = f"{path.name}, {node.name}"
                assert declared not in found, f"{where} and {found[declared]}: {declared}"
                found[declared] = where


def typer_commands() -> set[tuple[str, str]]:
    """Module and name of every function that is a command."""
    from quantkit.cli.main import app

    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    found = [command.callback for group in groups for command in group.registered_commands]
    return {(callback.__module__, callback.__name__) for callback in found}


NAMED_IN = {"dispatch", "formats", "hardware", "methods", "numbers", "schemes"}
"""Homes of formats, methods and numbers, and of engines, whose rules go by these names."""


def test_nobody_else_decides_by_the_name_of_a_format_method_or_number():
    """What differs between them is a field of theirs, and asked for there."""
    from quantkit.formats import MODULES
    from quantkit.formats.declared import DIALECTS
    from quantkit.methods import METHODS

    names = {*MODULES, *DIALECTS, *METHODS, "nvfp4", "mxfp4", "mxfp8"}
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if part_of(path) in NAMED_IN:
            continue
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Compare):
                continue
            constants = {
                each.value
                for side in (node.left, *node.comparators)
                for each in ast.walk(side)
                if isinstance(each, ast.Constant) and isinstance(each.value, str)
            }
            if constants & names:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)
