"""A line between processes, here between threads: who is gone, and why, is known at once."""

import threading
import time

import pytest

from quantkit.errors import MethodError, RankLost
from quantkit.onepass.lifeline import Lifeline


class Store(dict):
    """What ranks leave each other, in one process."""

    def set(self, key, value):
        self[key] = value.encode()

    def check(self, keys):
        return all(key in self for key in keys)


@pytest.fixture
def lines():
    """The ends of a line of three ranks."""
    store, found = Store(), {}

    def open_line(rank):
        found[rank] = Lifeline.open(rank, 3, store, "127.0.0.1")

    threads = [threading.Thread(target=open_line, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    yield [found[rank] for rank in range(3)]
    for line in found.values():
        line.close()


def die(line):
    """What the system does for a process that was killed."""
    import socket

    line.lost = "dead"  # its threads would be gone with it, and pass nothing on
    for connection in line._lines.values():
        connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("victim", [1, 2])
def test_a_death_is_known_to_all(lines, victim):
    die(lines[victim])
    for rank in {0, 1, 2} - {victim}:
        said = lines[rank].news(5)
        assert said.startswith(f"rank {victim} ended early")
        with pytest.raises(RankLost, match="run the same command again"):
            lines[rank].check()
        # The first says it for all.
        assert lines[rank].mark_reported(RankLost(said)).is_reported == (rank != 0)


def test_when_the_first_dies_everybody_says_so(lines):
    die(lines[0])
    for line in lines[1:]:
        assert line.news(5).startswith("rank 0 ended early")
        assert not line.mark_reported(RankLost("x")).is_reported


def test_a_failure_is_told_in_its_own_words(lines):
    lines[2].fail("this tensor\nis no good")
    assert [line.news(5) for line in lines[:2]] == ["rank 2: this tensor is no good"] * 2
    assert lines[2].mark_reported(MethodError("x")).is_reported


def test_one_that_is_done_may_leave(lines):
    lines[1].done()
    die(lines[1])
    assert lines[0].news(0.2) is None
    lines[0].check()
    lines[2].check()


def test_waiting_ends_with_what_is_waited_for_with_bad_news_or_in_time(lines):
    started = time.monotonic()
    lines[0].wait(lambda: time.monotonic() > started + 0.05, 5, "")
    with pytest.raises(RankLost, match="rank 0 waited 0 minutes for the others to sum"):
        lines[0].wait(lambda: False, 0.1, "to sum")
    threading.Timer(0.1, die, [lines[1]]).start()
    with pytest.raises(RankLost, match="rank 1 ended"):
        lines[2].wait(lambda: False, 10, "to sum")


def test_strangers_at_the_port_are_not_let_in():
    import socket

    store, found = Store(), []
    first = threading.Thread(target=lambda: found.append(Lifeline.open(0, 2, store, "")))
    first.start()
    while not store:
        time.sleep(0.01)
    ((port, _),) = [value.decode().split() for value in store.values()]
    with (
        socket.create_connection(("127.0.0.1", int(port))) as stranger,
        socket.create_connection(("127.0.0.1", int(port))) as endless,
    ):
        stranger.sendall(b"guess 1\n")
        endless.sendall(b"x" * 5000)  # and never a line's end
        other = Lifeline.open(1, 2, store, "127.0.0.1")
        first.join(10)
        assert found[0].news(0.2) is None
        die(other)
        assert found[0].news(5).startswith("rank 1 ended")


def test_one_alone_has_no_line():
    line = Lifeline.open(0, 1, Store(), "nowhere")
    line.done()
    line.fail("nobody hears it")
    line.check()
    line.close()
