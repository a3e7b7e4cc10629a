"""The seconds of a recipe are its own: of its work, and its part of what all of them share."""

import time
from threading import Thread

import pytest
from tiny import READABLE

from quantkit.methods.awq import Protecting
from quantkit.model.source import ModelSource
from quantkit.onepass import clock as clocks
from quantkit.onepass.clock import Clock
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import load


@pytest.fixture
def hand(monkeypatch):
    """A clock that stands still unless it is moved."""
    now = [100.0]
    monkeypatch.setattr(clocks.time, "monotonic", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


def test_own_work_and_an_equal_part_of_the_rest(hand):
    clock = Clock()
    clock.n_recipes = 2
    hand(4)
    with clock.of("slow"):
        hand(10)
    with clock.of("quick"):
        hand(1)
    hand(2)
    assert clock.seconds_of("slow") == 13
    assert clock.seconds_of("quick") == 4
    assert clock.seconds == 17


def test_threads_side_by_side_count_a_part_each():
    clock = Clock()
    clock.n_recipes = 10**9

    def work():
        with clock.of("one", 0.5):
            time.sleep(0.2)

    threads = [Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.seconds_of("other") < 0.01
    assert 0.19 < clock.seconds_of("one") <= clock.seconds


def test_seconds_of_a_run_add_up_and_the_slow_recipe_has_them(tiny_model, tmp_path, monkeypatch):
    """A recipe that is held up has the time, not those that run beside it."""
    usual = Protecting.scale

    def slowly(*arguments, **options):
        time.sleep(0.25)
        return usual(*arguments, **options)

    monkeypatch.setattr(Protecting, "scale", slowly)
    text = tmp_path / "text.txt"
    text.write_text("Every block is finished, or it is not. " * 200)
    names = ["awq-w4a16", "int8-w8a8", "rtn-w8a16", "gguf-q8_0"]
    source = ModelSource.open(str(tiny_model(**READABLE)))
    started = time.monotonic()
    made = quantize(
        source,
        [load(name) for name in names],
        tmp_path / "out",
        "cpu",
        calibration=CalibrationChoice(str(text), 4, 64),
    )
    whole = time.monotonic() - started
    took = {checkpoint.label: checkpoint.manifest.seconds for checkpoint in made}
    assert 0.5 * whole < sum(took.values()) <= whole
    assert all(took["awq-w4a16"] > 1 + seconds for n, seconds in took.items() if n != "awq-w4a16")
