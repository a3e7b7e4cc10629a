"""Whether bits go where they matter: predictions against measured KL, and choices against others.

    python benchmarks/allocation.py model --model DIR|demo --name NAME --origin TEXT
        --calibration SET|FILE [FILE ...] --text FILE|python_docs --work DIR --out FILE
        [--samples 128] [--length 2048] [--bits 4.5 5 6] [--mixtures 40] [--windows 8]
        [--search 4.5] [--peer 4.5] [--peer-batch 4] [--path autoround=DIRS]
    python benchmarks/allocation.py blocks --work DIR --out FILE
    python benchmarks/allocation.py solver --out FILE

model   one calibration set makes the table of candidates (`quantkit sensitivity`) and, by GPTQ
        without propagation, a checkpoint in each format: the bank. A mixture takes each unit from
        the bank, so that every choice below is rounded by the same method, and costs one forward
        pass. KL is that of the source's predictions on windows of --text, over the whole
        vocabulary. Predictions are tested by Spearman's correlation over random mixtures of one
        size within 1%; choices are compared with the best uniform format of no more bytes and with
        20 random mixtures of the size. With --peer, AutoRound's AutoScheme chooses among the same
        formats from the same texts, in a process with its own PYTHONPATH, and ours, from a table
        of these formats made just before, is asked for no more bytes than it took. --search asks
        how much better any choice could be: measured KL of single changes, on other windows, leads
        from ours to the next mixture of that size, until none is better.
blocks  seconds that the table takes on blocks of an 8B Llama's shape, six formats, beside the pass
        of one GPTQ recipe: the difference between models of two block counts.
solver  seconds for 1,000 units in 8 formats, with the gap that is proven.

FILE is written after every measurement; what it has of the same set and text is not done again.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
USUAL = ("w4a16-g128", "w4a16-g64", "w4a16-g32", "w8a16-g128", "w8a16-g32", "bf16")
PREDICTIONS = ("weighted", "output_error", "relative_error")
SHARED = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]
"""Layers that vLLM fuses, for the peer."""


def ranks(values: list[float]) -> list[float]:
    """Places from 1, equal values their mean."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop + 1 < len(order) and values[order[stop + 1]] == values[order[start]]:
            stop += 1
        for place in range(start, stop + 1):
            found[order[place]] = (start + stop) / 2 + 1
        start = stop + 1
    return found


def spearman(left: list[float], right: list[float]) -> float:
    """Pearson's correlation of ranks."""
    a, b = ranks(left), ranks(right)
    mean = (len(a) + 1) / 2
    cross = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    sizes = [sum((x - mean) ** 2 for x in values) for values in (a, b)]
    return cross / (sizes[0] * sizes[1]) ** 0.5 if all(sizes) else 0.0


def random_choice(table: Any, size: int, seed: int) -> list[int]:
    """Formats at random for every unit, of a size within half a percent, whatever they cost."""
    rng = random.Random(seed)
    sizes = table.sizes()
    likely = [rng.random() ** 2 for _ in table.formats]
    options = [[p for p, s in enumerate(row) if s is not None] for row in sizes]
    choice = [rng.choices(row, [likely[p] + 1e-6 for p in row])[0] for row in options]
    total = table.size_of(choice)
    for _ in range(200_000):
        if abs(total / size - 1) < 0.005:
            return choice
        unit = rng.randrange(len(choice))
        place = rng.choice(options[unit])
        other = total + sizes[unit][place] - sizes[unit][choice[unit]]
        if abs(other - size) < abs(total - size):
            choice[unit], total = place, other
    raise SystemExit(f"no mixture of {size} bytes was found")


def letters(choice: list[int]) -> str:
    """A letter per unit, `a` for the first format: short in a file."""
    return "".join(string.ascii_letters[place] for place in choice)


def predictions(table: Any, choice: list[int]) -> dict[str, float]:
    """What a choice should cost: by KL weights, by squared output errors, and by relative ones."""
    raw = sum(unit.errors[p] or 0.0 for unit, p in zip(table.units, choice, strict=True))
    return {
        "weighted": table.cost_of(choice),
        "output_error": raw,
        "relative_error": table.cost_of(choice, weighted=False),
    }


class Bank:
    """The source on the device, and each unit's weights in each format."""

    def __init__(self, source: Any, table: Any, folder: Path, device: Any) -> None:
        from quantkit.export.checkpoint import Checkpoint
        from quantkit.scoring import loading

        self.table, self.device = table, device
        self.model = loading.load(source, device)
        self.own = dict(self.model.named_parameters())
        dtype = next(iter(self.own.values())).dtype
        self.weights: list[dict[str, Any]] = []
        names = {f"{m}.weight" for unit in table.units for m in unit.modules}
        for format in table.formats:
            if format == "bf16":
                kept = {n: self.own[n].detach().clone() for n in names}
            else:
                state = Checkpoint.open(folder / format).state(dtype)
                kept = {n: w.to(device) for n, w in state if n in names}
            self.weights.append(kept)
        self.mixed: list[int | None] = [None] * len(table.units)
        self.references: dict[int, list[Any]] = {}

    def mix(self, choice: list[int]) -> None:
        """Put a mixture in place."""
        import torch

        with torch.no_grad():
            for index, (unit, place) in enumerate(zip(self.table.units, choice, strict=True)):
                for module in unit.modules if self.mixed[index] != place else ():
                    name = f"{module}.weight"
                    self.own[name].copy_(self.weights[place][name])
        self.mixed = list(choice)

    def kl(self, choice: list[int], windows: Any) -> float:
        """Mean KL in nats per token of the source's predictions from a mixture's."""
        import torch

        with torch.no_grad():
            reference = self.references.get(id(windows))
            if reference is None:
                self.mix([self.table.formats.index("bf16")] * len(self.table.units))
                reference = [self.model(w[None].to(self.device)).logits[0] for w in windows]
                self.references[id(windows)] = reference
            self.mix(choice)
            total, n_tokens = 0.0, 0
            for window, wanted in zip(windows, reference, strict=True):
                logits = self.model(window[None].to(self.device)).logits[0]
                for mine, theirs in zip(logits.split(512), wanted.split(512), strict=True):
                    found = mine.float().log_softmax(-1)
                    known = theirs.float().log_softmax(-1)
                    total += float((known.exp() * (known - found)).sum(dtype=torch.float64))
                n_tokens += len(window)
        return total / n_tokens


def text_windows(tokenizer: Any, text: str, length: int, n_windows: int, skip: int = 0) -> Any:
    """Whole windows, spread over the text; `skip` begins with a later one."""
    import torch

    if text == "python_docs":
        from quantkit.calibration.reading import python_text

        content = "\n\n".join(document.text for document in python_text.heldout())
    else:
        content = Path(text).read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(content, verbose=False)["input_ids"])
    windows = ids[: len(ids) // length * length].view(-1, length)
    return windows[skip :: max(1, len(windows) // n_windows)][:n_windows]


def build_bank(source: Any, table: Any, calibration: Any, folder: Path, device: str) -> float:
    """A checkpoint in each format by GPTQ without propagation; those that are there are kept."""
    from quantkit.mixed import candidates
    from quantkit.onepass.run import quantize
    from quantkit.recipe import Recipe

    started = time.monotonic()
    wanted = []
    for name in table.formats:
        if name == "bf16" or (folder / name / "quantkit.json").is_file():
            continue
        recipe = candidates.find(name).recipe
        if recipe.input_activations is not None:
            raise SystemExit(f"{name} rounds activations, which a bank of weights does not hold")
        told = recipe.model_dump() | {"options": {"propagate": False}}
        wanted.append(Recipe.model_validate(told))
    if wanted:
        quantize(source, wanted, folder, device, calibration)
    return time.monotonic() - started


def model(args: argparse.Namespace) -> None:
    import torch

    from quantkit import device as devices
    from quantkit.mixed.run import write_table
    from quantkit.mixed.table import Table
    from quantkit.model.source import ModelSource
    from quantkit.model.tokenizer import load as load_tokenizer
    from quantkit.offline import without_hub
    from quantkit.onepass.prepare import CalibrationChoice, Run

    without_hub()
    result = opened(args.out)
    args.work.mkdir(parents=True, exist_ok=True)
    chosen = build_set(args)
    source = ModelSource.open(args.model)
    device = devices.choose()
    calibration = CalibrationChoice(str(chosen))

    def table_of(formats: Sequence[str], folder: Path) -> tuple[Any, float]:
        if not (folder / "sensitivity.json").is_file():
            started = time.monotonic()
            write_table(source, folder, "auto", calibration, Run(), tuple(formats))
            (folder / "seconds").write_text(str(time.monotonic() - started))
        return fitting(Table.read(folder)), float((folder / "seconds").read_text())

    table, seconds = table_of(args.formats, args.work / "table")
    asked: dict[float, str] = {}
    if args.peer:  # first, while nothing of ours is on the GPU
        usual = [name for name in USUAL if name in table.formats]
        only = table_of(usual, args.work / "table-usual")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        asked = {bits: ask_peer(args, chosen, usual, bits) for bits in args.peer}
    tokenizer = load_tokenizer(source.folder)
    windows = text_windows(tokenizer, args.text, args.length, args.windows)
    about = {
        "origin": args.origin,
        "calibration": table.calibration_digest,
        "n_calibration_tokens": table.n_tokens,
        "n_probe_tokens": table.n_probe_tokens,
        "text": Path(args.text).name,
        "windows": len(windows),
        "length": args.length,
        "formats": table.formats,
    }
    before = result["models"].get(args.name, {})
    entry = before if all(before.get(k) == v for k, v in about.items()) else dict(about)
    result["models"][args.name] = entry
    entry["table_seconds"] = seconds
    entry.setdefault("bank_seconds", 0.0)
    entry["bank_seconds"] += build_bank(source, table, calibration, args.work / "bank", "auto")
    bank = Bank(source, table, args.work / "bank", device)
    rows: dict[str, Any] = entry.setdefault("rows", {})

    def measured(label: str, choice: list[int]) -> dict[str, Any]:
        if label not in rows or rows[label]["choice"] != letters(choice):
            rows[label] = {
                "bits": table.bits_of(choice),
                "size_bytes": table.size_of(choice),
                **predictions(table, choice),
                "kl": bank.kl(choice, windows),
                "choice": letters(choice),
            }
            keep(args.out, result)
            print(
                f"{label}: {rows[label]['bits']:.3f} bits, KL {rows[label]['kl']:.5f}", flush=True
            )
        rows[label] |= predictions(table, choice)  # of this table, whenever KL was measured
        found: dict[str, Any] = rows[label]
        return found

    for place, name in enumerate(table.formats):
        if name != "bf16":
            measured(f"uniform {name}", [place] * len(table.units))
    entry["choices"] = {f"{bits:g}": choices(table, bits, measured) for bits in args.bits}
    for bits in args.search:
        others = text_windows(tokenizer, args.text, args.length, args.windows // 2, skip=1)
        found = search(bank, entry["choices"][f"{bits:g}"], rows[f"ours {bits:g}"], others)
        found["kl"] = measured(f"searched {bits:g}", found.pop("choice"))["kl"]
        entry.setdefault("searched", {})[f"{bits:g}"] = found
        print(json.dumps(found), flush=True)
    entry["mixtures"] = {}
    for bits in args.sizes:
        some = [
            measured(f"mixture {bits:g} {seed}", random_choice(table, size_at(table, bits), seed))
            for seed in range(args.mixtures)
        ]
        entry["mixtures"][f"{bits:g}"] = {
            "n": len(some),
            "size_spread": max(r["size_bytes"] for r in some) / min(r["size_bytes"] for r in some),
            "spearman": {
                p: spearman([r[p] for r in some], [r["kl"] for r in some]) for p in PREDICTIONS
            },
        }
        print(json.dumps(entry["mixtures"][f"{bits:g}"]), flush=True)
    entry["order_after_gptq"] = order(table, args.work / "bank")
    if args.peer:
        entry["peer"] = {
            f"{bits:g}": {"error": problem}
            if problem
            else against_peer(args.work / f"peer-{bits:g}.json", table, only, bits, measured)
            for bits, problem in asked.items()
        }
    keep(args.out, result)
    print(json.dumps({k: v for k, v in entry.items() if k != "rows"}, indent=2))


def fitting(table: Any) -> Any:
    """The table without formats that some unit cannot have."""
    names = [
        name
        for place, name in enumerate(table.formats)
        if all(unit.sizes[place] is not None for unit in table.units)
    ]
    return table.only(names)


def size_at(table: Any, bits: float) -> int:
    """Bytes of so many bits per weight; a uniform format within a thousandth is that size."""
    size = bits * table.n_weights / 8
    for place in range(len(table.formats)):
        uniform = table.size_of([place] * len(table.units))
        if abs(uniform / size - 1) < 1e-3:
            return max(int(size), uniform)
    return int(size)


def choices(table: Any, bits: float, measured: Any) -> dict[str, Any]:
    """Ours at a size, beside others of no more bytes."""
    from quantkit.mixed.allocation import solve

    size = size_at(table, bits)
    started = time.monotonic()
    found = solve(table.costs(), table.sizes(), size)
    seconds = time.monotonic() - started
    ours = measured(f"ours {bits:g}", list(found.choice))
    raw = [list(unit.errors) for unit in table.units]
    others = {
        "by_output_error": list(solve(raw, table.sizes(), size).choice),
        "by_relative_error": list(solve(table.costs(False), table.sizes(), size).choice),
    }
    usual = [name for name in USUAL if name in table.formats]
    places = [table.formats.index(name) for name in usual]
    only = solve(table.only(usual).costs(), table.only(usual).sizes(), size)
    others["of_usual_formats"] = [places[pick] for pick in only.choice]
    uniform = {
        name: measured(f"uniform {name}", [place] * len(table.units))["kl"]
        for place, name in enumerate(table.formats)
        if name != "bf16" and table.size_of([place] * len(table.units)) <= size
    }
    best = min(uniform, key=uniform.__getitem__)
    some = [
        measured(f"random {bits:g} {seed}", random_choice(table, size, 1000 + seed))["kl"]
        for seed in range(20)
    ]
    same = "w4a16-g32" if "w4a16-g32" in uniform else best
    return {
        "size_bytes": size,
        "solve_seconds": seconds,
        "gap": found.gap,
        "kl": ours["kl"],
        "predicted": found.cost,
        **{name: measured(f"{name} {bits:g}", pick)["kl"] for name, pick in others.items()},
        "best_uniform": best,
        "best_uniform_kl": uniform[best],
        "four_bits": same,
        "four_bits_kl": uniform[same],
        "less_than_four_bits": 1 - ours["kl"] / uniform[same],
        "best_random_kl": min(some),
        "median_random_kl": sorted(some)[len(some) // 2],
    }


def search(
    bank: Bank, chosen: dict[str, Any], row: dict[str, Any], windows: Any, most_rounds: int = 2
) -> dict[str, Any]:
    """How far from the best our choice is: the mixture of no more bytes that measured KL leads to.

    In each round every unit's next smaller and next larger format is measured, all others as they
    are; what these cost together chooses the next mixture, and KL on the same windows judges it.
    """
    from quantkit.mixed.allocation import solve

    table, started, n_measured = bank.table, time.monotonic(), 0
    choice = [string.ascii_letters.index(letter) for letter in row["choice"]]
    first = best = bank.kl(choice, windows)
    for _ in range(most_rounds):
        costs: list[list[float | None]] = []
        for index, (unit, of_unit) in enumerate(zip(table.units, table.costs(), strict=True)):
            found: list[float | None] = [None] * len(table.formats)
            for place in neighbours(list(unit.sizes), of_unit, choice[index]):
                other = [*choice[:index], place, *choice[index + 1 :]]
                found[place] = best if place == choice[index] else bank.kl(other, windows)
                n_measured += place != choice[index]
            costs.append(found)
        other = list(solve(costs, table.sizes(), chosen["size_bytes"]).choice)
        kl = bank.kl(other, windows)
        if not kl < best:
            break
        choice, best = other, kl
    return {
        "choice": choice,
        "n_measured": n_measured,
        "windows": len(windows),
        "before": first,
        "after": best,
        "seconds": time.monotonic() - started,
    }


def neighbours(sizes: list[int], costs: list[float], place: int) -> list[int]:
    """A format, and the next smaller and larger ones that no other one is better than."""
    by_size = sorted(range(len(sizes)), key=lambda each: (sizes[each], costs[each]))
    worth = [
        each
        for rank, each in enumerate(by_size)
        if each == place or all(costs[other] > costs[each] for other in by_size[:rank])
    ]
    at = worth.index(place)
    return worth[max(0, at - 1) : at + 2]


def order(table: Any, folder: Path) -> dict[str, float]:
    """Whether rounding's errors have the order of GPTQ's, over all units of one layer."""
    from quantkit.export.checkpoint import Checkpoint

    rounded, solved = [], []
    for place, name in enumerate(table.formats):
        if name == "bf16":
            continue
        layers = Checkpoint.open(folder / name).manifest.layers
        for unit in table.units:
            if len(unit.modules) == 1:
                rounded.append(unit.errors[place] / unit.energy)
                solved.append(layers[unit.modules[0]].output_error)
    return {"n": len(rounded), "spearman": spearman(rounded, solved)}


def ask_peer(args: argparse.Namespace, chosen: Path, usual: Sequence[str], bits: float) -> str:
    """Let the peer choose; empty, or what went wrong."""
    path = args.work / f"peer-{bits:g}.json"
    if path.is_file():
        return ""
    texts = args.work / "peer-texts.json"
    if not texts.is_file():
        write_texts(args, chosen, texts)
    command = [sys.executable, __file__, "peer", "--model", str(model_folder(args.model))]
    command += ["--texts", str(texts), "--avg-bits", str(bits), "--out", str(path)]
    # It drops texts that come out shorter than this when they are tokenised again.
    shorter = args.length - args.length // 16
    command += ["--samples", str(args.samples), "--length", str(shorter)]
    command += ["--batch", str(args.peer_batch)] if args.peer_batch else []
    command += ["--formats", *(name for name in usual if name != "bf16")]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    if "autoround" in args.path:
        env["PYTHONPATH"] = args.path["autoround"]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    return "" if path.is_file() else (done.stderr or done.stdout)[-2000:]


def against_peer(
    path: Path, table: Any, of_usual: tuple[Any, float], bits: float, measured: Any
) -> dict[str, Any]:
    """The peer's choice and ours of no more bytes, both from the bank."""
    from quantkit.mixed.allocation import solve

    only, table_seconds = of_usual
    found = json.loads(path.read_text())
    choice = []
    for unit in table.units:
        names = {found["layers"].get(module, "bf16") for module in unit.modules}
        if len(names) > 1:
            return {"error": f"{unit.name} has several formats: {', '.join(sorted(names))}"}
        choice.append(table.formats.index(names.pop()))
    theirs = measured(f"peer {bits:g}", choice)
    started = time.monotonic()
    solved = solve(only.costs(), only.sizes(), theirs["size_bytes"])
    mine = table_seconds + time.monotonic() - started
    places = [table.formats.index(name) for name in only.formats]
    ours = measured(f"ours at peer's size {bits:g}", [places[pick] for pick in solved.choice])
    return {
        "bits": theirs["bits"],
        "kl": theirs["kl"],
        "our_bits": ours["bits"],
        "our_kl": ours["kl"],
        "seconds": found["seconds"],
        "scheme_seconds": found["scheme_seconds"],
        "batch": found["batch"],
        "our_seconds": mine,
        "our_share_of_time": mine / found["seconds"],
        "versions": found["versions"],
    }


def model_folder(name: str) -> Path:
    from quantkit.model.source import locate

    return locate(name, None)


def write_texts(args: argparse.Namespace, chosen: Path, path: Path) -> None:
    """The set's samples as texts: the peer tokenises itself."""
    from safetensors.torch import load_file

    from quantkit.model.tokenizer import load as load_tokenizer

    tokenizer = load_tokenizer(model_folder(args.model))
    ids = load_file(chosen / "tokens.safetensors")["input_ids"]
    rows = [{"text": tokenizer.decode(row, skip_special_tokens=False)} for row in ids]
    path.write_text(json.dumps(rows))


def peer(args: argparse.Namespace) -> None:
    """AutoScheme's choice; runs where AutoRound is, and imports nothing of quantkit."""
    from importlib import metadata

    import torch
    from auto_round import AutoRound, AutoScheme
    from auto_round.auto_scheme import gen_auto_scheme
    from auto_round.schemes import QuantizationScheme
    from transformers import AutoTokenizer

    class Chosen(Exception):
        pass

    plain = gen_auto_scheme.GenScheme.get_layer_config
    kept: dict[str, Any] = {}

    def watched(self: Any) -> Any:
        started = time.monotonic()
        kept["layers"] = plain(self)
        kept["seconds"] = time.monotonic() - started
        raise Chosen

    gen_auto_scheme.GenScheme.get_layer_config = watched
    options = []
    for name in args.formats:
        width, _, size = name.partition("a16-g")
        numbers = {"bits": int(width[1:]), "group_size": int(size), "sym": True}
        options.append(
            QuantizationScheme.from_dict({**numbers, "data_type": "int", "act_bits": 16})
        )
    started = time.monotonic()
    scheme = AutoScheme(
        avg_bits=args.avg_bits,
        options=options,
        shared_layers=SHARED,
        ignore_scale_zp_bits=False,
        dataset=str(args.texts),
        nsamples=args.samples,
        seqlen=args.length,
        batch_size=args.batch,
    )
    with contextlib.suppress(Chosen):
        AutoRound(
            str(args.model),
            tokenizer=AutoTokenizer.from_pretrained(args.model),
            scheme=scheme,
            iters=0,
            nsamples=args.samples,
            seqlen=args.length,
            dataset=str(args.texts),
        ).quantize()
    found = {
        name: f"w{config['bits']}a16-g{config['group_size']}" if config["bits"] < 16 else "bf16"
        for name, config in kept["layers"].items()
    }
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    told = {
        "layers": found,
        "seconds": time.monotonic() - started,
        "scheme_seconds": kept["seconds"],
        "batch": args.batch,
        "versions": {name: metadata.version(name) for name in ("auto-round", "torch")},
    }
    args.out.write_text(json.dumps(told, indent=2))


def build_set(args: argparse.Namespace) -> Path:
    """Tokens for everybody, unless they are there."""
    import quantkit

    chosen: Path = args.work / "set"
    if not (chosen / "calibration.json").is_file():
        quantkit.calibrate(
            args.calibration,
            model=args.model,
            out=chosen,
            samples=args.samples,
            length=args.length,
        )
    return chosen


def blocks(args: argparse.Namespace) -> None:
    """Marginal seconds per block of the table and of one GPTQ recipe."""
    import torch
    from data_free import make_model
    from whole_model import make_text

    import quantkit
    from quantkit.mixed.run import write_table
    from quantkit.model.source import ModelSource
    from quantkit.onepass.prepare import CalibrationChoice, Run

    result = opened(args.out)
    args.work.mkdir(parents=True, exist_ok=True)
    six = ("w3a16-g128", "w4a16-g128", "w4a16-g64", "w4a16-g32", "w8a16-g128", "w8a16-g32")
    shape = tuple(args.shape)
    seconds: dict[str, list[float]] = {"table": [], "gptq": []}
    for n_blocks in (args.blocks[0], *args.blocks):  # the first call warms up
        folder = args.work / f"model-{n_blocks}"
        if not folder.exists():
            make_model(folder, n_blocks, *shape)
        text, chosen = args.work / "text.txt", args.work / f"set-{n_blocks}"
        if not text.is_file():
            make_text(text, args.samples * args.length)
        if not chosen.exists():
            quantkit.calibrate(
                text, model=folder, out=chosen, samples=args.samples, length=args.length
            )
        source = ModelSource.open(str(folder))
        calibration = CalibrationChoice(str(chosen))
        out = args.work / "out"
        started = time.monotonic()
        write_table(source, out / "table", "auto", calibration, Run(force=True), six)
        seconds["table"].append(time.monotonic() - started)
        started = time.monotonic()
        quantkit.quantize(source, "gptq-w4a16", out=out, calibration=str(chosen), force=True)
        seconds["gptq"].append(time.monotonic() - started)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    more = args.blocks[1] - args.blocks[0]
    each = {name: (found[2] - found[1]) / more for name, found in seconds.items()}
    result["blocks"] = {
        "shape": list(shape),
        "blocks": args.blocks,
        "n_tokens": args.samples * args.length,
        "formats": list(six),
        "seconds": seconds,
        "seconds_per_block": each,
        "table_over_pass": each["table"] / each["gptq"],
    }
    keep(args.out, result)
    print(json.dumps(result["blocks"], indent=2))


def solver(args: argparse.Namespace) -> None:
    """One random problem of the size that matters."""
    from quantkit.mixed.allocation import solve

    result = opened(args.out)
    rng = random.Random(0)
    costs, sizes = [], []
    bits = (3.125, 3.5, 4.125, 4.25, 4.5, 8.125, 8.5, 16.0)
    for _ in range(1000):
        n_weights, weight = rng.randint(1, 64) * (1 << 20), rng.lognormvariate(0, 1.5)
        sizes.append([int(n_weights * b / 8) + rng.randrange(64) for b in bits])
        costs.append([weight * 4**-b * rng.uniform(0.8, 1.2) if b < 16 else 0.0 for b in bits])
    smallest = sum(row[0] for row in sizes)
    rows = {}
    for share in (1.1, 1.45, 2.0):
        started = time.monotonic()
        found = solve(costs, sizes, int(share * smallest))
        seconds = time.monotonic() - started
        filled = found.size_bytes / int(share * smallest)
        rows[f"{share:g}"] = {"seconds": seconds, "gap": found.gap, "filled": filled}
    result["solver"] = {"n_units": 1000, "n_formats": len(bits), "budgets": rows}
    keep(args.out, result)
    print(json.dumps(rows, indent=2))


def opened(path: Path) -> dict[str, Any]:
    """What is known so far."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    known.pop("recorded", None)
    return {
        "what": "KL of mixed formats: predicted, chosen, and against others",
        "models": {},
    } | known


def keep(path: Path, result: dict[str, Any]) -> None:
    """Write the result with where it comes from."""
    from recording import write

    from quantkit import device as devices
    from quantkit.export.manifest import versions

    result |= {
        "device": devices.describe(devices.choose()),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
    }
    write(path, result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("model")
    part.add_argument("--model", required=True)
    part.add_argument("--name", required=True)
    part.add_argument("--origin", required=True, help="where the source's weights come from")
    part.add_argument("--calibration", nargs="+", required=True)
    part.add_argument("--text", required=True)
    part.add_argument("--samples", type=int, default=128)
    part.add_argument("--length", type=int, default=2048)
    part.add_argument("--windows", type=int, default=8)
    part.add_argument("--formats", nargs="*", default=[])
    part.add_argument("--bits", type=float, nargs="+", default=[4.5, 5.0, 6.0])
    part.add_argument("--sizes", type=float, nargs="+", default=[4.5, 6.0])
    part.add_argument("--search", type=float, nargs="*", default=[], help="as --bits")
    part.add_argument("--mixtures", type=int, default=40)
    part.add_argument("--peer", type=float, nargs="+", default=[])
    part.add_argument("--peer-batch", type=int, help="samples at a time, where its own 8 are lost")
    part.add_argument("--path", type=lambda text: text.split("=", 1), action="append", default=[])
    part.add_argument("--work", type=Path, required=True)
    part = parts.add_parser("blocks")
    part.add_argument("--samples", type=int, default=128)
    part.add_argument("--length", type=int, default=2048)
    part.add_argument("--blocks", type=int, nargs=2, default=[1, 3])
    part.add_argument("--shape", type=int, nargs=3, default=[4096, 14336, 32000])
    part.add_argument("--work", type=Path, required=True)
    parts.add_parser("solver")
    part = parts.add_parser("peer")
    part.add_argument("--model", type=Path, required=True)
    part.add_argument("--texts", type=Path, required=True)
    part.add_argument("--avg-bits", type=float, required=True)
    part.add_argument("--formats", nargs="+", required=True)
    part.add_argument("--samples", type=int, required=True)
    part.add_argument("--length", type=int, required=True)
    part.add_argument("--batch", type=int)
    for part in parts.choices.values():
        part.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.part == "model":
        args.path = dict(args.path)
    {"model": model, "blocks": blocks, "solver": solver, "peer": peer}[args.part](args)


if __name__ == "__main__":
    main()
