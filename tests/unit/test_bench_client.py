"""The client against a real server on a real socket that misbehaves as scripted."""

import asyncio

import pytest
from fake_openai import FakeServer, Script, running
from processes import free_port

from quantkit.bench import engines
from quantkit.bench.arrivals import Load
from quantkit.bench.client import Client
from quantkit.bench.connection import Address
from quantkit.bench.measure import Plan, measure
from quantkit.bench.record import Target
from quantkit.bench.request import Request
from quantkit.bench.workloads import Fixed
from quantkit.errors import EngineError
from quantkit.progress import Silent


def ask(server, timeout_s=20.0, n_output=4):
    with running(server) as url:
        client = Client(Address.of(url), "fake", timeout_s)
        return asyncio.run(client.ask(Request([1, 2, 3], n_output)))


def measured(server, plan):
    with running(server) as url:
        connected = engines.connect(url)
        return [row for row, _ in measure(connected, plan, "model", None, {}, Silent())]


def test_a_stream_is_timed_piece_by_piece():
    answer = ask(FakeServer(lambda number, body: Script(first_s=0.2, gap_s=0.05)))
    assert answer.failure is None
    assert (answer.n_output, answer.n_prompt, len(answer.pieces)) == (4, 3, 4)
    # A loaded machine makes things later, never earlier.
    assert 0.19 < answer.pieces[0] - answer.sent < 5
    assert 0.14 < answer.pieces[-1] - answer.pieces[0] < 5


def test_tokens_are_counted_as_the_server_counts_them():
    server = FakeServer(lambda number, body: Script(pieces=2, tokens_per_piece=3))
    answer = ask(server, n_output=6)
    assert (len(answer.pieces), answer.n_output) == (2, 6)


def test_a_last_token_without_text_counts_and_is_timed():
    def mute(number, body):
        return Script(gap_s=0.2, mute_end=True)

    answer = ask(FakeServer(mute), n_output=1)
    assert (answer.failure, answer.n_output, len(answer.pieces)) == (None, 1, 1)
    answer = ask(FakeServer(mute), n_output=2)
    assert len(answer.pieces) == 2
    assert answer.pieces[1] - answer.pieces[0] > 0.19


def test_requests_ask_for_exact_lengths_and_figures():
    server = FakeServer()
    ask(server, n_output=3)
    (body,) = server.bodies
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert (body["prompt"], body["max_tokens"], body["temperature"]) == ([1, 2, 3], 3, 0)


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (Script(status=500), "HTTP 500", "scripted trouble"),
        (Script(status=429), "HTTP 429", "scripted trouble"),
        (Script(cut_after=2), "stream cut", "middle"),
        (Script(cut_after=0), "stream cut", "middle"),
        (Script(model="another"), "wrong model", "another answered instead of fake"),
        (Script(error_after=2), "error in the stream", "the engine fell over"),
        (Script(garbage=True), "not an answer", "{half"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_failure_is_told_by_its_kind(script, kind, words):
    answer = ask(FakeServer(lambda number, body: script))
    assert answer.failure.kind == kind
    assert words in answer.failure.words


def test_a_server_that_hangs_is_given_up():
    server = FakeServer(lambda number, body: Script(first_s=30))
    answer = ask(server, timeout_s=0.3)
    assert answer.failure.kind == "timed out"


def test_a_stream_that_stops_in_the_middle_without_closing_is_given_up():
    server = FakeServer(lambda number, body: Script(gap_s=30))
    answer = ask(server, timeout_s=0.5)
    assert answer.failure.kind == "timed out"
    assert len(answer.pieces) == 1


def test_nobody_there():
    client = Client(Address.of(f"http://127.0.0.1:{free_port()}"), "fake")
    answer = asyncio.run(client.ask(Request([1], 1)))
    assert answer.failure.kind == "connection refused"
    with pytest.raises(EngineError, match="cannot be reached"):
        engines.connect(f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://a", "http://", "http://a:port", "http://[::1"]
)
def test_what_is_no_address(url):
    with pytest.raises(EngineError, match="not a server address"):
        Address.of(url)


def test_a_name_that_no_host_can_have():
    with pytest.raises(EngineError, match="cannot be reached"):
        engines.connect(f"http://{70 * 'a'}.example")


def test_addresses_with_and_without_their_ending():
    for url in ("http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"):
        assert (Address.of(url).host, Address.of(url).port, Address.of(url).path) == ("a", 1, "")
    assert Address.of("https://a/gate/v1").path == "/gate"
    assert Address.of("https://a").port == 443


def test_a_server_of_another_model_is_refused():
    with (
        running(FakeServer(model="other")) as url,
        pytest.raises(EngineError, match="serves other"),
    ):
        engines.connect(url, "mine")


def test_failures_under_load_are_counted_and_not_averaged_away():
    scripts = {1: Script(status=500), 4: Script(cut_after=1), 5: Script(status=500)}
    server = FakeServer(lambda number, body: scripts.get(number, Script()))
    plan = Plan(
        [Fixed(5, 3)],
        [Load("closed", concurrency=2)],
        n_requests=10,
        n_warmup=0,
        target=Target(ttft_s=60),
        gpu_hour=1.0,
    )
    (row,) = measured(server, plan)
    assert row.failures == {"HTTP 500": 2, "stream cut": 1}
    assert row.failure_examples["HTTP 500"] == "scripted trouble"
    assert (row.n_requests, row.n_ok, row.n_failed) == (10, 7, 3)
    assert row.ttft_s.n == row.e2e_s.n == 7
    assert row.attained == pytest.approx(0.7)
    assert row.meets is False
    (once,) = row.repetitions
    assert once.output_tokens == 21
    assert once.prompt_tokens == 35
    price = 1e6 / 3600 / row.output_tokens_per_s.mean
    assert row.cost_per_million_output == pytest.approx(price)


def test_a_server_with_one_place_shows_its_queue_in_an_open_loop():
    # Twelve at once to a server that takes 50 ms each: the last waits for all the others.
    server = FakeServer(lambda number, body: Script(first_s=0.05), slots=1)
    plan = Plan([Fixed(5, 1)], [Load("constant", rate=1000)], n_requests=12, n_warmup=0)
    (row,) = measured(server, plan)
    assert row.n_ok == 12
    assert row.ttft_s.max > 0.5
    assert row.ttft_s.p50 > 0.25


def test_warm_up_is_sent_and_not_measured():
    server = FakeServer()
    plan = Plan([Fixed(5, 2)], [Load("closed", concurrency=3)], n_requests=4, repetitions=2)
    (row,) = measured(server, plan)
    assert len(server.bodies) == 3 + 8
    assert row.n_requests == 8
    assert [one.n_ok for one in row.repetitions] == [4, 4]
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts)  # nothing for a prefix cache to find


def test_no_load_meets_the_prompts_of_another():
    server = FakeServer()
    plan = Plan(
        [Fixed(5, 2), Fixed(5, 3)],
        [Load("closed", concurrency=1), Load("closed", concurrency=2), Load("poisson", rate=99)],
        n_requests=4,
    )
    measured(server, plan)
    prompts = [tuple(body["prompt"]) for body in server.bodies]
    assert len(set(prompts)) == len(prompts)
    again = FakeServer()
    measured(again, plan)
    assert sorted(prompts) == sorted(tuple(body["prompt"]) for body in again.bodies)


def test_repetitions_over_the_same_prompts_have_a_cache_of_their_own():
    server = FakeServer()
    plan = Plan([Fixed(5, 2)], [Load("closed", concurrency=1)], n_requests=1, repetitions=3)
    measured(server, plan)
    assert len({body["cache_salt"] for body in server.bodies}) == 4  # and the warm-up


def test_a_warm_up_that_fails_altogether_measures_nothing():
    server = FakeServer(lambda number, body: Script(status=404))
    plan = Plan([Fixed(5, 2)], [Load("closed", concurrency=2)])
    with pytest.raises(EngineError, match=r"all 2 requests of the warm-up failed .*HTTP 404"):
        measured(server, plan)


def test_answers_that_end_too_soon_are_counted():
    server = FakeServer(lambda number, body: Script(pieces=2))
    plan = Plan([Fixed(5, 6)], [Load("closed", concurrency=1)], n_requests=3, n_warmup=0)
    (row,) = measured(server, plan)
    assert (row.n_ok, row.n_short) == (3, 3)


def test_metrics_of_the_engine_come_along():
    def page(n_requests):
        return (
            f"vllm:kv_cache_usage_perc 0.25\nvllm:prefix_cache_queries_total {10 * n_requests}\n"
            f"vllm:prefix_cache_hits_total {4 * n_requests}\nvllm:num_requests_waiting 3\n"
        )

    plan = Plan([Fixed(5, 1)], [Load("closed", concurrency=1)], n_requests=4)
    (row,) = measured(FakeServer(metrics=page), plan)
    assert row.metrics.prefix_hit_rate == pytest.approx(0.4)
    assert row.metrics.kv_cache_peak == 0.25
    assert row.metrics.queue_peak == 3
