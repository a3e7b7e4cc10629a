"""Tokens per second of one answer, by llama.cpp's shared libraries instead of its server.

    python benchmarks/llama_library.py FOLDER FILE.gguf [--n-gpu-layers N] [--threads N]

FOLDER has libllama, libggml and their backends (libggml-cpu-*, libggml-cuda) beside each other, as
builds with loadable backends have them. Prints one line of JSON. Needs nothing but Python, so that
it runs where only the libraries were carried to. CUDA's own libraries come from LD_LIBRARY_PATH.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_int32, c_void_p
from pathlib import Path

PROMPT, OUTPUT, ROUNDS, ROUNDS_STARTED = 64, 128, 4, 2
WARNING, ERROR = 3, 4
LAYERS_AT, CONTEXT_AT = 16, 0
"""Where llama_model_params keeps n_gpu_layers, and llama_context_params n_ctx."""


class Params(Structure):
    """Room for any kind of parameters: what is behind their end is never read."""

    _fields_ = (("bytes", c_char * 1024),)

    def number(self, at: int) -> c_int32:
        return c_int32.from_buffer(self, at)


class Batch(Structure):
    _fields_ = (
        ("n_tokens", c_int32), ("token", c_void_p), ("embd", c_void_p), ("pos", c_void_p),
        ("n_seq_id", c_void_p), ("seq_id", c_void_p), ("logits", c_void_p),
    )  # fmt: skip


@ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)
def told(level: int, text: bytes, _: object) -> None:
    """Warnings and errors alone."""
    if level in (WARNING, ERROR):
        sys.stderr.write(text.decode(errors="replace"))


def load(folder: Path) -> ctypes.CDLL:
    """libllama with all backends that this machine can use."""
    named = {name: library(folder, name) for name in ("libggml-base", "libggml", "libllama")}
    backends, found = named["libggml"], named["libllama"]
    found.llama_log_set(told, None)  # which is ggml's own too
    backends.ggml_backend_load_all_from_path.argtypes = [c_char_p]
    backends.ggml_backend_load_all_from_path(str(folder).encode())
    for name, result, arguments in (
        ("llama_model_default_params", Params, []),
        ("llama_context_default_params", Params, []),
        ("llama_model_load_from_file", c_void_p, [c_char_p, Params]),
        ("llama_init_from_model", c_void_p, [c_void_p, Params]),
        ("llama_set_n_threads", None, [c_void_p, c_int32, c_int32]),
        ("llama_attach_threadpool", None, [c_void_p, c_void_p, c_void_p]),
        ("llama_detach_threadpool", None, [c_void_p]),
        ("llama_batch_get_one", Batch, [POINTER(c_int32), c_int32]),
        ("llama_decode", c_int32, [c_void_p, Batch]),
        ("llama_sampler_init_greedy", c_void_p, []),
        ("llama_sampler_sample", c_int32, [c_void_p, c_void_p, c_int32]),
        ("llama_get_memory", c_void_p, [c_void_p]),
        ("llama_memory_clear", None, [c_void_p, ctypes.c_bool]),
        ("llama_supports_gpu_offload", ctypes.c_bool, []),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.llama_backend_init()
    return found


def threads_of(folder: Path, n: int) -> int:
    """Threads that stay between steps, as llama.cpp's own programs have them; without, every step
    that has more to do on the CPU than to look tokens up starts its own and ends them
    (ggml_graph_compute in ggml-cpu.c)."""
    base, backends = library(folder, "libggml-base"), library(folder, "libggml")
    find, address = backends.ggml_backend_reg_by_name, base.ggml_backend_reg_get_proc_address
    find.restype, find.argtypes = c_void_p, [c_char_p]
    address.restype, address.argtypes = c_void_p, [c_void_p, c_char_p]
    params = Params()
    base.ggml_threadpool_params_init.argtypes = [c_void_p, c_int32]
    base.ggml_threadpool_params_init(byref(params), n)
    make = ctypes.CFUNCTYPE(c_void_p, c_void_p)(address(find(b"CPU"), b"ggml_threadpool_new"))
    made: int = make(ctypes.addressof(params))
    return made


def library(folder: Path, stem: str) -> ctypes.CDLL:
    """`stem.so`, or with a version inside its name."""
    names = sorted(folder.glob(f"{stem}.so*")) or sorted(folder.glob(f"{stem}.*.so"))
    if not names:
        raise SystemExit(f"{folder} has no {stem}.so")
    return ctypes.CDLL(str(names[0]), mode=ctypes.RTLD_GLOBAL)


def n_physical() -> int:
    """Cores without their second threads, which llama.cpp's own programs take."""
    siblings = set()
    for cpu in os.sched_getaffinity(0):
        try:
            path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            siblings.add(Path(path).read_text())
        except OSError:
            siblings.add(str(cpu))
    return len(siblings)


def rates(folder: Path, file: Path, n_gpu_layers: int, n_threads: int) -> dict[str, list[float]]:
    """Tokens per second of every round but the first, which warms up: with threads that stay, and
    with threads that each step starts."""
    llama = load(folder)
    if n_gpu_layers and not llama.llama_supports_gpu_offload():
        raise SystemExit(f"no GPU: libggml-cuda of {folder} is missing, or did not load")
    model_params, params = llama.llama_model_default_params(), llama.llama_context_default_params()
    layers, context = model_params.number(LAYERS_AT), params.number(CONTEXT_AT)
    if not (layers.value in (-1, 0, 999) and context.value == 512):
        raise SystemExit("this llama.cpp has its parameters at other places: see LAYERS_AT")
    layers.value, context.value = n_gpu_layers, 1024
    model = llama.llama_model_load_from_file(str(file).encode(), model_params)
    if not model:
        raise SystemExit(f"{file}: llama.cpp cannot load it")
    session = llama.llama_init_from_model(model, params)
    if not session:
        raise SystemExit(f"{file}: llama.cpp made no context")
    llama.llama_set_n_threads(session, n_threads, n_threads)
    llama.llama_attach_threadpool(session, threads_of(folder, n_threads), None)
    greedy = llama.llama_sampler_init_greedy()
    staying = [round_rate(llama, session, greedy) for _ in range(ROUNDS)][1:]
    llama.llama_detach_threadpool(session)
    started = [round_rate(llama, session, greedy) for _ in range(ROUNDS_STARTED)][1:]
    return {"tokens_per_second": staying, "with_threads_started_each_step": started}


def round_rate(llama: ctypes.CDLL, session: int, greedy: int) -> float:
    llama.llama_memory_clear(llama.llama_get_memory(session), True)
    prompt = (c_int32 * PROMPT)(*range(5, 5 + PROMPT))
    decode(llama, session, prompt, PROMPT)
    token = c_int32(llama.llama_sampler_sample(greedy, session, -1))
    started = time.monotonic()
    for _ in range(OUTPUT):
        decode(llama, session, token, 1)
        token.value = llama.llama_sampler_sample(greedy, session, -1)
    return OUTPUT / (time.monotonic() - started)


def decode(llama: ctypes.CDLL, session: int, tokens: c_int32, n: int) -> None:
    pointer = ctypes.cast(byref(tokens), POINTER(c_int32))
    if code := llama.llama_decode(session, llama.llama_batch_get_one(pointer, n)):
        raise SystemExit(f"llama_decode returned {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--n-gpu-layers", type=int, default=0)
    parser.add_argument("--threads", type=int, default=n_physical())
    args = parser.parse_args()
    found = rates(args.folder.resolve(), args.file, args.n_gpu_layers, args.threads)
    print(json.dumps({**found, "threads": args.threads}))


if __name__ == "__main__":
    main()
