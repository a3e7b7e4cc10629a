"""Model folders and data files that were made to do harm, or came to it: named, never copied."""

import gzip
import json
import resource
import shutil

import pytest

from quantkit import resources
from quantkit.calibration.reading import files, record
from quantkit.cli.main import main
from quantkit.errors import DataError, SourceError
from quantkit.model import source
from quantkit.model.source import ModelSource


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(resources.DEMO_MODEL, folder)
    return folder


@pytest.mark.parametrize("name", ["LICENSE", "chat_template.jinja", "secret.json"])
def test_links_to_elsewhere_are_not_copied(tmp_path, model, name, capsys):
    (tmp_path / "secret").write_text("geheim")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(tmp_path / "secret")
    out = tmp_path / "out"
    assert main(["quantize", str(model), "-r", "rtn-w8a16", "-o", str(out), "-q"]) == 3
    assert "is a link to outside" in " ".join(capsys.readouterr().err.split())
    assert not [p for p in out.rglob("*") if p.is_file() and "geheim" in p.read_text("latin-1")]


def test_links_within_are_the_folders_own(tmp_path, model):
    (model / "terms").write_text("all yours")
    (model / "LICENSE").symlink_to("terms")
    assert ModelSource.open(str(model)).folder == model


def test_snapshots_of_the_hub_are_links_into_its_cache(tmp_path, model):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b/snapshots/c0de"
    snapshot.parent.mkdir(parents=True)
    shutil.move(model, snapshot)
    blobs.mkdir()
    shutil.move(snapshot / "config.json", blobs / "1234")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    assert ModelSource.open(str(snapshot)).config["model_type"]
    (snapshot / "LICENSE").symlink_to("../../../models--other--one/blobs/1")
    (tmp_path / "models--other--one/blobs").mkdir(parents=True)
    (tmp_path / "models--other--one/blobs/1").write_text("geheim")
    with pytest.raises(SourceError, match="outside"):
        ModelSource.open(str(snapshot))


@pytest.mark.parametrize("revision", ["../../../etc", "a\0b", "-x", "a" * 300, ""])
def test_a_revision_cannot_be_a_path(revision):
    with pytest.raises(SourceError):
        source._download("some/model", revision or "..", cached_only=True)


def test_a_row_is_bounded_while_it_is_unpacked(tmp_path, monkeypatch):
    for module in (files, record):
        monkeypatch.setattr(module, "MAX_ROW_BYTES", 1 << 20)
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wb") as stream:
        stream.write(b'{"text": "first"}\n{"text": "')
        for _ in range(300):
            stream.write(b"a" * (1 << 20))
        stream.write(b'"}\n{"text": "last"}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match="line 2: it is longer than 1 MiB"):
        list(files.read(path))
    bad = []
    rows = list(files.read(path, skip_bad=True, on_bad=bad.append))
    assert [row.value["text"] for row in rows] == ["first", "last"]
    assert rows[1].place.endswith(":3")
    assert [trouble.place for trouble in bad] == ["rows.jsonl.gz:2"]
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 64  # MiB


def test_a_document_is_bounded_while_it_is_unpacked(tmp_path, monkeypatch):
    from quantkit.calibration.reading import json_rows

    monkeypatch.setattr(json_rows, "MAX_DOCUMENT_BYTES", 1 << 20)
    path = tmp_path / "rows.json.gz"
    with gzip.open(path, "wt") as stream:
        stream.write('["a",\n' + '"b",\n' * (1 << 18) + '"c"]')
    with pytest.raises(DataError, match="write it as JSON Lines"):
        list(files.read(path))


def test_a_calibration_set_whose_files_are_others(tmp_path, capsys):
    out = tmp_path / "set"
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": f"import {n} as it is, and return"}) + "\n" for n in range(50))
    )
    build = ["calibrate", "build", str(tmp_path / "rows.jsonl"), "--model", "demo", "-q"]
    assert main([*build, "--samples", "2", "--length", "16", "-o", str(out)]) == 0
    manifest = json.loads((out / "calibration.json").read_text())
    from quantkit.storage import sha256_of

    for name, content in (
        ("samples.parquet", b"PAR1 nothing PAR1"),
        ("tokens.safetensors", (2).to_bytes(8, "little") + b"{}"),
    ):
        kept = (out / name).read_bytes()
        (out / name).write_bytes(content)
        manifest["files"][name] = sha256_of(out / name)
        (out / "calibration.json").write_text(json.dumps(manifest))
        arguments = ["quantize", "demo", "-r", "gptq-w4a16", "--calibration", str(out), "-q"]
        assert main([*arguments, "-o", str(tmp_path / "out")]) == 3
        assert "build the set again" in " ".join(capsys.readouterr().err.split())
        (out / name).write_bytes(kept)
        manifest["files"][name] = sha256_of(out / name)
