"""The second of two writers is refused and changes nothing."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quantkit.cli.main import main
from quantkit.errors import StorageError
from quantkit.storage import MANIFEST, claimed, output_folder, scratch_folder

PUBLISHED = Path(__file__).parents[2] / "reports" / "smollm2-135m" / "scores"
HOLDER = """
import sys
from pathlib import Path
from quantkit.storage import output_folder, scratch_folder
how, target = sys.argv[1], Path(sys.argv[2])
if how == "filled":
    holding = output_folder(target)
else:
    holding = scratch_folder(target, resumable=how == "resumable")
with holding as folder:
    ((folder or target) / "weights").write_text("first")
    print("ready", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def first(tmp_path):
    """Another process in the middle of writing a folder."""
    children = []

    def start(how: str) -> subprocess.Popen:
        line = [sys.executable, "-c", HOLDER, how, str(tmp_path / "out")]
        child = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        assert child.stdout.readline() == "ready\n"
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else ""
        for path in folder.rglob("*")
    }


def finish(child: subprocess.Popen) -> None:
    child.communicate("\n", timeout=60)
    assert child.returncode == 0


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("how", ["resumable", "plain"])
@pytest.mark.parametrize("resumable", [False, True])
def test_second_writer_of_a_folder(tmp_path, first, how, resumable, force):
    child = first(how)
    before = tree(tmp_path)
    with pytest.raises(StorageError, match=r"another run is writing .*out"):
        scratch_folder(tmp_path / "out", force, resumable).__enter__()
    assert tree(tmp_path) == before
    finish(child)
    assert tree(tmp_path) == {"out": "", "out/weights": "first"}


def test_second_writer_after_the_first_is_done_is_told_so(tmp_path, first, monkeypatch):
    """It looked before the first had finished, and must look again once it has the lock."""
    child = first("plain")
    from quantkit import storage

    looked = storage.refuse_existing

    def late(*arguments):
        looked(*arguments)
        if child.poll() is None:
            finish(child)

    monkeypatch.setattr(storage, "refuse_existing", late)
    with pytest.raises(StorageError, match="exists already"):
        scratch_folder(tmp_path / "out").__enter__()
    assert tree(tmp_path) == {"out": "", "out/weights": "first"}


def test_second_writer_into_a_folder(tmp_path, first):
    child = first("filled")
    before = tree(tmp_path)
    with pytest.raises(StorageError, match="another run is writing"):
        output_folder(tmp_path / "out").__enter__()
    assert tree(tmp_path) == before
    finish(child)
    assert tree(tmp_path) == {"out": "", "out/weights": "first"}


@pytest.mark.parametrize("command", ["calibrate", "report"])
def test_second_command_on_an_output(tmp_path, tmp_path_factory, first, command, capsys):
    """Commands look for another writer before they read, and do not end with 0 beside it."""
    child = first("plain" if command == "calibrate" else "filled")
    before = tree(tmp_path)
    text = tmp_path_factory.mktemp("in") / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy.\n" * 50)
    line = {
        "calibrate": [
            *("calibrate", "build", str(text), "--model", "demo"),
            *("--samples", "2", "--length", "16"),
        ],
        "report": ["report", str(PUBLISHED)],
    }[command]
    assert main([*line, "-o", str(tmp_path / "out")]) == 3
    assert "another run is writing" in " ".join(capsys.readouterr().err.split())
    assert tree(tmp_path) == before
    finish(child)
    assert tree(tmp_path) == {"out": "", "out/weights": "first"}


def test_lock_goes_with_its_process(tmp_path, first):
    child = first("plain")
    child.kill()
    child.communicate()
    with scratch_folder(tmp_path / "out") as scratch:
        (scratch / "weights").write_text("second")
    assert tree(tmp_path) == {"out": "", "out/weights": "second"}


def test_stages_of_one_command_share_their_folder(tmp_path):
    with output_folder(tmp_path / "out"), output_folder(tmp_path / "out"):
        pass
    with claimed(tmp_path / "out"), scratch_folder(tmp_path / "out") as scratch:
        (scratch / "weights").write_text("new")
    assert tree(tmp_path) == {"out": "", "out/weights": "new"}


def test_another_thread_is_another_writer(tmp_path):
    caught = []

    def second() -> None:
        try:
            output_folder(tmp_path / "out").__enter__()
        except StorageError as error:
            caught.append(error)

    with output_folder(tmp_path / "out"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(caught) == 1


def test_folder_made_for_nothing_is_removed(tmp_path):
    with pytest.raises(KeyError), output_folder(tmp_path / "out"):
        raise KeyError
    assert tree(tmp_path) == {}


def test_kill_amid_replacing_keeps_the_old_folder(tmp_path):
    old = tmp_path / ".out.replaced"
    old.mkdir()
    (old / MANIFEST).write_text("{}")
    with pytest.raises(StorageError, match="exists already"):
        scratch_folder(tmp_path / "out").__enter__()  # looks before it holds the lock, and after
    assert tree(tmp_path) == {"out": "", f"out/{MANIFEST}": "{}"}
