"""What several processes make of the statistics part of a pass, and what 8 H200 should give.

    python benchmarks/ranks.py [--repeats 9] [--out benchmarks/results/ranks-cpu.json]

Measured: two gloo ranks with one thread each against one rank with one thread, on the demo model.
Both in the same two processes and in turns, so that whatever else the machine does befalls both;
while one works alone, the other sleeps. Timed is what a visit observes: forwards with statistics of
all blocks, and their sums over the ranks.

Computed: seconds a block on 8 H200, from those of one (results/one_pass-h200.json), the cost of
the largest share of the solves, and the bytes that go over NVLink. The arithmetic is in the result.
"""

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from recording import tell

from quantkit import launch, recipe, resources
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.export.manifest import versions
from quantkit.model.architecture import Architecture
from quantkit.model.blocks import Decoder
from quantkit.model.source import ModelSource
from quantkit.onepass import onepass
from quantkit.onepass.distributed import DistributedRanks, joined
from quantkit.onepass.estimate import solving_cost, stacked_linears
from quantkit.onepass.ranks import Ranks, assign
from quantkit.onepass.streams import streams_of
from quantkit.onepass.visit import Visit
from quantkit.plan import checkpoint as plan

RESULTS = Path(__file__).parent / "results"
RECIPE = "gptq-w4a16"
N_RANKS = 2

SHAPES = {
    "8B": {"hidden": 4096, "intermediate": 14336, "kv": 1024, "blocks": 32},
    "70B": {"hidden": 8192, "intermediate": 28672, "kv": 1024, "blocks": 80},
}
N_GPUS = 8
NVLINK_BYTES_A_SECOND = 450e9
"""H200, one direction: NVIDIA states 900 GB/s for both together."""
NVLINK_SHARE = 0.75
"""Of that which a collective of this size is taken to reach."""
FLOAT32_SLOWER = 14
"""bf16 products against float32 on an H200: 700 and 50 TFLOP/s (methods/products.py)."""
LENGTH, N_SAMPLES = 2048, 128


class Setting:
    """The demo model and tokens, ready for a pass over its blocks."""

    def __init__(self, n_samples: int, length: int) -> None:
        source = ModelSource.open(str(resources.DEMO_MODEL))
        architecture = Architecture.of(source.folder)
        stored = architecture.stored(source)
        self.plan = plan.make(architecture, stored, recipe.load(RECIPE))
        self.decoder = Decoder.open(source, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 4096, (n_samples, length), generator=generator)
        self.tokens = CalibrationTokens("random", ids)
        self.states = [self.decoder.read(i) for i in range(len(self.decoder.blocks))]

    @torch.no_grad()
    def observe(self, ranks: Ranks, meet: Any) -> tuple[float, float]:
        """Wall and processor seconds of the statistics of all blocks, from a common start."""
        hidden, arguments, padding = onepass._begin(self.decoder, self.tokens, ranks)
        (stream,) = streams_of([self.plan], hidden, None)
        meet()
        wall, used = time.monotonic(), time.process_time()
        for index, state in enumerate(self.states):
            visit = Visit(self.decoder, index, state, stream, arguments[index], padding, ranks)
            visit.observe([self.plan], [0])
        return time.monotonic() - wall, time.process_time() - used


def rank_main(rank: int, port: int, args: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with joined(launch.Place(rank, N_RANKS, rank, N_RANKS), "cpu") as ranks:
        setting = Setting(args.samples, args.length)
        for repeat in range(args.repeats + 1):
            both = measure_together(setting, ranks)
            ranks.share(0)
            one = setting.observe(Ranks(), lambda: None) if ranks.is_first else None
            ranks.share(0)
            if ranks.is_first and repeat:  # the first time warms up
                results.put({"alone": one, "together": both})


def measure_together(setting: Setting, ranks: DistributedRanks) -> tuple[float, float]:
    """Of the rank that took longest, and used most."""
    own = torch.tensor(setting.observe(ranks, lambda: ranks.share(0)))
    ranks.max_([own])
    wall, used = own.tolist()
    return wall, used


def measure(args: argparse.Namespace) -> dict[str, Any]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=rank_main, args=(rank, port, args, results))
        for rank in range(N_RANKS)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=600) for _ in range(args.repeats)]
    for process in processes:
        process.join()
    walls, used = ([f["alone"][k] / f["together"][k] for f in found] for k in (0, 1))
    return {
        "what": "statistics of all blocks of the demo model, 2 gloo ranks with 1 thread each "
        "against 1 rank with 1 thread, in turns",
        "recipe": RECIPE,
        "samples": args.samples,
        "length": args.length,
        "repeats": args.repeats,
        "seconds_alone": [f["alone"][0] for f in found],
        "seconds_together": [f["together"][0] for f in found],
        "times_faster": statistics.median(walls),
        "times_faster_each": walls,
        "times_less_processor_time_of_a_rank": statistics.median(used),
        "times_less_processor_time_of_a_rank_each": used,
        "processor_seconds_alone": statistics.median(f["alone"][1] for f in found),
        "processor_seconds_of_the_busier_rank": statistics.median(f["together"][1] for f in found),
        "load_average": os.getloadavg(),
        "n_cores": os.cpu_count(),
        "note": "The two kinds alternate, and the median of their ratios counts. Where the load "
        "average is above n_cores, other work held the processors most of the time and wall times "
        "say little: two ranks that meet at every block wait for whichever got its turn last. The "
        "processor time of the busier rank holds its work on sums, but not the time that messages "
        "travel, so it bounds what an idle machine can reach.",
    }


def linears(shape: dict[str, int]) -> dict[str, tuple[int, int]]:
    hidden, wide, kv = shape["hidden"], shape["intermediate"], shape["kv"]
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }


class Counted:
    """Operations and bytes of one block of a model."""

    def __init__(self, shape: dict[str, int]) -> None:
        self.block = linears(shape)
        self.groups = list(stacked_linears(self.block).values())
        self.n_parameters = sum(rows * columns for rows, columns in self.block.values())
        self.gram_bytes = 4 * sum(columns**2 for _, columns in self.groups)

    def sample_operations(self, forwards: int) -> float:
        """Of one sample: forwards, and the upper half of G."""
        return LENGTH * (
            2.0 * self.n_parameters * forwards + 1.15 * sum(c**2 for _, c in self.groups)
        )

    def solves(self, name: str) -> list[float]:
        """By group, in operations of the fast type."""
        made = recipe.load(name)
        assert isinstance(made, recipe.Recipe)
        costs = [solving_cost(made, *group) for group in self.groups]
        return [cost.fast + FLOAT32_SLOWER * cost.slow for cost in costs]


def line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Seconds a sample and seconds for all solves, by least squares."""
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    return slope, intercept


def computed() -> dict[str, Any]:
    """Seconds a block on eight GPUs, from those on one."""
    one = json.loads((RESULTS / "one_pass-h200.json").read_text())
    fits, kinds = {}, {"gptq": ("gptq-w4a16", 2), "awq": ("awq-w4a16", 1)}
    for kind, (name, _) in kinds.items():
        points = [(p["samples"], p["seconds_a_block"]) for p in one["sweep"]
                  if p["recipes"] == [name]]  # fmt: skip
        fits[kind] = line(sorted([*points, (one["samples"], one[kind]["seconds_a_block"])]))
    speed = NVLINK_BYTES_A_SECOND * NVLINK_SHARE
    small, result = Counted(SHAPES["8B"]), {}
    for size, shape in SHAPES.items():
        this = Counted(shape)
        solves: list[float] = []
        sampled, solved, streams = 0.0, 0.0, 0
        for kind, (name, forwards) in kinds.items():
            slope, intercept = fits[kind]
            ratio = this.sample_operations(forwards) / small.sample_operations(forwards)
            sampled += N_SAMPLES * slope * ratio
            operations = this.solves(name)
            rate = sum(small.solves(name)) / intercept
            solves += [found / rate for found in operations]
            solved += sum(operations) / rate
            streams += 1
        shares = [0.0] * N_GPUS
        for owner, seconds in zip(assign(solves, N_GPUS), solves, strict=True):
            shares[owner] += seconds
        reduced = streams * this.gram_bytes
        shared = len(kinds) * this.n_parameters
        moving = (2 * (N_GPUS - 1) / N_GPUS * reduced + shared) / speed
        alone = sampled + solved
        together = sampled / N_GPUS + max(shares) + moving
        result[size] = {
            "shape": shape,
            "recipes": [name for name, _ in kinds.values()],
            "one_gpu": {
                "seconds_a_block_for_samples": sampled,
                "seconds_a_block_for_solves": solved,
                "seconds_a_block": alone,
                "minutes_in_all": alone * shape["blocks"] / 60,
            },
            "eight_gpus": {
                "seconds_a_block_for_samples": sampled / N_GPUS,
                "seconds_a_block_for_solves": max(shares),
                "longest_job_seconds": max(solves),
                "bytes_added_up_a_block": reduced,
                "bytes_shared_a_block": shared,
                "seconds_a_block_for_both": moving,
                "seconds_a_block": together,
                "minutes_in_all": together * shape["blocks"] / 60,
                "bytes_a_second_from_disk": 2 * this.n_parameters / together,
            },
            "times_faster": alone / together,
        }
    return {
        "what": f"{N_GPUS} H200, {N_SAMPLES} samples of {LENGTH} tokens: computed, not measured",
        "arithmetic": [
            "one GPU, 8B: seconds a block = a * samples + b, a least-squares line through the "
            "measured 32, 64, 128 and 256 samples of one_pass-h200.json; a * samples is forwards "
            "with statistics, b the solves",
            "70B: a grows with the operations of a sample, 2048 * (2 * parameters * forwards + "
            "1.15 * sum of columns^2); b with those of the solves (onepass/estimate.py, float32 "
            "taken as 14 times slower)",
            "eight GPUs: a * samples / 8; solves: each group of each recipe is a job, given out "
            "as onepass/ranks.py does, and the rank with most counts",
            "all-reduce: 2 * 7/8 * bytes of G (float32, all groups, once a stream) over "
            "0.75 * 450 GB/s; results: one byte a weight and recipe, broadcast at the same rate",
            "not counted: reading the block from disk (bytes_a_second_from_disk says what that "
            "takes; the ranks of a machine share one page cache), writing, starting",
        ],
        "fit": {kind: {"a": fit[0], "b": fit[1]} for kind, fit in fits.items()},
        **result,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    result = {
        "measured": measure(args),
        "computed": computed(),
        "machine": platform.machine(),
        "versions": versions(),
    }
    tell(result, args.out)


if __name__ == "__main__":
    main()
