"""Jobs in the background: how many may wait, in which order they run, and how they fail."""

import threading

import pytest

from quantkit.onepass.delivery import SMALL, Delivery


@pytest.fixture
def gate():
    """Jobs that wait for it stop the queue."""
    made = threading.Event()
    yield made
    made.set()


def waits(delivery, done, n_bytes):
    """Whether submitting a job blocks, until the queue moves."""
    thread = threading.Thread(target=delivery.submit, args=(lambda: done.append("late"), n_bytes))
    thread.start()
    thread.join(0.2)
    return thread.is_alive(), thread


def test_small_jobs_do_not_wait_for_each_other_and_run_in_order(gate):
    done = []
    with Delivery() as delivery:
        delivery.submit(gate.wait, 0)
        for place in range(9):
            delivery.submit(lambda place=place: done.append(place), SMALL // 20)
        assert done == []
        gate.set()
    assert done == list(range(9))


@pytest.mark.parametrize(("n_bytes", "blocks"), [(SMALL, True), (SMALL // 3 + 1, True), (9, False)])
def test_large_ones_wait_for_the_first_of_two(gate, n_bytes, blocks):
    done = []
    with Delivery() as delivery:
        delivery.submit(gate.wait, n_bytes)
        delivery.submit(lambda: done.append("early"), n_bytes)
        blocked, thread = waits(delivery, done, n_bytes)
        assert blocked == blocks
        gate.set()
        thread.join()
    assert done == ["early", "late"]


def test_nothing_runs_after_a_failure_which_the_next_call_raises():
    done = []

    def fail():
        raise OSError("full")

    delivery = Delivery()
    delivery.submit(fail, 0)
    assert delivery._waiting[0][0].exception() is not None  # waits for it
    with pytest.raises(OSError, match="full"):
        delivery.submit(lambda: done.append(1), 0)
    with delivery:
        delivery.submit(lambda: done.append(2), 0)
    assert done == []
