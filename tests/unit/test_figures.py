"""Measured figures in documents come from benchmarks/results, and only from there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import write_figures
from figures import by_hand, regions, sources

ROOT = Path(__file__).parents[2]
# These are what the program prints, and what its recipes store.
PAGES = sorted(set(write_figures.DOCUMENTS) - {"docs/help.md", "docs/formats.md"})


def call(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts/write_figures.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_documents_are_what_the_results_say():
    done = call("--check")
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0), "run: make docs"


@pytest.mark.parametrize("page", PAGES)
def test_no_figure_is_typed_by_hand(page):
    assert by_hand.problems(page, (ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "docs/models.md"])
def test_no_page_types_which_vllm_was_measured(page):
    """docs/measured.md states it, from the records; others may type what a format needs."""
    prose = write_figures.REGION.sub("", (ROOT / page).read_text())
    prose = re.sub(r"^```.*?^```", "", prose, flags=re.S | re.M)
    named = re.compile(r"vLLM 0[.\d]*\d\b(?!\.?\d)(?! (?:and|or) (?:later|earlier))")
    assert not named.findall(prose)


def test_the_readme_has_one_figure_for_a_block():
    text = " ".join((ROOT / "README.md").read_text().split())
    prose = re.search(r"takes ([\d.]+ s) for GPTQ and ([\d.]+ s) for AWQ", text)
    table = [
        re.search(rf"\| {name}, per block of an 8B \| ([\d.]+ s),", text)
        for name in ("GPTQ", "AWQ")
    ]
    assert list(prose.groups()) == [found[1] for found in table]


@pytest.fixture
def tree(tmp_path):
    """A copy of all that the script reads and writes."""
    for name in (*write_figures.DOCUMENTS, "quantkit/_data/demo-model/training.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    weights = "quantkit/_data/demo-model/model.safetensors"
    (tmp_path / weights).symlink_to(ROOT / weights)
    for name in ("scripts", "benchmarks/results"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_another_result_is_noticed_and_written(tree):
    change(tree / "benchmarks/results/startup.json", quantkit_help=0.2345)
    done = call("--check", root=tree)
    assert done.returncode == 1
    assert done.stdout == "docs/measured.md: differs from the results; run: make docs\n"
    assert call(root=tree).stdout == "docs/measured.md: written\n"
    assert "| `quantkit --help` | 0.234 s |" in (tree / "docs/measured.md").read_text()
    assert call("--check", root=tree).returncode == 0


def test_a_region_that_was_edited_is_noticed(tree):
    page = tree / "README.md"
    opening = "<!-- figures: measured-in-short -->\n"
    before, after = page.read_text().split(opening)
    page.write_text(f"{before}{opening}{after.replace('|', '| 21 s |', 1)}")
    assert call("--check", root=tree).stdout.startswith("README.md: differs")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<!-- figures: startup -->", "<!-- figures: sartup -->", "fills sartup"),
        ("<!-- figures: startup -->", "", "a region is opened twice, not closed"),
        ("<!-- figures: startup -->", "see <!-- figures: startup -->", "on lines of their own"),
    ],
)
def test_a_damaged_region_is_an_error(tree, old, new, said):
    page = tree / "docs/measured.md"
    page.write_text(page.read_text().replace(old, new))
    done = call(root=tree)
    assert (done.returncode, done.stdout) == (1, "")
    assert said in " ".join(done.stderr.split())


def test_a_region_that_no_document_has_is_an_error(tree):
    page = tree / "docs/measured.md"
    page.write_text(
        page.read_text().replace("<!-- figures: startup -->", "<!-- figures: ranks -->")
    )
    assert "no document has a region for startup" in call(root=tree).stderr


def test_a_missing_result_is_named_and_leaves_the_documents(tree):
    (tree / "benchmarks/results/startup.json").unlink()
    done = call(root=tree)
    assert done.returncode == 1
    assert "benchmarks/results/startup.json is missing" in done.stderr
    for name in write_figures.DOCUMENTS:
        assert (tree / name).read_bytes() == (ROOT / name).read_bytes()


def test_every_result_says_when_it_was_recorded(tree):
    path = tree / "benchmarks/results/startup.json"
    without = json.loads(path.read_text())
    del without["recorded"]
    path.write_text(json.dumps(without))
    assert "startup.json does not say when it was recorded" in call(root=tree).stderr
    for result in regions.RESULTS.glob("*.json"):
        day, _ = sources.recorded(result.stem, json.loads(result.read_text()))
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", day), result


def test_old_results_get_their_date_from_git(tmp_path):
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    path = tmp_path / "old.json"
    path.write_text('{\n  "a": 1.50\n}\n')
    git("init", "-q")
    with pytest.raises(regions.FigureError, match="commit it first"):
        write_figures.date(path)
    git("add", "old.json")
    git("commit", "-q", "-m", "a result", "--date", "2026-01-02T03:04:05Z")
    write_figures.date(path)
    once = path.read_text()
    write_figures.date(path)
    assert path.read_text() == once
    assert once.startswith('{\n  "a": 1.50,\n  "recorded": {')  # nothing else changes
    recorded = json.loads(once)["recorded"]
    assert recorded["commit"] == git("log", "-1", "--format=%h").strip()
    assert recorded["date"] == git("log", "-1", "--format=%cs").strip()


@pytest.mark.parametrize(
    "typed",
    [
        "It takes 21 s.",
        "They are 12 times as fast.",
        "That is twelve times as fast.",
        "1.6x in all",
        "a peak of 2.6 GiB",
        "| AWQ | 0.59 s, 6.6 GiB |",
        "perplexity 28.99",
        "a perplexity of 29",
        "+9.7, +1.8 and +10.1%",
        "1,200 tokens/s",
        "off by 0.04 nats",
        "ready after half a minute",
        "a ratio of 0.95",
        "two points lower, 2.3 points",
        "<!-- a comment --> 45 ms",
    ],
)
def test_what_looks_measured_is_found(typed):
    assert by_hand.typed(f"Words.\n{typed}\n", [])


@pytest.mark.parametrize(
    "text",
    [
        "vLLM 0.32.0, Python 3.11 and transformers 5.17",
        "vLLM 0.10 to 0.23",
        "128 x 128 blocks, 4 bits, groups of 64, 14,042 questions",
        "`--limit 5%` and `1.25 s`",
        "```\n$ quantkit demo\ntakes 21 s\n```",
        "<!-- figures: a -->\n| 21 s |\n<!-- /figures -->",
        "[results](a-2.55.json)",
    ],
)
def test_what_is_not_a_measurement_is_left_alone(text):
    assert by_hand.typed(f"Words.\n{text}\nMore.\n", []) == []


def test_what_is_allowed_must_be_there(monkeypatch):
    monkeypatch.setattr(by_hand, "ALLOWED", [("a.md", "within 3 s", "a limit")])
    assert by_hand.problems("a.md", "It ends within 3 s.") == []
    assert "'within 3 s': remove it" in by_hand.problems("a.md", "It ends.")[0]
    assert "a.md:2: '4 s' looks measured" in by_hand.problems("a.md", "within 3 s\nor 4 s")[0]
    monkeypatch.setattr(by_hand, "ALLOWED", [("a.md", "## Limits", "limits")])
    assert by_hand.problems("a.md", "## Limits\n\n3 s\n### More\n4 s") == []
    assert len(by_hand.problems("a.md", "## Limits\n\n3 s\n## Speed\n4 s")) == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.15641, "0.156"),
        (27.0016, "27.0"),
        (9.996, "10.0"),
        (375.1, "375"),
        (0, "0"),
        (-2.5, "-2.50"),
    ],
)
def test_numbers_have_three_digits(value, shown):
    assert regions.number(value) == shown


def test_within_is_rounded_up_and_nothing_is_minus_zero():
    assert regions.at_most(0.1843) == "19%"
    assert regions.at_most(0.25) == "25%"
    assert regions.percent(-0.0003) == "0.0%"
    assert regions.span([0.0124, 0.0075], regions.percent) == "0.8 to 1.2%"
    assert regions.span([0.011, 0.0112], regions.percent) == "1.1%"


def test_results_are_written_with_commit_and_date(tmp_path):
    """By a program of benchmarks/, in a repository and in a copy without one."""
    for name in ("benchmarks", "quantkit"):
        (tmp_path / name).mkdir()
    shutil.copy(ROOT / "benchmarks/recording.py", tmp_path / "benchmarks")
    program = "import pathlib, recording; recording.write(pathlib.Path('out.json'), {'a': 'ü'})"

    def run(**environment: str) -> dict[str, object]:
        folder = tmp_path / "benchmarks"
        places = {"PATH": os.environ["PATH"], "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
        subprocess.run(
            [sys.executable, "-c", program], cwd=folder, env=places | environment, check=True
        )
        written = json.loads((folder / "out.json").read_text(encoding="utf-8"))
        assert written["a"] == "ü"
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", written["recorded"]["date"])
        return written["recorded"]["commit"]

    assert run() is None
    assert run(QUANTKIT_COMMIT="1234567") == "1234567"
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a program"]):
        subprocess.run([*git, *arguments], check=True)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    assert run() == head.stdout.strip()
    with (tmp_path / "benchmarks/recording.py").open("a") as stream:
        stream.write("# changed\n")
    assert run() == f"{head.stdout.strip()}+"
