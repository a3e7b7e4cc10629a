"""A finished checkpoint: its folder, its manifest, and its weights read back as numbers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from quantkit import formats, grid
from quantkit.errors import CheckpointError
from quantkit.export.folder import SCALES_FILE
from quantkit.export.manifest import FILE, Manifest
from quantkit.gguf import imatrix
from quantkit.gguf.layout import Layout
from quantkit.gguf.plan import NAME as GGUF_NAME
from quantkit.gguf.reader import GGUF, read_file
from quantkit.model import fused
from quantkit.model.shards import StoredTensor, TensorSpec, read_header
from quantkit.model.source import read_config, read_tensors
from quantkit.numbers import channel_scales


@dataclass(frozen=True)
class Checkpoint:
    """What a run wrote for one recipe."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read the manifest of a folder; weights are not read."""
        return cls(folder, Manifest.read(folder))

    @property
    def label(self) -> str:
        """A short name for tables."""
        return self.manifest.name

    @property
    def digest(self) -> str:
        """A hash of what was written."""
        return self.manifest.digest

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Every stored tensor, experts one by one; each file's header is checked."""
        return fused.separated(self.stored, read_config(self.folder))

    @cached_property
    def stored(self) -> Mapping[str, StoredTensor]:
        """The tensors of its files."""
        return read_tensors(self.folder)

    def parts(self, module: str) -> list[str]:
        """Names of the tensors of one quantised layer."""
        # Only names are used, so the shape does not matter.
        any_weight = TensorSpec(f"{module}.weight", self.manifest.source.dtype, (128, 128))
        recipe = self.manifest.weights_recipe
        return [s.name for s in formats.specs(module, any_weight, recipe)]

    def quantized_weight(self, module: str) -> grid.QuantizedWeight:
        """One layer's quantised values as stored."""
        parts = self.parts(module)
        if missing := [name for name in parts if name not in self.tensors]:
            raise CheckpointError(
                f"{self.folder} has no tensor {missing[0]}, of a layer that {FILE} lists; run "
                "`quantkit verify` on it, or get it again"
            )
        stored = {name: self.tensors[name].read() for name in parts}
        return formats.unpack(module, stored, self.manifest.weights_recipe)

    def weight(self, module: str) -> torch.Tensor:
        """One layer's weight, dequantised to float32."""
        scheme = self.manifest.weights_recipe.part(module).weights
        return grid.dequantize(self.quantized_weight(module), scheme)

    def served_weight(self, module: str) -> torch.Tensor:
        """One layer's weight as engines compute with it."""
        recipe = self.manifest.weights_recipe.part(module)
        stored = self.quantized_weight(module)
        if channel_scales.apply_to(recipe.weights, recipe.input_activations):
            stored = replace(stored, scale=channel_scales.served(stored.scale))
        return grid.dequantize(stored, recipe.weights)

    def input_scale(self, module: str) -> torch.Tensor | None:
        """The fixed scale of a layer's inputs; None if there is none."""
        stored = {name: self.tensors[name].read() for name in self.parts(module)}
        return formats.input_scale(module, stored, self.manifest.weights_recipe)

    @cached_property
    def scales(self) -> Mapping[str, torch.Tensor]:
        """Scales that were folded from one layer into another; empty for most recipes."""
        path = self.folder / SCALES_FILE
        return {n: t.read() for n, t in read_header(path).items()} if path.is_file() else {}

    @cached_property
    def kv_scales(self) -> Mapping[str, StoredTensor]:
        """Scales of keys and values, by name; empty unless the recipe has a `kv_cache`."""
        if self.manifest.weights_recipe.kv_cache is None:
            return {}
        endings = tuple(spec.name for spec in formats.kv_specs("", "F32"))
        return {n: tensor for n, tensor in self.tensors.items() if n.endswith(endings)}

    @property
    def is_gguf(self) -> bool:
        """Whether the weights are a GGUF file for llama.cpp."""
        return self.manifest.format == GGUF_NAME

    @cached_property
    def gguf(self) -> GGUF:
        """That file, with its header checked."""
        names = [n for n in self.manifest.files if n.endswith(".gguf") and n != imatrix.FILE]
        if len(names) != 1:
            raise CheckpointError(
                f"{self.folder} does not list one GGUF file; run `quantkit verify`"
            )
        return read_file(self.folder / names[0])

    def state(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter of the model by its own name, dequantised where necessary."""
        if self.is_gguf:
            layout = Layout.of_folder(self.folder)
            restored = layout.restore(self.gguf.dequantized)
            yield from ((name, weight.to(dtype)) for name, weight in restored)
            return
        quantized = set(self.kv_scales)
        for module in self.manifest.layers:
            quantized.update(self.parts(module))
            yield f"{module}.weight", self.served_weight(module).to(dtype)
        for name, tensor in self.tensors.items():
            if name not in quantized:
                values = tensor.read()
                yield name, values.to(dtype) if values.is_floating_point() else values
