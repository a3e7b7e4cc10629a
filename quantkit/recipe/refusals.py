"""What is wrong with a recipe, in words that help to mend it."""

import difflib
from collections.abc import Iterable

from pydantic import BaseModel, ValidationError

from quantkit.recipe.schemes import ActivationScheme, KVCacheScheme, WeightScheme


def meant(name: str, known: Iterable[str]) -> str:
    """A hint at what somebody may have wanted to write."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"


def problems(error: ValidationError, kind: type[BaseModel]) -> list[str]:
    """One line for every fault that pydantic found; each names its key."""
    lines = []
    for item in error.errors():
        path = ".".join(str(part) for part in item["loc"] if part not in ("int", "literal['auto']"))
        if item["type"] == "extra_forbidden":
            known = _known_keys(item["loc"], kind)
            near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
            lines.append(f"{path}: unknown key; {hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {message}" if path else message)
    return list(dict.fromkeys(lines))


def _known_keys(location: tuple[int | str, ...], kind: type[BaseModel]) -> list[str]:
    models: dict[int | str, type[BaseModel]] = {
        "weights": WeightScheme,
        "input_activations": ActivationScheme,
        "kv_cache": KVCacheScheme,
    }
    model = models.get(location[0], kind) if len(location) > 1 else kind
    return list(model.model_fields)
