"""Files of every kind give the rows that were written, and say what is wrong with the others."""

import codecs
import csv
import gzip
import io
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.calibration.reading import plain_text, tables
from quantkit.calibration.reading.files import Record, Trouble, find, read, read_stream
from quantkit.errors import DataError

ROWS = [{"text": "first"}, {"text": "zweite Zeile, größer"}, {"text": '三\nlines "quoted", too'}]
ENDINGS = ["jsonl", "ndjson", "json", "parquet", "csv", "tsv"]
PACKINGS = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}


def written(rows, ending):
    """Rows as the bytes of a file."""
    if ending in ("jsonl", "ndjson"):
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if ending == "json":
        return json.dumps(rows, indent=1).encode()
    if ending == "parquet":
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=2)
        return sink.getvalue()
    sink = io.StringIO(newline="")
    writer = csv.DictWriter(
        sink, rows[0], delimiter="," if ending == "csv" else "\t", quoting=csv.QUOTE_ALL
    )
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue().encode()


def values(path, **options):
    return [record.value for record in read(path, **options)]


@pytest.fixture
def put(tmp_path):
    def put(name, content):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return put


def fault(path):
    """The one sentence with which reading a file ends."""
    with pytest.raises(DataError) as caught:
        values(path)
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ending", ENDINGS)
def test_every_format_gives_back_its_rows(put, ending, packing):
    path = put(f"rows.{ending}{packing}", PACKINGS[packing](written(ROWS, ending)))
    assert values(path) == ROWS


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.fixed_dictionaries(
            # csv makes no difference between the two kinds of line ends
            {key: st.text(st.characters(codec="utf-8", exclude_characters="\0\r")) for key in "ab"}
        ),
        min_size=1,
        max_size=5,
    )
)
def test_any_rows_come_back_the_same_from_all_formats(tmp_path, rows):
    for ending in ENDINGS:
        path = tmp_path / f"any.{ending}"
        path.write_bytes(written(rows, ending))
        assert values(path) == rows, ending


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n"), max_size=30)))
def test_plain_text_loses_nothing_but_blank_lines(lines):
    raw = "\n".join(lines).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_text, "TEXT_CHARACTERS", 40)
        if not raw.strip():
            return
        records = list(plain_text.documents(io.BytesIO(raw), tables.Reading("t", "t")))
    kept = [line for record in records for line in record.value.split("\n") if line.strip()]
    assert kept == [line for line in lines if line.strip()]
    for record in records:
        first = int(record.place.removeprefix("t:"))
        assert lines[first - 1] == record.value.split("\n")[0]
        assert len(record.value) <= 40


def test_places_name_file_and_line(put):
    path = put("traffic.jsonl", b'\n{"text": "a"}\n\n{"text": "b"}')
    assert list(read(path)) == [
        Record("traffic.jsonl:2", {"text": "a"}),
        Record("traffic.jsonl:4", {"text": "b"}),
    ]
    assert next(read(path, name="day1/traffic.jsonl")).place == "day1/traffic.jsonl:2"


def test_places_of_csv_rows_are_the_lines_where_they_begin(put):
    path = put("rows.csv", 'text\n"two\nlines"\nlast\n')
    assert [r.place for r in read(path)] == ["rows.csv:2", "rows.csv:4"]


@pytest.mark.parametrize("key", ["data", "rows", "anything"])
def test_json_may_hold_its_rows_in_an_object(put, key):
    assert values(put("a.json", json.dumps({key: ROWS}))) == ROWS


def test_json_may_be_a_single_row(put):
    row = {"messages": [{"role": "user", "content": "x"}], "tools": []}
    assert values(put("a.json", json.dumps(row, indent=2))) == [row]
    alone = {"messages": [{"role": "user", "content": "x"}]}
    assert values(put("b.json", json.dumps(alone))) == [alone]
    assert values(put("c.json", json.dumps(alone["messages"]))) == [alone["messages"]]


def test_json_with_several_lists_asks_for_one(put):
    path = put("a.json", json.dumps({"train": ROWS, "test": ROWS}))
    assert "several lists of rows (train, test)" in fault(path)


def test_json_lines_under_the_name_of_json(put):
    path = put("a.json", b"\n" + written(ROWS, "jsonl"))
    assert values(path) == ROWS
    assert next(read(path)).place == "a.json:2"
    broken = put("b.json", b'{"text": \n{"text": "b"}\n{"text": "c"}\n')
    assert values(broken, skip_bad=True) == [{"text": "b"}, {"text": "c"}]


def test_what_python_writes_as_json_is_read(put):
    path = put("a.jsonl", '{"text": "a", "score": NaN}\n{"text": "cut \\ud83d"}\n')
    first, second = values(path)
    assert first["score"] != first["score"]
    assert second["text"] == "cut \ufffd"


def test_text_is_parted_at_blank_lines_then_at_line_ends(put, monkeypatch):
    monkeypatch.setattr(plain_text, "TEXT_CHARACTERS", 20)
    path = put("book.txt", "aaaa\nbbbb\n\ncccc\ndddd\neeee\nffff\ngggg\n\n\nhhhh\n")
    assert list(read(path)) == [
        Record("book.txt:1", "aaaa\nbbbb"),
        Record("book.txt:4", "cccc\ndddd\neeee\nffff"),
        Record("book.txt:8", "gggg\n\n\nhhhh"),
    ]


def test_a_long_line_is_a_document_of_its_own(put):
    article = "word " * 5000
    path = put("articles.txt", f"short\n{article}\r\nshort again\n")
    assert list(read(path)) == [
        Record("articles.txt:1", "short"),
        Record("articles.txt:2", article),
        Record("articles.txt:3", "short again"),
    ]


@pytest.mark.parametrize("ending", [*ENDINGS, "txt"])
def test_rows_of_ten_megabytes_just_work(put, ending):
    row = {"text": "long and ü" * 1_000_000}
    if ending == "txt":  # a line that no article fills: a file without line breaks
        records = list(read(put("a.txt", row["text"].encode())))
        assert "".join(record.value for record in records) == row["text"]
        assert all(len(record.value) <= plain_text.TEXT_CHARACTERS for record in records)
        assert all(record.value.endswith(" ") for record in records[:-1])
    else:
        assert next(read(put(f"a.{ending}", written([row, *ROWS], ending)))).value == row


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "txt"])
def test_byte_order_marks_are_dropped_and_utf16_is_decoded(put, ending):
    text = "text\nü" if ending == "csv" else "ü" if ending == "txt" else '{"text": "ü"}'
    expected = ["ü"] if ending == "txt" else [{"text": "ü"}]
    assert values(put(f"a.{ending}", codecs.BOM_UTF8 + text.encode())) == expected
    for encoding in ("utf-16", "utf-32"):
        assert values(put(f"b.{ending}", text.encode(encoding))) == expected
    assert values(put(f"c.{ending}", codecs.BOM_UTF16_BE + text.encode("utf-16-be"))) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [('\n{"text": "a"}\n{"text": "b"}', [{"text": "a"}, {"text": "b"}]), ("a\nb", ["a\nb"])],
)
def test_a_log_is_json_or_text_by_how_it_begins(put, content, expected):
    assert values(put("server.log", content)) == expected


def test_broken_utf16_is_told(put):
    assert "UTF-16" in fault(put("a.txt", "text".encode("utf-16") + b"\x00"))


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "txt"])
def test_an_empty_file_is_an_error(put, ending, packing):
    for content in (b"", b"\n \n"):
        path = put(f"a.{ending}{packing}", PACKINGS[packing](content))
        assert "is empty" in fault(path)
        troubles = []
        assert values(path, skip_bad=True, on_bad=troubles.append) == []
        assert [t.place for t in troubles] == [path.name]


def test_tables_without_rows_are_errors(put):
    assert "is empty" in fault(put("a.csv", "text,label\n"))
    schema = pyarrow.schema([("text", pyarrow.string())])
    sink = io.BytesIO()
    pyarrow.parquet.write_table(schema.empty_table(), sink)
    assert "is empty" in fault(put("a.parquet", sink.getvalue()))


BAD_LINES = {
    "broken JSON": (b'{"text": "b", }', "broken JSON at column 15"),
    "not UTF-8": (b'{"text": "\xff"}', "byte 11 is not UTF-8 (0xff)"),
    "NUL": (b'{"text": "\0"}', "byte 11 is NUL"),
    "number": (b"42", "a row is an object or a text, not 42"),
    "null": (b"null", "a row is an object or a text, not null"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_json_line_is_named_or_skipped(put, case):
    bad, reason = BAD_LINES[case]
    path = put("a.jsonl", b'{"text": "a"}\n' + bad + b'\n{"text": "c"}\n')
    message = fault(path)
    assert "a.jsonl, line 2: " in message
    assert reason in message
    assert "--skip-bad" in message
    troubles = []
    assert values(path, skip_bad=True, on_bad=troubles.append) == [{"text": "a"}, {"text": "c"}]
    (trouble,) = troubles
    assert trouble.place == "a.jsonl:2"
    assert reason in trouble.reason


def test_a_json_line_without_its_end_says_that_the_file_ends_there(put):
    assert "line 2: broken JSON" in fault(path := put("a.jsonl", '{"text": "a"}\n{"text": "b'))
    assert "where the file ends" in fault(path)


def test_nested_beyond_reason_is_told(put):
    assert "nested too deep" in fault(put("a.jsonl", b"[" * 200_000 + b"\n"))
    # NaN has Python read it, which on some versions goes as deep as there is memory.
    assert "nested deeper" in fault(
        put("b.jsonl", b'{"a": NaN, "b": ' + b"[" * 150 + b"]" * 150 + b"}\n")
    )


def test_bad_rows_of_a_json_document(put):
    path = put("a.json", '[{"text": "a"}, 3, null, {"text": "b"}]')
    assert "a.json, row 2: a row is an object or a text, not 3" in fault(path)
    assert values(path, skip_bad=True) == [{"text": "a"}, {"text": "b"}]


def test_a_broken_json_document_names_line_and_column(put):
    assert "broken JSON at line 3, column 1" in fault(put("a.json", '[\n{"text": "a"}\n{}]'))
    assert "line 2, byte 11 is not UTF-8" in fault(put("b.json", b'[\n{"text": "\xff"}]'))


def test_bad_lines_of_text(put):
    path = put("a.txt", b"good\nbad \xe9\nnul \0\ngood too\n")
    assert "a.txt, line 2: byte 5 is not UTF-8 (0xe9)" in fault(path)
    troubles = []
    assert values(path, skip_bad=True, on_bad=troubles.append) == ["good\ngood too"]
    assert troubles == [
        Trouble("a.txt:2", "byte 5 is not UTF-8 (0xe9)"),
        Trouble("a.txt:3", "byte 5 is NUL, which text cannot contain"),
    ]


BAD_CSV = {
    "too many fields": (b"x,y,z", "3 fields below a header of 2"),
    "not UTF-8": (b'"one\nline \xff",y', "byte 6 is not UTF-8"),
    "NUL": (b"x\0,y", "byte 2 is NUL"),
    "quotes": (b'"x"x,y', "a broken quotation"),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_a_bad_csv_row_is_named_or_skipped(put, case):
    bad, reason = BAD_CSV[case]
    path = put("a.csv", b"a,b\n1,2\n" + bad + b"\n3,4\n")
    message = fault(path)
    assert "a.csv, line 3: " in message
    assert reason in message
    troubles = []
    good = [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert values(path, skip_bad=True, on_bad=troubles.append) == good
    assert [t.place for t in troubles] == ["a.csv:3"]


def test_an_open_quote_is_named_where_it_opens(put):
    path = put("a.csv", 'a,b\n1,2\n"3,4\n5,6\n')
    assert "line 3: a quote opens here and is never closed" in fault(path)


def test_csv_headers_name_each_column_once(put):
    assert "the header names 'a' twice" in fault(put("a.csv", "a,a\n1,2\n"))
    # pandas writes its index under no name
    assert values(put("b.csv", ",text\n0,x\n")) == [{"text": "x"}]
    assert values(put("c.csv", "a,b\n1\n")) == [{"a": "1", "b": ""}]


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "txt", "parquet"])
def test_a_cut_off_packed_file_is_an_error_even_with_skip_bad(put, ending, packing):
    rows = [{"text": f"{number} {number**9}"} for number in range(5000)]
    content = b"text\n" * 5000 if ending == "txt" else written(rows, ending)
    path = put(f"a.{ending}{packing}", PACKINGS[packing](content)[:-20])
    assert "is truncated" in fault(path)
    with pytest.raises(DataError):
        values(path, skip_bad=True)


def test_damaged_packed_files_are_told(put):
    assert "not a gzip file" in fault(put("a.jsonl.gz", b'{"text": "plain"}\n'))
    assert "damaged" in fault(put("a.jsonl.zst", b'{"text": "plain"}\n'))


def test_packed_files_of_several_pieces_are_read_to_the_end(put):
    for packing, compress in list(PACKINGS.items())[1:]:
        pieces = b"".join(compress(written([row], "jsonl")) for row in ROWS)
        assert values(put(f"a.jsonl{packing}", pieces)) == ROWS


@pytest.mark.parametrize("keep", [3, 100, -5])
def test_a_cut_off_parquet_file_is_an_error(put, keep):
    message = fault(put("a.parquet", written(ROWS, "parquet")[:keep]))
    assert "not a Parquet file" in message


def test_parquet_rows_that_are_not_utf8_are_named_or_skipped(put):
    raw = pyarrow.array([b"a", b"\xff", b"c"], pyarrow.binary())
    # Arrow checks no bytes when it takes them for text.
    text = pyarrow.StringArray.from_buffers(3, raw.buffers()[1], raw.buffers()[2])
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), sink)
    path = put("a.parquet", sink.getvalue())
    assert "a.parquet, row 2: byte 1 of a field is not UTF-8" in fault(path)
    kept = list(read(path, skip_bad=True))
    assert kept == [
        Record("a.parquet:1", {"text": "a"}),
        Record("a.parquet:3", {"text": "c"}),
    ]


def test_parquet_keeps_lists_of_messages(put):
    rows = [{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(1000)]
    assert values(put("a.parquet", written(rows, "parquet"))) == rows


def test_a_file_that_is_not_there_or_has_no_known_ending(tmp_path, put):
    assert "No such file" in fault(tmp_path / "none.jsonl")
    message = fault(put("a.xlsx", "x"))
    assert ".jsonl, .ndjson, .json" in message
    assert ".gz or .zst" in message


def test_find_takes_files_folders_and_patterns(put, tmp_path):
    names = ["b.jsonl", "deep/c.JSON.gz", "a.txt"]
    files = {name: put(name, "x") for name in names}
    for other in (".hidden.jsonl", ".git/d.jsonl", "README.md", "picture.png", "LICENSE.txt"):
        put(other, "x")
    everything = sorted(files.values())
    assert find(tmp_path) == everything
    assert find(str(tmp_path / "**")) == everything
    assert find(tmp_path / "*.jsonl") == [files["b.jsonl"]]
    assert find(files["a.txt"]) == [files["a.txt"]]
    assert find(tmp_path / "README.md") == [tmp_path / "README.md"]


def test_a_name_with_brackets_is_a_file_before_it_is_a_pattern(put):
    path = put("rows[1].jsonl", "x")
    assert find(path) == [path]


def test_find_says_what_it_did_not_find(put, tmp_path):
    with pytest.raises(DataError, match="no file or folder matches"):
        find(tmp_path / "none*")
    put("only/picture.png", "x")
    for path in (tmp_path / "only", tmp_path / "on*", tmp_path / "only/picture.png"):
        with pytest.raises(DataError, match=r"known: \.jsonl"):
            find(path)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_standard_input_takes_json(ending, packing):
    stream = io.BytesIO(PACKINGS[packing](b"\n" + written(ROWS, ending)))
    assert [r.value for r in read_stream(stream, "stdin")] == ROWS
    assert not stream.closed


@pytest.mark.parametrize("text", ["plain words\nand more", "[1] a footnote", '"quoted" words'])
def test_standard_input_takes_text(text):
    assert list(read_stream(io.BytesIO(b"\n" + text.encode()), "stdin")) == [
        Record("stdin:2", text)
    ]


def test_standard_input_says_what_is_wrong():
    with pytest.raises(DataError, match="stdin is empty"):
        list(read_stream(io.BytesIO(b""), "stdin"))
    with pytest.raises(DataError, match="stdin, line 2: broken JSON"):
        list(read_stream(io.BytesIO(b'{"text": 1}\n{"text": \n'), "stdin"))
    kept = read_stream(io.BytesIO(b'{"text": 1}\n{"text": \n'), "stdin", skip_bad=True)
    assert [r.value for r in kept] == [{"text": 1}]


def test_reading_is_lazy(put):
    """The first row comes before a later one is looked at."""
    records = read(put("a.jsonl", b'{"text": "a"}\nbroken\n'))
    assert next(records).value == {"text": "a"}
    with pytest.raises(DataError):
        next(records)
