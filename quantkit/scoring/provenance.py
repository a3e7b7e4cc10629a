"""The part of a manifest that a score file keeps."""

from pathlib import Path

from quantkit.export import format_map
from quantkit.export.manifest import Manifest
from quantkit.hardware import support
from quantkit.recipe import Recipe
from quantkit.scoring.scorecard import LayerError, Provenance


def of_manifest(manifest: Manifest) -> Provenance:
    """The part of a manifest that a score file keeps, so that a report needs no checkpoint."""
    recipe = manifest.recipe
    activations = recipe.input_activations if isinstance(recipe, Recipe) else None
    return Provenance(
        method=recipe.method if isinstance(recipe, Recipe) else recipe.gguf,
        weight_bits=recipe.weights.num_bits if isinstance(recipe, Recipe) else None,
        weight_type=recipe.weights.type if isinstance(recipe, Recipe) else None,
        weight_strategy=recipe.weights.strategy if isinstance(recipe, Recipe) else None,
        activation_bits=activations.num_bits if activations is not None else None,
        runs_as=support.format_of(recipe),
        recipe_digest=manifest.recipe_digest,
        engine=manifest.engine,
        calibration=Path(manifest.calibration.name).name if manifest.calibration else None,
        calibration_digest=manifest.calibration.digest if manifest.calibration else None,
        calibration_perplexity=manifest.calibration.perplexity if manifest.calibration else None,
        disk_bytes=sum(file.size_bytes for file in manifest.files.values()),
        seconds=manifest.seconds,
        peak_host_bytes=manifest.peak_host_bytes,
        peak_device_bytes=manifest.peak_device_bytes,
        device=manifest.device,
        source_quantized_by=manifest.source.quantized_by,
        layers={
            name: LayerError(weight=layer.relative_error, output=layer.output_error)
            for name, layer in manifest.layers.items()
        },
        formats=format_map.rows(manifest),
    )
