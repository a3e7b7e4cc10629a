"""Pages are complete, say everything as text, and come out the same every time."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pages
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from quantkit.calibration import page
from quantkit.calibration.inspection import warnings
from quantkit.page import svg
from quantkit.page.bars import Bar, bars
from quantkit.page.document import Section, document
from quantkit.page.figure import NARROW, WIDE
from quantkit.page.heatmap import heatmap
from quantkit.page.lines import Series, lines
from quantkit.page.scale import Axis, log_ticks, number, scale, ticks
from quantkit.page.scatter import Point, _misleads, scatter
from quantkit.page.table import WHOLE, Cell, Column, table

VOID = {"meta", "link", "input", "br"}


class Reader(HTMLParser):
    """Tags, attributes and texts, and whether all that was opened is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.tags, self.texts, self.faults = [], [], [], []
        self.feed(html)
        self.close()
        self.faults += self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(tag)

    def handle_data(self, data):
        self.texts.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def gallery():
    return pages.gallery()


@pytest.fixture(scope="module")
def calibration_page():
    return page.render(pages.calibration_set())


@pytest.fixture(params=["gallery", "calibration_page"])
def html(request):
    return request.getfixturevalue(request.param)


def test_every_element_is_closed(html):
    assert Reader(html).faults == []


def test_hostile_names_are_text_everywhere(html):
    read = Reader(html)
    assert len(read.of("script")) == 1
    assert len(read.of("style")) == 1
    assert not read.of("img")
    assert not [key for _, found in read.tags for key in found if key.startswith("on")]
    seen = "".join(read.texts)
    for name in pages.HOSTILE:
        assert name in seen
    assert "49" not in re.findall(r"\d+", seen.split("<style>*{display:none}</style>")[1][:12])


def test_pages_need_nothing_from_elsewhere(html):
    read = Reader(html)
    assert not [a for _, a in read.tags if a.get("src")]
    assert {a["href"][:1] for _, a in read.tags if "href" in a} <= {"#", "d"}
    assert not re.findall(r"@import|url\(|https?://", html)
    (policy,) = [a["content"] for a in read.of("meta") if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_same_input_gives_the_same_bytes(gallery, calibration_page):
    assert pages.gallery() == gallery
    assert page.render(pages.calibration_set()) == calibration_page


def test_page_does_not_depend_on_the_hash_seed():
    code = "import hashlib, pages; print(hashlib.sha256(pages.gallery().encode()).hexdigest())"
    found = {
        subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {code}"],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_links_lead_to_sections(gallery):
    read = Reader(gallery)
    anchors = [a["id"] for _, a in read.tags if "id" in a]
    assert len(set(anchors)) == len(anchors)
    links = [a["href"][1:] for a in read.of("a")]
    assert set(links) <= set(anchors)
    assert len(read.of("h1")) == 1


def test_sections_of_one_name_have_anchors_of_their_own():
    found = document("t", [Section("Same", []), Section("Same", []), Section("§", [])])
    assert re.findall(r'<h2 id="([^"]+)"', found) == ["same", "same-2", "section-3"]


def test_plain_text_becomes_a_paragraph_and_markup_stays():
    found = document("t", [Section("s", ["a < b", Markup("<em>c</em>")])])
    assert "<p>a &lt; b</p>" in found
    assert "<em>c</em>" in found


def test_a_name_that_is_no_unicode_can_be_written():
    assert b"bad ? name" in document("bad \udcff name", []).encode("utf-8")


def test_pictures_name_themselves_and_come_with_their_numbers(gallery):
    read = Reader(gallery)
    drawings = [a for a in read.of("svg") if a.get("role") == "img"]
    assert len(drawings) == 2 * len(read.of("figure")) == 8
    assert gallery.count("<desc>") == len(drawings)
    assert len(read.of("details")) == len(read.of("figure"))
    assert {a["viewbox"].split()[2] for a in drawings} == {str(NARROW), str(WIDE)}


def test_headers_of_tables_have_scopes(html):
    assert {a.get("scope") for a in Reader(html).of("th")} == {"row", "col"}


@pytest.mark.parametrize(("n", "scrolls"), [(1, False), (WHOLE, False), (WHOLE + 1, True)])
def test_only_long_tables_scroll_in_a_frame(n, scrolls):
    made = table("Rows", [Column("Name")], [[f"row {i}"] for i in range(n)], dense=True)
    assert ("tall" in re.search(r'<div class="table ([^"]*)"', made)[1].split()) is scrolls


def test_cells_carry_full_values_to_sort_by():
    cells = [Cell("0.33", 1 / 3), Cell("unknown", math.nan)]
    found = str(table("c", [Column("n"), *[Column("v", numeric=True)] * 2], [["a", *cells]]))
    assert f'data-value="{1 / 3!r}"' in found
    assert found.count("data-value") == 1


def test_colours_are_the_style_sheets(gallery):
    drawn = "".join(re.findall(r"<svg.*?</svg>", gallery, re.S))
    assert not re.search(r'(fill|stroke|style)="', drawn)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, (0, 0.2, 0.4, 0.6, 0.8, 1)),
        (0, 512, (0, 200, 400)),
        (-3, 3, (-2, 0, 2)),
        (0.1, 0.3, (0.1, 0.15, 0.2, 0.25, 0.3)),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)


def test_log_ticks_are_powers_of_ten_or_their_multiples():
    assert log_ticks(1, 1000) == (1, 10, 100, 1000)
    assert log_ticks(1e-9, 1e9) == pytest.approx((1e-9, 1e-5, 1e-1, 1e3, 1e7))
    assert log_ticks(4, 16) == (4, 6, 8, 10, 15)


@given(
    st.lists(st.floats(-1e12, 1e12).filter(lambda v: not 0 < abs(v) < 1e-30), min_size=1),
    st.booleans(),
    st.sampled_from(["round", "padded", "exact"]),
)
def test_every_value_lies_between_the_ends(values, log, ends):
    axis = Axis("x", log=log)
    found = scale(values, axis, 10, 100, ends=ends)
    assert found.low < found.high
    for value in filter(axis.takes, values):
        assert 10 - 1e-3 <= found(value) <= 100 + 1e-3
    assert len(found.ticks) <= 12
    texts = [found.tick_text(tick) for tick in found.ticks]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0"), (1234567, "1,234,567"), (0.12345, "0.1235"), (1e-7 / 3, "3.333e-08")],
)
def test_numbers_are_short(value, shown):
    assert number(value) == shown


def test_names_are_shortened_to_their_room():
    name = svg.shorten("a/very/long-name-of-a-model" * 3, 100)
    assert name.endswith("…")
    assert svg.text_width(name) <= 100


@pytest.mark.parametrize("log", [False, True])
def test_pictures_of_nothing_and_of_one_value_are_drawn(log):
    axis = Axis("x", log=log)
    for points in ([], [(1, 1)], [(math.nan, 1), (0, 0)]):
        assert lines("t", [Series("s", points)], axis, axis)
        assert scatter("t", [Point("p", a, b) for a, b in points], axis, axis)
        assert bars("t", [Bar("b", b) for _, b in points], Axis("x"))
    assert heatmap("t", ["a"], ["b"], [[None]], axis)
    assert heatmap("t", [], [], [], axis)


def test_bars_are_as_long_as_their_values():
    found = str(bars("t", [Bar("half", 0.5), Bar("whole", 1.0), Bar("less", -0.25)], Axis("x")))
    wide = found.split('class="narrow"')[0]
    widths = re.findall(r'width="([\d.]+)" height="14" class="bar"', wide)
    half, whole, less = map(float, widths)
    assert whole == pytest.approx(2 * half, abs=0.02)
    assert whole == pytest.approx(4 * less, abs=0.04)


def test_names_of_points_do_not_cover_each_other():
    points = [Point(f"a name {k}", 1 + k % 5, 1 + k // 5, front=k < 3) for k in range(25)]
    found = str(scatter("t", points, Axis("x"), Axis("y")))
    for drawing in found.split('class="narrow"'):
        named = re.findall(
            r'<text x="([\d.]+)" y="([\d.]+)" class="point-name[^"]*">([^<]+)<', drawing
        )
        assert len(named) >= 10
        boxes = [(float(x), float(y), float(x) + svg.text_width(n, 11)) for x, y, n in named]
        for i, one in enumerate(boxes):
            for other in boxes[:i]:
                apart = one[0] >= other[2] or other[0] >= one[2] or abs(one[1] - other[1]) >= 11
                assert apart


def test_a_name_away_from_its_point_is_joined_to_it():
    crowd = [Point(f"crowded name {k}", 5 + k / 100, 5 + k / 100) for k in range(8)]
    corners = [Point("a", 0, 0), Point("b", 10, 10)]
    found = str(scatter("t", [*crowd, *corners], Axis("x"), Axis("y")))
    assert 'class="leader"' in found
    assert 'class="leader"' not in str(scatter("t", corners, Axis("x"), Axis("y")))


def test_a_name_beyond_another_point_would_be_taken_for_that_points_name():
    places = [(100.0, 100.0), (100.0, 80.0)]
    beyond, beside = (90.0, 55.0, 110.0, 67.0), (109.0, 95.0, 129.0, 107.0)
    assert _misleads(0, places, beyond)
    assert not _misleads(0, places, beside)
    assert not _misleads(1, places, beyond)
    assert not _misleads(0, [(100.0, 100.0), (100.0, 97.0)], beyond)  # they look like one


def test_line_leads_through_the_chosen_points_from_left_to_right():
    points = [Point("c", 3, 3, front=True), Point("b", 2, 9), Point("a", 1, 1, front=True)]
    found = str(scatter("t", points, Axis("x"), Axis("y"), front="best"))
    way = re.search(r'<path d="M([\d.]+) [\d.]+L([\d.]+) [\d.]+" class="front"', found)
    assert float(way.group(1)) < float(way.group(2))


def test_a_name_keeps_off_the_line_through_the_chosen_points():
    points = [
        Point("awq-gptq-w4a16", 107.9, 12.9, front=True),
        Point("fp8-static", 155.3, 3.07, front=True),
        Point("fp8-dynamic", 155.6, 2.5),
        Point("int8-w8a8", 155.61, 0.99, front=True),
    ]
    found = str(scatter("t", points, Axis("x"), Axis("y"), front="best"))
    for drawing in found.split('class="narrow"'):
        way = re.search(r'<path d="M([^"]+)" class="front"', drawing)[1]
        places = [tuple(map(float, place.split())) for place in way.split("L")]
        named = re.search(r'<text x="([\d.]+)" y="([\d.]+)" class="point-name">fp8-dyn', drawing)
        if named is None:  # no room for it
            continue
        left, baseline = map(float, named.groups())
        for step in range(1001):
            x = places[0][0] + step / 1000 * (places[1][0] - places[0][0])
            y = places[0][1] + step / 1000 * (places[1][1] - places[0][1])
            inside = left < x < left + svg.text_width("fp8-dynamic", 11)
            assert not (inside and baseline - 9 < y < baseline + 3)


def test_calibration_page_says_what_the_terminal_says(calibration_page):
    made = pages.calibration_set()
    text = "".join(Reader(calibration_page).texts)
    for sentence in warnings(made):
        assert sentence in text
    for digest in ("a" * 64, "b" * 64, "c" * 64, "d" * 64, "e" * 64, "f" * 64):
        assert digest in text
    for words in (
        "near-duplicate",
        "not chosen",
        "e-mail addresses",
        "1.2.3",
        "repeats an earlier row",
    ):
        assert words in text


def test_near_duplicates_are_counted_in_a_warning_and_explained_on_the_page(calibration_page):
    made = pages.calibration_set()
    assert not any("near-duplicate" in sentence for sentence in warnings(made))
    log = made.manifest.sources[0].model_copy(
        update={"name": "log", "rows": {"read": 10, "near-duplicate": 6}}
    )
    repetitive = made.manifest.model_copy(update={"sources": [log]})
    (found,) = [s for s in warnings(replace(made, manifest=repetitive)) if "near-duplicate" in s]
    assert all(word in found for word in ("60%", "log"))
    text = "".join(Reader(calibration_page).texts)
    _, _, after = text.partition("Near-duplicates")
    assert f"{made.manifest.spec.near_duplicates:.0%}" in after[:200]


def test_ten_samples_come_from_all_sources(calibration_page):
    assert calibration_page.count('<article class="extract">') == 10
    pieces = [{"source": "big", "n": n} for n in range(90)] + [{"source": "small", "n": 0}]
    shown = page.spread(pieces, ["big", "small"], 10)
    assert [p["source"] for p in shown].count("small") == 1
    numbers = [p["n"] for p in shown if p["source"] == "big"]
    assert len(set(numbers)) == 9
    assert min(numbers) < 10 < 80 < max(numbers)
    assert len(page.spread(pieces[:3], ["big", "small"], 10)) == 3


def test_page_of_a_set_that_was_not_compared_has_no_random_column():
    found = page.render(pages.calibration_set(random=None, redacted={}))
    assert "not compared with random draws" in found
    assert "mean of" not in found
    assert "Not searched" in found
