"""How several GPUs share a model, in vLLM's terms.

Tensor parallel: each GPU has a part of every layer, and they communicate twice per layer. Pipeline
parallel: each has consecutive layers and passes its output on. Expert parallel, for MoE models:
attention is split as in tensor parallel, and experts are distributed whole. Tensor and pipeline
parallelism combine. llama.cpp's split by layers is a pipeline, too.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Split:
    """Tensor-parallel size times pipeline stages."""

    tensor: int = 1
    pipeline: int = 1
    has_whole_experts: bool = False
    """Expert parallel: each GPU of the tensor-parallel group holds some experts whole."""

    @property
    def n_gpus(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        text = "one GPU"
        if self.tensor > 1 and self.pipeline > 1:
            text = f"tensor parallel over {self.tensor} in a pipeline of {self.pipeline}"
        elif self.tensor > 1:
            text = f"tensor parallel over {self.tensor} GPUs"
        elif self.pipeline > 1:
            text = f"a pipeline of {self.pipeline} GPUs"
        return f"{text} with whole experts" if self.has_whole_experts else text


ONE = Split()


@dataclass(frozen=True)
class SplitConstraint:
    """Constraints on the split; None leaves a dimension open."""

    tensor: int | None = None
    pipeline: int | None = None
    has_whole_experts: bool = False

    @property
    def is_any(self) -> bool:
        return self != ANY

    def allows(self, split: Split) -> bool:
        return (
            self.tensor in (None, split.tensor)
            and self.pipeline in (None, split.pipeline)
            and (split.has_whole_experts or not self.has_whole_experts)
        )


ANY = SplitConstraint()


def stages(n_layers: int, n_stages: int) -> list[range]:
    """The layers of each pipeline stage.

    As vLLM distributes them (get_pp_indices in distributed/utils.py): the remainder goes to the
    last stage but one and those before it, since the first has the embeddings and the last the
    head.
    """
    each, more = divmod(n_layers, n_stages)
    sizes = [each + (n_stages - 1 - more <= n < n_stages - 1) for n in range(n_stages)]
    starts = [sum(sizes[:n]) for n in range(n_stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def stage_of_layers(n_layers: int, n_stages: int) -> dict[int, int]:
    """The stage of each layer."""
    rows = stages(n_layers, n_stages)
    return {layer: stage for stage, layers in enumerate(rows) for layer in layers}
