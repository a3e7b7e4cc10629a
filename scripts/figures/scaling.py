"""Several ranks, and sweeps (benchmarks/ranks.py, sweep.py, sweep_kill.py)."""

import statistics

from figures.regions import count, gb, link, number, paragraph, region, result, seconds, span, table

SIZES = ("8B", "70B")


@region
def ranks() -> str:
    run = result("ranks-cpu")["measured"]
    each = run["times_faster_each"]
    assert statistics.median(each) == run["times_faster"]
    return table(
        ["", "measured:", "aim:"],
        [
            [
                f"two gloo ranks of one thread against one, statistics of the demo model, "
                f"{run['samples']} samples of {run['length']} tokens, median of {len(each)} turns",
                f"{number(run['times_faster'])} times as fast ({span(each, lambda x: f'{x:.2f}')})",
                "1.7 times",
            ]
        ],
    )


def minutes(found: dict[str, float]) -> str:
    return f"{number(found['minutes_in_all'], 2)} min"


@region
def eight_gpus() -> str:
    computed = result("ranks-cpu")["computed"]
    rows = []
    for size in SIZES:
        one, eight = computed[size]["one_gpu"], computed[size]["eight_gpus"]
        rows.append(
            [
                size,
                f"{seconds(one['seconds_a_block'])} per block, {minutes(one)}",
                f"{seconds(eight['seconds_a_block'])}, {minutes(eight)}",
                number(computed[size]["times_faster"], 2),
                gb(eight["bytes_added_up_a_block"]),
                seconds(eight["seconds_a_block_for_both"]),
                seconds(eight["seconds_a_block_for_solves"]),
                f"{gb(eight['bytes_a_second_from_disk'])}/s",
            ]
        )
    head = [
        "", "one GPU", "eight GPUs", "times faster:", "added up per block:", "exchange per block:",
        "longest share of the solves:", "from disk:",
    ]  # fmt: skip
    return table(head, rows)


@region
def sweeps() -> str:
    kill, own = result("ray-kill"), result("ray-overhead")
    side, plan = own["side_by_side"], own["planning"]
    return paragraph(
        f"`benchmarks/sweep_kill.py` runs sweeps on a real cluster of three local nodes and kills "
        f"a node or the driver at a random point of each. Recorded "
        f"({link('results', 'ray-kill')}): {kill['identical']} of {kill['sweeps']} sweeps over the "
        f"demo model, {kill['killed_while_running']} of the kills while there was work, ended with "
        "results identical to those of an undisturbed one. A sweep's own time is small: on "
        f"{count(own['cores'])} busy cores {seconds(own['chain']['seconds_a_step'])} per step on a "
        f"local Ray cluster, {side['steps']:,} empty steps in {seconds(side['seconds'])}, and a "
        f"graph of {plan['steps']:,} steps laid out and looked up in {seconds(plan['seconds'])} "
        f"({link('results', 'ray-overhead')})."
    )


@region
def sweep_overhead() -> str:
    own = result("ray-overhead")
    chain, side, plan = own["chain"], own["side_by_side"], own["planning"]
    return table(
        ["", "measured:", "aim:"],
        [
            [
                "per step, one after another",
                seconds(chain["seconds_a_step"]),
                f"{chain['limit']} s",
            ],
            [f"{side['steps']:,} empty steps", seconds(side["seconds"]), f"{side['limit']:.0f} s"],
            [f"{plan['steps']:,} steps planned", seconds(plan["seconds"]), f"{plan['limit']} s"],
        ],
    )


@region
def sweep_kills() -> str:
    kill = result("ray-kill")
    return paragraph(
        f"{kill['identical']} of {kill['sweeps']} sweeps with a node or the driver killed, "
        f"{kill['killed_while_running']} of them while there was work, ended with the same results "
        "as an undisturbed one."
    )
