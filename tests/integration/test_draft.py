"""Expected acceptance of drafts, against speculative sampling as it is really done."""

import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transcripts import form, shown

from quantkit.draft import acceptance, speedup
from quantkit.draft.measure import DraftOptions, measure
from quantkit.draft.speedup import Costs
from quantkit.errors import DataError, SourceError
from quantkit.model.source import ModelSource
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe

pytestmark = pytest.mark.usefixtures("demo_is_short")

WORDS = 6


def tables(seed, sharpness=1.5):
    """Two random languages whose next word depends on the last: logits [last, next]."""
    generator = torch.Generator().manual_seed(seed)
    p = sharpness * torch.randn(WORDS, WORDS, generator=generator, dtype=torch.float64)
    q = p + 0.7 * torch.randn(WORDS, WORDS, generator=generator, dtype=torch.float64)
    return p, q


def one_step(p, q, last, k, way, chance):
    """Speculative sampling by the book: propose, accept or reject, and draw the rest."""
    proposals, at = [], last
    for _ in range(k):
        at = draw(q[at], chance) if way == "sampled" else q[at].index(max(q[at]))
        proposals.append(at)
    made, at = [], last
    for token in proposals:
        believed = q[at] if way == "sampled" else [float(n == token) for n in range(WORDS)]
        if chance.random() >= p[at][token] / believed[token]:
            rest = [max(0.0, mine - theirs) for mine, theirs in zip(p[at], believed, strict=True)]
            made.append(draw(rest, chance))
            return made, len(made) - 1
        made.append(token)
        at = token
    made.append(draw(p[at], chance))
    return made, k


def draw(weights, chance):
    return chance.choices(range(WORDS), weights)[0]


def simulated(p, q, k, way, n_steps):
    """In plain numbers: one by one, tensors take thirty times as long."""
    p, q, chance = p.tolist(), q.tolist(), random.Random(1)
    accepted = 0
    last = 0
    for _ in range(n_steps):
        made, n = one_step(p, q, last, k, way, chance)
        accepted += n
        last = made[-1]
    return 1 + accepted / n_steps


def written(p, n_rows, n_tokens):
    """Text of the target's own language."""
    chance = torch.Generator().manual_seed(2)
    last = torch.zeros(n_rows, dtype=torch.long)
    rows = [last]
    for _ in range(n_tokens):
        last = torch.multinomial(p[last], 1, generator=chance)[:, 0]
        rows.append(last)
    return torch.stack(rows, 1)


@pytest.mark.parametrize("way", ["greedy", "sampled"])
@pytest.mark.parametrize("k", [1, 3])
def test_steps_are_those_of_real_speculative_sampling(way, k):
    logits, theirs = tables(seed=k)
    p, q = logits.softmax(-1), theirs.softmax(-1)
    text = written(p, 400, 60)
    before, after = text[:, :-1], text[:, 1:]
    found = getattr(acceptance, way)(logits[before], theirs[before], after)
    expected = acceptance.follow(found.followed, k)
    assert expected.tokens == pytest.approx(simulated(p, q, k, way, 12_000), rel=0.02)
    assert expected.accepted == pytest.approx((expected.tokens - 1) / k)
    assert expected.at == tuple(sorted(expected.at, reverse=True))


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_a_proposal_is_accepted_as_often_as_rejection_sampling_does(seed):
    logits, theirs = tables(seed)
    p, q = logits.softmax(-1), theirs.softmax(-1)
    text = torch.zeros(WORDS, dtype=torch.long)
    by_draw = (q * (p / q).clamp(max=1)).sum(-1)
    by_top = p[torch.arange(WORDS), q.argmax(-1)]
    equal = (p.argmax(-1) == q.argmax(-1)).double()
    assert torch.allclose(acceptance.sampled(logits, theirs, text).taken, by_draw)
    assert torch.allclose(acceptance.greedy(logits, theirs, text).taken, by_top)
    assert torch.equal(acceptance.temperature_zero(logits, theirs, text).taken, equal)


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_what_the_text_tells_is_right_on_average(seed):
    """Over the target's own choice of the next token, `followed` is `taken`."""
    logits, theirs = tables(seed)
    p = logits.softmax(-1)
    every = torch.arange(WORDS).expand(WORDS, WORDS)
    wide, narrow = (t[:, None, :].expand(-1, WORDS, -1) for t in (logits, theirs))
    for way in (acceptance.greedy, acceptance.sampled):
        found = way(wide, narrow, every)
        assert torch.allclose((p * found.followed).sum(-1), found.taken[:, 0])


def test_a_draft_that_is_the_target_is_always_right():
    logits, _ = tables(3)
    text = written(logits.softmax(-1), 4, 40)
    before, after = text[:, :-1], text[:, 1:]
    same = acceptance.sampled(logits[before], logits[before], after)
    assert torch.allclose(same.taken, torch.ones(4, 40, dtype=torch.float64))
    assert acceptance.follow(same.followed, 5).tokens == pytest.approx(6)
    zero = acceptance.temperature_zero(logits[before], logits[before], after)
    assert bool((zero.taken == 1).all())
    # A greedy draft proposes one word where the target wants several.
    top = acceptance.greedy(logits[before], logits[before], after)
    assert torch.allclose(top.taken, logits.softmax(-1).amax(-1)[before])


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.8, 1.0])
def test_even_chances_give_the_geometric_sum(k, chance):
    rows = torch.full((3, 200), chance, dtype=torch.float64)
    steps = acceptance.follow(rows, k)
    assert steps.tokens == pytest.approx(sum(chance**i for i in range(k + 1)))
    assert steps.at == pytest.approx([chance ** (i + 1) for i in range(k)])


def test_runs_of_easy_tokens_are_worth_more_than_their_average():
    mixed = torch.tensor([[1.0, 0.0] * 60], dtype=torch.float64)
    runs = torch.tensor([([1.0] * 10 + [0.0] * 10) * 6], dtype=torch.float64)
    assert mixed.mean() == runs.mean()
    # Every second token: all steps are of two. In runs: three steps of four, then ten of one.
    assert acceptance.follow(mixed, 3).tokens == pytest.approx(2, rel=0.02)
    assert acceptance.follow(runs, 3).tokens < 2


def test_speed_is_tokens_over_bytes():
    gains = speedup.speedups([1.8, 2.4], Costs(speedup.reading(1000), speedup.reading(250)))
    assert gains == pytest.approx([1.8 / 1.25, 2.4 / 1.5])
    assert speedup.best(gains) == 2
    assert speedup.best([0.9, 0.8]) == 0
    dear = speedup.speedups([2.0, 3.0], Costs(lambda n: float(n), speedup.reading(0)))
    assert dear == pytest.approx([1.0, 1.0]), (
        "a target whose passes cost by the token gains nothing"
    )


def test_where_the_cpu_sets_the_pace_a_draft_costs_its_time():
    costs = Costs(lambda n: 1.0, lambda n: 2.0, at_least=2.0)
    alone, more = 2.0, 1.0
    steps = [max(1 + 2 * k, alone + more * k) for k in (1, 2, 3)]
    assert steps == [3, 5, 7]  # the CPU's, then what the passes take
    expected = [tokens * alone / step for tokens, step in zip((1.8, 2.4, 3.0), steps, strict=True)]
    assert speedup.speedups([1.8, 2.4, 3.0], costs) == pytest.approx(expected)


@pytest.fixture(scope="module")
def four_bits(tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    (made,) = quantize(ModelSource.open("demo"), [Recipe.load("rtn-w4a16")], out)
    return made.folder


def test_a_four_bit_copy_drafts_for_its_source(run_cli, four_bits):
    command = ["draft", "demo", four_bits, "--calibration", "python-docs", "--samples", 4]
    result = run_cli([*command, "--prompt", 32, "--tokens", 24, "--json", "-q"])
    assert result.code == 0, result.stderr
    found = json.loads(result.stdout)
    zero, sampled, greedy = (found["ways"][n] for n in ("temperature-0", "sampled", "greedy"))
    assert 0.6 < zero["acceptance"] < 1
    assert 0.7 < sampled["acceptance"] < 1
    assert greedy["acceptance"] < sampled["acceptance"]
    assert len(zero["steps"]) == 8
    assert zero["best_speedup"] > 1
    assert found["draft_bytes"] < 0.6 * found["target_bytes"]


def test_speed_ups_may_be_those_of_a_gpu(run_cli, four_bits):
    command = ["draft", "demo", four_bits, "--calibration", "python-docs", "--samples", 1]
    command += ["--prompt", 32, "--tokens", 12, "-q"]
    found = json.loads(run_cli([*command, "--gpu", "l40s", "--users", 2, "--json"]).stdout)
    assert (found["gpu"], found["users"]) == ("L40S", 2)
    # A model this small is launched longer than it is read, and so is its draft.
    assert found["ways"]["temperature-0"]["best_speedup"] < 1.2
    assert found["ways"]["sampled"]["stderr"] is None
    told = run_cli(command).stdout
    assert "nan" not in told
    (output,) = shown("serving.md", "python-docs --gpu L40S").values()
    assert _rows(output) == _rows(run_cli([*command, "--gpu", "l40s"]).stdout)
    refused = run_cli([*command, "--users", 2])
    assert refused.code == 2
    assert "--gpu" in refused.stderr


def _rows(text):
    """What each row is called, and every line that is not a row."""
    return [line.partition(" #")[0].replace("none", "#") for line in form(text)]


def test_the_source_as_its_own_draft_is_always_right():
    demo = ModelSource.open("demo")
    found = measure(demo, demo, DraftOptions("python-docs", 2, 16, 12), "cpu")
    assert found.ways["temperature-0"].acceptance == 1
    assert found.ways["sampled"].acceptance == pytest.approx(1, abs=1e-5)
    assert found.ways["sampled"].steps[7].tokens == pytest.approx(9, abs=1e-3)
    assert found.ways["sampled"].best_k == 0, "and costs as much as it saves"


def test_the_text_of_the_set_can_be_taken_as_it_is(four_bits):
    from quantkit.export.checkpoint import Checkpoint

    asked = DraftOptions("python-docs", 4, 32, 24, on_text=True)
    found = measure(ModelSource.open("demo"), Checkpoint.open(four_bits), asked, "cpu")
    assert found.on_text
    assert 0.6 < found.ways["sampled"].acceptance < 1


def test_another_vocabulary_is_refused(tiny_model, tmp_path):
    demo, other = ModelSource.open("demo"), tiny_model()
    with pytest.raises(SourceError, match=r"logits for 256 tokens and demo for 4,096"):
        measure(demo, ModelSource.open(str(other)), DraftOptions("python-docs"))
    file = other / "tokenizer.json"
    told = json.loads(file.read_text())
    words = told["model"]["vocab"]
    one, two = list(words)[300:302]
    words[one], words[two] = words[two], words[one]
    file.write_text(json.dumps(told))
    with pytest.raises(SourceError, match="another vocabulary"):
        measure(demo, ModelSource.open(str(other)), DraftOptions("python-docs"))


def test_continuations_must_hold_a_step():
    demo = ModelSource.open("demo")
    with pytest.raises(DataError, match="more than 8 tokens"):
        measure(demo, demo, DraftOptions("python-docs", 2, 16, 8), "cpu")


def test_on_a_gpu_a_draft_is_worth_less_the_more_users_there_are():
    from quantkit.advise import formats, shape, work
    from quantkit.advise.speed import Case
    from quantkit.hardware import gpus

    form, place = formats.of(None), gpus.find("H100 SXM")
    models = [shape.of(size) for size in ("8B", "1B")]
    cases = [Case(model, work.of(model, form), form, place) for model in models]
    tokens = [1 + k * 0.7 for k in range(1, 5)]

    def best(users):
        target, draft = (speedup.on_gpu(case, users, 512) for case in cases)
        return max(speedup.speedups(tokens, Costs(target, draft)))

    assert best(1) > 1.5
    assert best(1) > best(64) > best(1024)
