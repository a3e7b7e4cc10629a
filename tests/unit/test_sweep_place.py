"""Storage of sweeps, and the lease that keeps two drivers apart."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import MissingDependency, StorageError
from quantkit.sweep import lease as leases
from quantkit.sweep import place as places
from quantkit.sweep.lease import Lease
from quantkit.sweep.place import Place


@pytest.fixture(params=["disk", "memory"])
def place(request, tmp_path):
    disk = request.param == "disk"
    return Place(tmp_path / "runs" if disk else f"memory://{tmp_path}")


def test_files_come_back_as_they_went(place):
    assert place.read("a/b") is None
    place.write("a/b", b"one")
    place.write("a/b", b"two")
    place.write("a/c", b"")
    assert place.read("a/b") == b"two"
    assert place.names("a") == ["b", "c"]
    assert place.names("none") == []
    assert place.sizes("a", ["b", "c", "d"]) == {"b": 3, "c": 0}
    assert place.read_all(["a/b", "a/none", "a/c"]) == {"a/b": b"two", "a/c": b""}
    place.remove("a")
    place.remove("a")
    assert place.names("a") == []


def test_only_one_creates(place):
    assert place.create("mark", b"first")
    assert not place.create("mark", b"second")
    assert place.read("mark") == b"first"


def test_one_of_many_creates(tmp_path):
    place, won = Place(tmp_path), []
    gate = threading.Barrier(8)

    def race(number: int) -> None:
        gate.wait()
        if place.create("mark", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [place.read("mark")] == [str(n).encode() for n in won]


def test_folders_move_there_and_back(place, tmp_path):
    folder = tmp_path / "made"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "file").write_bytes(b"x" * 1000)
    place.publish(folder, "results/one")
    assert not folder.exists()
    place.fetch("results/one/in/file", tmp_path / "back" / "file")
    assert (tmp_path / "back" / "file").read_bytes() == b"x" * 1000


def test_a_place_travels(tmp_path, monkeypatch):
    import pickle

    monkeypatch.chdir(tmp_path)
    travelled = pickle.loads(pickle.dumps(Place("runs")))
    assert travelled.local == tmp_path / "runs"


@pytest.mark.parametrize(("address", "package"), [("s3://b/x", "s3fs"), ("gs://b/x", "gcsfs")])
def test_a_bucket_library_that_is_missing_is_named(monkeypatch, address, package):
    import sys
    from importlib import import_module

    monkeypatch.setitem(sys.modules, package, None)
    loaded = import_module("fsspec.registry")._registry
    for name in ("s3", "gs", "gcs"):
        monkeypatch.delitem(loaded, name, raising=False)
    with pytest.raises(MissingDependency, match=f"pip install {package}"):
        Place(address)


def test_an_unknown_kind_of_storage(tmp_path):
    with pytest.raises(StorageError, match="unknown storage floppy://"):
        Place("floppy://a/runs")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="no permission to write"):
        Place(tmp_path / "runs").require(0)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(StorageError, match="cannot be a folder"):
        Place(tmp_path / "runs").require(0)


def test_a_full_disk_is_told_before_the_start(tmp_path):
    with pytest.raises(StorageError, match=r"needs .* but its disk has"):
        Place(tmp_path / "runs").require(1 << 60)


def test_halves_of_killed_writers_go_and_those_of_living_ones_stay(tmp_path):
    program = (
        "import os, sys, time\n"
        "from quantkit.sweep.place import Place\n"
        "os.fsync = lambda stream: print('there', flush=True) or time.sleep(60)\n"
        "Place(sys.argv[1]).write('done/a.json', b'half')\n"
    )
    line = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(line, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        (half,) = tmp_path.rglob(".*")
        Place(tmp_path).require(0)
        assert half.exists()
        writer.kill()
    own = tmp_path / ".mine.half"
    own.touch()
    Place(tmp_path).require(0)
    assert list(tmp_path.rglob(".*")) == [own]


def test_what_a_bucket_refuses_is_one_sentence(place, monkeypatch):
    if place.local is not None:
        pytest.skip("disks have their own words")

    def denied(*_: object, **__: object) -> None:
        raise PermissionError("AccessDenied: 403\nlots of XML")

    monkeypatch.setattr(type(place._fs), "pipe_file", denied)
    with pytest.raises(StorageError, match="no permission to write memory://") as caught:
        place.write("a", b"")
    assert "\n" not in str(caught.value)


def test_a_bucket_that_does_not_answer_is_not_an_empty_one(place, monkeypatch):
    if place.local is not None:
        pytest.skip("disks answer")
    place.write("a", b"1")
    place.write("b", b"2")
    fetch = type(place._fs).cat_file

    def busy(self, path, *more, **most):
        if path.endswith("/b"):
            raise OSError("503: slow down")
        return fetch(self, path, *more, **most)

    monkeypatch.setattr(type(place._fs), "cat_file", busy)
    with pytest.raises(StorageError, match="503: slow down"):
        place.read_all(["a", "b", "none"])
    assert place.read_all(["a", "none"]) == {"a": b"1"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def elsewhere(place: Place) -> None:
    """Make the present holder one of another machine."""
    number, holder = leases.current(place)
    name = f"lease/{number:06d}.json"
    place.write(name, json.dumps(vars(replace(holder, host="elsewhere"))).encode())


def test_a_lease_is_held_renewed_and_given_back(place):
    clock = Clock()
    with Lease(place, 60, clock) as lease:
        for _ in range(5):
            clock.now += 50
            lease.renew()
            lease.require()
        with pytest.raises(StorageError, match="belongs to another driver"):
            Lease(place, 60, clock).take()
    Lease(place, 60, clock).take()


def test_a_lease_of_a_dead_machine_runs_out(place):
    clock = Clock()
    dead = Lease(place, 60, clock)
    dead.take()
    elsewhere(place)
    clock.now += 59
    with pytest.raises(StorageError, match=r"belongs to another driver: process .* on elsewhere"):
        Lease(place, 60, clock).take()
    clock.now += 2
    Lease(place, 60, clock).take()
    dead.renew()
    with pytest.raises(StorageError, match="taken over by another driver"):
        dead.require()


def test_a_driver_that_slept_too_long_stops(place):
    clock = Clock()
    lease = Lease(place, 60, clock)
    lease.take()
    clock.now += 61
    with pytest.raises(StorageError, match="ran out"):
        lease.require()


def test_a_killed_process_of_this_machine_leaves_no_wait(place):
    import subprocess

    gone = subprocess.Popen(["true"])
    gone.wait()
    Lease(place, 60).take()
    number, holder = leases.current(place)
    content = json.dumps(vars(replace(holder, pid=gone.pid))).encode()
    place.write(f"lease/{number:06d}.json", content)
    assert leases.holder_of(place) is None
    Lease(place, 60).take()


def test_storage_that_cannot_hold_a_lease_is_refused(place, monkeypatch):
    monkeypatch.setattr(leases, "EXCLUSIVE", places.EXCLUSIVE - {"memory", "file"})
    with pytest.raises(StorageError, match="cannot keep two drivers apart"):
        Lease(place).take()


def test_storage_that_only_pretends_is_found_out(place, monkeypatch):
    monkeypatch.setattr(Place, "create", lambda self, name, content: True)
    with pytest.raises(StorageError, match="lets two drivers write one file"):
        Lease(place).take()


def test_a_damaged_lease_is_named(place):
    place.write("lease/000001.json", b"{")
    with pytest.raises(StorageError, match=r"lease/000001\.json is not a lease"):
        Lease(place).take()


@given(st.lists(st.sampled_from(["take", "renew", "sleep", "give back"]), max_size=30))
def test_never_two_holders(actions):
    clock, place = Clock(), Place("memory://leases")
    place.remove("")
    holders: list[Lease] = []
    for action in actions:
        if action == "take":
            lease = Lease(place, 60, clock)
            try:
                lease.take()
                holders.append(lease)
            except StorageError:
                pass
        elif action == "renew" and holders:
            holders[0].renew()
        elif action == "give back" and holders:
            holders.pop(0).__exit__()
        else:
            clock.now += 25
        good = []
        for lease in holders:
            try:
                lease.require()
                good.append(lease)
            except StorageError:
                continue
        assert len(good) <= 1
