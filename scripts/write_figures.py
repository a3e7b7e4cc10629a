"""Write the measured figures of the documents from benchmarks/results.

    python scripts/write_figures.py                 # rewrite the regions of all documents
    python scripts/write_figures.py --check         # only say which differ; exit code 1 if any does
    python scripts/write_figures.py --date FILE...  # give old result files a date and a commit

A region stands between two comments, each on a line of its own, and is never edited by hand:

    <!-- figures: NAME -->
    <!-- /figures -->

What fills it is the function NAME in scripts/figures/.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from figures import REGIONS
from figures.regions import ROOT, FigureError

DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "calibration/README.md",
    "quantkit/_data/demo-model/README.md",
    *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
)
REGION = re.compile(
    r"^<!-- figures: (?P<name>\S+) -->\n(?P<text>.*?)^<!-- /figures -->$", re.M | re.S
)
MARKER = re.compile(r"<!-- /?figures\b")


def filled(text: str, name: str) -> str:
    """A document with every region as the results have it."""
    if len(MARKER.findall(text)) != 2 * len(REGION.findall(text)):
        raise FigureError(
            f"{name}: a region is opened twice, not closed, or its comments are not on lines of "
            "their own"
        )
    return REGION.sub(lambda found: f"{opening(found)}{content(found, name)}{CLOSING}", text)


CLOSING = "\n<!-- /figures -->"


def opening(found: re.Match[str]) -> str:
    return f"<!-- figures: {found['name']} -->\n"


def content(found: re.Match[str], name: str) -> str:
    """What fills a region."""
    if found["name"] not in REGIONS:
        raise FigureError(f"{name}: no function in scripts/figures fills {found['name']}")
    return REGIONS[found["name"]]()


def outdated() -> dict[str, str]:
    """Documents that differ from the results, as they should be."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
    right = {name: filled(text, name) for name, text in texts.items()}
    used = {found["name"] for text in texts.values() for found in REGION.finditer(text)}
    if unused := sorted(set(REGIONS) - used):
        raise FigureError(f"no document has a region for {', '.join(unused)}")
    return {name: text for name, text in right.items() if text != texts[name]}


def date(path: Path) -> None:
    """Put the commit and date that git has of a file into it, unless it has its own."""
    text = path.read_text(encoding="utf-8")
    if {"recorded", "created"} & set(json.loads(text)):
        return
    answer = subprocess.run(
        ["git", "log", "-1", "--format=%h %cs", "--", path.name],
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if not answer.stdout:
        raise FigureError(f"git has no history of {path}; commit it first")
    commit, day = answer.stdout.split()
    recorded = {"commit": commit, "date": day, "from": "git log of this file"}
    added = json.dumps({"recorded": recorded}, indent=2).removeprefix("{\n")
    path.write_text(f"{text.rstrip().removesuffix('}').rstrip()},\n{added}\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--date", type=Path, nargs="+", metavar="FILE", help="result files")
    args = parser.parse_args()
    try:
        if args.date:
            for path in args.date:
                date(path)
            return 0
        found = outdated()
    except FigureError as error:
        print(f"write_figures: {error}", file=sys.stderr)
        return 1
    for name, text in found.items():
        if not args.check:
            (ROOT / name).write_text(text, encoding="utf-8")
        print(f"{name}: {'differs from the results; run: make docs' if args.check else 'written'}")
    return int(args.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
