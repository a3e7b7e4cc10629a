"""Decoding of a GGUF file with 0 to 100% of its layers on the GPU: predicted, then llama.cpp's own.

    python benchmarks/offload.py make FOLDER
    python benchmarks/offload.py predict --gpu H200 --out PREDICTED [--host-bandwidth GB/S]
    python benchmarks/offload.py measure FILE.gguf PREDICTED --out MEASURED [--server llama-server]
        [--libraries FOLDER]

`make` writes a Llama of 8B's width and half its layers with random weights, as Q4_K_M, for which
the speed is that of any. `predict` times how fast this machine's cores read memory, which is the
host's bandwidth in the prediction, and nothing of llama.cpp; commit what it writes before it is
measured.
`measure` starts llama.cpp's server (built with CUDA) once for each share, asks for 128 tokens after
a prompt, and holds what the server says of its own speed against the prediction. `--libraries` has
llama.cpp's shared libraries do the same (llama_library.py), where there is no server at hand, and
once more with threads that every step starts anew: what those cost is no part of the prediction.
What it has is written after every share, with the cores that others had meanwhile; a share that
fails or takes too long is written down as such, and the exit code is 1.
"""

import argparse
import json
import os
import platform
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(ROOT))

from recording import write  # noqa: E402

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PROMPT, OUTPUT = 64, 128
ENDS = ("low", "typical", "high")
RECIPE = "gguf-q4_k_m"
POINT_SECONDS = 120.0
"""After which a share is given up."""
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 16,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "rope_theta": 500000.0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip


def config() -> dict[str, Any]:
    """With the vocabulary of the demo model, whose tokenizer it gets."""
    from quantkit import resources
    from quantkit.model.source import read_config

    return CONFIG | {"vocab_size": read_config(resources.DEMO_MODEL)["vocab_size"]}


def make(folder: Path) -> None:
    """A source with random weights and the demo model's tokenizer, then its Q4_K_M file."""
    import torch
    from safetensors.torch import save_file

    from quantkit import resources
    from quantkit.advise import families

    source = folder / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(config()))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (source / file).write_bytes((resources.DEMO_MODEL / file).read_bytes())
    torch.manual_seed(0)
    found = families.shapes(families.completed(config()), "source")
    tensors = {
        name: torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) == 1
        else (torch.randn(shape, dtype=torch.float32) * 0.02).to(torch.bfloat16)
        for name, shape in found.items()
    }
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    command = [sys.executable, "-m", "quantkit", "quantize", str(source), "-r", RECIPE]
    subprocess.run([*command, "-o", str(folder)], check=True, env={**os.environ})
    print(*(folder / RECIPE).glob("source*.gguf"))


def host_gb_s(n_threads: int | None = None, n_bytes: int = 4 * 10**9) -> float:
    """How fast all cores together read memory; the best of five passes."""
    import numpy

    n_threads = n_threads or len(os.sched_getaffinity(0))
    parts = [numpy.ones(n_bytes // 8 // n_threads) for _ in range(n_threads)]
    best = float("inf")
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(5):
            started = time.monotonic()
            list(pool.map(numpy.sum, parts))
            best = min(best, time.monotonic() - started)
    return sum(part.nbytes for part in parts) / best / 1e9


def predict(gpu: str, bandwidth: float | None) -> dict[str, Any]:
    """Ranges of tokens per second for one user at every share."""
    from quantkit import recipe
    from quantkit.advise import efficiency, formats, kv, offload, parallel, speed, weights, work
    from quantkit.advise import shape as shapes
    from quantkit.advise.offload import Host, Offload
    from quantkit.advise.work import Part
    from quantkit.hardware import gpus

    file = recipe.load(RECIPE)
    shape, form, device = shapes.from_config(config(), "source"), formats.of(file), gpus.find(gpu)
    case = speed.Case(shape, work.of(shape, form), form, device)
    rate = bandwidth or host_gb_s()
    n_layers = int(shape.config["num_hidden_layers"])
    layers, depth = [0] * n_layers, PROMPT + OUTPUT // 2
    for name, size in weights.gguf_tensors(shape, file).items():
        if (layer := parallel.layer_of(name)) is not None:
            layers[layer] += size
    values = [layer.values(depth) for layer in kv.layers(shape.config)]
    points = []
    for share in SHARES:
        first = n_layers - round(share * n_layers)
        split = Offload(
            Host(rate, is_measured=True), n_layers, n_layers - first,
            gpu_read=Part(sum(layers[first:])), host_read=Part(sum(layers[:first])),
            host_values=sum(values[:first]), context=depth,
        )  # fmt: skip
        ends = efficiency.of(form.engine, device.vendor)
        rates = [1 / offload.step_seconds(case, 1, depth, end, split) for end in ends]
        flag = 999 if first == 0 else split.n_gpu_layers
        points.append({"share": share, "n_gpu_layers": flag, **dict(zip(ENDS, rates, strict=True))})
    return {
        "what": "tokens a second of one user in llama.cpp, predicted",
        "gpu": device.name,
        "host_gb_s": rate,
        "points": points,
    }


def asked(url: str) -> float:
    """Tokens per second of one answer, as the server counts them."""
    body = {
        "prompt": list(range(5, 5 + PROMPT)),
        "n_predict": OUTPUT,
        "ignore_eos": True,
        "cache_prompt": False,
        "temperature": 0,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return float(json.loads(answer.read())["timings"]["predicted_per_second"])


def by_server(server: str, path: Path, n_gpu_layers: int) -> dict[str, Any]:
    """Three answers of llama.cpp's server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--n-gpu-layers", str(n_gpu_layers), "--ctx-size", "1024"]
    flags += ["--parallel", "1", "--flash-attn", "on", "--port", str(port), "--no-warmup"]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen([server, "-m", str(path), *flags], stdout=log, stderr=log)
        try:
            wait(child, url)
            asked(url)  # to warm up
            return {"rounds": [asked(url) for _ in range(3)]}
        finally:
            child.terminate()
            child.wait(60)


def by_libraries(folder: Path, path: Path, n_gpu_layers: int, seconds: float) -> dict[str, Any]:
    """Three answers of llama.cpp's libraries, in a process of their own."""
    program = Path(__file__).with_name("llama_library.py")
    words = [sys.executable, program, folder, path, "--n-gpu-layers", n_gpu_layers]
    command = [str(word) for word in words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=seconds)
    told = json.loads(done.stdout)
    return {"rounds": told.pop("tokens_per_second"), **told}


class Cores:
    """How many of the machine's cores others kept busy, and how many were not given to it."""

    def __init__(self) -> None:
        self.started = self.now()

    @staticmethod
    def now() -> tuple[float, float, float, float]:
        """Seconds on the clock, of all processes, of ours that have ended, and taken away."""
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        user, nice, system, _, _, irq, soft, steal = map(int, words[:8])
        tick = os.sysconf("SC_CLK_TCK")
        own = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = (user + nice + system + irq + soft) / tick
        return time.monotonic(), busy, own.ru_utime + own.ru_stime, steal / tick

    def told(self) -> dict[str, float]:
        clock, busy, own, stolen = (b - a for a, b in zip(self.started, self.now(), strict=True))
        return {"others_cores": max(0.0, busy - own) / clock, "stolen_cores": stolen / clock}


def measure(args: argparse.Namespace) -> bool:
    """Every share of a prediction; whether none failed."""
    predicted, host = json.loads(args.predicted.read_text()), machine()
    points: list[dict[str, Any]] = []
    for point in predicted["points"]:
        layers, cores = point["n_gpu_layers"], Cores()
        try:
            if args.libraries is None:
                found = by_server(args.server, args.file, layers)
            else:
                found = by_libraries(args.libraries, args.file, layers, args.point_seconds)
        except (subprocess.SubprocessError, OSError, SystemExit) as error:
            points.append({**point, "failed": f"{type(error).__name__}: {error}"})
            print(f"{point['share']:4.0%} on the GPU failed: {error}", flush=True)
        else:
            rate = max(found["rounds"])
            held = {"measured": rate, "error": point["typical"] / rate - 1}
            points.append({**point, **held, **found, **cores.told()})
            span = f"{point['low']:.1f} to {point['high']:.1f}, {point['typical']:.1f}"
            print(f"{point['share']:4.0%} on the GPU: {span}; measured {rate:.1f} "
                  f"({points[-1]['error']:+.0%})", flush=True)  # fmt: skip
        result = {**predicted, "what": "tokens a second of one user in llama.cpp", **host}
        write(args.out, {**result, "file_bytes": args.file.stat().st_size, "points": points})
    return all("measured" in point for point in points)


def machine() -> dict[str, Any]:
    """The host, whose cores compute what does not lie on the GPU."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text().splitlines() if listed.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    found = {"machine": platform.machine(), "cpu": names[0] if names else "", "n_cores": cores}
    try:
        return {**found, "host_gb_s_when_measured": host_gb_s()}
    except ImportError:  # where only llama.cpp's libraries were carried to
        return found


def wait(child: subprocess.Popen[bytes], url: str, seconds: float = 300) -> None:
    """Until the server is healthy."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise SystemExit(f"llama-server ended with {child.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    raise SystemExit("llama-server was not ready in time")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("make").add_argument("folder", type=Path)
    second = parts.add_parser("predict")
    second.add_argument("--gpu", required=True)
    known = "GB/s that cores were timed to read at; default: timed here"
    second.add_argument("--host-bandwidth", type=float, help=known)
    third = parts.add_parser("measure")
    third.add_argument("file", type=Path)
    third.add_argument("predicted", type=Path)
    third.add_argument("--server", default="llama-server")
    third.add_argument("--libraries", type=Path, help="folder of llama.cpp's shared libraries")
    third.add_argument("--point-seconds", type=float, default=POINT_SECONDS)
    for part in (second, third):
        part.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(words)
    if args.part == "make":
        make(args.folder)
    elif args.part == "predict":
        write(args.out, predict(args.gpu, args.host_bandwidth))
    elif not measure(args):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
