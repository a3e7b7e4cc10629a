"""Recipes, devices and output folders that cannot be used: refused by name, nothing is left."""

import errno
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quantkit.storage import MANIFEST

RECIPE = "summary: mine\nmethod: rtn\nweights: {num_bits: 4, strategy: group, group_size: 128}\n"


@pytest.fixture
def own_recipe(tmp_path):
    def write(text: str, name: str = "mine.yaml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_misspelt_key(refused, tiny_model, own_recipe):
    file = own_recipe(RECIPE.replace("num_bits", "num_bit"))
    message = refused(tiny_model(), recipe=file)
    assert message.startswith(f"{file} is not a valid recipe:\n")
    assert "weights.num_bit: unknown key; did you mean num_bits?" in message


def test_recipe_that_is_no_yaml(refused, tiny_model, own_recipe):
    file = own_recipe("summary: a\n  method: [")
    assert refused(tiny_model(), recipe=file).startswith(f"{file} is not valid YAML at line 2: ")


def test_unknown_recipe(refused, tiny_model):
    message = refused(tiny_model(), recipe="rtn-w4a61")
    assert message.startswith("unknown recipe 'rtn-w4a61'. Did you mean rtn-w4a16")


def test_recipe_name_that_is_too_long(refused, tiny_model):
    assert "unknown recipe" in refused(tiny_model(), recipe="a" * 300)


def test_missing_recipe_file(refused, tiny_model, tmp_path):
    file = str(tmp_path / "none.yaml")
    assert f"unknown recipe '{file}'" in refused(tiny_model(), recipe=file)


def test_recipe_is_read_before_the_model(refused, tmp_path):
    assert "unknown recipe" in refused(tmp_path / "nothing", recipe="none")


def test_recipe_asked_for_twice(refused, tiny_model):
    message = refused(tiny_model(), "-r", "rtn-w4a16", code=2)
    assert "rtn-w4a16 is given twice" in message


def test_two_files_of_one_name(refused, tiny_model, own_recipe):
    file = own_recipe(RECIPE, "rtn-w4a16.yaml")
    assert "rtn-w4a16 is given twice" in refused(tiny_model(), "-r", file, code=2)


def test_targets_that_match_nothing(refused, tiny_model, own_recipe):
    file = own_recipe(RECIPE + "targets: ['re:.*experts.*']\n")
    message = refused(tiny_model(), recipe=file)
    assert message.startswith("recipe mine: targets")
    assert "match no layer" in message


def test_half_of_a_fused_layer(refused, tiny_model, own_recipe):
    file = own_recipe(RECIPE + "ignore: [lm_head, 're:.*k_proj']\n")
    message = refused(tiny_model(), recipe=file)
    assert "model.layers.0.self_attn.k_proj is left alone" in message
    assert "quantise all of them or none" in message


def test_pattern_that_does_not_compile(refused, tiny_model, own_recipe):
    file = own_recipe(RECIPE + "targets: ['re:(']\n")
    assert "re:(" in refused(tiny_model(), recipe=file)


@pytest.mark.parametrize("device", ["tpu", "cuda:x", "gpu", "cuda:-1", "cuda:²", ""])
def test_unknown_device(run_cli, device):
    result = run_cli(["quantize", "demo", "-r", "rtn-w4a16", "--device", device])
    assert (result.code, result.stdout) == (2, "")
    assert f"--device: '{device}' is not auto, cpu, cuda or cuda:N" in result.stderr


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_cuda_where_there_is_none(refused, tiny_model, monkeypatch, device):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    message = refused(tiny_model(), "--device", device)
    assert message.startswith(f"device {device}: no CUDA device can be used")
    assert "--device cpu" in message


def test_cuda_device_beyond_the_last(refused, tiny_model, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "there are 2 CUDA devices" in refused(tiny_model(), "--device", "cuda:2")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def lasting(files: dict[str, bytes]) -> dict[str, list[bytes]]:
    """All that must not differ between two runs: not when they were, nor how long they took."""
    lines = {name: data.split(b"\n") for name, data in files.items() if name != MANIFEST}
    lines["README.md"] = [x for x in lines["README.md"] if not x.startswith(b"| made |")]
    return lines


def test_existing_output_and_force(run_cli, tiny_model, out):
    target = out / "rtn-w4a16"
    command = ["quantize", tiny_model(), "-r", "rtn-w4a16", "-o", out, "-q"]
    assert run_cli(command).code == 0
    first = snapshot(target)
    (target / "stray").touch()

    again = run_cli(command)
    assert (again.code, again.stdout) == (3, "")
    assert again.stderr.startswith(f"quantkit: {target} ")
    assert "--force" in again.stderr
    assert again.stderr.count("\n") == 1
    assert (target / "stray").exists()

    assert run_cli([*command, "--force"]).code == 0
    second = snapshot(target)
    assert second.keys() == first.keys()
    assert lasting(second) == lasting(first)
    assert [path.name for path in out.iterdir()] == ["rtn-w4a16"]


def test_existing_output_stops_all_recipes(run_cli, tiny_model, out):
    model = tiny_model()
    assert run_cli(["quantize", model, "-r", "rtn-w4a16", "-o", out, "-q"]).code == 0
    both = ["quantize", model, "-r", "fp8-dynamic", "-r", "rtn-w4a16", "-o", out, "-q"]
    assert run_cli(both).code == 3
    assert [path.name for path in out.iterdir()] == ["rtn-w4a16"]


def test_failure_under_force_keeps_the_old_output(run_cli, tiny_model, out, monkeypatch):
    command = ["quantize", tiny_model(), "-r", "rtn-w4a16", "-o", out, "-q"]
    assert run_cli(command).code == 0
    before = snapshot(out / "rtn-w4a16")
    monkeypatch.setattr(os, "posix_fallocate", full_disk)
    assert run_cli([*command, "--force"]).code == 3
    assert snapshot(out / "rtn-w4a16") == before
    assert [path.name for path in out.iterdir()] == ["rtn-w4a16"]


def test_force_never_replaces_what_is_not_ours(run_cli, tiny_model, out):
    folder = out / "rtn-w4a16"
    folder.mkdir(parents=True)
    (folder / "thesis.tex").touch()
    result = run_cli(["quantize", tiny_model(), "-r", "rtn-w4a16", "-o", out, "--force", "-q"])
    assert result.code == 3
    assert str(folder) in result.stderr
    assert "is not a checkpoint made by quantkit" in result.stderr
    assert snapshot(folder) == {"thesis.tex": b""}


@pytest.mark.parametrize("below", ["", "deeper"])
def test_file_in_the_way(run_cli, tiny_model, tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    result = run_cli(["quantize", tiny_model(), "-r", "rtn-w4a16", "-o", file / below, "-q"])
    assert result.code == 3
    assert f"{file / below} cannot be a folder" in result.stderr
    assert file.read_text() == "mine"


def test_output_name_that_is_too_long(run_cli, tiny_model, tmp_path):
    out = tmp_path / ("a" * 300)
    assert run_cli(["quantize", tiny_model(), "-r", "rtn-w4a16", "-o", out, "-q"]).code == 3


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_disk_that_is_too_small(refused, tiny_model, out, monkeypatch):
    usage = shutil._ntuple_diskusage(1 << 30, 1 << 30, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    message = refused(tiny_model())
    assert message.startswith(f"{out} needs more than 0.")
    assert "its disk has 0.0 MiB free; free some space or choose another --out" in message


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_disk_that_fills_up(refused, tiny_model, out, monkeypatch, call):
    monkeypatch.setattr(os, call, full_disk)
    message = refused(tiny_model(), "-r", "fp8-dynamic")
    assert message.startswith(f"the disk that holds {out}/")
    assert message.endswith("is full; free some space and try again")


def test_files_that_are_really_too_large(refused, tiny_model, out):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    model = tiny_model()
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 17, hard))
    try:
        message = refused(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message == f"the file system of {out}/rtn-w4a16 does not take files this large"


@contextmanager
def without_rights() -> Iterator[None]:
    """Root may do everything, so that for a while we are someone else."""
    if os.getuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def readable_model(tiny_model):
    """A model that others may read, in a folder where they may not write."""
    place = Path(tempfile.mkdtemp())
    model = shutil.copytree(tiny_model(), place / "model")
    for path in model.iterdir():
        path.chmod(0o644)
    place.chmod(0o555)
    yield model
    place.chmod(0o755)
    shutil.rmtree(place)


def test_no_permission_to_write(run_cli, readable_model):
    place = readable_model.parent
    with without_rights():
        result = run_cli(["quantize", readable_model, "-r", "rtn-w4a16", "-o", place / "o", "-q"])
    assert result.code == 3
    assert result.stderr.startswith(f"quantkit: no permission to write {place / 'o'}")
    assert "choose another --out" in result.stderr
    assert [path.name for path in place.iterdir()] == ["model"]


def test_no_permission_to_look(run_cli, readable_model):
    closed = readable_model / "closed"
    closed.mkdir(mode=0o000)
    with without_rights():
        result = run_cli(["quantize", readable_model, "-r", "rtn-w4a16", "-o", closed, "-q"])
    assert result.code == 3
    assert str(closed) in result.stderr


@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    ],
)
def test_no_permission_to_read(run_cli, readable_model, file):
    (readable_model / file).chmod(0o000)
    writable = Path(tempfile.mkdtemp())
    writable.chmod(0o777)
    try:
        with without_rights():
            result = run_cli(["quantize", readable_model, "-r", "rtn-w4a16", "-o", writable, "-q"])
        assert result.code == 3
        assert str(readable_model / file) in result.stderr
        assert list(writable.iterdir()) == []
    finally:
        shutil.rmtree(writable)


@pytest.mark.parametrize("text", ["", "[]", '{"source": '])
def test_damaged_key_of_a_stopped_run(run_cli, tiny_model, out, text):
    key = out / "rtn-w4a16" / "journal" / "key.json"
    key.parent.mkdir(parents=True)
    key.write_text(text)
    (out / "rtn-w4a16" / MANIFEST).write_text("{}")
    result = run_cli(["quantize", tiny_model(), "-r", "rtn-w4a16", "-o", out, "--quiet"])
    told = f"quantkit: {key} is damaged; use --force to start over\n"
    assert (result.code, result.stderr) == (3, told)
    assert key.read_text() == text
