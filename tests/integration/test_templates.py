"""Chat templates that never end or never stop writing cost one row, not the run."""

import json
import os
import shutil
import time

import pytest

from quantkit import resources
from quantkit.calibration import template
from quantkit.calibration.reading.row import Row
from quantkit.calibration.rendering import Refused, Renderer
from quantkit.cli.main import main
from quantkit.model.tokenizer import load

HOSTILE = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "endless while folding": "{{ (9 ** (9 ** 9)) % 7 }}",
    "huge": "{{ 'a' * 10000000000 }}",
    "huge by doubling": "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "huge by a filter": "{{ 'a' | center(9999999999) }}",
    "long": "{{ 'abc' * 30000000 }}",
    "recurses": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "half a character": "{{ '\\ud800' }}",
    "broken": "{% if %}",
    "reaches out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}
ROW = Row("logs", "chat.jsonl:1", "chat", messages=({"role": "user", "content": "Hello"},))


@pytest.fixture
def tokenizer(monkeypatch):
    monkeypatch.setattr(template, "SECONDS", 1.0)
    return load(resources.DEMO_MODEL)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_an_error_of_the_row(tokenizer, name):
    tokenizer.chat_template = HOSTILE[name]
    renderer = Renderer(tokenizer, 64)
    begun = time.monotonic()
    with pytest.raises(Refused, match="chat template refuses it"):
        renderer.template(ROW.messages, ROW)
    assert time.monotonic() - begun < 5


def test_a_row_that_the_template_chokes_on_does_not_end_the_next(tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0].content == 'bad' %}" + HOSTILE["endless"] + "{% endif %}"
        "{{ messages[0].content }}"
    )
    renderer = Renderer(tokenizer, 64)
    with pytest.raises(Refused, match="longer than 1 s"):
        renderer.template([{"role": "user", "content": "bad"}], ROW)
    for said in ("import sys", "return"):
        ids = renderer.template([{"role": "user", "content": said}], ROW)
        assert tokenizer.decode(ids) == said


def test_the_child_goes_with_its_renderer(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}"
    renderer = Renderer(tokenizer, 64)
    renderer.template(ROW.messages, ROW)
    child = renderer._template._child
    os.kill(child, 0)
    del renderer
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_calibrate_names_the_template(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(template, "SECONDS", 1.0)
    model = tmp_path / "model"
    shutil.copytree(resources.DEMO_MODEL, model)
    (model / "chat_template.jinja").write_text(HOSTILE["endless"])
    row = {"messages": [{"role": "user", "content": "Hello"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row) + "\n")
    out = str(tmp_path / "set")
    arguments = ["calibrate", "build", str(tmp_path / "chat.jsonl"), "--model", str(model)]
    assert main([*arguments, "-o", out, "-q"]) == 3
    assert "chat template" in " ".join(capsys.readouterr().err.split())
