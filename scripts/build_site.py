"""Build the documentation as a site: README, docs/ and what they link to, offline and strictly.

Pages outside docs/ and files that pages link to are copied under their own paths, so that every
link on the site works; a dead link fails the build.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "mkdocs.yml"
SCRIPTS = ROOT / "scripts" / "site"
HOME = Path("README.md")
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]*)(#[^)\s]*)?(\))")
FENCE = re.compile(r"^```.*?^```", re.S | re.M)


def staged(target: Path) -> list[str]:
    """Copy all pages and what they link to; links that lead nowhere are returned."""
    dead: list[str] = []
    waiting, done = (
        [HOME, *sorted(p.relative_to(ROOT) for p in (ROOT / "docs").glob("*.md"))],
        set(),
    )
    while waiting:
        page = waiting.pop()
        if page in done:
            continue
        done.add(page)
        text = (ROOT / page).read_text(encoding="utf-8")
        linked: list[Path] = []
        out = target / _on_site(page)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(_rewritten(text, page, linked, dead), encoding="utf-8")
        for path in linked:
            if path.suffix == ".md":
                waiting.append(path)
            elif path not in done:
                done.add(path)
                copy = target / _on_site(path)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / path, copy)
    return dead


def _on_site(path: Path) -> Path:
    """Where a file of the repository lies on the site."""
    if path == HOME:
        return Path("index.md")
    if path.parts[0] == "docs":
        return Path(*path.parts[1:])
    return path


def _rewritten(text: str, page: Path, linked: list[Path], dead: list[str]) -> str:
    """The page with links as they are on the site; code stays as it is."""

    def link(found: re.Match[str]) -> str:
        before, place, anchor, after = found[1], found[2], found[3] or "", found[4]
        if not place or "://" in place or place.startswith("mailto:"):
            return found[0]
        path = (ROOT / page.parent / place).resolve()
        if path.is_dir() and (path / "README.md").is_file():
            path = path / "README.md"
        if path.is_dir():  # a folder without a page: its name is enough
            return before.lstrip("![").rstrip("](")
        if not path.is_file() or not path.is_relative_to(ROOT):
            dead.append(f"{page}: {place}")
            return found[0]
        own = path.relative_to(ROOT)
        linked.append(own)
        start = _on_site(page).parent
        there = Path(*[".."] * len(start.parts), _on_site(own)) if start.parts else _on_site(own)
        return f"{before}{there.as_posix()}{anchor}{after}"

    parts, last = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(link, text[last : fence.start()]), fence[0]]
        last = fence.end()
    return "".join([*parts, LINK.sub(link, text[last:])])


def build(out: Path) -> int:
    """The exit code of mkdocs, or 1 for dead links."""
    with tempfile.TemporaryDirectory() as folder:
        pages = Path(folder) / "pages"
        if dead := staged(pages):
            print("links that lead nowhere:", *dead, sep="\n  ")
            return 1
        for script in SCRIPTS.glob("*.js"):
            shutil.copyfile(script, pages / script.name)
        config = Path(folder) / "mkdocs.yml"
        config.write_text(CONFIG.read_text(encoding="utf-8") + f"docs_dir: {pages}\n")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
        command += ["-f", str(config), "-d", str(out.absolute())]
        quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        return subprocess.run(command, env=quiet, check=False).returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path, default=ROOT / "build" / "site")
    sys.exit(build(parser.parse_args().out))
