"""The numbers that weights, activations and the KV cache are rounded to.

What no engine serves is refused here, with a word on what to write instead.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from quantkit import numbers


class Strict(BaseModel):
    """Frozen, and without room for misspelt keys."""

    model_config = ConfigDict(
        allow_inf_nan=False, frozen=True, extra="forbid", use_attribute_docstrings=True
    )


class WeightScheme(Strict):
    """The numbers that weights are rounded to."""

    num_bits: int
    """Bits a stored weight takes: 4 or 8."""
    type: Literal["int", "float"] = "int"
    """Evenly spaced integers, or FP8 (E4M3)."""
    symmetric: bool = True
    """Without zero points. FP8 is always symmetric."""
    strategy: Literal["tensor", "channel", "group", "block"] = "group"
    """What shares one scale: the tensor, a row, `group_size` weights of a row, or a block."""
    group_size: int | Literal["auto"] | None = None
    """Weights that share a scale; `auto` is 128, 64 or 32, the first that divides every layer."""
    block_structure: tuple[Literal[128], Literal[128]] | None = None
    """Rows and columns of a block: 128 x 128, the size that engines have kernels for."""

    @field_validator("num_bits")
    @classmethod
    def _served(cls, bits: int) -> int:
        if bits == 3:
            raise ValueError("3 bits: vLLM has no fast kernel for it; use 4, or a GGUF type")
        if bits not in (4, 8):
            raise ValueError(f"{bits} bits: choose 4 or 8")
        return bits

    @field_validator("type", mode="before")
    @classmethod
    def _stored(cls, kind: Any) -> Any:
        if str(kind).lower() == "nf4":
            raise ValueError("nf4: a run-time format of bitsandbytes; use int with 4 bits")
        return kind

    @model_validator(mode="after")
    def _consistent(self) -> "WeightScheme":
        if self.type == "float" and (self.num_bits != 8 or not self.symmetric):
            raise ValueError("type float means FP8: num_bits 8 and symmetric true")
        if self.type == "float" and self.strategy == "group":
            raise ValueError("vLLM has no FP8 kernel with groups; use channel, tensor or block")
        if (self.strategy == "block") != (self.block_structure is not None):
            raise ValueError("block_structure goes with strategy block, and only with it")
        if self.strategy == "block" and self.type != "float":
            raise ValueError("blocks are for FP8: type float")
        if self.type == "int" and self.strategy == "tensor":
            raise ValueError("integers with one scale a tensor lose too much; use channel or group")
        if (self.strategy == "group") != (self.group_size is not None):
            raise ValueError("group_size goes with strategy group, and only with it")
        if isinstance(self.group_size, int) and self.group_size not in (32, 64, 128):
            raise ValueError(f"group_size {self.group_size}: vLLM takes 32, 64 or 128 (or auto)")
        return self

    def n_scales(self, rows: int, columns: int) -> tuple[int, int]:
        """How many scales a weight has, down and across; strategy tensor counts as one a row."""
        if self.block_structure is not None:
            high, wide = self.block_structure
            return rows // high, columns // wide
        assert self.group_size != "auto", "a plan has chosen the group size"
        return rows, columns // (self.group_size or columns)

    def words(self) -> str:
        """The scheme for people."""
        grid = numbers.of(self).words
        size = self.group_size
        share = {
            "tensor": "one scale a tensor",
            "channel": "one scale a row",
            "block": "one scale a block of 128 x 128",
            "group": f"one scale for {size} weights of a row"
            if size != "auto"
            else "one scale for 128, 64 or 32 weights of a row, the first that divides every layer",
        }[self.strategy]
        return f"{grid}, {share}{'' if self.symmetric else ', with zero points'}"


class ActivationScheme(Strict):
    """The numbers that a layer's inputs are rounded to at run time."""

    num_bits: Literal[8] = 8
    type: Literal["int", "float"]
    symmetric: Literal[True] = True
    strategy: Literal["token", "tensor", "group"]
    """One scale for each token, one for all, or one for 128 channels of each token."""
    group_size: Literal[128] | None = None
    """Channels that share a scale; goes with strategy group."""
    dynamic: bool
    """Scales measured at run time; otherwise they come from calibration."""

    @model_validator(mode="after")
    def _consistent(self) -> "ActivationScheme":
        if self.dynamic == (self.strategy == "tensor"):
            raise ValueError("strategy tensor goes with dynamic false, token and group with true")
        if (self.strategy == "group") != (self.group_size is not None):
            raise ValueError("group_size goes with strategy group, and only with it")
        return self

    def words(self) -> str:
        """The scheme for people."""
        share = "128 channels of each token" if self.group_size else f"each {self.strategy}"
        when = "measured at run time" if self.dynamic else "from calibration"
        return f"{numbers.of(self).words}, one scale for {share}, {when}"


class KVCacheScheme(Strict):
    """The numbers that keys and values are kept in: FP8 with fixed scales, as vLLM serves it."""

    num_bits: Literal[8] = 8
    type: Literal["float"] = "float"
    symmetric: Literal[True] = True
    strategy: Literal["tensor"] = "tensor"
    """One scale for the keys of a layer and one for its values ..."""
    dynamic: Literal[False] = False
    """... which come from calibration."""

    def words(self) -> str:
        """The scheme for people."""
        grid = numbers.of(self).words
        share = "one scale for the keys and one for the values of each layer"
        return f"{grid}, {share}, from calibration"
