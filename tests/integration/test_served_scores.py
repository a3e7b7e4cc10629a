"""Scores through a server: held against the folder, and kept only while the same engine runs."""

import json
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from fake_completions import MAX_LENGTH, Fake, end, serve

from quantkit.errors import ScoreError
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.scoring import endpoint, following, harness, loading, server_identity
from quantkit.scoring.options import ScoreOptions

ASKED = ScoreOptions(("python_docs",), samples={"python_docs": [1]}, max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def demo(short_demo):
    model = loading.load(short_demo, torch.device("cpu"))
    return model, load_tokenizer(short_demo.folder)


@pytest.fixture(scope="module")
def _fake(demo, short_demo):
    server = Fake(*demo)
    server.source = short_demo
    serve(server)
    yield server
    end(server)


@pytest.fixture
def fake(_fake, monkeypatch):
    _fake.reset()
    monkeypatch.setattr(endpoint, "BACKOFF_S", 0.01)
    monkeypatch.setattr(server_identity, "N_PROMPTS", (8, 16))  # enough, and sooner
    return _fake


def scored(fake, cache, target=None):
    asked = replace(ASKED, cache=cache, server=fake.url)
    return harness.evaluate(target or fake.source, asked, "cpu")


def n_scored(fake):
    """Windows that the fake was asked for, beside those that tell which model it serves."""
    lengths = [len(p) for b in fake.bodies if not isinstance(b["prompt"], str) for p in b["prompt"]]
    return len(lengths)


def test_a_scorecard_through_a_server(fake, tmp_path):
    fake.start()
    here = harness.evaluate(fake.source, replace(ASKED, cache=tmp_path), "cpu")
    there = scored(fake, tmp_path)
    ours, theirs = (e.card.scores["python_docs/perplexity"] for e in (here, there))
    assert theirs.value == pytest.approx(ours.value, rel=1e-5)
    assert theirs.n == ours.n
    assert there.card.device == f"served at {fake.url}"
    assert [o.weight for o in there.outcomes] == [o.weight for o in here.outcomes]
    assert there.card.served.agreement.mean < 1e-4
    assert (there.card.served.version, there.card.served.started) == ("1.0", 1000.25)
    assert there.card.cached == {}
    n_before = len(fake.bodies)
    again = scored(fake, tmp_path)
    assert again.card.scores == there.card.scores
    assert len(fake.bodies) <= n_before + 1  # the probe of its tokenizer alone
    assert again.card.cached == {"python_docs": 1.0}
    assert again.card.served == there.card.served


@pytest.mark.parametrize(
    "changed",
    [
        {"seconds": 2000.5},
        {"version": "1.1"},
        {"cache_dtype": "fp8"},
    ],
)
def test_a_server_that_is_another_one_now_is_asked_again(fake, tmp_path, changed):
    fake.start()
    scored(fake, tmp_path)
    n_first = n_scored(fake)
    fake.bodies.clear()
    fake.start(**changed)
    again = scored(fake, tmp_path)
    assert n_scored(fake) == n_first
    assert again.card.cached == {}


def test_another_context_or_root_is_another_server(fake, tmp_path):
    fake.start()
    scored(fake, tmp_path)
    fake.cards = [{"id": "demo", "max_model_len": MAX_LENGTH + 8, "root": "/models/other"}]
    assert scored(fake, tmp_path).card.cached == {}


def test_answers_of_a_server_that_hides_its_start_are_not_kept(fake, tmp_path):
    """`created` says nothing: vLLM fills in the time of the request."""
    fake.cards[0]["created"] = 1
    for _ in range(2):
        fake.bodies.clear()
        assert scored(fake, tmp_path).card.cached == {}
        assert n_scored(fake) > server_identity.N_PROMPTS[0]
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_is_restarted_while_it_is_scored_is_refused(fake, tmp_path):
    fake.start()
    scored(fake, tmp_path / "once")  # so that the next is not a refusal of another kind

    def restart(answer):
        fake.start(seconds=3000.0)
        return answer

    fake.faults = [None, None, restart]
    with pytest.raises(ScoreError, match="was restarted while it was scored; score it again"):
        scored(fake, tmp_path / "twice")


@contextmanager
def changed_weight(model, factor):
    weight = model.get_submodule("model.layers.1.mlp.down_proj").weight
    before = weight.data.clone()
    weight.data *= factor
    try:
        yield
    finally:
        weight.data = before


def test_another_model_under_the_same_name_is_refused(fake, tmp_path):
    """Same architecture and tokenizer, one layer off by a third: only the numbers differ."""
    fake.start()
    with changed_weight(fake.model, 1.3):
        message = "serves 'demo', which is not the model in .*: log-probabilities of prompts differ"
        with pytest.raises(ScoreError, match=message):
            scored(fake, tmp_path)
    assert not list(tmp_path.glob("*.held.json"))
    assert scored(fake, tmp_path).card.cached == {}, "nothing was kept of the other"


@pytest.fixture(scope="module")
def quantized(short_demo, tmp_path_factory):
    (made,) = quantize(short_demo, [Recipe.load("rtn-w8a16")], tmp_path_factory.mktemp("made"))
    return made


def test_a_server_of_the_source_is_not_scored_as_the_checkpoint(fake, quantized, tmp_path):
    """Which it calls itself, and whose rounding would explain the difference."""
    fake.start()
    fake.cards[0] |= {"id": quantized.label, "root": str(quantized.folder)}
    with pytest.raises(ScoreError, match="are those of the unquantised source"):
        scored(fake, tmp_path, quantized)


def test_a_server_of_the_checkpoint_is_scored_whatever_it_calls_itself(
    fake, quantized, tmp_path, monkeypatch
):
    fake.start()
    monkeypatch.setattr(fake, "model", loading.load(quantized, torch.device("cpu")))
    card = scored(fake, tmp_path, quantized).card
    assert card.served.attribution.nearer == "checkpoint"
    assert card.served.attribution.power > 0.99


def test_the_table_and_the_file_say_what_came_from_a_cache(fake, tmp_path, run_cli):
    fake.start()
    command = ["score", fake.source.folder, "--tasks", "python_docs", "--limit", 1]
    command += [
        "--max-length",
        MAX_LENGTH,
        "--server",
        fake.url,
        "--cache",
        tmp_path / "cache",
        "-o",
        tmp_path / "out",
        "-q",
    ]
    first, second = run_cli(command), run_cli(command)
    assert first.code == second.code == 0, second.stderr
    assert "cached" not in first.stdout
    assert "cached" in second.stdout
    assert last_cells(second.stdout) == {"all"}
    told = json.loads((tmp_path / "out" / "source.json").read_text())
    assert told["cached"] == {"python_docs": 1.0}
    command[command.index("--limit") + 1] = 2
    (share,) = last_cells(run_cli(command).stdout)
    assert 0 < float(share.removesuffix("%")) < 100


def last_cells(table):
    """The last column of all rows of scores."""
    return {row.split()[-1] for row in table.splitlines() if "python_docs/" in row}


def test_scores_here_say_what_came_from_a_cache(short_demo, tmp_path):
    asked = replace(ASKED, cache=tmp_path)
    cards = [harness.evaluate(short_demo, asked, "cpu").card for _ in range(2)]
    assert [card.cached for card in cards] == [{}, {"python_docs": 1.0}]


def test_answers_to_a_team_s_prompts_are_judged_through_a_server(fake, tmp_path):
    fake.start()
    rows = [{"prompt": "import", "regex": "."}, {"prompt": "class", "reference": "no such answer"}]
    prompts = tmp_path / "traffic.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = ScoreOptions((), max_length=MAX_LENGTH, cache=tmp_path / "c", prompts=prompts)
    short = replace(following.of_file(prompts), max_new=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following, "of_file", lambda path, judge=None: short)
        there = harness.evaluate(fake.source, replace(how, server=fake.url), "cpu").card.scores
        here = harness.evaluate(fake.source, how, "cpu").card.scores
    judged = {name: score for name, score in here.items() if name in there}
    assert there == judged
    assert [there[name].value for name in sorted(there)] == [0.0, 1.0]
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"prompt": "import"}) + "\n")
    with pytest.raises(ScoreError, match="rows a judge"):
        harness.evaluate(fake.source, replace(how, server=fake.url, prompts=plain), "cpu")
