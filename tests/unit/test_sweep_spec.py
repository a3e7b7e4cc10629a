"""Sweep files: what they may say, and how everything wrong with one is told at once."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import SweepError
from quantkit.scoring.suites import DEMO
from quantkit.sweep import spec
from quantkit.sweep.spec import cycle

MINIMAL = "models: [demo]\nrecipes: [rtn-w4a16]\n"


@pytest.fixture
def refused(tmp_path):
    def read(text: str) -> str:
        path = tmp_path / "sweep.yaml"
        path.write_text(text)
        with pytest.raises(SweepError) as caught:
            spec.read(path)
        return str(caught.value)

    return read


def test_names_alone_are_enough(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(MINIMAL + "calibration: [python-docs, {set: own/chats.yaml, samples: 8}]\n")
    found = spec.read(path)
    assert [m.label for m in found.models] == ["demo"]
    assert [c.label for c in found.calibration] == ["python-docs", "chats-8"]
    # The demo has tasks that need no hub; other models get those that everybody knows.
    assert (found.attempts, found.tasks, found.policy) == (3, list(DEMO), None)
    path.write_text(MINIMAL.replace("demo", "org/model"))
    assert spec.read(path).tasks == ["wikitext", "mmlu"]
    assert found.of("score").cpus == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("recipe: [a]", "recipe: unknown key; did you mean recipes?"),
        ("models: []", "models: must be a list of at least one, not []"),
        ("models: [3]", "models #1: must be a name, or lines such as `key: value`, not 3"),
        ("models: [{model: demo, name: a/b}]", "models #1.name: must be a name of letters"),
        ("models: [{model: demo, revison: x}]", "unknown key; did you mean revision?"),
        (
            "resources: {quantise: {gpus: 1}}",
            "resources.quantise: must be calibrate, quantize,",
        ),
        ("resources: {quantize: {gpu: 1}}", "resources.quantize.gpu: unknown key; did you mean"),
        ("resources: {quantize: {memory: lots}}", "'lots' is not an amount of memory"),
        ("resources: {quantize: {memory: 8}}", "8 bytes are too little"),
        ("resources: {quantize: {cpus: 0}}", "resources.quantize.cpus: must be above 0, not 0"),
        ("resources: {quantize: {gpus: -1}}", "resources.quantize.gpus: must be 0 or more, not -1"),
        ("resources: {verify: {gpus: 1}}", "resources.verify: gpus: 1, but verify uses none"),
        ("resources: {score: {gpus: 4}}", "scoring one model uses one GPU"),
        ("device: cpu\nresources: {score: {gpus: 1}}", "gpus: 1 contradicts device: cpu"),
        ("device: cuda\nresources: {score: {gpus: 0}}", "gpus: 0 contradicts device: cuda"),
        ("device: tpu", "device: must be auto, cpu or cuda, not 'tpu'"),
        ("attempts: 0", "attempts: must be 1 or more, not 0"),
        ("tasks: [a, a]", "tasks: a is listed twice"),
        ("models: [x/demo, demo]", "models: demo is listed twice; give one of them a `name`"),
        ("models: [{model: a, after: [b]}, c]", "a comes after b, which is not a model here"),
        ("models: [{model: a, after: [a]}]", "a comes after a: none of them can start"),
        (
            "models: [{model: a, after: [b]}, {model: b, after: [c]}, {model: c, after: [a]}]",
            "a comes after b comes after c comes after a: none of them can start",
        ),
    ],
    ids=lambda value: value.split(":")[0],
)
def test_what_is_wrong_is_told(refused, line, words):
    key = line.split(":")[0]
    kept = "".join(row + "\n" for row in MINIMAL.splitlines() if not row.startswith(f"{key}:"))
    message = refused(kept + line)
    assert "is not a valid sweep:" in message
    assert words in message


def test_all_problems_come_at_once(refused):
    message = refused("modls: [demo]\nrecipes: []\ndevice: tpu\n")
    assert message.count("\n  ") == 4
    for key in ("modls", "models", "recipes", "device"):
        assert f"  {key}: " in message


@pytest.mark.parametrize("text", ["[", "a: b: c", "&a [*a"])
def test_bad_yaml(refused, text):
    assert "is not valid YAML" in refused(text)


@pytest.mark.parametrize("text", ["", "- demo", "demo"])
def test_no_sweep_at_all(refused, text):
    assert "is not a sweep" in refused(text)


def test_a_file_that_holds_itself(refused):
    assert "refers to itself" in refused("models: &m [*m]\nrecipes: [a]\n")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SweepError, match=r"cannot read .*No such file"):
        spec.read(tmp_path / "none.yaml")


@given(st.dictionaries(st.integers(0, 8), st.lists(st.integers(0, 8), max_size=4), max_size=9))
def test_a_circle_is_found_exactly_when_there_is_one(edges):
    waits = {str(k): [str(v) for v in vs] for k, vs in edges.items()}
    found = cycle(waits)
    left = dict(waits)  # a graph without circles can be taken apart from its ends
    while ends := [n for n, vs in left.items() if not any(v in left for v in vs)]:
        left = {n: vs for n, vs in left.items() if n not in ends}
    assert bool(found) == bool(left)
    if found:
        assert found[0] == found[-1]
        assert all(b in waits[a] for a, b in itertools.pairwise(found))


@pytest.mark.parametrize(
    ("text", "size"), [("64GiB", 64 << 30), ("1.5 GB", 1_500_000_000), ("4194304b", 4 << 20)]
)
def test_memory_in_words(text, size):
    assert spec.Resources(memory=text).memory == size
