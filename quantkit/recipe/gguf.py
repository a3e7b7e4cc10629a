"""A recipe for llama.cpp: one GGUF file of one of its types."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from quantkit.errors import RecipeError
from quantkit.recipe.named import Named
from quantkit.recipe.patterns import words
from quantkit.specs import suggestion

BLOCK_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K",
    "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
"""Types that a single tensor of a GGUF file can have."""
GGUF_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S",
    "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "IQ4_NL", "IQ4_XS",
    "MXFP4_MOE",
)  # fmt: skip
"""llama.cpp's mixtures of them that quantkit writes."""
CONVERTED = "NVFP4"
"""A file type that is only made from a checkpoint with the same numbers, by `convert --to gguf`."""


class GGUFRecipe(Named):
    """A file for llama.cpp: one of its mixtures of block types."""

    gguf: str
    """llama.cpp's file type, such as Q4_K_M."""
    tensors: dict[str, str] = Field({})
    """Types of single tensors, by patterns that match their GGUF names."""
    method: Literal["gptq"] | None = None
    """How the levels of K-quants are chosen: `gptq`; left out, as llama.cpp rounds them."""

    @property
    def needs_calibration(self) -> bool:
        """Without a method data is optional: it is used where available."""
        return self.method is not None

    def _decisive(self, content: dict[str, Any]) -> dict[str, Any]:
        # Recipes without a method keep the digest they had before there was one.
        return {key: value for key, value in content.items() if key != "method" or value}

    def tuned(self) -> "GGUFRecipe":
        """Refused: gradients cannot tune llama.cpp's block types."""
        raise RecipeError(
            f"recipe {self.name} cannot be tuned: GGUF files have no gradient stage; leave out "
            "--tune, or take a recipe of GPTQ"
        )

    @field_validator("gguf", mode="before")
    @classmethod
    def _known(cls, kind: Any) -> str:
        name = str(kind).upper()
        if name not in (*GGUF_TYPES, CONVERTED):
            raise ValueError(
                f"'{kind}' is not a llama.cpp file type that quantkit writes; "
                f"{suggestion(name, GGUF_TYPES)}"
            )
        return name

    @field_validator("tensors")
    @classmethod
    def _types(cls, tensors: dict[str, str]) -> dict[str, str]:
        for pattern, kind in tensors.items():
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"'{pattern}' is not a valid pattern: {error}") from error
            if kind.upper() not in BLOCK_TYPES:
                raise ValueError(
                    f"'{kind}' is not a block type; choose from: {', '.join(BLOCK_TYPES)}"
                )
        return {pattern: kind.upper() for pattern, kind in tensors.items()}

    def explain(self) -> str:
        """What the recipe does, in words."""
        others = ", ".join(f"{kind} for {words([one])}" for one, kind in self.tensors.items())
        data = "Needs no data; with --calibration or --imatrix errors are weighted by the inputs."
        if self.method is not None:
            data = (
                "Needs --calibration: GPTQ chooses the levels of K-quants on llama.cpp's scales; "
                "the file has the same size and loses less."
            )
        return (
            f"One GGUF file of type {self.gguf} for llama.cpp and what is built on it, with types "
            f"chosen tensor by tensor as llama.cpp does{f', but {others}' if others else ''}.\n"
            f"{data}"
        )
