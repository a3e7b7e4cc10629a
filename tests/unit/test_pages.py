"""Pages for people: links lead somewhere, and commands are ones that quantkit understands."""

import ast
import importlib.util
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ASKED = (
    "tutorial",
    "concepts",
    "api",
    "recipes",
    "models",
    "measured",
    "troubleshooting",
    "extending",
)
GENERATED = ROOT / "docs" / "help.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)


def commands():
    """Command lines in fenced blocks, joined where they go on."""
    for page in PAGES:
        if page == GENERATED:
            continue
        for _, text in FENCE.findall(page.read_text()):
            for line in text.replace("\\\n", " ").splitlines():
                words = line.strip().removeprefix("$ ").removeprefix("- ")
                words = re.sub(r"^.*-m quantkit ", "quantkit ", words)
                if words.startswith("quantkit ") and not re.search(r"…|\.\.\.|\$|<|\[", words):
                    yield pytest.param(
                        shlex.split(words, comments=True)[1:], id=f"{page.stem}: {words[:60]}"
                    )


def understood(arguments):
    """What quantkit makes of a command line, without doing it."""
    from typer.main import get_command

    from quantkit.cli.main import app

    command, rest, name = get_command(app), list(arguments), ""
    while getattr(command, "commands", None) and rest:
        name, rest = rest[0], rest[1:]
        command = command.commands[name]
    rest = [word for word in rest if word not in ("|", "&&")]
    return command.make_context(name, rest)


@pytest.mark.parametrize("arguments", list(commands()))
def test_commands_of_pages_have_real_names_and_options(arguments):
    cut = next((n for n, word in enumerate(arguments) if word in ("|", "&&", ">", "2>&1")), None)
    assert understood(arguments[:cut]) is not None


def test_options_named_in_the_text_exist():
    from typer.main import get_command

    from quantkit.cli.main import app

    known = get_command(app).commands
    wrong = []
    for page in PAGES:
        for name, options in re.findall(r"`quantkit (\w+)((?: --[\w-]+)*)", page.read_text()):
            if name not in known:
                wrong.append(f"{page.name}: {name}")
                continue
            inner = [known[name], *getattr(known[name], "commands", {}).values()]
            own = {o for one in inner for p in one.params for o in (*p.opts, *p.secondary_opts)}
            wrong += [
                f"{page.name}: {name} {o}" for o in options.split() if o not in own | {"--help"}
            ]
    assert wrong == []


@pytest.mark.parametrize("name", ASKED)
def test_the_page_is_there(name):
    text = (ROOT / "docs" / f"{name}.md").read_text()
    assert text.startswith("# ")
    assert f"{name}.md" in (ROOT / "mkdocs.yml").read_text()


def test_the_readme_is_short_and_leads_on():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 300
    for name in ASKED:
        assert f"docs/{name}.md" in text, name


def test_troubleshooting_has_every_exit_code_and_twenty_errors():
    from quantkit import errors

    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|", text, re.M))
    assert {int(code) for code in rows} == set(errors.EXIT_CODES)
    for code, words in errors.EXIT_CODES.items():
        assert words.split(":")[0] in rows[str(code)]
    assert len(re.findall(r"^\d+\. \*\*", text, re.M)) >= 20


def sentences():
    """All texts in the program, with a NUL for every value that is filled in."""
    for path in sorted((ROOT / "quantkit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "\0" for p in node.values)
                yield "".join(parts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def fragments(sentence):
    """The fixed parts of a sentence: without names, numbers and what is in brackets."""
    varying = r" is \.\.\.|\.\.\.|[A-Z_]+ is set|\b[A-Z]+\b|recipe '|cuda:0|gptq|\(\w*\)|\d+"
    fixed = re.split(rf"{varying}|[.:] | with ", sentence)
    return [
        part.strip(" ,()").removesuffix(", and") for part in fixed if len(part.strip(" ,()")) >= 8
    ]


def test_troubleshooting_quotes_what_the_program_prints():
    text = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().split())
    quoted = re.findall(r"\*\*`([^`]+)`\*\*", text)
    assert len(quoted) >= 20
    printed = "\n".join(sentences())
    missing = [part for one in quoted for part in fragments(one) if part not in printed]
    assert missing == []


def site():
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "scripts/build_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_link_of_a_page_is_dead(tmp_path):
    assert site().staged(tmp_path) == []
    assert (tmp_path / "index.md").is_file()


def test_a_dead_link_is_noticed(tmp_path, monkeypatch):
    module = site()
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text("[a](docs/a.md) [b](docs/missing.md)\n")
    (root / "docs" / "a.md").write_text("[up](../README.md)\n```\n[not](a-link.md)\n```\n")
    monkeypatch.setattr(module, "ROOT", root)
    assert module.staged(tmp_path / "out") == ["README.md: docs/missing.md"]


def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("material", reason="pip install mkdocs-material")
    out = tmp_path / "site"
    assert site().build(out) == 0
    pages = list(out.rglob("*.html"))
    assert {f"{name}.html" for name in ASKED} <= {page.name for page in pages}
    loaded = re.compile(r"<(?:script|link|img)\b[^>]*(?:src|href)=[\"']?(https?:)?//[^>]*>")
    for page in pages:
        if "reports" in page.parts:
            continue
        foreign = [f[0] for f in loaded.finditer(page.read_text()) if "canonical" not in f[0]]
        assert foreign == [], page
