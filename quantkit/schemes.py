"""Number formats that weights, activations and the KV cache are rounded to.

What no engine serves is refused here, with a hint at what to write instead.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from quantkit import numbers
from quantkit.numbers.fp8 import FP8


class Strict(BaseModel):
    """Frozen, and rejects unknown keys."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="forbid")


class WeightScheme(Strict):
    """Number format of the weights."""

    num_bits: int
    """Bits per stored weight: integers 2 to 8, floats 4 or 8."""
    type: Literal["int", "float"] = "int"
    """Evenly spaced integers, or floats: FP8 (E4M3), NVFP4, MXFP4, MXFP8."""
    symmetric: bool = True
    """Without zero points. Floats are always symmetric."""
    strategy: Literal["tensor", "channel", "group", "block", "tensor_group"] = "group"
    """What shares one scale: the tensor, a row, `group_size` weights of a row, or a block. With
    `tensor_group` groups have scales, and the tensor one more: NVFP4."""
    group_size: int | Literal["auto"] | None = None
    """Weights that share a scale; `auto` is 128, 64 or 32, the first that divides every layer."""
    block_structure: tuple[Literal[128], Literal[128]] | None = None
    """Rows and columns of a block: 128 x 128, the size that engines have kernels for."""

    @field_validator("num_bits")
    @classmethod
    def _served(cls, bits: int) -> int:
        if not 2 <= bits <= 8:
            raise ValueError(f"{bits} bits: choose 2 to 8")
        return bits

    @field_validator("type", mode="before")
    @classmethod
    def _stored(cls, kind: Any) -> Any:
        if str(kind).lower() == "nf4":
            raise ValueError("nf4: a run-time format of bitsandbytes; use int with 4 bits")
        return kind

    @model_validator(mode="after")
    def _consistent(self) -> "WeightScheme":
        if (self.strategy == "block") != (self.block_structure is not None):
            raise ValueError("block_structure goes with strategy block, and only with it")
        if (self.strategy in ("group", "tensor_group")) != (self.group_size is not None):
            raise ValueError("group_size goes with strategy group or tensor_group, and only so")
        if wrong := self._wrong_float() if self.type == "float" else self._wrong_integer():
            raise ValueError(wrong)
        return self

    def _wrong_float(self) -> str:
        if self.num_bits not in (4, 8) or not self.symmetric:
            return "type float has num_bits 4 or 8, and symmetric true"
        if self.strategy == "tensor_group":
            nvfp4 = (self.num_bits, self.group_size) == (4, 16)
            return "" if nvfp4 else "strategy tensor_group means NVFP4: num_bits 4, group_size 16"
        if self.strategy == "group":
            mx = self.group_size == 32
            return "" if mx else "floats in groups are MXFP4 or MXFP8: group_size 32"
        if self.num_bits == 4:
            return (
                "4-bit floats are NVFP4 (strategy tensor_group, group_size 16) or MXFP4 (strategy "
                "group, group_size 32)"
            )
        return ""

    def _wrong_integer(self) -> str:
        if self.strategy == "block":
            return "blocks are for FP8: type float"
        if self.strategy == "tensor_group":
            return "strategy tensor_group is for NVFP4: type float"
        if self.strategy == "tensor":
            return "integers with one scale per tensor lose too much; use channel or group"
        if isinstance(self.group_size, int) and self.group_size not in (32, 64, 128):
            return f"group_size {self.group_size}: vLLM takes 32, 64 or 128 (or auto)"
        if not self.symmetric and self.num_bits not in (4, 8):
            return f"{self.num_bits} bits: vLLM has zero points for 4 and 8 bits only"
        return ""

    @property
    def kind(self) -> str:
        """What a method must be able to round to: `int`, `float` (8 bits) or `fp4`."""
        return "fp4" if (self.type, self.num_bits) == ("float", 4) else self.type

    def n_scales(self, rows: int, columns: int) -> tuple[int, int]:
        """Number of scales of a weight, down and across; strategy tensor counts as one per row."""
        if self.block_structure is not None:
            high, wide = self.block_structure
            return rows // high, columns // wide
        assert self.group_size != "auto", "a plan has chosen the group size"
        return rows, columns // (self.group_size or columns)

    def words(self) -> str:
        """The scheme in words."""
        grid = numbers.of(self).words
        size = self.group_size
        share = {
            "tensor": "one scale per tensor",
            "tensor_group": f"one scale per group of {size}, and one per tensor",
            "channel": "one scale per row",
            "block": "one scale per block of 128 x 128",
            "group": f"one scale per group of {size}"
            if size != "auto"
            else "one scale per group of 128, 64 or 32 (the first that divides every layer)",
        }[self.strategy]
        return f"{grid}, {share}{'' if self.symmetric else ', with zero points'}"


class ActivationScheme(Strict):
    """Number format that a layer's inputs are rounded to at run time."""

    num_bits: Literal[4, 8] = 8
    """Bits per activation."""
    type: Literal["int", "float"]
    """Integers, or floats: FP8 (E4M3), NVFP4, MXFP4, MXFP8."""
    symmetric: Literal[True] = True
    """Without zero points."""
    strategy: Literal["token", "tensor", "group", "tensor_group"]
    """What shares one scale: a token, all tokens (`tensor`) or `group_size` channels of a token."""
    group_size: Literal[16, 32, 128] | None = None
    """Channels that share a scale: 128 for FP8 in blocks, 32 for MX, 16 for NVFP4."""
    dynamic: bool | Literal["local"]
    """Whether scales are measured at run time or come from calibration. `local`: group scales are
    measured, the tensor's scale comes from calibration."""

    @model_validator(mode="after")
    def _consistent(self) -> "ActivationScheme":
        when = {"tensor": False, "tensor_group": "local"}.get(self.strategy, True)
        if self.dynamic != when:
            raise ValueError(
                "strategy tensor goes with dynamic false, tensor_group with local, token and group "
                "with true"
            )
        if (self.strategy in ("group", "tensor_group")) != (self.group_size is not None):
            raise ValueError("group_size goes with strategy group or tensor_group, and only so")
        if (self.strategy == "tensor_group") != (self.group_size == 16):
            raise ValueError("strategy tensor_group goes with group_size 16, and only with it")
        if self.num_bits == 4 and (self.type != "float" or self.group_size not in (16, 32)):
            raise ValueError(
                "4-bit activations are NVFP4 or MXFP4: type float, group_size 16 or 32"
            )
        if self.num_bits == 8 and self.group_size == 16:
            raise ValueError("group_size 16 is for NVFP4: num_bits 4")
        return self

    @property
    def is_static(self) -> bool:
        """Whether any scale is fixed and stored."""
        return self.dynamic is not True

    def words(self) -> str:
        """The scheme in words."""
        share = f"{self.group_size} channels of a token" if self.group_size else self.strategy
        when = "measured at run time" if self.dynamic else "from calibration"
        if self.dynamic == "local":
            when += ", and one per tensor from calibration"
        return f"{numbers.of(self).words}, one scale per {share}, {when}"


class KVCacheScheme(Strict):
    """Number format of keys and values: FP8 with fixed scales, as vLLM serves it."""

    num_bits: Literal[8] = 8
    """Bits per key or value."""
    type: Literal["float"] = "float"
    """FP8 (E4M3)."""
    symmetric: Literal[True] = True
    """Without zero points."""
    strategy: Literal["tensor", "attn_head"] = "tensor"
    """One scale for the keys of a layer and one for its values, or one per head, which vLLM
    supports with FlashAttention only."""
    dynamic: Literal[False] = False
    """Scales come from calibration."""

    def words(self) -> str:
        """The scheme in words."""
        grid = FP8().words
        of = "head" if self.strategy == "attn_head" else "layer"
        share = f"one scale per {of} for keys and one for values"
        return f"{grid}, {share}, from calibration"


def runs_as(tag: str, weights: numbers.Scheme, inputs: ActivationScheme | None) -> str:
    """Engines' name for these numbers, one of `hardware.support.FORMATS`; `tag` is the weights'
    name.
    """
    if tag in ("nvfp4", "mxfp4"):
        return tag if inputs else f"{tag}-a16"
    if tag == "mxfp8":
        return tag
    if inputs is None:
        return f"w{weights.num_bits}a16"
    if weights.type == "int":
        return "w4afp8" if inputs.type == "float" else "int8-w8a8"
    return "fp8-block" if weights.strategy == "block" else "fp8-w8a8"
