"""Build a set from sources: read, render, select, pack, measure."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit import __version__
from quantkit.calibration import calibration_set
from quantkit.calibration.calibration_set import CalibrationSet, Manifest, Pool, SourceRecord
from quantkit.calibration.choosing import figures, packing, selection
from quantkit.calibration.choosing.candidates import Candidates
from quantkit.calibration.choosing.packing import Sample
from quantkit.calibration.choosing.selection import Choice, Shape
from quantkit.calibration.images import Unusable, Vision
from quantkit.calibration.overlap.contamination import EvaluationText
from quantkit.calibration.pool import GatheredSource, Reading, describe, gather, require_rows
from quantkit.calibration.reading.record import SKIP
from quantkit.calibration.redaction.rows import redact_rows
from quantkit.calibration.rendering import Piece, Refused, Renderer, TooLong
from quantkit.calibration.spec import Files, SetSpec
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import DataError
from quantkit.home import expanded
from quantkit.model.source import context_of, locate, read_config, text_config
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.progress import Progress
from quantkit.quiet import only_errors

ENOUGH = 8
"""Candidate text to read, as a multiple of the set's size."""
CHARACTERS_PER_TOKEN = 4
ROWS_AHEAD = 128
"""Rows whose texts are encoded at once: enough for all cores, few enough to keep in memory."""
JUST_OVER = 8
"""Rows that exceed a sample by at most 1/8 would fit whole into a slightly longer one."""
MANY_OVER = 0.1
"""Share of such rows in a source that is worth a note."""
N_RANDOM = 20


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer and model that a set is for."""

    model: str
    tokenizer: Any
    context: int
    n_tokens: int
    """Size of the model's embedding."""
    widest: int | None = None
    """Input width of its widest layer."""
    folder: Path | None = None
    """Where its image processor may be."""

    @classmethod
    def of(cls, name: str, revision: str | None = None) -> "Vocabulary":
        """From a folder, a hub model or `demo`; weights are neither downloaded nor read."""
        folder = locate(name, revision, weights=False)
        config = read_config(folder)
        tokenizer = load_tokenizer(folder)
        label = name if name == "demo" else Path(name).name
        n_tokens = text_config(config).get("vocab_size") or len(tokenizer)
        widths = [config.get(key) for key in ("hidden_size", "intermediate_size", "ffn_dim")]
        widest = max((int(w) for w in widths if isinstance(w, int)), default=None)
        return cls(label, tokenizer, context_of(config), int(n_tokens), widest, folder)


@dataclass(frozen=True)
class Rendered:
    """A piece, and the row it comes from."""

    piece: Piece
    source: int
    row: int
    """Index in its source's rows."""


@dataclass(frozen=True)
class Chosen:
    """Samples for one model, and what they were chosen from."""

    name: str
    spec: SetSpec
    model: Vocabulary
    gathered: list[GatheredSource]
    rendered: list[Rendered]
    candidates: Candidates
    shape: Shape
    choice: Choice
    redacted: Counter[str]
    tokens: CalibrationTokens


def choose(
    name: str,
    spec: SetSpec,
    reading: Reading,
    model: Vocabulary,
    progress: Progress,
    evaluation: EvaluationText | None = None,
) -> Chosen:
    """The samples that a spec describes, for one model."""
    length = min(spec.max_length, model.context)
    if length < spec.max_length:
        progress.note(f"samples of {length:,} tokens, the model's context")
    renderer = Renderer(model.tokenizer, length, spec.chat)
    enough = ENOUGH * spec.n_samples * length * CHARACTERS_PER_TOKEN
    gathered = gather(spec, reading, enough, renderer.check, evaluation, progress)
    require_rows(gathered)
    renderer.vision = _vision(gathered, model, spec, progress)
    gathered, redacted = redact_rows(gathered, spec, progress)
    folders = [_folder(source, reading.base) for source in spec.sources]
    with only_errors("transformers"):  # it warns about rows longer than the context, which are cut
        rendered = _render(gathered, renderer, spec.seed, reading.skip_bad, progress, folders)
    candidates = _candidates(rendered, gathered, model, spec.seed)
    pictured = any(item.piece.pictures for item in rendered)
    if pictured and spec.short == "pack":
        progress.note("one chat per sample, since images are not cut")
    shape = Shape(spec.n_samples, length, spec.short == "pack" and not pictured)
    names, accounts = [s.name for s in gathered], [describe(s.account) for s in gathered]
    selection.require_enough(candidates, shape, names, accounts)
    progress.start("choose", 1, "sets")
    choice = selection.cover(candidates, shape)
    if spec.select == "random":
        drawn = selection.at_random(candidates, shape, spec.seed, exact=True)
        choice = replace(choice, samples=drawn, why={})
    progress.finish()
    selection.require_full(candidates, shape, choice.samples, names, accounts)
    tokens = _tokens(name, choice.samples, candidates, length, model)
    if pictured:
        of_sample = [
            tuple(one for part in sample for one in rendered[part.piece].piece.pictures)
            for sample in choice.samples
        ]
        tokens = replace(tokens, pictures=tuple(of_sample))
    return Chosen(
        name, spec, model, gathered, rendered, candidates, shape, choice, redacted, tokens
    )


def build(
    name: str,
    spec: SetSpec,
    reading: Reading,
    model: Vocabulary,
    progress: Progress,
    evaluation: EvaluationText | None = None,
    avoided: dict[str, str] | None = None,
) -> CalibrationSet:
    """The same as a set to keep: what the samples are, and how they compare with random ones."""
    chosen = choose(name, spec, reading, model, progress, evaluation)
    table = _table(chosen.choice, chosen.rendered, chosen.gathered, model.tokenizer)
    return CalibrationSet(chosen.tokens, table, _manifest(chosen, avoided or {}))


def _manifest(chosen: Chosen, avoided: dict[str, str]) -> Manifest:
    spec, model, candidates = chosen.spec, chosen.model, chosen.candidates
    choice, tokens = chosen.choice, chosen.tokens
    seeds = range(spec.seed, spec.seed + N_RANDOM)
    draws = [selection.at_random(candidates, chosen.shape, seed) for seed in seeds]
    measured = [
        figures.measure(candidates, samples, choice.clusters, choice.n_clusters)
        for samples in (choice.samples, *draws)
    ]
    return Manifest(
        name=chosen.name,
        spec=spec,
        n_samples=len(choice.samples),
        length=chosen.shape.length,
        n_tokens=tokens.n_tokens,
        tokenizer=calibration_set.Tokenizer(
            model=model.model,
            digest=calibration_set.tokenizer_digest(model.tokenizer),
            template_digest=calibration_set.template_digest(model.tokenizer),
            vocabulary=model.n_tokens,
            widest=model.widest,
        ),
        sources=_source_records(chosen.gathered, chosen.rendered, choice.samples, candidates, spec),
        pool=_pool(candidates, choice),
        figures=measured[0],
        random=figures.mean(measured[1:]),
        n_random=N_RANDOM,
        redacted=dict(chosen.redacted),
        avoided=avoided,
        digest=tokens.digest,
        version=__version__,
    )


def _vision(
    gathered: list[GatheredSource], model: Vocabulary, spec: SetSpec, progress: Progress
) -> Vision | None:
    """The model's processor if chats have images; None, with a note, if it cannot be used."""
    n_rows = sum(row.has_images for source in gathered for row in source.rows)
    if not n_rows:
        return None
    try:
        if spec.redact:
            raise Unusable("rows are redacted, and images cannot be")
        if spec.chat == "plain":
            raise Unusable("`chat: plain` renders text alone")
        return Vision.of(model.folder)
    except Unusable as error:
        progress.note(f"warning: {n_rows:,} chats are read without their images: {error}")
        return None


def _folder(source: Any, base: Path) -> Path:
    """Base folder for paths in a source's rows."""
    if not isinstance(source, Files):
        return base
    root = base / expanded(source.path)
    return root if root.is_dir() else root.parent


def _render(
    gathered: list[GatheredSource],
    renderer: Renderer,
    seed: int,
    skip_bad: bool,
    progress: Progress,
    folders: list[Path],
) -> list[Rendered]:
    """All rows as pieces; rows that the template refuses are counted, or raise an error."""
    progress.start("render", sum(len(source.rows) for source in gathered), "rows")
    rendered: list[Rendered] = []
    just_over: Counter[int] = Counter()
    fitting = renderer.length + renderer.length // JUST_OVER
    for index, source in enumerate(gathered):
        rng = random.Random(f"{seed} {source.name}")
        for place, row in enumerate(source.rows):
            if place % ROWS_AHEAD == 0:
                renderer.encode_ahead(source.rows[place : place + ROWS_AHEAD])
            try:
                pieces = renderer.pieces(row, rng, folders[index])
            except TooLong as error:
                source.account.leave_out("too long with its images", str(error))
                continue
            except (Refused, Unusable) as error:
                if not skip_bad and isinstance(error, Unusable):
                    raise DataError(f"{row.place}: {error}; {SKIP}") from None
                if not skip_bad:
                    raise
                reason = (
                    "without its images"
                    if isinstance(error, Unusable)
                    else "refused by the template"
                )
                source.account.leave_out(reason, str(error))
                continue
            if not pieces:
                source.account.leave_out("empty", f"{row.place} has no tokens")
            if row.kind != "text" and row.messages[-1]["role"] != "assistant":
                source.account.remarks["without an answer"] += 1
            if len(pieces) > 1 and sum(len(piece.ids) for piece in pieces) <= fitting:
                just_over[index] += 1
            rendered += [Rendered(piece, index, place) for piece in pieces]
        progress.advance(len(source.rows))
    progress.finish()
    for index, source in enumerate(gathered):
        if n := source.account.remarks["without an answer"]:
            progress.note(
                f"{source.name}: {n:,} rows end before an answer; they are rendered up to where "
                "the assistant would begin"
            )
        if (n := just_over[index]) > MANY_OVER * len(source.rows):
            progress.note(
                f"{source.name}: {n:,} of {len(source.rows):,} rows are just longer than a sample "
                f"of {renderer.length:,} tokens, and are cut into a piece and a stub; --length "
                f"{fitting} would keep them whole"
            )
        if not any(item.source == index for item in rendered):
            raise DataError(f"{source.name} has no usable row: {describe(source.account)}")
    return rendered


def _candidates(
    rendered: list[Rendered], gathered: list[GatheredSource], model: Vocabulary, seed: int
) -> Candidates:
    pieces = [item.piece for item in rendered]
    source = np.array([item.source for item in rendered])
    largest = max(int(piece.ids.max()) for piece in pieces)
    if largest >= model.n_tokens:
        raise DataError(
            f"the tokenizer gives the id {largest}, the model has {model.n_tokens} tokens: "
            "they do not match"
        )
    weights = np.array([0.0 if s.weight is None else s.weight for s in gathered])
    if not weights.any():  # as much as each has, including rows that were not sampled
        tokens = np.bincount(source, [len(piece.ids) for piece in pieces], len(gathered))
        weights = tokens * [1 + s.account.counts["not drawn"] / len(s.rows) for s in gathered]
    return Candidates(pieces, source, weights / weights.sum(), model.n_tokens, seed)


def _tokens(
    name: str, samples: list[Sample], candidates: Candidates, length: int, model: Vocabulary
) -> CalibrationTokens:
    padding = model.tokenizer.pad_token_id
    padding = model.tokenizer.eos_token_id if padding is None else padding
    ids, lengths = packing.arrays(
        samples, [piece.ids for piece in candidates.pieces], length, padding or 0
    )
    full = bool((lengths == length).all())
    return CalibrationTokens(
        name,
        torch.from_numpy(ids.astype(np.int64)),
        None if full else torch.from_numpy(lengths.astype(np.int64)),
    )


def _source_records(
    gathered: list[GatheredSource],
    rendered: list[Rendered],
    samples: list[Sample],
    candidates: Candidates,
    spec: SetSpec,
) -> list[SourceRecord]:
    """What each source contributed; a row is used in part if some of its tokens are left out."""
    used: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        for part in sample:
            item = rendered[part.piece]
            used[item.source, item.row] += part.n_tokens
    whole: Counter[tuple[int, int]] = Counter()
    cut = set()
    for item in rendered:
        whole[item.source, item.row] += len(item.piece.ids)
        if item.piece.cut:
            cut.add((item.source, item.row))
    records = []
    for index, source in enumerate(gathered):
        rows = Counter({reason: n for reason, n in source.account.counts.items() if n})
        for key in whole:
            if key[0] == index:
                partial = key in cut or used[key] < whole[key]
                rows["not chosen" if not used[key] else "in part" if partial else "whole"] += 1
        records.append(
            SourceRecord(
                name=source.name,
                share=float(candidates.shares[index]),
                n_tokens=sum(n for key, n in used.items() if key[0] == index),
                licence=spec.sources[index].licence,
                digest=source.digest,
                files=source.files,
                rows=dict(rows),
                remarks=dict(source.account.remarks),
                examples=source.account.examples,
            )
        )
    return records


def _pool(candidates: Candidates, choice: Choice) -> Pool:
    steps = np.linspace(0, 1, 21)
    used = [part.n_tokens for sample in choice.samples for part in sample]
    return Pool(
        n_pieces=len(candidates.pieces),
        n_tokens=int(candidates.lengths.sum()),
        n_clusters=choice.n_clusters,
        lengths=np.quantile(candidates.lengths, steps, method="nearest").tolist(),
        set_lengths=np.quantile(used, steps, method="nearest").tolist(),
    )


def _table(
    choice: Choice, rendered: list[Rendered], gathered: list[GatheredSource], tokenizer: Any
) -> list[dict[str, Any]]:
    """Every piece of every sample, in readable form."""
    any_pictures = any(item.piece.pictures for item in rendered)

    def pictured(piece: Piece) -> dict[str, Any]:
        return {"images": [one.name for one in piece.pictures]} if any_pictures else {}

    rows = []
    for number, sample in enumerate(choice.samples):
        for part in sample:
            item = rendered[part.piece]
            row = gathered[item.source].rows[item.row]
            rows.append(
                {
                    "sample": number,
                    "source": row.source,
                    "place": row.place,
                    "kind": row.kind,
                    "n_tokens": part.n_tokens,
                    "cut": item.piece.cut or part.n_tokens < len(item.piece.ids),
                    "cluster": int(choice.clusters[part.piece]),
                    "why": choice.why.get(part.piece, "drawn at random"),
                    "text": tokenizer.decode(
                        part.of(item.piece.ids), clean_up_tokenization_spaces=False
                    ),
                    **pictured(item.piece),
                }
            )
    return rows
