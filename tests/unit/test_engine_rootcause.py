"""What an engine died of, in logs as vLLM's processes write them.

The first is of vLLM 0.32 for CPUs as it is; others have the form of logs in public issues of
vllm-project/vllm, whose numbers stand beside them.
"""

import pytest

from quantkit.bench.record import Refusal
from quantkit.engine.causes import decisive_line, explain
from quantkit.engine.process import run
from quantkit.engine.rootcause import root_cause
from quantkit.errors import EngineError

POINTER = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
WORKER = (
    "Exception: WorkerProc initialization failed due to an exception in a background process. "
    "See stack trace for root cause."
)
FRAMES = """\
Traceback (most recent call last):
  File "vllm/v1/executor/multiproc_executor.py", line 920, in worker_main
    worker = WorkerProc(*args, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^^^^"""
MEMORY = (
    "ValueError: Available memory on node 0 (21.69/23.54 GiB) on startup is less than desired CPU "
    "memory utilization (0.92, 21.66 GiB)."
)
OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 2 has a total "
    "capacity of 14.62 GiB of which 3.31 MiB is free."
)
KV = (
    "ValueError: To serve at least one request with the models's max seq len (131072), (4.54 GiB "
    "KV cache is needed, which is larger than the available KV cache memory (1.71 GiB)."
)


def told(prefix, *texts):
    """Lines as one process writes them."""
    lines = "\n".join(texts).splitlines()
    return [f"{prefix}{line}" for line in lines]


def cpu_032():
    return [
        "(APIServer pid=12335) WARNING 11-15 16:55:56 [system_utils.py:255] Found ulimit of 20000 "
        "and failed with error. This can cause `OSError: [Errno 24] Too many open files`.",
        *told(
            "(VllmWorker-0 pid=12476) ERROR 11-15 16:56:22 [multiproc_executor.py:953] ",
            "WorkerProc failed to start.",
            FRAMES,
            MEMORY,
        ),
        "(EngineCore pid=12438) INFO 11-15 16:56:25 [multiproc_executor.py:486] [shutdown] done",
        *told(
            "(EngineCore pid=12438) ERROR 11-15 16:56:25 [core.py:1510] ",
            "EngineCore failed to start.",
            FRAMES,
            WORKER,
        ),
        "Process EngineCore:",
        *told("", FRAMES, WORKER),
        *told("", FRAMES, POINTER),
    ]


def two_workers():
    """#14095: the lines of two workers are mixed, and the server's come last."""
    first = told(
        "(Worker_TP0 pid=195295) ERROR 03-02 19:49:43 [multiproc_executor.py:826] ", FRAMES, OOM
    )
    second = told(
        "(Worker_TP1 pid=195297) ERROR 03-02 19:49:43 [multiproc_executor.py:826] ",
        FRAMES,
        "torch.distributed.DistBackendError: NCCL error: remote process exited",
    )
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    return [*mixed, *told("(APIServer pid=1) ", FRAMES, POINTER)]


def core_itself():
    """#27508 and #16749: no worker of its own; older ones write no process and no brackets."""
    return [
        "INFO 10-11 10:42:14 [gpu_worker.py:298] Available KV cache memory: 1.71 GiB",
        "ERROR 04-17 08:12:47 [core.py:387] EngineCore hit an exception: Traceback (most recent "
        "call last):",
        *told("ERROR 04-17 08:12:47 [core.py:387] ", *FRAMES.splitlines()[1:], KV),
        "Process EngineCore_0:",
        *told("", FRAMES, KV),
        *told("", FRAMES, POINTER),
    ]


def chained():
    """#24 of rhymes-ai/Aria: the cause stands first, what it led to after it."""
    return told(
        "(VllmWorkerProcess pid=2421) ERROR 10-14 12:32:47 multiproc_worker_utils.py:233] ",
        FRAMES,
        OOM,
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        FRAMES,
        "RuntimeError: Error in memory profiling.",
    )


def handled():
    return told(
        "",
        FRAMES,
        "_queue.Empty",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        FRAMES,
        "TimeoutError: RPC call to determine_available_memory timed out.",
        POINTER,
    )


def validation():
    """#19660: pydantic says on the next line what it is about."""
    return told(
        "(APIServer pid=7) ",
        FRAMES,
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
        "  Value error, User-specified max_model_len (513) is greater than the derived "
        "max_model_len (max_position_embeddings=512)",
    )


@pytest.mark.parametrize(
    ("log", "line", "meaning"),
    [
        (cpu_032, MEMORY, "VLLM_CPU_KVCACHE_SPACE"),
        (two_workers, OOM, "memory is too small"),
        (core_itself, KV, "the KV cache of one full context does not"),
        (chained, OOM, "memory is too small"),
        (handled, "TimeoutError: RPC call to determine_available_memory timed out.", None),
        (validation, "ModelConfig Value error, User-specified max_model_len (513)", "--context"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_first_process_that_failed_is_quoted(log, line, meaning):
    words = "\n".join(log())
    found = decisive_line(words)
    assert line in found
    assert "See root cause above" not in found
    assert explain(words) is None if meaning is None else meaning in explain(words)


def test_only_pointers_are_no_cause_but_exit_codes_tell():
    words = "\n".join(told("(APIServer pid=1) ", FRAMES, POINTER))
    assert root_cause(words) is None
    assert explain(words) is None
    assert "main memory runs out" in explain(words.replace("{}", "{'EngineCore_DP0': -9}"))
    assert "crashed" in explain(words.replace("{}", "{'EngineCore_DP0': -11}"))


def test_what_is_only_mentioned_while_all_is_well_explains_nothing():
    chatter = (
        "INFO 10-11 10:42:14 [gpu.py:1] compute capability 9.0, CUDA out of memory is not expected"
    )
    assert explain(chatter) is None
    assert decisive_line(chatter) is None
    words = f"{chatter}\n" + "\n".join(told("", FRAMES, "OSError: Address already in use"))
    assert "--port" in explain(words)


def test_an_exception_that_was_only_warned_of_is_not_the_cause():
    warned = told("WARNING 10-11 10:42:14 [plugins.py:3] ", FRAMES, "ImportError: no plugin")
    died = told("ERROR 10-11 10:42:20 [core.py:3] ", FRAMES, "RuntimeError: no kernel")
    assert root_cause("\n".join([*warned, *died])) == "RuntimeError: no kernel"


def test_the_error_of_a_dead_engine_begins_with_it(tmp_path):
    log = tmp_path / "log"
    log.write_text("\n".join(cpu_032()))
    with pytest.raises(EngineError) as failed:
        run(["sh", "-c", f"cat {log}; exit 1"], timeout=20, name="vLLM")
    lines = str(failed.value).splitlines()
    assert lines[0].startswith("vLLM ended with exit code 1. vLLM for CPUs asks for more")
    assert lines[1:3] == [f"  {MEMORY}", "  ..."]
    assert lines[-1] == f"  {POINTER}"
    brief = Refusal(model="m", setting={}, reason=str(failed.value)).brief
    assert brief.endswith(MEMORY)
