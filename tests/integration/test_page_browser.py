"""Pages in a real browser: nothing runs that is not ours, and everything can be reached."""

import base64
from pathlib import Path

import pages
import pytest

from quantkit.calibration import page
from quantkit.report import document, html

pytest_plugins = ["browser"]

PUBLISHED = Path(__file__).parents[2] / "reports" / "smollm2-135m"
PAGES = {"gallery": pages.gallery, "calibration": lambda: page.render(pages.calibration_set())}


@pytest.fixture(scope="module")
def made():
    return {name: make() for name, make in PAGES.items()}


def names(browser):
    """First column of the first table, as shown."""
    return browser.run(
        "return [...document.querySelector('table').querySelectorAll('tbody tr:not([hidden])')]"
        ".map(row => row.cells[0].textContent)"
    )


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_fits_and_runs_nothing_of_others(browser, made, name, width, dark):
    browser.show(made[name], width, dark)
    assert browser.complaints() == []
    assert browser.requests() == []
    assert not browser.is_too_wide()
    assert "taken" not in browser.driver.title.split("'")[0]
    assert browser.driver.title.startswith(pages.IMAGE)
    assert browser.run("return document.images.length + document.scripts.length") == 1


def test_dark_pages_are_dark(browser, made):
    shades = []
    for dark in (False, True):
        browser.show(made["calibration"], dark=dark)
        colour = browser.run("return getComputedStyle(document.body).backgroundColor")
        shades.append(int(colour.removeprefix("rgb(").split(",")[0]))
    assert shades[0] > 240
    assert shades[1] < 40


def test_one_drawing_of_each_picture_is_shown_and_can_be_read(browser, made):
    for width, shown in ((390, ".narrow"), (1440, ".wide")):
        browser.show(made["gallery"], width)
        figures = browser.all("figure")
        assert figures
        for figure in figures:
            (drawing,) = [
                e for e in figure.find_elements("css selector", "svg[role=img]") if e.rect["width"]
            ]
            assert drawing in figure.find_elements("css selector", f"{shown} svg")
            inner = float(drawing.get_dom_attribute("viewBox").split()[2])
            assert drawing.rect["width"] / inner * 12 > 11


def test_table_is_sorted_by_click_and_by_key(browser, made):
    browser.show(made["gallery"])
    button = browser.all("table thead button")[1]
    heading = browser.all("table thead th")[1]
    before = names(browser)
    values = dict(zip(before, [9, 1000, 30, None, 200, -4.5], strict=True))
    button.click()
    assert heading.get_attribute("aria-sort") == "ascending"
    rising = [values[name] for name in names(browser)]
    assert rising == [-4.5, 9, 30, 200, 1000, None]
    button.send_keys("\ue007")  # Enter
    assert heading.get_attribute("aria-sort") == "descending"
    assert [values[name] for name in names(browser)] == [1000, 200, 30, 9, -4.5, None]
    browser.all("table thead button")[0].send_keys(" ")
    assert heading.get_attribute("aria-sort") is None
    assert names(browser)[:2] != before[:2]
    assert sorted(names(browser)) == sorted(before)


def test_search_leaves_the_rows_that_have_all_words(browser, made):
    browser.show(made["gallery"])
    field = browser.find("input[type=search]")
    field.send_keys("ALPHA 0.123")
    assert names(browser) == ["alpha"]
    assert browser.find("output").text == "1 of 6 rows"
    field.clear()
    field.send_keys("<img")
    assert names(browser) == [pages.IMAGE]


def test_wide_tables_scroll_in_their_box_and_keep_the_names(browser, made):
    browser.show(made["gallery"], 390)
    box, name = browser.find(".scroll"), browser.find(".scroll tbody th")
    assert browser.run("return arguments[0].scrollWidth > arguments[0].clientWidth", box)
    before = browser.run("return arguments[0].getBoundingClientRect().left", name)
    browser.run("arguments[0].scrollLeft = 300", box)
    assert browser.run("return arguments[0].scrollLeft", box) == 300
    assert browser.run("return arguments[0].getBoundingClientRect().left", name) == before


def test_numbers_of_a_picture_open_by_key(browser, made):
    browser.show(made["gallery"])
    summary = browser.find("figure summary")
    inside = browser.find("figure details table")
    assert not inside.is_displayed()
    summary.send_keys("\ue007")
    assert inside.is_displayed()
    assert browser.find("figure details tbody th").text == pages.SCRIPT


def test_texts_of_a_picture_do_not_touch(browser):
    """In the ordinary case, whose names are ordinary."""
    ordinary = pages.ordinary()
    for width in (390, 1440):
        browser.show(ordinary, width)
        assert browser.run(TOUCHING) == []


TOUCHING = """
const touching = [];
for (const drawing of document.querySelectorAll("figure svg[role=img]")) {
  if (!drawing.getBoundingClientRect().width) continue;
  const texts = [...drawing.querySelectorAll("text")];
  const boxes = texts.map((text) => text.getBoundingClientRect());
  const frame = drawing.closest("figure").getBoundingClientRect();
  boxes.forEach((a, i) => {
    if (a.left < frame.left - 12 || a.right > frame.right + 12) touching.push(texts[i].textContent);
    boxes.slice(0, i).forEach((b, j) => {
      const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      const both = texts[i].textContent + " / " + texts[j].textContent;
      if (across > 1 && down > 4) touching.push(both);
    });
  });
}
return touching;
"""


def test_page_prints(browser, made):
    browser.show(made["calibration"], dark=True)
    printed = browser.driver.execute_cdp_cmd("Page.printToPDF", {})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-damage"])
@pytest.mark.parametrize("width", [1280, 1920])
def test_the_tables_of_a_report_are_seen_whole(browser, width, name):
    report = document.read(PUBLISHED.parent / name / "report.json")
    browser.show(html.render(report, "0"), width)
    hidden = browser.run(
        "const box = document.querySelector('.table.wide .scroll');"
        "return box.scrollWidth - box.clientWidth"
    )
    assert hidden <= 0
    assert not browser.is_too_wide()
    # The names of recipes stand in one line, and no other table is cut off either.
    lines = browser.run(
        "const range = document.createRange(); range.selectNodeContents("
        "[...document.querySelectorAll('.table.wide tbody th')]"
        ".find((one) => one.firstChild.textContent == 'awq-gptq-w4a16').firstChild);"
        "return range.getClientRects().length"
    )
    assert lines == 1
    cut = browser.run(
        "return [...document.querySelectorAll('section > .table .scroll')]"
        ".filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.ariaLabel)"
    )
    assert cut == []


@pytest.mark.parametrize("width", [390, 1280])
def test_names_of_many_columns_do_not_touch(browser, width):
    from quantkit.page.document import Section, document
    from quantkit.page.heatmap import heatmap
    from quantkit.page.scale import Axis

    formats = [f"awq-gptq-w{n}a16+kv-fp8" for n in range(20)]
    gpus = [f"RTX {n} Super" for n in range(90)]
    values = [[float(1 + x + y) for x in range(len(gpus))] for y in range(len(formats))]
    drawn = heatmap("Speed", formats, gpus, values, Axis("tokens/s"))
    few = heatmap("Few", formats, gpus[:29], [line[:29] for line in values], Axis("tokens/s"))
    browser.show(document("Many", [Section("Overview", [drawn, few])]), width)
    assert browser.run(TOUCHING) == []
    assert browser.run(LINES_TOUCHING) == []


LINES_TOUCHING = """
const touching = [];
for (const drawing of document.querySelectorAll("figure svg[role=img]")) {
  const names = [...drawing.querySelectorAll("text.tick[text-anchor=end]")];
  names.slice(1).forEach((name, i) => {
    const [above, below] = [names[i].getBoundingClientRect(), name.getBoundingClientRect()];
    if (below.width && above.bottom - below.top > 1) touching.push(name.textContent);
  });
}
return touching;
"""
