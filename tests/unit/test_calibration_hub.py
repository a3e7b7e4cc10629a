"""Datasets stream out of folders, and the hub's absence is one sentence."""

import json
import time

import pytest

from quantkit.calibration.reading import hub
from quantkit.errors import DataError

ROWS = [{"text": "first"}, {"text": "second"}]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A dataset that lies at a relative path, as `datasets` takes it."""
    monkeypatch.chdir(tmp_path)
    for split, rows in (("train", ROWS), ("test", ROWS[:1])):
        path = tmp_path / "org/set/data" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "org/set"


def fault(*arguments):
    with pytest.raises(DataError) as caught:
        list(hub.stream(*arguments))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_streams_its_rows(folder):
    records = list(hub.stream("org/set", None, "train", None))
    assert [record.value for record in records] == ROWS
    assert [record.place for record in records] == ["org/set:train:1", "org/set:train:2"]
    assert len(list(hub.stream(str(folder), "default", "test", None))) == 1


def test_a_tree_of_folders_stands_in_for_the_hub(folder, tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    records = list(hub.stream("org/set", None, "train", "a revision", tmp_path))
    assert [record.value for record in records] == ROWS
    assert records[0].place == "org/set:train:1"


def test_unknown_splits_and_configs_are_told_with_the_known_ones(folder):
    assert fault("org/set", None, "dev", None) == (
        "dataset org/set has no split dev; it has train, test"
    )
    assert fault("org/set", "main", "train", None) == (
        "dataset org/set has no config main; it has default"
    )


def test_a_config_must_be_chosen_where_there_are_several(folder):
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: one\n  data_files: data/train.jsonl\n"
        "- config_name: two\n  data_files: data/test.jsonl\n---\n"
    )
    assert fault("org/set", None, "train", None) == (
        "dataset org/set has several configs and none was asked for; it has one, two"
    )
    (record,) = hub.stream("org/set", "two", "train", None)
    assert record.place == "org/set/two:train:1"


def test_offline_fails_at_once_and_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    began = time.monotonic()
    message = fault("nobody/nothing", None, "train", None)
    assert time.monotonic() - began < 5
    assert "HF_HUB_OFFLINE is set" in message
    assert "`files` source" in message


def test_a_hub_out_of_reach_says_what_to_set(tmp_path, monkeypatch):
    import datasets

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach it\nand more")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    message = fault("nobody/nothing", None, "train", None)
    assert "the hub cannot be reached for dataset nobody/nothing" in message
    assert "set HF_HUB_OFFLINE=1" in message


def test_a_dataset_that_does_not_exist(monkeypatch):
    import datasets

    def missing(*_, **__):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'x/y' doesn't exist on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", missing)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert "there is no dataset x/y on the hub" in fault("x/y", None, "train", None)


def test_offline_reads_what_was_downloaded_before(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_downloaded", lambda dataset, revision: folder)
    monkeypatch.chdir(tmp_path.parent)
    records = list(hub.stream("somebody/set", None, "train", None))
    assert [record.value for record in records] == ROWS
    assert records[0].place == "somebody/set:train:1"


def test_a_cached_snapshot_is_found(folder, tmp_path, monkeypatch):
    import huggingface_hub.constants

    snapshot = tmp_path / "cache/datasets--some--set/snapshots/abc"
    snapshot.mkdir(parents=True)
    refs = tmp_path / "cache/datasets--some--set/refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    assert hub._downloaded("some/set", None) == snapshot
    assert hub._downloaded("some/other", None) is None


def test_an_empty_folder_and_a_broken_file_are_told(folder, tmp_path):
    (tmp_path / "org/none").mkdir()
    assert "dataset org/none cannot be read" in fault("org/none", None, "train", None)
    (folder / "data/train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    message = fault("org/set", None, "train", None)
    assert "cannot be read" in message
    assert "org/set" in message
