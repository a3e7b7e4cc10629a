"""Progress without a terminal: what a log holds after short, long, silent and broken stages."""

import threading

import pytest

from quantkit.cli.lines import OFTEN, SELDOM, Lines


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def told():
    return []


@pytest.fixture
def lines(told, clock, monkeypatch):
    # Nobody looks but the test.
    monkeypatch.setattr(threading.Thread, "start", lambda self: None)
    return Lines(told.append, clock)


def pass_time(lines, clock, seconds):
    for _ in range(int(seconds)):
        clock.now += 1
        lines.look()


def test_a_short_stage_is_one_line_when_it_is_over(lines, clock, told):
    lines.start("verify rtn", 3 << 20, "bytes")
    lines.advance(3 << 20)
    clock.now = 0.25
    lines.look()
    lines.finish()
    assert told == ["verify rtn: 3.0 MiB in 0.2 s"]


def test_a_long_stage_says_where_it_is_every_half_minute(lines, clock, told):
    lines.start("calibrate", 24, "blocks")
    pass_time(lines, clock, 20)
    assert told == ["calibrate: 24 blocks"]
    lines.advance(6)
    lines.status("4,000 tokens/s")
    pass_time(lines, clock, 12)
    assert told[1:] == ["calibrate: 6 of 24 blocks, 32 s, about 96 s left; 4,000 tokens/s"]
    lines.advance(18)
    clock.now = 50
    lines.finish()
    assert told[2:] == ["calibrate: 24 blocks in 50 s"]


def test_hours_do_not_fill_a_log_and_are_never_long_silent(lines, clock, told):
    lines.start("calibrate", 80, "blocks")
    silence = longest = 0
    for _ in range(5 * 3600):
        before = len(told)
        pass_time(lines, clock, 1)
        silence = 0 if len(told) > before else silence + 1
        longest = max(longest, silence)
    assert OFTEN < longest <= SELDOM
    assert len(told) < 150


def test_a_note_comes_after_the_beginning_of_its_stage(lines, told):
    lines.start("render", 10, "rows")
    lines.note("two rows are empty")
    assert told == ["render: 10 rows", "two rows are empty"]


def test_a_stage_that_breaks_off_does_not_look_done(lines, clock, told):
    lines.start("calibrate", 24, "blocks")
    lines.advance(5)
    pass_time(lines, clock, 12)
    lines.finish()
    lines.finish()
    assert told == ["calibrate: 24 blocks", "calibrate: ended at 5 of 24 blocks, after 12 s"]


def test_a_stage_that_breaks_off_at_once_leaves_the_word_to_its_error(lines, told):
    lines.start("convert", 24, "layers")
    lines.advance(5)
    lines.finish()
    assert told == []


def test_names_of_layer_and_recipe_are_not_cut(lines, clock, told):
    worst = "worst output error 4.1e-03 (model.layers.31.self_attn.v_proj, awq-gptq-w4a16+kv-fp8)"
    lines.start("calibrate", 32, "blocks")
    pass_time(lines, clock, 3)
    lines.status(f"1,762 tokens/s per block, {worst}")
    pass_time(lines, clock, 30)
    lines.finish()
    assert any(line.endswith(worst) for line in told)


def test_a_wait_has_no_part_that_is_done(lines, clock, told):
    lines.start("vllm starts", 900, "s")
    pass_time(lines, clock, 3)
    lines.status("x" * 200)
    pass_time(lines, clock, 30)
    lines.finish()
    assert told[0] == "vllm starts: at most 15 min"
    assert told[1].startswith("vllm starts: 32 s; xxx")
    assert len(told[1]) < 120
    assert told[2:] == ["vllm starts: 33 s"]


def test_the_next_stage_ends_the_one_before(lines, told):
    lines.start("choose", 1, "sets")
    lines.start("render", 2, "rows")
    assert told == ["choose: 0.0 s"]


def test_somebody_looks_by_himself(told, monkeypatch):
    monkeypatch.setattr("quantkit.cli.lines.SOON", 0.02)
    said = threading.Event()
    lines = Lines(lambda text: (told.append(text), said.set()))
    lines.start("calibrate", 24, "blocks")
    assert said.wait(10)
    assert told == ["calibrate: 24 blocks"]
    lines.finish()
