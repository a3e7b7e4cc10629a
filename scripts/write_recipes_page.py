"""Write docs/recipes.md: every key that a recipe may have, from the models that read recipes."""

import ast
import inspect
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Union, get_args, get_origin

from quantkit import methods, resources, schemes
from quantkit.recipe import GGUFRecipe, Recipe, load
from quantkit.recipe import checkpoint as recipes
from quantkit.recipe.files import ADDITIONS
from quantkit.recipe.named import Named

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "recipes.md"
INTRODUCTION = """# Recipes

Made by `make docs` from the classes that read recipes.

A recipe is a short YAML file that says what to store and how to choose it, in the vocabulary of
compressed-tensors. `quantkit recipes` lists those that ship, `quantkit recipes show NAME` explains
one, and `quantkit recipes validate FILE` lists everything that is wrong with yours. Unknown keys
are errors. The calibration set belongs to the run, not to the recipe.

```yaml
# mine.yaml: INT4 in groups of 32 by GPTQ, attention left alone
summary: 4-bit weights in groups of 32, attention in 16 bits
method: gptq
weights: {num_bits: 4, type: int, symmetric: true, strategy: group, group_size: 32}
ignore: [lm_head, "re:.*self_attn.*"]
options: {sweeps: 2}
```

```
quantkit recipes validate mine.yaml
quantkit quantize MODEL -r mine.yaml --calibration general -o out
```
"""


OPTIONS = {
    "propagate": "Later blocks see this recipe's own quantised outputs instead of the source's.",
    "scales": "What judges the scales of integers: the Gram matrix of each group, or its diagonal.",
    "held_out": "Held-out tokens choose between GPTQ and rounding to nearest, layer by layer.",
    "sweeps": "Rounds of coordinate descent over codes and scales after GPTQ.",
    "signed": "Scales of symmetric integers may be negative: few bits reach further below zero.",
    "tune": "Steps of gradient descent after each block (`quantize --tune`).",
    "distil": "Passes at the end in which all scales learn from the whole model's KL divergence.",
    "strength": "How much of the outliers moves into the weights; without it, a search decides.",
}


def documented(model: type[Any]) -> dict[str, str]:
    """The string under each field."""
    body = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for one, after in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
        ):
            found[one.target.id] = " ".join(str(after.value.value).split())
    return found


def kind(annotation: Any) -> str:
    """A field's type, for people."""
    if annotation is NoneType:
        return "nothing"
    if get_origin(annotation) is Literal:
        return ", ".join(
            f"`{str(v).lower() if isinstance(v, bool) else v}`" for v in get_args(annotation)
        )
    if get_origin(annotation) in (list, tuple):
        inner = get_args(annotation)[0]
        return "128 x 128" if get_origin(annotation) is tuple else f"list of {kind(inner)}"
    if get_origin(annotation) is dict:
        return "`key: value` lines"
    if get_origin(annotation) is Union or "UnionType" in type(annotation).__name__:
        return " or ".join(kind(part) for part in get_args(annotation) if part is not NoneType)
    names = {"str": "text", "int": "whole number", "bool": "`true` or `false`", "Any": "value"}
    name = getattr(annotation, "__name__", str(annotation))
    return names.get(name, f"[{name}](#{name.lower()})")


def default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{', '.join(value)}]`"
    return f"`{value}`"


def table(model: type[Any], *also: type[Any]) -> str:
    words = {name: text for one in (*also, model) for name, text in documented(one).items()}
    rows = [
        f"| `{name}` | {kind(field.annotation)} | {default(field)} | {words.get(name, '')} |"
        for name, field in model.model_fields.items()
        if name != "name"
    ]
    return "\n".join(["| key | value | default | meaning |", "|---|---|---|---|", *rows])


def options() -> str:
    rows = []
    for name in sorted(methods.METHODS):
        method = methods.find(name)
        known = {key: option.words for key, option in sorted(method.options.items())}
        told = "; ".join(f"`{key}`: {words}" for key, words in known.items()) or "none"
        data = "yes" if method.statistics else "no"
        rows.append(f"| `{name}` | {method.summary} | {data} | {told} |")
    used = {key for name in methods.METHODS for key in methods.find(name).options}
    assert used == set(OPTIONS), used ^ set(OPTIONS)
    meanings = "\n".join(f"- `{key}`: {words}" for key, words in OPTIONS.items())
    head = "| method | what it does | calibration data | `options` |\n|---|---|---|---|"
    return "\n".join([head, *rows, "", meanings])


def shipped() -> str:
    rows = [f"| `{r.name}` | {r.summary} |" for r in map(load, resources.names("recipes"))]
    return "\n".join(["| recipe | what it is for |", "|---|---|", *rows])


def page() -> str:
    """The whole page."""
    parts = [
        INTRODUCTION,
        "## Keys\n\n" + table(Recipe, Named),
        "### WeightScheme\n\n" + table(schemes.WeightScheme),
        "### ActivationScheme\n\n" + table(schemes.ActivationScheme),
        "### KVCacheScheme\n\n" + table(schemes.KVCacheScheme),
        "### Group\n\n" + table(recipes.Group),
        "## Methods\n\n" + options(),
        "## GGUF\n\nA recipe with `gguf` writes one file for llama.cpp.\n\n"
        + table(GGUFRecipe, Named),
        "## Additions\n\n"
        + "\n".join(
            f"- `+{name}`, appended to any recipe except GGUF, {words}."
            for name, words in ADDITIONS.items()
        ),
        "## Recipes that ship\n\n" + shipped(),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
