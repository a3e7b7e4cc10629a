"""A second engine: llm-compressor does the arithmetic; plan, files and checks stay ours.

It covers MoE models, and shows what another implementation makes of the same recipe and the same
tokens. The model is loaded whole, `oneshot` changes it in memory, and every tensor that the plan
promises is taken from there, after comparing its name, dtype and shape. Scales that AWQ and
SmoothQuant fold are recorded on the way, so that `verify` can undo them.
"""

import gc
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import metadata
from typing import Any

import torch

from quantkit import formats, grid, methods, resources
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import HardwareError, MethodError, MissingDependency, RecipeError
from quantkit.export.folder import FolderWriter
from quantkit.export.manifest import Layer
from quantkit.formats import COMPRESSED_TENSORS
from quantkit.model.shards import DTYPES
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.onepass.datafree import copy_tensor, require_finite
from quantkit.onepass.external import EngineOutput, Fold, compare, folded_scales, others
from quantkit.onepass.onepass import CalibratedOutcome
from quantkit.plan.checkpoint import Plan
from quantkit.progress import Progress
from quantkit.quiet import only_errors
from quantkit.recipe import Recipe

SERIES = "0.14"  # we hook methods that are not part of its public interface
INSTALL = resources.install("llmcompressor")
NEEDS_GPU = "AWQModifier"
# Its warnings about what we do on purpose, or have reported already.
EXPECTED = ("No accelerator", "MoE is being linearized", "Disabling tokenizer", "Running oneshot")


def version() -> str:
    """The installed version; a clear error if it is missing or unsupported."""
    try:
        found = metadata.version("llmcompressor")
    except metadata.PackageNotFoundError:
        raise MissingDependency(f"the engine llmcompressor is not installed; {INSTALL}") from None
    if not found.startswith(f"{SERIES}."):
        raise MissingDependency(
            f"llmcompressor {found} is installed, quantkit supports {SERIES}; {INSTALL}"
        )
    return found


def check(recipes: Sequence[Recipe], device: torch.device, progress: Progress) -> None:
    """Refuse before any work what the engine cannot do, here or at all."""
    version()
    # It always uses the first GPU if there is one.
    own = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if device != own:
        raise HardwareError(
            f"the engine llmcompressor chooses its device itself, here {own}, not {device}; "
            "hide GPUs from it with CUDA_VISIBLE_DEVICES"
        )
    for recipe in recipes:
        if recipe.format != COMPRESSED_TENSORS:
            raise RecipeError(
                f"recipe {recipe.name}: the engine llmcompressor writes compressed-tensors; make "
                f"that, then call quantkit convert --to {recipe.format}"
            )
        if "propagate" in recipe.options:
            raise RecipeError(
                f"recipe {recipe.name}: the engine llmcompressor has no option propagate"
            )
        if recipe.kv_cache is not None:
            raise RecipeError(
                f"recipe {recipe.name}: the engine llmcompressor makes no KV cache scales here; "
                "use --engine native"
            )
        method = methods.find(recipe.method)
        if not method.modifiers:
            raise RecipeError(
                f"recipe {recipe.name}: the engine llmcompressor has no method {recipe.method}; "
                "use --engine native"
            )
        if NEEDS_GPU in method.modifiers and device.type == "cpu":
            raise HardwareError(
                f"recipe {recipe.name}: AWQ of the engine llmcompressor needs a GPU, and there is "
                "none here; use --engine native"
            )
    if device.type == "cpu":
        progress.note("warning: the engine llmcompressor is meant for a GPU; on a CPU it is slow")


def modifiers(plan: Plan) -> list[tuple[str, dict[str, Any]]]:
    """A recipe in llm-compressor's terms: its classes and their arguments, in order."""
    recipe = plan.recipe
    config = formats.config(recipe, plan.ignore)
    *smoothing, rounding = methods.find(recipe.method).modifiers
    settings = {"SmoothQuantModifier": {"smoothing_strength": recipe.options.get("strength", 0.5)}}
    arguments = {"config_groups": config["config_groups"], "ignore": config["ignore"]}
    return [*((name, settings.get(name, {})) for name in smoothing), (rounding, arguments)]


@torch.no_grad()
def quantize_model(
    source: ModelSource,
    plan: Plan,
    writer: FolderWriter,
    calibration: CalibrationTokens | None,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> CalibratedOutcome:
    """Let the engine run one recipe, check its result, and write it."""
    made = carry_out(source, plan, calibration, dtype, progress)
    scales = folded_scales(made.folds, plan)
    compare(made.state, plan, source, scales)
    if made.fallbacks:
        progress.note(
            f"warning: {plan.recipe.name}: GPTQ failed on {len(made.fallbacks)} layers, which were "
            f"rounded to nearest: {', '.join(made.fallbacks[:3])} ..."
        )
    layers = {}
    progress.start(f"write {plan.recipe.name}", plan.size_bytes)
    for module, weight in plan.quantized.items():
        specs = formats.specs(module, weight, plan.recipe)
        parts = {spec.name: made.state[spec.name].to(device) for spec in specs}
        original = source.tensors[weight.name]
        values = original.read().to(device)
        require_finite(original, values)
        restored = grid.unfold(
            grid.dequantize(
                formats.unpack(module, parts, plan.recipe), plan.recipe.part(module).weights
            ),
            *(_on(device, scales.get(f"{module}.{side}_scale")) for side in ("in", "out")),
        )
        error = grid.relative_error(values, restored)
        if not error < float("inf"):
            raise MethodError(f"llm-compressor gave non-finite values for {module}")
        layers[module] = Layer(relative_error=error, fallback=module in made.fallbacks)
        for spec in specs:
            writer.write(spec.name, made.state.pop(spec.name))
            progress.advance(spec.size_bytes)
    for name, spec in others(plan).items():
        if f"{name}.folded" in scales:
            writer.write(name, made.state[name].to(DTYPES[spec.dtype]))
            progress.advance(spec.size_bytes)
        else:
            copy_tensor(source.tensors[name], [writer], progress)
    progress.finish()
    return CalibratedOutcome(layers, scales)


def carry_out(
    source: ModelSource,
    plan: Plan,
    calibration: CalibrationTokens | None,
    dtype: torch.dtype,
    progress: Progress,
) -> EngineOutput:
    """Load the model, run `oneshot` on it, and take its parameters out again."""
    try:
        with _listening(progress):
            return _oneshot(source, plan, calibration, dtype, progress)
    except Exception as error:  # anything can go wrong in a third party's code
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise MethodError(
            f"llm-compressor {version()} failed at {plan.recipe.name}: {reason}"
        ) from error
    finally:
        gc.collect()  # the next recipe loads the model again
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _oneshot(
    source: ModelSource,
    plan: Plan,
    calibration: CalibrationTokens | None,
    dtype: torch.dtype,
    progress: Progress,
) -> EngineOutput:
    from compressed_tensors import ModelCompressor
    from compressed_tensors.offload import disable_onloading
    from llmcompressor import active_session, oneshot
    from llmcompressor.modeling.moe.linearize import linearize_moe
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source.folder, dtype=dtype, trust_remote_code=source.trust_remote_code
    )
    # Experts become linear layers with the names that checkpoints use. Its loader could do this
    # while reading, but patches transformers so that torchvision is required.
    linearize_moe(model)
    made = EngineOutput({})
    classes = _recorders(model, made, progress)
    steps = [classes[name](**arguments) for name, arguments in modifiers(plan)]
    data: dict[str, Any] = {}
    n_stages = 1
    if calibration is not None:
        rows = _rows(calibration)
        data = {
            "dataset": DataLoader(rows, batch_size=1),  # type: ignore[arg-type]
            "num_calibration_samples": len(rows),
            "max_seq_length": calibration.ids.shape[1],
            # Otherwise it looks for a processor, which may need packages for images.
            "processor": load_tokenizer(source.folder, source.trust_remote_code),
        }
        n_stages = 1 + int(getattr(model.config, "num_hidden_layers", 0))
    progress.start(f"llm-compressor {plan.recipe.name}", n_stages * len(steps), "stages")
    try:
        oneshot(model=model, recipe=steps, trust_remote_code_model=source.trust_remote_code, **data)
        ModelCompressor.from_pretrained_model(model).compress_model(model)
    finally:
        active_session().reset()  # it would hold on to the model
        progress.finish()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    with disable_onloading():  # otherwise every tensor goes to the GPU once more
        made.state.update((n, t) for n, t in model.state_dict().items() if n not in tied)
    return made


def _rows(calibration: CalibrationTokens) -> list[dict[str, torch.Tensor]]:
    """The samples without their padding, one per batch.

    A mask is not enough: attention respects it, but Hessians and observers count every position,
    and AWQ skips only the positions given by a separate loss mask.
    """
    lengths = calibration.lengths
    ends = [None] * len(calibration.ids) if lengths is None else lengths.tolist()
    rows = [row[:end] for row, end in zip(calibration.ids, ends, strict=True)]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]


def _recorders(model: Any, made: EngineOutput, progress: Progress) -> dict[str, Any]:
    """Its modifiers, each recording what it did."""
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    names = {module: name for name, module in model.named_modules()}

    def record(feeder: str, readers: list[str], scale: torch.Tensor) -> None:
        made.folds.append(Fold(feeder, readers, scale.detach().float().cpu()))

    class Stage:
        def on_sequential_epoch_end(self, *args: Any, **kwargs: Any) -> None:
            super().on_sequential_epoch_end(*args, **kwargs)  # type: ignore[misc]
            progress.advance(1)

    class Rounding(Stage, QuantizationModifier):  # type: ignore[misc]
        pass

    class GPTQ(Stage, GPTQModifier):  # type: ignore[misc]
        def on_finalize(self, *args: Any, **kwargs: Any) -> Any:
            made.fallbacks.extend(self._rtn_fallback_module_names)  # cleared when this returns
            return super().on_finalize(*args, **kwargs)

    class AWQ(Stage, AWQModifier):  # type: ignore[misc]
        def _compute_best_scale(self, mapping: Any, *args: Any) -> Any:
            scale = super()._compute_best_scale(mapping, *args)
            record(mapping.smooth_name, list(mapping.balance_names), scale)
            return scale

    class SmoothQuant(Stage, SmoothQuantModifier):  # type: ignore[misc]
        def _calculate_smoothing_scales(self, balance_layers: Any, activations: Any) -> Any:
            scale = super()._calculate_smoothing_scales(balance_layers, activations)
            scale = scale.clamp(min=1e-5)  # as it does next
            mapping = next(m for m in self.resolved_mappings_ if m.balance_layers is balance_layers)
            record(mapping.smooth_name, [names[layer] for layer in balance_layers], scale)
            return scale

    return {
        "QuantizationModifier": Rounding,
        "GPTQModifier": GPTQ,
        "AWQModifier": AWQ,
        "SmoothQuantModifier": SmoothQuant,
    }


@contextmanager
def _listening(progress: Progress) -> Iterator[None]:
    """Turn its log lines into our notes and details; by default it writes to stdout."""
    noted = set()

    def tell(message: Any) -> None:
        text, level = message.record["message"], message.record["level"].name
        if level not in ("WARNING", "ERROR", "CRITICAL") or text.startswith(EXPECTED):
            progress.detail(f"llm-compressor: {text}")
        elif text not in noted:
            noted.add(text)
            progress.note(f"llm-compressor: {text}")

    with (
        only_errors("torch.fx", "transformers"),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        import llmcompressor  # noqa: F401  (sets up its log when imported)
        from loguru import logger

        logger.remove()
        sink = logger.add(tell, level="INFO")
        try:
            yield
        finally:
            logger.remove(sink)


def _on(device: torch.device, scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.to(device)
