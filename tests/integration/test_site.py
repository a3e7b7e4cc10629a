"""The documentation's site, opened from its folder in a real browser."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest_plugins = ["browser"]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("material", reason="pip install mkdocs-material")
    out = tmp_path_factory.mktemp("site")
    program = [sys.executable, str(ROOT / "scripts" / "build_site.py"), str(out)]
    subprocess.run(program, check=True, timeout=300)
    return out


def test_search_works_without_a_server(browser, site):
    browser.driver.get((site / "serving.html").as_uri())
    field = browser.find("input.md-search__input")
    browser.run("arguments[0].focus()", field)
    field.send_keys("importance matrix")
    found, end = [], time.monotonic() + 30
    while not found and time.monotonic() < end:
        time.sleep(0.2)
        found = browser.all(".md-search-result__item a")
    assert found
    assert all(one.get_attribute("href").startswith(site.as_uri()) for one in found)
    assert browser.complaints() == []
