"""Sentences on a terminal: nothing is lost, nothing is too long, and commands stay whole."""

import io

from hypothesis import given
from hypothesis import strategies as st

from quantkit.cli.wrapping import columns_of, fitted, wrapped

WORDS = st.text("abcdefgh-./_", min_size=1, max_size=18)


@given(st.lists(WORDS, min_size=1, max_size=40), st.integers(40, 120), st.integers(0, 6))
def test_wrapping_keeps_every_word_and_the_width(words, columns, lead):
    text = " " * lead + " ".join(words)
    lines = wrapped(text, columns).split("\n")
    assert " ".join(lines).split() == words
    assert all(len(line) <= columns for line in lines)
    assert all(line.startswith(" " * (lead + 2)) for line in lines[1:])
    assert len(lines[0]) - len(lines[0].lstrip()) == lead


def test_paths_and_quoted_commands_are_never_parted():
    path = "/data/" + "very-long-folder/" * 8 + "model.safetensors"
    command = "`quantkit calibrate build general --model MODEL -o set`"
    shown = wrapped(f"there is no file {path}; to make one, run {command} and try again", 60)
    assert path in shown
    assert command in shown


def test_a_line_that_is_a_command_is_left_alone():
    command = "  quantkit quantize meta-llama/Llama-3.1-8B -r awq-gptq-w4a16 --calibration general"
    assert wrapped(f"do this:\n{command}", 40).split("\n")[1] == command
    assert wrapped("vllm is a program, and what is said of it is a sentence", 40).count("\n") == 1


def test_a_quoted_piece_that_fits_no_line_is_parted_like_others():
    lines = wrapped(f"run `{'word ' * 30}`", 40).split("\n")
    assert max(map(len, lines)) <= 40


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        raise OSError


def test_only_a_terminal_has_columns(monkeypatch):
    text = "word " * 40
    monkeypatch.setenv("COLUMNS", "50")
    assert columns_of(io.StringIO()) is None
    assert fitted(text, io.StringIO()) == text
    assert columns_of(Terminal()) == 50
    assert max(map(len, fitted(text, Terminal()).split("\n"))) <= 50
    monkeypatch.delenv("COLUMNS")
    assert columns_of(Terminal()) is None
