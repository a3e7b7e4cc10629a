"""JSON and YAML from elsewhere: what a file should not hold is named, and soon."""

import json
import time

import pytest
import yaml

from quantkit.cli.main import main
from quantkit.errors import DataError
from quantkit.parsing import parse_json, parse_yaml
from quantkit.specs import read_yaml

BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("[" * 100_000, "nested deeper"),
        ("[" * 150 + "]" * 150, "nested deeper"),
        ('{"a":' * 150 + "1" + "}" * 150, "nested deeper"),
        ('{"a": "\\ud800"}', "half a character"),
        ('{"\\udfff": 1}', "half a character"),
        ('{"a": NaN}', "NaN is not a number"),
        ('{"a": -Infinity}', "not a number"),
        ('{"a": 1e999}', "out of range"),
        ('{"a": %s}' % ("1" * 401), "401 digits"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ("{", "Expecting"),
    ],
)
def test_json_that_is_refused(raw, words):
    with pytest.raises(ValueError, match=words):
        parse_json(raw)


def test_json_as_it_should_be():
    data = {"a": [1, -2.5, None, True, "ü", 10**30], "\U0001f600": {}}
    for escaped in (True, False):
        assert parse_json(json.dumps(data, ensure_ascii=escaped).encode()) == data
    assert parse_json("[Infinity]", finite=False) == [float("inf")]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (BOMB, "aliases for more than 100,000 values"),
        (MERGED, "aliases for more than 100,000 values"),
        ("a: &a [*a]", "refers to itself"),
        ("[" * 150 + "]" * 150, "nested deeper"),
        ("[" * 50_000, "nested deeper"),
        ('a: "\\ud800"', "half a character"),
        ("a: 1".encode("utf-16"), "UTF-16"),
        ("a: 2020-99-99", "not valid YAML"),
        ("a: " + "1" * 5000, "not valid YAML"),
        ("#" * (1 << 21), "longer than 1 MiB"),
    ],
)
def test_yaml_that_is_refused(tmp_path, raw, words):
    begun = time.monotonic()
    with pytest.raises(ValueError, match=words):
        parse_yaml(raw, yaml.SafeLoader)
    path = tmp_path / "x.yaml"
    path.write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    with pytest.raises(DataError, match=words):
        read_yaml(path, DataError)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize(
    "text",
    [
        BOMB,
        MERGED,
        "[" * 5000,
        'models: ["\\ud800"]\nrecipes: [rtn-w8a16]\n',
        "models: [demo]\nrecipes: [rtn-w8a16]\nresources: {score: {memory: %sGiB}}\n" % ("9" * 400),
        "models: [demo]\nrecipes: [rtn-w8a16]\nresources: {score: {cpus: .inf}}\n",
        "models: [demo]\nrecipes: [rtn-w8a16]\nresources: {score: {cpus: .nan}}\n",
    ],
    ids=range(7),
)
def test_a_sweep_that_cannot_be_read_is_refused(tmp_path, text, capsys):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    out = str(tmp_path / "out")
    assert main(["sweep", "run", str(path), "-o", out, "--dry-run"]) == 3
    assert str(path) in capsys.readouterr().err.replace("\n", "").replace(" ", "")
