"""NVFP4: FP4 with an E4M3 scale per 16 weights, and one global scale per tensor.

weight = code * scale / global scale         global scale = 448 * 6 / largest magnitude

The global scale divides, as compressed-tensors stores it; engines that fuse layers use one for all
of them. Scales are held as stored, in torch's own dtype.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quantkit.numbers import fp8
from quantkit.numbers.fp4 import FP4, TOP

if TYPE_CHECKING:
    import torch

SIZE = 16
EMPTY = 0x20
"""The scale of a group without any weight, 0.125 in E4M3, as in compressed-tensors."""
NEAR = range(-4, 9)
"""Scales that a search tries, as E4M3 steps from the one given by the largest weight: eight steps
double a scale. Five to seven steps up make 4 instead of 6 the code of the largest weight.
"""
LIMITS = 1, 126
"""Codes of the smallest positive number and of 448; 127 is NaN."""


@dataclass(frozen=True)
class NVFP4(FP4):
    """FP4 codes, E4M3 scales."""

    @property
    def words(self) -> str:
        return "NVFP4 (E2M1 with E4M3 scales)"

    @property
    def tag(self) -> str:
        return "nvfp4"

    @property
    def scale_file_type(self) -> str | None:
        return "F8_E4M3"

    @property
    def has_global_scale(self) -> bool:
        return True

    def global_scale(self, largest: "torch.Tensor") -> "torch.Tensor":
        """In the dtype of the magnitude first, then in float32: compressed-tensors' arithmetic."""
        import torch

        scale = fp8.TOP * TOP / largest.clamp(min=torch.finfo(largest.dtype).tiny)
        return scale.nan_to_num(nan=1.0, posinf=1.0).float().reshape(1)

    def scale(self, largest: "torch.Tensor", global_scale: "torch.Tensor | None") -> "torch.Tensor":
        import torch

        assert global_scale is not None
        stored = (global_scale * (largest / TOP)).clamp_(max=fp8.TOP).to(torch.float8_e4m3fn)
        codes = stored.view(torch.uint8)
        return codes.masked_fill(codes == 0, EMPTY).view(torch.float8_e4m3fn)

    def steps(self, scale: "torch.Tensor", global_scale: "torch.Tensor | None") -> "torch.Tensor":
        assert global_scale is not None
        return scale.float() / global_scale

    @property
    def search(self) -> tuple[range, tuple[int, int]]:
        return NEAR, LIMITS

    def near(self, scale: "torch.Tensor") -> "list[torch.Tensor]":
        """Scales to try: codes of positive E4M3 numbers sort like the numbers."""
        import torch

        code = scale.view(torch.uint8).to(torch.int16)
        return [
            (code + step).clamp_(*LIMITS).to(torch.uint8).view(torch.float8_e4m3fn) for step in NEAR
        ]

    def nearest_scale(
        self, step: "torch.Tensor", like: "torch.Tensor", global_scale: "torch.Tensor | None"
    ) -> "torch.Tensor":
        import torch

        assert global_scale is not None
        stored = (step * global_scale).clamp_(max=fp8.TOP).to(torch.float8_e4m3fn)
        codes = stored.view(torch.uint8)
        usable = (step > 0) & (codes > 0)
        return torch.where(usable, codes, like.view(torch.uint8)).view(torch.float8_e4m3fn)

    def room(self, scale: "torch.Tensor") -> "torch.Tensor":
        return fp8.TOP * TOP / scale

    def rounded(self, values: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
        """Activations in groups of 16 with scales measured at run time; `scale` is the global one.

        As in vLLM's kernels: float32 throughout, and a scale of zero gives zeros.
        """
        import torch

        whole = scale.to(values.device).float()
        wide = values.float()
        largest = wide.abs().amax(-1, keepdim=True)
        local = (whole * (largest * (1 / TOP))).clamp(max=fp8.TOP).to(torch.float8_e4m3fn).float()
        step = local / whole
        inverse = torch.where(step == 0, 0.0, 1 / step)
        return self.widen(self.round(wide * inverse)).mul_(step).to(values.dtype)
