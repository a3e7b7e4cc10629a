"""The fields of every file in `recipes/`, and its digest."""

import hashlib
import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from quantkit.errors import RecipeError
from quantkit.schemes import Strict
from quantkit.specs import problems


class Named(Strict):
    """The fields of every file in `recipes/`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=80)
    """The file's name without its suffix."""
    summary: str
    """One line: what it is for."""
    demo: bool = False
    """Included in `quantkit demo`."""

    def public(self) -> dict[str, Any]:
        """The recipe's contents, as plain data."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """A hash of everything that affects the result."""
        content = self.model_dump(mode="json", exclude={"name", "summary", "demo"})
        canonical = json.dumps(self._decisive(content), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _decisive(self, content: dict[str, Any]) -> dict[str, Any]:
        return content

    @classmethod
    def validated(cls, data: dict[str, Any], where: str | Path) -> Self:
        """A recipe from plain data; every problem is listed."""
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            lines = "\n".join(f"  {line}" for line in problems(error, cls))
            raise RecipeError(f"{where} is not a valid recipe:\n{lines}") from error
