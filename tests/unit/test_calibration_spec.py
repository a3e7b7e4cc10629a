"""Files that describe sets: those that ship are right, and every wrong one is told in words."""

import pytest
import yaml

from quantkit import resources
from quantkit.calibration import spec
from quantkit.errors import DataError

SOURCE = {"kind": "files", "path": "a.jsonl"}


@pytest.mark.parametrize("name", resources.names("calibration"))
def test_sets_that_ship_are_valid(name):
    found = spec.read(resources.find("calibration", name))
    assert found.summary
    assert found.sources


def written(tmp_path, data):
    path = tmp_path / "set.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def test_defaults_are_the_usual_ones(tmp_path):
    found = spec.read(written(tmp_path, {"sources": [SOURCE]}))
    assert (found.n_samples, found.max_length, found.short) == (256, 2048, "pack")
    assert (found.select, found.chat, found.redact, found.seed) == ("cover", "template", False, 0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"sources": [SOURCE], "sample": 3}, ["sample: unknown key; did you mean n_samples?"]),
        ({"sources": [SOURCE | {"paht": 1}]}, ["sources #1.paht: unknown key; did you mean path?"]),
        (
            {"sources": [{"kind": "s3", "path": "a"}]},
            ["sources #1.kind: must be files, hub, stdin, ", "not 's3'"],
        ),
        ({"sources": [{"path": "a"}]}, ["sources #1.kind: is missing; choose from: files, hub,"]),
        ({"sources": [{"kind": "files"}]}, ["sources #1.path: is missing"]),
        ({"sources": []}, ["sources: must be a list of at least one, not []"]),
        ({"summary": "nothing"}, ["sources: is missing"]),
        ({"sources": [SOURCE | {"weight": 0}]}, ["sources #1.weight: must be above 0, not 0"]),
        ({"sources": [SOURCE | {"weight": -1}]}, ["sources #1.weight: must be above 0, not -1"]),
        ({"sources": [SOURCE | {"weight": float("inf")}]}, ["sources #1.weight: "]),
        ({"sources": [SOURCE | {"weight": float("nan")}]}, ["sources #1.weight: "]),
        (
            {"sources": [SOURCE | {"weight": 1}, {"kind": "python-docs"}]},
            ["give every source a weight, or none"],
        ),
        (
            {"sources": [SOURCE, {"kind": "files", "path": "b/a.jsonl"}]},
            ["two sources are called a.jsonl; give each a `name`"],
        ),
        (
            {"sources": [{"kind": "stdin"}, {"kind": "stdin"}]},
            ["two sources are called stdin"],
        ),
        ({"sources": [SOURCE], "select": "best"}, ["select: must be cover or random, not 'best'"]),
        ({"sources": [SOURCE], "short": "drop"}, ["short: must be pack or pad, not 'drop'"]),
        ({"sources": [SOURCE], "chat": "raw"}, ["chat: must be template or plain, not 'raw'"]),
        ({"sources": [SOURCE], "n_samples": 0}, ["n_samples: must be above 0, not 0"]),
        ({"sources": [SOURCE], "max_length": 1}, ["max_length: must be above 1, not 1"]),
        ({"sources": [SOURCE], "near_duplicates": 1.5}, ["near_duplicates: "]),
        ({"sources": [SOURCE], "seed": -1}, ["seed: must be 0 or more, not -1"]),
        ({"sources": [SOURCE], "seed": 2**64}, ["seed: must be below 4294967296"]),
        (
            {"sources": [SOURCE], "redact": ["emial"]},
            ["redact: unknown kind of redaction 'emial'. Did you mean email?"],
        ),
        ({"sources": [SOURCE | {"max_rows": 0}]}, ["sources #1.max_rows: "]),
        ({"sources": [SOURCE | {"rows": "poem"}]}, ["sources #1.rows: must be chat, "]),
    ],
)
def test_wrong_sets_are_told_where_and_why(tmp_path, data, words):
    path = written(tmp_path, data)
    with pytest.raises(DataError) as refused:
        spec.read(path)
    first, *problems = str(refused.value).splitlines()
    assert first == f"{path} is not a valid calibration set:"
    assert len(problems) == 1
    for word in words:
        assert word in problems[0]


def test_all_problems_are_told_at_once(tmp_path):
    data = {"sources": [SOURCE | {"weight": 0}], "n_samples": 0, "short": "drop", "typo": 1}
    with pytest.raises(DataError) as refused:
        spec.read(written(tmp_path, data))
    assert len(str(refused.value).splitlines()) == 5


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just words"])
def test_a_file_that_is_no_mapping(tmp_path, text):
    with pytest.raises(DataError, match="is not a calibration set: it has no fields such as"):
        spec.read(written(tmp_path, text))


@pytest.mark.parametrize("text", ["a: [1, 2", "a: b: c", "\0"])
def test_a_file_that_is_no_yaml(tmp_path, text):
    with pytest.raises(DataError, match="is not valid YAML"):
        spec.read(written(tmp_path, text))


def test_changed_changes_what_was_asked_for_and_nothing_else(tmp_path):
    data = {"sources": [SOURCE | {"weight": 2.0, "columns": {"text": "body"}}], "seed": 4}
    before = spec.read(written(tmp_path, data))
    after = spec.changed(before, {"n_samples": 8, "redact": True}, "set")
    assert (after.n_samples, after.redact) == (8, True)
    assert after.model_copy(update={"n_samples": 256, "redact": False}) == before
    assert before.n_samples == 256
    assert spec.changed(before, {}, "set") == before


def test_changed_is_checked_like_the_file():
    before = spec.of_files(["a.jsonl"])
    with pytest.raises(DataError) as refused:
        spec.changed(before, {"short": "drop", "n_samples": 0}, "mine")
    first, *problems = str(refused.value).splitlines()
    assert first.startswith("mine cannot be built")
    assert {problem.strip().split(":")[0] for problem in problems} == {"n_samples", "short"}


def test_files_of_one_name_in_several_folders_are_told_apart():
    found = spec.of_files(["monday/log.jsonl", "tuesday/log.jsonl", "other.jsonl", "-"])
    named = [spec.source_name(source) for source in found.sources]
    assert named == ["monday/log.jsonl", "tuesday/log.jsonl", "other.jsonl", "stdin"]


@pytest.mark.parametrize("path", ["a.jsonl", "-"])
def test_the_same_file_twice_is_refused(path):
    with pytest.raises(DataError, match=f"{path} is given twice; give it once"):
        spec.of_files([path, "b.jsonl", path])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ({"kind": "files", "path": "logs/a.jsonl"}, "a.jsonl"),
        ({"kind": "files", "path": "logs/*"}, "logs/*"),
        ({"kind": "files", "path": "."}, "."),
        ({"kind": "files", "path": "logs/a.jsonl", "name": "ours"}, "ours"),
        ({"kind": "hub", "dataset": "a/b"}, "a/b"),
        ({"kind": "hub", "dataset": "a/b", "config": "c"}, "a/b/c"),
        ({"kind": "python-docs"}, "python-docs"),
        ({"kind": "stdin"}, "stdin"),
    ],
)
def test_names_of_sources(source, name):
    found = spec.SetSpec.model_validate({"sources": [source]})
    assert spec.source_name(found.sources[0]) == name
