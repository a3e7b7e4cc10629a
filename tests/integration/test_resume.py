"""A calibrated run that is stopped at any moment goes on and ends in the same bytes."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import pytest
import torch
from stopping import FULL, stopping_at
from tiny import READABLE, save_llama

from quantkit import storage
from quantkit.errors import HardwareError, StorageError
from quantkit.export.checkpoint import Checkpoint
from quantkit.model.source import ModelSource
from quantkit.onepass import mark, onepass
from quantkit.onepass.from_gguf import quantize_file
from quantkit.onepass.prepare import REPLAYED, CalibrationChoice, Run, prepare
from quantkit.onepass.run import quantize
from quantkit.recipe import load

pytestmark = pytest.mark.usefixtures("coarse_awq")

NAMES = ("awq-gptq-w4a16+kv-fp8", "int8-w8a8")
TEXT = "Every block is finished, or it is not. " * 400


def small_model(folder: Path) -> ModelSource:
    save_llama(folder, num_hidden_layers=3, **READABLE)
    (folder.parent / "text.txt").write_text(TEXT)
    return ModelSource.open(str(folder))


def run(source: ModelSource, out: Path, names=NAMES, **options) -> dict[str, str]:
    """Quantise and return what was written, by recipe."""
    text = CalibrationChoice(str(source.folder.parent / "text.txt"), 8, 64)
    recipes = [load(name) for name in names]
    made = quantize(source, recipes, out, device="cpu", calibration=text, run=Run(**options))
    return {checkpoint.label: checkpoint.digest for checkpoint in made}


def kill_again_and_again(folder: Path, n_kills: int) -> None:
    """Runs in a process of its own, since forking needs one without threads."""
    torch.set_num_threads(1)
    source = small_model(folder / "model")
    expected = run(source, folder / "whole")  # which imports what forks then have
    started = time.monotonic()
    assert run(source, folder / "again") == expected
    duration = time.monotonic() - started
    chance = random.Random(0)
    kills = resumed = 0
    out = folder / "out"
    while kills < n_kills:
        child = os.fork()
        if child == 0:
            try:
                run(source, out)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        due = time.monotonic() + chance.uniform(0.05, 1.1) * duration
        ended, status = 0, 0
        while not ended and time.monotonic() < due:
            time.sleep(0.01)
            ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
        kills += os.WIFSIGNALED(status)
        resumed += any(out.glob(".*.partial/journal/00000.json"))
        finished = [name for name in NAMES if (out / name).exists()]
        for name in finished:
            assert Checkpoint.open(out / name).digest == expected[name]
        if any(mark.key_in(out / name) is None for name in finished):  # all had their names
            assert len(finished) == len(NAMES)
            shutil.rmtree(out)
    assert run(source, out) == expected
    assert resumed > n_kills // 4, f"only {resumed} kills left something to go on from"
    print(f"{kills} kills, {resumed} of them after a finished block")  # noqa: T201


@pytest.mark.slow
def test_kills_end_in_the_same_bytes(tmp_path):
    """Slow: tests/faults kills a calibrated run once in every suite, at a moment as random."""
    n_kills = 20
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(n_kills)],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path]),
        },
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{n_kills} kills" in done.stdout


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A folder with a run that a full disk stopped after two blocks, and what a whole run makes."""
    folder = tmp_path_factory.mktemp("half")
    source = small_model(folder / "model")
    expected = run(source, folder / "whole")
    with stopping_at(2, FULL), pytest.raises(StorageError, match="is full"):
        run(source, folder / "out")
    return folder, expected


@pytest.fixture(scope="module")
def source(half):
    """The model of that folder, which tests leave as it is."""
    return ModelSource.open(str(half[0] / "model"))


@pytest.fixture(scope="module")
def mixed(half, source):
    """What a whole run of recipes of all kinds makes of it."""
    return run(source, half[0] / "mixed", MIXED)


@pytest.fixture
def copied(half, tmp_path):
    """A copy of the model and its text."""
    shutil.copytree(half[0] / "model", tmp_path / "model")
    shutil.copyfile(half[0] / "text.txt", tmp_path / "text.txt")
    return ModelSource.open(str(tmp_path / "model"))


@pytest.fixture
def stopped(half, copied, tmp_path, monkeypatch):
    """A copy of it that a test may go on with; blocks that are made from now on are counted."""
    folder, expected = half
    shutil.copytree(folder / "out", tmp_path / "out")
    deliver, calls = onepass.FinishedBlock.deliver, []

    def counted(finished, *rest):
        calls.append(finished.index)
        deliver(finished, *rest)

    monkeypatch.setattr(onepass.FinishedBlock, "deliver", counted)
    return copied, tmp_path / "out", expected, calls


def planned(source: ModelSource, out: Path, force: bool = False) -> float:
    """Seconds that a run is said to take."""
    text = CalibrationChoice(str(source.folder.parent / "text.txt"), 8, 64)
    job = prepare(source, [load(n) for n in NAMES], out, "cpu", text, Run(force=force))
    assert job.cost is not None
    return job.cost.seconds


def test_a_full_disk_loses_no_finished_block(stopped):
    source, out, expected, calls = stopped
    assert [p for p in out.iterdir() if not p.name.startswith(".")] == []
    assert planned(source, out) == pytest.approx(
        (1 - REPLAYED * 2 / 3) * planned(source, out, True)
    )
    assert run(source, out) == expected
    assert not any(path.is_dir() for name in NAMES for path in (out / name).iterdir())
    assert min(calls) == 2  # blocks 0 and 1 were not made again
    assert sorted(p.name for p in out.iterdir()) == sorted(NAMES)


def test_another_source_or_text_is_refused(stopped):
    source, out, _, _ = stopped
    (source.folder.parent / "text.txt").write_text(TEXT.replace("block", "thing"))
    with pytest.raises(StorageError, match=r"another calibration \(.*samples of.*others\)"):
        run(source, out)
    (source.folder.parent / "text.txt").write_text(TEXT)
    config = source.folder / "config.json"
    config.write_text(config.read_text().replace('"hidden_act": "silu"', '"hidden_act": "gelu"'))
    with pytest.raises(StorageError, match="another source"):
        run(ModelSource.open(str(source.folder)), out)


def test_force_starts_over(stopped):
    source, out, expected, calls = stopped
    assert run(source, out, force=True) == expected
    assert min(calls) == 0


class Stopped(BaseException):
    """Stands for a kill."""


@pytest.fixture
def stop_after(monkeypatch):
    """Stops a run when so many of its folders have their names."""

    def arrange(n_named, out):
        sync, named = storage.sync_folder, []

        def until(folder):
            sync(folder)
            named.extend([folder] if folder == out else [])  # a name was given just now
            if len(named) == n_named:
                monkeypatch.setattr(storage, "sync_folder", sync)
                raise Stopped

        monkeypatch.setattr(storage, "sync_folder", until)

    return arrange


MIXED = ("rtn-w4a16", "awq-w4a16", "gguf-q8_0", "fp8-dynamic")


@pytest.mark.parametrize(
    "n_named", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 4]
)
def test_what_was_named_before_a_stop_is_taken_up(source, mixed, tmp_path, stop_after, n_named):
    out = tmp_path / "out"
    stop_after(n_named, out)
    with pytest.raises(Stopped):
        run(source, out, MIXED)
    before = {p.name: p.stat().st_ino for p in out.iterdir() if p.name in MIXED}
    assert len(before) == n_named
    assert run(source, out, MIXED) == mixed
    assert before.items() <= {p.name: p.stat().st_ino for p in out.iterdir()}.items()
    assert sorted(p.name for p in out.iterdir()) == sorted(MIXED)
    assert not any(path.is_dir() for name in MIXED for path in (out / name).iterdir())


def test_another_run_does_not_take_it_up(copied, tmp_path, stop_after):
    source, out = copied, tmp_path / "out"
    stop_after(1, out)
    with pytest.raises(Stopped):
        run(source, out, MIXED)
    (source.folder.parent / "text.txt").write_text(TEXT.replace("block", "thing"))
    (named,) = [path.name for path in out.iterdir() if path.name in MIXED]
    with pytest.raises(StorageError, match=f"{named} exists already; use --force"):
        run(source, out, [named])
    assert set(run(source, out, MIXED, force=True)) == set(MIXED)


def test_a_run_from_a_gguf_file_takes_up_its_own_too(source, tmp_path, stop_after):
    run(source, tmp_path / "whole", ["gguf-f16"])
    (file,) = (tmp_path / "whole" / "gguf-f16").glob("model*.gguf")
    recipes, out = [load("gguf-q8_0"), load("gguf-q4_0")], tmp_path / "out"
    stop_after(1, out)
    with pytest.raises(Stopped):
        quantize_file(file, recipes, out, "cpu")
    (named,) = [path for path in out.iterdir() if not path.name.startswith(".")]
    before = named.stat().st_ino
    made = quantize_file(file, recipes, out, "cpu")
    assert [checkpoint.label for checkpoint in made] == ["gguf-q8_0", "gguf-q4_0"]
    assert named.stat().st_ino == before
    assert not any(path.is_dir() for folder in out.iterdir() for path in folder.iterdir())
    with pytest.raises(StorageError, match="exists already"):
        quantize_file(file, recipes, out, "cpu")


def test_second_run_leaves_the_first_alone(source, tmp_path, run_cli):
    """Two commands in two processes on one --out: the first ends as if it had been alone."""
    out = tmp_path / "out"
    line = ["quantize", str(source.folder), "-r", "rtn-w4a16", "-q", "-o", str(out)]
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    first = subprocess.Popen([sys.executable, "-m", "quantkit", *line], **piped)
    while first.poll() is None and not (out / ".rtn-w4a16.lock").exists():
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGSTOP)  # so that it is still writing when the second comes
    assert not (out / "rtn-w4a16").exists()
    second = run_cli([*line, "--force"])
    os.kill(first.pid, signal.SIGCONT)
    told = first.communicate(timeout=300)[1]
    assert (first.returncode, told) == (0, "")
    assert second.code == 3
    assert f"another run is writing {out / 'rtn-w4a16'}" in second.stderr
    assert [path.name for path in out.iterdir()] == ["rtn-w4a16"]
    assert run(source, tmp_path / "alone", ["rtn-w4a16"]) == {
        "rtn-w4a16": Checkpoint.open(out / "rtn-w4a16").digest
    }


if __name__ == "__main__":
    kill_again_and_again(Path(sys.argv[1]), int(sys.argv[2]))


@pytest.mark.parametrize("block", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_out_of_memory_falls_back_to_offloading(half, source, tmp_path, monkeypatch, block):
    observe, notes = onepass.Visit.observe, []

    def once(visit, *arguments):
        if visit.index == block and not notes:
            notes.append("out of memory")
            raise torch.OutOfMemoryError("CUDA out of memory")
        return observe(visit, *arguments)

    monkeypatch.setattr(onepass.Visit, "observe", once)
    assert run(source, tmp_path / "out") == half[1]
    assert notes


def test_out_of_memory_twice_says_what_to_change(half, source, tmp_path, monkeypatch):
    def always(visit, *arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(onepass.Visit, "observe", always)
        with pytest.raises(HardwareError, match="shorter --length"):
            run(source, tmp_path / "out")
    assert run(source, tmp_path / "out") == half[1]
