"""The tokenizer of a model folder."""

import logging

import pytest

from quantkit.errors import SourceError
from quantkit.model.tokenizer import load
from quantkit.resources import DEMO_MODEL


def test_long_texts_are_nothing_to_warn_of(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tokenizer = load(DEMO_MODEL)
    tokenizer.model_max_length = 4
    with caplog.at_level(logging.WARNING):
        assert len(tokenizer.encode("def main(): pass\n" * 100)) > 4
    assert caplog.text == ""


def test_a_folder_without_one_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(SourceError, match=f"cannot load the tokenizer of {tmp_path}: "):
        load(tmp_path)
