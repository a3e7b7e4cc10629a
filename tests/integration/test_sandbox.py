"""Code that a model wrote: what it cannot do, and tasks that run it."""

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import pytest

from quantkit.errors import ScoreError
from quantkit.model.source import ModelSource
from quantkit.scoring import sandbox
from quantkit.scoring.harness import evaluate
from quantkit.scoring.options import ScoreOptions

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the box is made of Linux's walls")


@pytest.fixture(scope="module", autouse=True)
def _box():
    sandbox.check()


def test_a_sound_program_passes():
    program = """
import collections, heapq, itertools, math, re, threading
def area(r): return math.pi * r * r
thread = threading.Thread(target=area, args=(1,))
thread.start(); thread.join()
with open("notes.txt", "w") as file:
    file.write("in its own folder")
import os
assert os.listdir() == ["notes.txt"]
assert round(area(2), 3) == 12.566
"""
    assert sandbox.run(program) == sandbox.Verdict(True)


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("def f(:", "SyntaxError"),
        ("import os; os._exit(0)", "ended itself"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import ctypes; ctypes.string_at(0)", "ended itself, or was killed"),
        ("x = bytearray(3 << 30)", "MemoryError"),
        ("def f(): f()\nf()", "RecursionError"),
    ],
)
def test_programs_that_do_not_pass(program, why):
    found = sandbox.run(program)
    assert not found.passed
    assert why in found.why


ESCAPES = {
    "socket": "import socket; socket.socket()",
    "unix socket": "import socket; socket.socket(socket.AF_UNIX)",
    "pair": "import socket; socket.socketpair()",
    "raw call": "import ctypes; assert ctypes.CDLL(None).socket(2, 1, 0) >= 0",
    "fork": "import os; os.fork()",
    "shell": "import os; assert os.system('true') == 0",
    "child": "import subprocess; subprocess.run(['/bin/true'], check=True)",
    "replaced": "import os; os.execv('/bin/true', ['true'])",
    "kill": "import os; os.kill(os.getppid(), 9)",
    "kill all": "import os; os.kill(-1, 9)",
    "read": "open('/etc/passwd').read()",
    "read other": "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "read own": "open('/proc/self/maps').read()",
    "list": "import os; os.listdir('/home')",
    "write": "open('/tmp/quantkit-escape', 'w')",
    "link out": "import os; os.symlink('/etc/passwd', 'x'); open('x').read()",
    "climb": "import os; os.chdir('..'); open('quantkit-escape', 'w')",
    "mode": "import os; os.chmod('/tmp', 0)",
    "owner": "import os; os.chown('.', 0, 0)",
    "mount": "import ctypes; assert ctypes.CDLL(None).mount(b'x', b'/mnt', b'tmpfs', 0, 0) == 0",
    "namespace": "import ctypes; assert ctypes.CDLL(None).unshare(0x10000000) == 0",
    "trace": "import ctypes, os; assert ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0) == 0",
    "limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1))",
    "shared memory": "import ctypes; assert ctypes.CDLL(None).shmget(7, 4096, 0o1666) >= 0",
    "priority": "import os; os.nice(-5)",
}


@pytest.mark.parametrize("program", ESCAPES.values(), ids=ESCAPES)
def test_no_way_out(program):
    assert not sandbox.run(program).passed
    assert not Path("/tmp/quantkit-escape").exists()


def test_nobody_is_reached(tmp_path):
    """With a server that would answer, and a file that would be found: the program gets neither."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), 1)"
        assert not sandbox.run(program).passed
        with pytest.raises(TimeoutError):
            server.accept()
    secret = tmp_path / "secret"
    secret.write_text("x")
    for program in (f"open({str(secret)!r}).read()", f"import os; os.remove({str(secret)!r})"):
        assert not sandbox.run(program).passed
    assert secret.read_text() == "x"


def test_it_inherits_nothing(monkeypatch):
    """Neither variables nor open files."""
    monkeypatch.setenv("QUANTKIT_SECRET", "x")
    with Path("/etc/passwd").open() as file:
        os.set_inheritable(file.fileno(), True)
        program = f"""
import os
assert "QUANTKIT_SECRET" not in os.environ
try:
    os.read({file.fileno()}, 1)
except OSError:
    pass
else:
    raise AssertionError
"""
        assert sandbox.run(program).passed


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("while True: pass", "longer than"),
        ("import time; time.sleep(60)", "longer than"),
        ("import threading\nthreading.Thread(target=input).run()\nwhile True: pass", ""),
        ("for i in range(10**6): open(f'f{i}', 'wb').write(bytes(10 << 20))", "more than 64 MiB"),
        ("open('f', 'wb').write(bytes(20 << 20))", "File too large"),
        ("open_files = [open(f'f{i}', 'w') for i in range(100)]", "Too many open files"),
    ],
)
def test_limits(program, why, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started = time.monotonic()
    found = sandbox.run(program, seconds=1.5)
    assert not found.passed
    assert why in found.why
    assert time.monotonic() - started < 10
    assert not list(tmp_path.iterdir())  # its folder is gone


def test_threads_do_not_outlive_the_verdict(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    program = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()"
    started = time.monotonic()
    assert sandbox.run(program).passed
    assert time.monotonic() - started < 10
    assert threading.active_count() < 50


def test_a_machine_without_the_walls_runs_nothing(monkeypatch, tmp_path):
    """As on a kernel without Landlock: its call fails there."""
    walls = Path(sandbox.__file__).with_name("sandbox_child.py").read_text()
    (tmp_path / "sandbox_child.py").write_text(walls.replace("= 444, 445, 446", "= 9444, 445, 446"))
    monkeypatch.setattr(sandbox, "__file__", str(tmp_path / "sandbox.py"))
    with pytest.raises(ScoreError, match=r"cannot be run on this machine: .*Landlock"):
        sandbox.run("assert True")
    sandbox.check.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ScoreError, match="needs Linux"):
        sandbox.check()


SHARED = """
dataset_path: json
test_split: test
output_type: generate_until
num_fewshot: 0
metadata: {version: 1}
"""
HELPERS = """
import evaluate

code_eval = evaluate.load("code_eval")
assert code_eval.compute(references=["assert f()"], predictions=[["def f(): return 1"]], k=[1])


def pass_at_k(references, predictions, k):
    return code_eval.compute(references=references, predictions=predictions, k=k)[0]


def build(resps, docs):
    return [[doc["prompt"] + text for text in resp] for resp, doc in zip(resps, docs)]


def followed(doc, results):
    return {"prompt_level_strict_acc": len(results[0].split()) >= doc["words"]}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Like GSM8K, IFEval and HumanEval, as small as they can be."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "helpers.py").write_text(HELPERS)

    def write(name, rows, definition):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = f"dataset_kwargs: {{data_files: {{test: {folder / name}.jsonl}}}}"
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{files}\n{SHARED}\n{definition}")

    write(
        "like_humaneval",
        [
            {"prompt": "def add(a, b):\n    return a + b  #", "test": "assert add(2, 3) == 5"},
            {"prompt": "def add(a, b):\n    return a - b  #", "test": "assert add(2, 3) == 5"},
            {"prompt": "import socket; socket.socket()  #", "test": "assert True"},
        ],
        """
unsafe_code: true
doc_to_text: "{{prompt}}"
doc_to_target: "{{test}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: !function helpers.pass_at_k, aggregation: mean, higher_is_better: true, k: [1]}
filter_list: [{name: programs, filter: [{function: custom, filter_fn: !function helpers.build}]}]
""",
    )
    write(
        "like_gsm8k",
        [{"q": f"Question: What is {i} + 1?\nAnswer:", "a": f"#### {i + 1}"} for i in range(3)],
        """
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["Question:"], max_gen_toks: 8, do_sample: false}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: ["#### "]}
filter_list:
  - name: strict
    filter: [{function: regex, regex_pattern: "#### ([0-9]+)"}, {function: take_first}]
  - name: flexible
    filter: [{function: regex, regex_pattern: "([0-9]+)"}, {function: take_first}]
""",
    )
    write(
        "like_ifeval",
        [{"prompt": "Write a lot about lists.", "words": n} for n in (0, 1000)],
        """
doc_to_text: "{{prompt}}"
doc_to_target: 0
process_results: !function helpers.followed
generation_kwargs: {until: [], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: prompt_level_strict_acc, aggregation: mean, higher_is_better: true}]
""",
    )
    return folder


def test_code_is_run_only_where_it_is_allowed(tasks, tmp_path):
    source = ModelSource.open("demo")
    asked = ScoreOptions((str(tasks / "like_humaneval.yaml"),), cache=tmp_path)
    with pytest.raises(ScoreError, match=r"like_humaneval runs code .* --allow-code"):
        evaluate(source, asked, "cpu")
    with pytest.raises(ScoreError, match="--allow-code"):  # one that does not say what it does
        sandbox.CODE_EVAL.compute(["assert True"], [["x = 1"]])


def test_maths_instructions_and_code_are_scored(tasks, tmp_path):
    asked = ScoreOptions((str(tasks),), cache=tmp_path, allow_code=True)
    found = evaluate(ModelSource.open("demo"), asked, "cpu")
    scores = found.card.scores
    assert scores["like_humaneval/pass@1"].value == pytest.approx(1 / 3)
    assert scores["like_ifeval/prompt_level_strict_acc"].value == 0.5
    assert scores["like_gsm8k/exact_match"].n == 3
    passed = [o.value for o in found.outcomes if o.task == "like_humaneval"]
    assert passed == [1, 0, 0]


def test_pass_at_k_is_that_of_its_definition():
    verdicts = [sandbox.Verdict(True), sandbox.Verdict(False), sandbox.Verdict(False)]
    assert sandbox.pass_at(1, verdicts) == pytest.approx(1 / 3)
    assert sandbox.pass_at(2, verdicts) == pytest.approx(2 / 3)
    assert sandbox.pass_at(3, verdicts) == 1
