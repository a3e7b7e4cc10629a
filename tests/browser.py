"""A real Chromium without a window, for tests of pages: `pytest_plugins = ["browser"]`."""

import os
import shutil
from pathlib import Path

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class Browser:
    """A page as people get it: on a phone or a desk, light or dark."""

    def __init__(self, driver, folder: Path) -> None:
        self.driver = driver
        self._folder = folder
        self._n_pages = 0

    def show(self, html: str, width: int = 1440, dark: bool = False) -> None:
        """Open a page from a file."""
        self._n_pages += 1
        path = self._folder / f"{self._n_pages}.html"
        path.write_text(html, encoding="utf-8")
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get(path.as_uri())

    def run(self, script: str, *arguments: object):
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """What the console has said since the last question."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Everything the page loaded besides itself."""
        return self.run("return performance.getEntriesByType('resource').map(e => e.name)")

    def is_too_wide(self) -> bool:
        """Whether the page must be pushed sideways to be read."""
        return self.run("return document.documentElement.scrollWidth > innerWidth")

    def find(self, selector: str):
        """The first element of a kind."""
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str):
        """All elements of a kind."""
        return self.driver.find_elements("css selector", selector)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests of a module."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium = next(filter(None, map(shutil.which, CHROMIUM)), None)
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("there is no Chromium with its chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium has none for root
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Given both paths, selenium downloads nothing.
    service = webdriver.ChromeService(executable_path=chromedriver)
    driver = webdriver.Chrome(options=options, service=service)
    yield Browser(driver, tmp_path_factory.mktemp("pages"))
    driver.quit()
