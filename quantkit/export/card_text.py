"""The text of a model card: what a checkpoint is, how it was made, what it costs, its limits."""

import json
import shlex
from collections.abc import Sequence

from quantkit import methods
from quantkit.export import card_facts as facts
from quantkit.export import format_map, front_matter
from quantkit.export.card_facts import Scored
from quantkit.export.card_markup import fenced, plain, table
from quantkit.export.card_scores import scores
from quantkit.export.manifest import Manifest
from quantkit.export.verified import Verified
from quantkit.gguf import imatrix
from quantkit.hardware import gpus, support
from quantkit.recipe import GGUFRecipe, Recipe
from quantkit.registry import NATIVE
from quantkit.storage import duration, gib

N_WORST = 5
SMALL = 500_000_000
"""Below this many weights, scores say little about models that people serve."""


def body(
    manifest: Manifest,
    scored: Sequence[Scored] = (),
    has_chat: bool = False,
    proven: Verified | None = None,
    name: str | None = None,
) -> str:
    """The whole text below the metadata; `name` is the folder's, by which it is served."""
    sections = [
        f"# {plain(facts.last_part(facts.source_name(manifest)))}, {plain(manifest.name)}",
        _what(manifest),
        f"## How it was made\n\n{_how(manifest)}",
        f"## Size\n\n{_size(manifest)}",
        f"## Scores\n\n{scores(scored)}",
        *([f"## Layers that lost most\n\n{_worst(manifest)}"] if manifest.layers else []),
        f"## Serving\n\n{_serving(manifest, has_chat, name or manifest.name)}",
        f"## Checking\n\n{_checking(manifest, proven)}",
        f"## Limits\n\n{_limits(manifest, scored)}",
        f"## Licence\n\n{_licence(manifest)}",
    ]
    return "\n\n".join(sections)


def _what(manifest: Manifest) -> str:
    source = manifest.source
    hub = facts.base_model(manifest)
    name = f"[{plain(hub)}]({facts.HUB}/{hub})" if hub else plain(facts.source_name(manifest))
    at = f" at revision {plain(source.revision)}" if hub and source.revision else ""
    form = "one GGUF file for llama.cpp"
    if not facts.is_gguf(manifest):
        form = f"a folder in {plain(manifest.format)} form for vLLM"
    return (
        f"This is {name}{at}, quantised with quantkit: {plain(manifest.recipe.summary)}. It is "
        f"{form}, has {manifest.bits_per_weight:.2f} bits per weight and takes "
        f"{manifest.size_bytes / source.size_bytes:.1%} of the source's memory."
    )


def _how(manifest: Manifest) -> str:
    recipe = manifest.recipe
    if isinstance(recipe, Recipe):
        scheme, cache = recipe.explain().splitlines()[:2]
        words = [scheme, *([cache] if recipe.kv_cache else [])]
        words.append(methods.find(recipe.method).explanation)
    else:
        words = [plain(recipe.explain().splitlines()[0])]
        if recipe.method is not None:
            words.append(
                "GPTQ chose the levels of K-quants on llama.cpp's scales: each column of a layer "
                "compensates for the errors of those before it, judged by the layer's inputs."
            )
        elif imatrix.FILE in manifest.files:
            words.append(
                f"Rounding errors were weighted by how much inputs matter (`{imatrix.FILE}`)."
            )
    # The recipe is embedded in full, so that its digest matches and it can be run again.
    resolved = recipe.model_dump(mode="json", exclude_none=True, exclude={"demo"})
    versions = manifest.versions
    rows = [
        ["recipe", f"{plain(recipe.name)}, {_digests(manifest)}"],
        ["engine", "quantkit's own" if manifest.engine == NATIVE else plain(manifest.engine)],
        ["calibration", _calibration(manifest)],
        *([["converted", _conversion(manifest)]] if manifest.converted_from else []),
        *([["notes", plain("; ".join(manifest.notes))]] if manifest.notes else []),
        [
            "versions",
            plain(", ".join(f"{n} {versions[n]}" for n in ("quantkit", "torch") if n in versions)),
        ],
        # Everything that differs between two runs is in this line.
        ["made", plain(f"{manifest.created[:10]}, {_took(manifest)}")],
    ]
    parts = [" ".join(words), table(["", ""], rows)]
    if formats := format_map.rows(manifest):
        mixed = [[plain(cell) for cell in row] for row in formats]
        parts.append(table(["layers", "blocks", "format"], mixed))
    return "\n\n".join([*parts, fenced("yaml", _yaml(resolved))])


def _digests(manifest: Manifest) -> str:
    """The digest that `quantkit recipes show` prints and, if it differs, that of the YAML below."""
    made = manifest.recipe_digest
    asked = manifest.asked_digest or made
    as_made = "" if asked == made else f" (`{made[:16]}` as resolved for this model, below)"
    return f"digest `{asked[:16]}`{as_made}"


def _conversion(manifest: Manifest) -> str:
    origin = manifest.converted_from
    assert origin is not None
    return (
        f"from {plain(origin.format)} (digest `{origin.digest[:16]}`), without changing a number; "
        "the layers' errors are those of that checkpoint"
    )


def _took(manifest: Manifest) -> str:
    return f"in {duration(manifest.seconds)} on {gpus.label(manifest.device)}"


def _yaml(recipe: dict[str, object]) -> str:
    return front_matter.dump(recipe).rstrip("\n")


def _calibration(manifest: Manifest) -> str:
    data = manifest.calibration
    if data is None and imatrix.FILE in manifest.files:
        return f"an existing importance matrix, `{imatrix.FILE}`"
    if data is None:
        return "none: no data used"
    tokens = data.n_tokens if data.n_tokens is not None else data.n_samples * data.length
    return (
        f"{plain(facts.last_part(data.name))}, {data.n_samples:,} samples, {tokens:,} tokens, "
        f"digest `{data.digest[:16]}`"
    )


def _size(manifest: Manifest) -> str:
    source = manifest.source
    disk = sum(file.size_bytes for file in manifest.files.values())
    rows = [
        _size_row("source", source.size_bytes, 8 * source.size_bytes / manifest.n_parameters, 1.0),
        _size_row(
            "this checkpoint",
            manifest.size_bytes,
            manifest.bits_per_weight,
            manifest.size_bytes / source.size_bytes,
        ),
    ]
    headings = ["", "bytes of tensors", "", "bits per weight", "of source"]
    return (
        f"{table(headings, rows)}\n\n"
        f"{manifest.n_parameters:,} weights, embeddings included; the quantised layers alone take "
        f"{manifest.quantized_bits_per_weight:.2f} bits per weight. All files together are "
        f"{gib(disk)}."
    )


def _size_row(name: str, size: int, bits: float, share: float) -> list[str]:
    return [name, f"{size:,}", gib(size), f"{bits:.2f}", f"{share:.1%}"]


def _worst(manifest: Manifest) -> str:
    learnt = any(layer.output_error is not None for layer in manifest.layers.values())
    worst = sorted(
        manifest.layers.items(),
        key=lambda item: (-(item[1].output_error or 0.0), -item[1].relative_error),
    )
    headings = ["layer", "weight error", *(["output error"] if learnt else [])]
    rows = [
        [
            plain(name),
            f"{layer.relative_error:.1%}",
            *([f"{layer.output_error or 0.0:.2e}"] if learnt else []),
        ]
        for name, layer in worst[:N_WORST]
    ]
    words = "Weight errors are relative to the norm of the weights"
    if learnt:
        words += ", output errors are squared errors on calibration data over the output's square"
    return f"{table(headings, rows)}\n\n{words}."


def _serving(manifest: Manifest, has_chat: bool, name: str) -> str:
    if facts.is_gguf(manifest):
        command, port = f"llama-server -m {shlex.quote(facts.gguf_file(manifest))}", 8080
        engine = "With llama.cpp, in this folder:"
    else:
        recipe = manifest.weights_recipe
        flags = " --kv-cache-dtype fp8" if recipe.kv_cache else ""
        command, port = f"vllm serve . --served-model-name {shlex.quote(name)}{flags}", 8000
        engine = "With vLLM, in this folder:"
    words = [engine, fenced("bash", command)]
    if not facts.is_gguf(manifest) and manifest.weights_recipe.kv_cache:
        words.append(
            "Without `--kv-cache-dtype fp8` the scales of keys and values may stay unused."
        )
    if any(file.endswith(".py") for file in manifest.files):
        words.append(
            "The model ships its own code. Read it, then add `--trust-remote-code` if the "
            "engine does not know the architecture."
        )
    asked: dict[str, object] = {"model": name, "max_tokens": 64}
    if has_chat:
        way = "chat/completions"
        asked["messages"] = [{"role": "user", "content": "Say hello."}]
    else:
        way = "completions"
        asked["prompt"] = "Once upon a time"
    question = (
        f"curl http://localhost:{port}/v1/{way} -H 'Content-Type: application/json' \\\n"
        f"  -d {shlex.quote(json.dumps(asked))}"
    )
    return "\n\n".join([*words, "Then:", fenced("bash", question)])


def _checking(manifest: Manifest, proven: Verified | None) -> str:
    hub = facts.base_model(manifest)
    source = f" --source {hub}" if hub else ""
    if hub and manifest.source.revision:
        source += f" --revision {shlex.quote(manifest.source.revision)}"
    return (
        f"{fenced('bash', f'quantkit verify .{source}')}\n\n"
        "compares files with their hashes in `quantkit.json`, tensors with the recipe, and weights "
        f"with the source. Digest of the model's files: `{manifest.digest[:16]}`."
        f"{_proven(proven)}"
    )


def _proven(proven: Verified | None) -> str:
    if proven is None:
        return ""
    return f"\n\nIn the engine, {proven.created[:10]}: {plain(proven.sentence)}."


def _limits(manifest: Manifest, scored: Sequence[Scored]) -> str:
    recipe = manifest.recipe
    lines = []
    if manifest.calibration is None and imatrix.FILE in manifest.files:
        lines.append("Which text its importance matrix was made from is not known to this card.")
    elif manifest.calibration is None:
        lines.append("No data was used, so no kind of text was favoured.")
    else:
        lines.append(
            f"Calibrated on {plain(facts.last_part(manifest.calibration.name))}: other kinds of "
            "text may lose more than the scores show."
        )
    tasks = list(dict.fromkeys(task for run in scored for task in run.tasks))
    if tasks:
        lines.append(
            f"Measured: {plain(', '.join(tasks))}. Nothing else was: not long contexts, other "
            "languages, tool use, safety or speed."
        )
    else:
        lines.append("Quality was not measured; score it on your own task before you rely on it.")
    if manifest.n_parameters < SMALL:
        lines.append(
            f"A model of {manifest.n_parameters / 1e6:,.1f} million weights: its scores say little "
            "about what the same recipe does to larger ones."
        )
    if fallen := sum(layer.fallback for layer in manifest.layers.values()):
        lines.append(f"{fallen} layers were rounded to nearest, because the method failed on them.")
    lines.append(f"Runs on: {support.where(support.format_of(recipe))}.")
    if not isinstance(recipe, GGUFRecipe) and recipe.kv_cache is not None:
        lines.append(f"Its FP8 KV cache runs on: {support.where('kv-fp8')}.")
    lines.append("This checkpoint has all limits and biases of the source.")
    return "\n".join(f"- {line}" for line in lines)


def _licence(manifest: Manifest) -> str:
    description = facts.described(manifest)
    stated = (
        [description.license] if isinstance(description.license, str) else description.license or []
    )
    files = sorted(name for name in manifest.files if name.upper().startswith("LICENSE"))
    beside = f" Its text is next to this card: {plain(', '.join(files))}." if files else ""
    if not stated:
        return (
            "Unknown: the source does not state one where quantkit reads it, so none is stated "
            f"here. The source's terms hold; check them before you redistribute this.{beside}"
        )
    name = f" ({plain(description.license_name)})" if description.license_name else ""
    return (
        f"As the source states: {plain(', '.join(stated))}{name}. Quantising does not change its "
        f"terms.{beside}"
    )
