"""When requests are sent, and what their times come to, by a clock that the test turns."""

import asyncio
import statistics
from itertools import pairwise

import pytest
import virtual_clock
from hypothesis import given
from hypothesis import strategies as st

from quantkit.bench import figures, load
from quantkit.bench.arrivals import Load, at_rate
from quantkit.bench.record import Target
from quantkit.bench.request import Answer, Failure, Outcome, Request
from quantkit.errors import DataError


class OneAtATime:
    """A server that serves one request after the other, each a first token and then some more."""

    def __init__(self, first_s, gap_s=0.0, slots=1):
        self.first_s, self.gap_s = first_s, gap_s
        self.slots = slots
        self.free = None

    async def ask(self, request):
        self.free = self.free or asyncio.Semaphore(self.slots)
        clock = asyncio.get_running_loop().time
        sent, pieces = clock(), []
        async with self.free:
            for place in range(request.n_output):
                await asyncio.sleep(self.first_s if place == 0 else self.gap_s)
                pieces.append(clock())
        return Answer(sent, tuple(pieces), clock(), len(pieces), 5)


def requests(n, n_output=1):
    return [Request([1] * 5, n_output) for _ in range(n)]


def test_an_open_loop_shows_the_queue_that_a_slow_server_builds():
    # Ten a second to a server that takes 0.2 s each: every request waits 0.1 s longer.
    times = at_rate(False, 10, 20, 0)
    found = virtual_clock.run(load.scheduled(requests(20), times, OneAtATime(0.2).ask))
    assert [o.ttft_s for o in found] == pytest.approx([0.2 + 0.1 * k for k in range(20)])
    assert [o.lag_s for o in found] == pytest.approx([0] * 20)
    # A closed loop with one user sees nothing of it, which is why rates are asked for openly.
    found = virtual_clock.run(load.closed(requests(20), OneAtATime(0.2).ask, 1))
    assert [o.ttft_s for o in found] == pytest.approx([0.2] * 20)


def test_a_pause_of_the_server_is_felt_by_all_that_were_due_meanwhile():
    class Pausing(OneAtATime):
        async def ask(self, request):
            now = asyncio.get_running_loop().time()
            self.first_s = 1.0 if now < 0.05 else 0.01
            return await super().ask(request)

    times = at_rate(False, 10, 11, 0)
    found = virtual_clock.run(load.scheduled(requests(11), times, Pausing(0).ask))
    slow = [o for o in found if o.ttft_s > 0.05]
    assert len(slow) >= 10  # not only the one that met the pause


def test_a_client_that_is_late_does_not_hide_it():
    # The event loop is held for half a second while two requests are due.
    async def busy():
        clock = asyncio.get_running_loop()
        task = asyncio.ensure_future(
            load.scheduled(requests(3), [0.0, 0.1, 0.2], OneAtATime(0.01, slots=9).ask)
        )
        await asyncio.sleep(0.05)
        clock._turned.now += 0.5
        return await task

    found = virtual_clock.run(busy())
    assert found[1].lag_s == pytest.approx(0.45, abs=0.01)
    assert found[1].ttft_s == pytest.approx(0.46, abs=0.01)


def test_a_closed_loop_keeps_its_users_busy_and_no_more():
    under_way, most = 0, 0

    async def ask(request):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        clock = asyncio.get_running_loop().time
        sent = clock()
        await asyncio.sleep(0.1)
        under_way -= 1
        return Answer(sent, (clock(),), clock(), 1)

    found = virtual_clock.run(load.closed(requests(12), ask, 4))
    assert most == 4
    assert max(o.answer.ended for o in found) == pytest.approx(0.3)


def test_latencies_of_a_known_server():
    server = OneAtATime(0.5, gap_s=0.02, slots=8)
    found = virtual_clock.run(load.closed(requests(8, n_output=11), server.ask, 8))
    for outcome in found:
        assert outcome.ttft_s == pytest.approx(0.5)
        assert outcome.tpot_s == pytest.approx(0.02)
        assert outcome.gaps_s == pytest.approx([0.02] * 10)
        assert outcome.e2e_s == pytest.approx(0.7)
    once = figures.repetition(found, [5] * 8)
    assert once.seconds == pytest.approx(0.7)
    assert once.output_tokens_per_s == pytest.approx(88 / 0.7)
    assert once.total_tokens_per_s == pytest.approx(128 / 0.7)


def test_drafted_tokens_that_come_together_share_their_time():
    # 9 tokens in 3 pieces 0.3 s apart: 0.6 s for the 8 tokens after the first.
    outcome = Outcome(0.0, Answer(0.0, (1.0, 1.3, 1.6), 1.6, n_output=9), 9)
    assert outcome.tpot_s == pytest.approx(0.6 / 8)
    assert outcome.gaps_s == pytest.approx([0.3, 0.3])


def test_one_token_has_no_time_per_token():
    assert Outcome(0.0, Answer(0.0, (1.0,), 1.0, n_output=1), 1).tpot_s is None


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=200))
def test_percentiles_are_those_of_the_textbook(values):
    found = figures.distribution(values)
    cuts = statistics.quantiles(sorted(values), n=100, method="inclusive")
    assert found.p50 == pytest.approx(cuts[49])
    assert found.p90 == pytest.approx(cuts[89])
    assert found.p99 == pytest.approx(cuts[98])
    assert found.p50 <= found.p90 <= found.p99 <= found.max
    assert found.n == len(values)


def test_no_values_have_no_distribution():
    assert figures.distribution([]) is None


@given(st.floats(0.1, 1000), st.integers(1, 300), st.integers(0, 9))
def test_arrivals_start_at_once_and_only_go_forward(rate, n, seed):
    for random_gaps in (True, False):
        times = at_rate(random_gaps, rate, n, seed)
        assert len(times) == n
        assert times[0] == 0
        assert times == sorted(times)
        assert times == at_rate(random_gaps, rate, n, seed)


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_people():
    times = at_rate(True, 5, 20_000, 0)
    gaps = [b - a for a, b in pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(0.2, rel=0.05)  # as exponential gaps have
    assert times != at_rate(True, 5, 20_000, 1)


def test_a_trace_is_replayed_from_its_first_request_on():
    some = [Request([1], 1, at=at) for at in (100.0, 100.5, 103.0)]
    assert Load("trace").times(some, 0) == [0.0, 0.5, 3.0]
    with pytest.raises(DataError, match="times for 3 of the 4"):
        Load("trace").times([*some, Request([1], 1)], 0)


def outcome(ttft, gap=0.01, failure=None):
    pieces = () if failure else (ttft, ttft + gap)
    return Outcome(0.0, Answer(0.0, pieces, ttft + gap, 2, 5, failure), 2)


def test_failures_are_counted_by_kind_and_stay_out_of_throughput():
    refused = Failure("connection refused", "nobody there")
    found = [outcome(0.1), outcome(0.1, failure=refused), outcome(0.2), outcome(9, failure=refused)]
    found.append(outcome(1, failure=Failure("HTTP 500", "broken")))
    counts, words = figures.failures(found)
    assert counts == {"connection refused": 2, "HTTP 500": 1}
    assert words["HTTP 500"] == "broken"
    once = figures.repetition(found, [5] * 5)
    assert (once.n_ok, once.n_failed, once.output_tokens) == (2, 3, 4)


def test_a_failed_request_misses_every_target():
    found = [
        outcome(0.1),
        outcome(0.4),
        outcome(0.1, gap=0.5),
        outcome(0, failure=Failure("x", "")),
    ]
    assert figures.attained(found, Target(ttft_s=0.2)) == 0.5
    assert figures.attained(found, Target(ttft_s=1, tpot_s=0.1)) == 0.5
    assert figures.attained(found, Target(ttft_s=1, tpot_s=1)) == 0.75


def test_cost_is_the_price_of_the_hour_over_its_tokens():
    # 1,000 tokens per second are 3.6 million an hour.
    assert figures.cost_per_million(1000, 3.6, 1) == pytest.approx(1.0)
    assert figures.cost_per_million(1000, 3.6, 8) == pytest.approx(8.0)
    assert figures.cost_per_million(0, 3.6, 1) is None
