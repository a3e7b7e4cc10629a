"""The pass that fills the table of candidates: every unit in every format, from one read.

Statistics are those of the calibrated pass over the source's own stream. A block's results are
written to the journal once it is done, so a stopped run resumes from there.
"""

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import HardwareError
from quantkit.gguf.layout import Layout
from quantkit.gguf.tensors import HEAD
from quantkit.methods.products import Halves, row_energies
from quantkit.methods.statistics import Statistics
from quantkit.mixed import gguf_candidates, rounding, units
from quantkit.mixed.probe import Outer, Probe, outer_weight
from quantkit.mixed.rounding import AnyCandidate, Rows
from quantkit.mixed.table import Table, UnitRow
from quantkit.mixed.units import Unit
from quantkit.model.blocks import Decoder
from quantkit.model.shards import DTYPES
from quantkit.onepass import journal
from quantkit.onepass.onepass import Pass, quantize_blocks
from quantkit.onepass.prepare import Job, Run
from quantkit.onepass.visit import Observation, Visit
from quantkit.parsing import parse_json
from quantkit.plan.checkpoint import sharing
from quantkit.recipe import Recipe
from quantkit.schemes import WeightScheme
from quantkit.storage import write_json
from quantkit.tensorspec import TensorSpec

KEPT_INPUTS = 256
"""Inputs kept per layer, for formats that round activations."""
NAME = "sensitivity"


def statistics_recipe() -> Recipe:
    """The statistics to gather, as a recipe: their cost follows from that."""
    return Recipe.model_validate(
        {
            "name": NAME,
            "summary": "statistics of every layer's inputs",
            "method": "gptq",
            "weights": WeightScheme(num_bits=8, strategy="channel"),
            "options": {"propagate": False},
        }
    )


@dataclass
class Watch:
    """Watches the source's stream, and fills rows of the table block by block."""

    units: Sequence[Unit]
    candidates: Sequence[AnyCandidate]
    n_tokens: int
    folder: Path | None = None
    """Where finished blocks are stored; None: nowhere."""
    n_samples: int = 0
    n_known: int = 0
    """Blocks of which the folder has the errors."""
    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Errors, energy and the probe's error, by unit."""
    divergences: dict[str, float] = field(default_factory=dict)
    probe: Probe = field(default_factory=Probe)
    """Its `outer` holds embedding and head, where these are units."""

    def __post_init__(self) -> None:
        self._owner = {module: unit for unit in self.units for module in unit.modules}
        self._solves = any(one.by_gptq for one in self.candidates)
        while self.folder is not None and self._path(self.n_known).is_file():
            self.found |= parse_json(self._path(self.n_known).read_bytes())
            self.n_known += 1

    def _path(self, index: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{index:05d}.json"

    @property
    def modules(self) -> Container[str]:
        return self._owner

    @property
    def n_done(self) -> int:
        """None: the probe's changes follow from the statistics of every block."""
        return 0

    def arrive(self, visit: Visit) -> None:
        """Keep the samples that the probe follows."""
        if visit.index == 0:
            self.probe.begin(visit)

    def _here(self, visit: Visit) -> dict[str, Unit]:
        """A block's linears by their names in it, and the units that they belong to."""
        named = visit.decoder.blocks[visit.index].named_modules()
        linears = [name for name, module in named if isinstance(module, torch.nn.Linear)]
        return {n: self._owner[full] for n in linears if (full := visit.module(n)) in self._owner}

    def see(self, visit: Visit, found: Observation) -> None:
        """Round every unit of the block to every format, and run the probe's samples through it
        with each unit changed alone.
        """
        here = self._here(visit)
        stored = visit.decoder.tensors(visit.index)
        sums: dict[str, list[torch.Tensor]] = {}
        changes: dict[str, dict[str, torch.Tensor]] = {}
        for leader, members in found.collector.groups.items():
            statistics = found.collector.statistics[leader]
            gram = Halves.of(statistics.gram)
            solver = rounding.Solver.of(statistics.gram) if self._solves else None
            parts: dict[tuple[str, torch.dtype], list[str]] = {}
            for name in members:
                if name in here:
                    dtype = DTYPES[stored[f"{name}.weight"].dtype]
                    parts.setdefault((here[name].name, dtype), []).append(name)
            for (unit, dtype), names in parts.items():
                weights = [visit.state[f"{n}.weight"].float() for n in names]
                weight = torch.cat(weights)
                rounded = rounding.probe_change(weight, dtype)
                probed = rounded if solver is None else solver.left(rounded)
                pieces = torch.split(probed, [len(w) for w in weights])
                changes.setdefault(unit, {}).update(
                    (f"{n}.weight", moved) for n, moved in zip(names, pieces, strict=True)
                )
                if visit.index < self.n_known:
                    continue
                rows = Rows(
                    weight,
                    dtype,
                    statistics,
                    found.collector.raw_inputs.get(leader),
                    _largest(visit, names, here, dtype),
                )
                probe, whole = (
                    row_energies(moved, gram, exactly=False).sum() for moved in (probed, weight)
                )
                solved = None if solver is None else _solved(solver, rounded, probe)
                errors = [rounding.error(rows, one, gram, solved) for one in self.candidates]
                errors += [probe, whole]
                before = sums.get(unit)
                sums[unit] = (
                    errors
                    if before is None
                    else [a + b for a, b in zip(before, errors, strict=True)]
                )
        self.probe.advance(visit, changes)
        if visit.index >= self.n_known:
            self._keep(visit.index, sums)

    def _keep(self, index: int, sums: Mapping[str, list[torch.Tensor]]) -> None:
        block: dict[str, dict[str, Any]] = {}
        for unit, errors in sums.items():
            values = (torch.stack(errors).double() / self.n_tokens).tolist()
            *by_format, probe, energy = values
            block[unit] = {"errors": by_format, "probe_error": probe, "energy": energy}
        self.found |= block
        if self.folder is not None:
            write_json(self._path(index), block)
        self.n_known = index + 1

    def finish(self, decoder: Decoder, calibration: CalibrationTokens) -> None:
        """The effect of each unit's change on predictions; and the weights outside the blocks."""
        self.divergences = self.probe.divergences(decoder, calibration)
        outer = self.probe.outer
        if outer is None:
            return
        if outer.head:
            if outer.inputs is None:  # the samples were lost: all inputs weigh the same
                width = decoder.source.tensors[f"{outer.head}.weight"].shape[1]
                outer.inputs = torch.eye(width, device=decoder.device)
            inputs = outer.inputs.float()
            self._outer_errors(decoder, outer.head, inputs.t() @ inputs, len(inputs))
        if outer.embedding and outer.embedding != outer.head:
            weight, _ = outer_weight(decoder, outer.embedding)
            ids = outer.ids.flatten()
            n_seen = torch.bincount(ids, minlength=len(weight)).to(weight.device).float()
            unit = torch.eye(weight.shape[1], device=weight.device)
            self._outer_errors(decoder, outer.embedding, unit, len(ids), n_seen)

    def _outer_errors(
        self,
        decoder: Decoder,
        module: str,
        gram: torch.Tensor,
        n_tokens: int,
        n_seen: torch.Tensor | None = None,
    ) -> None:
        """Errors of the head, or of the embedding, whose rows are weighted by how often they are
        read.
        """
        weight, dtype = outer_weight(decoder, module)
        if n_seen is not None:
            weight = weight * n_seen.sqrt()[:, None]  # block types are invariant to a row's scale
            weight = weight[n_seen > 0]
        total = gram.new_zeros(len(gram))
        rows = Rows(weight, dtype, Statistics(gram, total, total, n_tokens), weighed=False)
        halves = Halves.of(gram)
        errors = [float(rounding.error(rows, one, halves)) / n_tokens for one in self.candidates]
        probed, whole = (
            float(row_energies(moved, halves, exactly=False).sum()) / n_tokens
            for moved in (rounding.probe_change(weight, dtype), weight)
        )
        self.found[module] = {"errors": errors, "probe_error": probed, "energy": whole}


def _solved(
    solver: rounding.Solver, rounded: torch.Tensor, probe: torch.Tensor
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Errors after GPTQ by the undamped matrix: the probe's change has its share of the damped one,
    which is nearly the same for all formats of a unit.
    """
    share = probe / solver.energy(rounded).clamp(min=1e-30)
    return lambda change: solver.energy(change) * share


def _largest(
    visit: Visit, names: list[str], here: Mapping[str, Unit], dtype: torch.dtype
) -> torch.Tensor:
    """The largest magnitude of all weights that share a global scale with these."""
    together = sharing(names[0], here)
    return torch.stack([visit.state[f"{n}.weight"].abs().amax() for n in together]).amax().to(dtype)


def measure(
    job: Job,
    candidates: Sequence[AnyCandidate],
    run: Run,
    folder: Path | None,
    layout: Layout | None = None,
) -> Table:
    """Measure the table of a model, from a job with the statistics recipe.

    `layout` is that of a GGUF file, where the table is for llama.cpp.
    """
    started = time.monotonic()
    if run.ranks.size > 1:
        raise HardwareError(
            "a table of candidates is made in one process; make it by `quantkit sensitivity` "
            "without torchrun, and name it with --sensitivity"
        )
    assert job.calibration is not None
    (plan,) = job.plans
    kept = None if folder is None else journal.claim(folder, _key(job, candidates))
    watch = Watch(
        units.fused(list(plan.quantized)) if layout is None else gguf_candidates.units(layout),
        candidates,
        job.calibration.n_tokens,
        kept,
        KEPT_INPUTS if any(one.activations for one in candidates) else 0,
        probe=Probe(None if layout is None else _outer(job.calibration, layout)),
    )
    wanted = Pass(
        job.source,
        [],
        job.calibration,
        job.device,
        progress=run.progress,
        watcher=watch,
        shares_experts=job.shares_experts,
    )
    quantize_blocks(wanted, "always" if job.on_host else run.offload)
    if watch.probe.is_lost:
        run.progress.note(
            "warning: this family's blocks pass more than hidden states, so units could not be "
            "changed one at a time; errors are relative to each unit's own output"
        )
    if layout is not None:
        weights = {
            n: TensorSpec(n, "BF16", t.shape) for n, t in gguf_candidates.tensors(layout).items()
        }
        return _table(
            job, watch, weights, gguf_candidates.other_bytes(layout), time.monotonic() - started
        )
    quantized = {weight.name for weight in plan.quantized.values()}
    stored = job.source.tensors
    kept_specs = [spec for spec in plan.specs if spec.name in stored and spec.name not in quantized]
    other_bytes = sum(spec.size_bytes for spec in kept_specs)
    return _table(job, watch, plan.quantized, other_bytes, time.monotonic() - started)


def _outer(calibration: CalibrationTokens, layout: Layout) -> Outer:
    """Embedding and head of a file."""
    embedding = layout.family.embedding.removesuffix(".weight")
    head = HEAD.removesuffix(".weight")
    has_head = head in gguf_candidates.tensors(layout)
    return Outer(calibration.longest_first().ids, embedding, head if has_head else embedding)


def _table(
    job: Job, watch: Watch, stored: Mapping[str, TensorSpec], other_bytes: int, seconds: float
) -> Table:
    assert job.calibration is not None
    rows = []
    for unit in watch.units:
        found = watch.found[unit.name]
        weights = {module: stored[module] for module in unit.modules}
        sizes: list[int | None] = []
        for candidate in watch.candidates:
            parts = [candidate.size_bytes(module, weight) for module, weight in weights.items()]
            sizes.append(None if None in parts else sum(part or 0 for part in parts))
        errors = [None if s is None else e for s, e in zip(sizes, found["errors"], strict=True)]
        rows.append(
            UnitRow(
                name=unit.name,
                modules=list(unit.modules),
                n_weights=sum(weight.n_elements for weight in weights.values()),
                sizes=sizes,
                errors=errors,
                energy=found["energy"],
                probe_error=found["probe_error"],
                probe_kl=watch.divergences.get(unit.name),
            )
        )
    return Table(
        model=job.source.label,
        source=job.source_record.fingerprint,
        engine="llama.cpp" if watch.probe.outer is not None else "vllm",
        calibration=job.calibration.name,
        calibration_digest=job.calibration.digest,
        n_tokens=job.calibration.n_tokens,
        formats=[one.name for one in watch.candidates],
        probe=f"{rounding.PROBE_BITS}-bit integers",
        n_probe_tokens=watch.probe.n_tokens,
        other_bytes=other_bytes,
        units=rows,
        seconds=seconds,
    )


def _key(job: Job, candidates: Sequence[AnyCandidate]) -> dict[str, str]:
    from quantkit import __version__

    assert job.calibration is not None
    return {
        "source": job.source_record.fingerprint,
        "calibration": job.calibration.digest,
        "formats": " ".join(one.name for one in candidates),
        "device": job.device.type,
        "version of quantkit or torch": f"{__version__} {torch.__version__}",
    }
