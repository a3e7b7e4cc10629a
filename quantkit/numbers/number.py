"""The interface of every number; only methods that take tensors load torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Number(ABC):
    """A set of numbers that a few bits can represent."""

    bits: int

    @property
    @abstractmethod
    def words(self) -> str:
        """The name in words."""

    @property
    @abstractmethod
    def tag(self) -> str:
        """One word that people search models by."""

    @property
    @abstractmethod
    def file_type(self) -> str:
        """The dtype of unpacked numbers in safetensors files."""

    @property
    @abstractmethod
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest number."""

    @property
    @abstractmethod
    def activation_top(self) -> float:
        """What engines scale an activation's largest magnitude to."""

    @property
    @abstractmethod
    def max_relative_error(self) -> float:
        """An upper bound on how far rounding to nearest moves a weight, relative to its norm."""

    @property
    def scale_file_type(self) -> str | None:
        """The dtype of scales in files; None: that of the model's own weights."""
        return None

    @property
    def has_own_scales(self) -> bool:
        """Whether scales come from a grid of their own, found by `scale`."""
        return self.scale_file_type is not None

    @property
    def has_global_scale(self) -> bool:
        """Whether a tensor has one more scale, by which all others are divided."""
        return False

    def global_scale(self, largest: "torch.Tensor") -> "torch.Tensor":
        """The global scale of tensors up to this magnitude; [1] in float32."""
        raise NotImplementedError

    def scale(self, largest: "torch.Tensor", global_scale: "torch.Tensor | None") -> "torch.Tensor":
        """Scales of tiles up to these magnitudes, as stored."""
        raise NotImplementedError

    def near(self, scale: "torch.Tensor") -> "list[torch.Tensor]":
        """Stored scales around these, for a search."""
        raise NotImplementedError

    def steps(self, scale: "torch.Tensor", global_scale: "torch.Tensor | None") -> "torch.Tensor":
        """What a number is multiplied by to give a weight, in float32."""
        return scale.float()

    def nearest_scale(
        self, step: "torch.Tensor", like: "torch.Tensor", global_scale: "torch.Tensor | None"
    ) -> "torch.Tensor":
        """The stored scale nearest to the wanted step; `like` has its dtype.

        A step that is zero, of the opposite sign, or out of the dtype's range gives `like` itself.
        """
        import torch

        stored = step.to(like.dtype)
        # In float32: the product of two small 16-bit numbers may be zero.
        alike = stored.float() * like.float() > 0
        return torch.where(alike & stored.isfinite(), stored, like)

    @abstractmethod
    def round(self, scaled: "torch.Tensor") -> "torch.Tensor":
        """Round each to the nearest number, in the dtype that holds them; may overwrite its
        argument.
        """

    @abstractmethod
    def widen(self, values: "torch.Tensor") -> "torch.Tensor":
        """Held numbers as float32."""

    def has_nan(self, values: "torch.Tensor") -> bool:
        """Whether held numbers include NaN; no quantiser writes it."""
        return False

    def activation_scale(self, largest: "torch.Tensor") -> "torch.Tensor":
        """The scale with which an engine rounds activations up to this magnitude."""
        return largest / self.activation_top

    def room(self, scale: "torch.Tensor") -> "torch.Tensor":
        """The largest activation that a static scale can represent."""
        return scale * self.activation_top

    def rounded(self, values: "torch.Tensor", scale: "torch.Tensor") -> "torch.Tensor":
        """Activations rounded with given scales and widened again, in their own dtype."""
        scale = scale.to(values.device).float()
        return self.widen(self.round(values.float() / scale)).mul_(scale).to(values.dtype)


@dataclass(frozen=True)
class Float(Number):
    """A small float: symmetric around zero, for weights and activations."""

    @property
    @abstractmethod
    def top(self) -> float:
        """The largest number."""

    @property
    def limits(self) -> tuple[float, float]:
        return -self.top, self.top

    @property
    def activation_top(self) -> float:
        return self.top
