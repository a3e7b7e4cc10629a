"""`quantkit recipes`, `recipes list`, `recipes show` and `recipes validate`."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli.options import AsJson
from quantkit.errors import EXIT_OK, QuantkitError, RecipeError

app = typer.Typer(
    help="List, explain and check recipes. Without a command, lists them.",
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def list_by_default(context: typer.Context, json: AsJson = False) -> None:
    """List, explain and check recipes. Without a command, lists them."""
    if not context.invoked_subcommand:
        list_recipes(json)


@app.command("list")
def list_recipes(json: AsJson = False) -> None:
    """List the recipes that ship with quantkit."""
    from quantkit import resources
    from quantkit.cli import console
    from quantkit.recipe import ADDITIONS, GGUFRecipe, load

    recipes = [load(name) for name in resources.names("recipes")]
    if json:
        console.print_json([recipe.public() for recipe in recipes])
        return
    console.print_table(
        ["recipe", "what it is for"], [[r.name, r.summary] for r in recipes], words=(0, 1)
    )
    for addition, meaning in ADDITIONS.items():
        example = next(r.name for r in recipes if not isinstance(r, GGUFRecipe))
        console.say(
            f"+{addition}, appended to any recipe except GGUF, {meaning}: -r {example}+{addition}"
        )


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe's name or file.")],
    json: AsJson = False,
) -> None:
    """Explain one recipe."""
    from quantkit import resources
    from quantkit.cli import console
    from quantkit.recipe import load, split_addition

    recipe = load(name)
    if json:
        console.print_json({**recipe.public(), "digest": recipe.digest})
        return
    base, addition = split_addition(name)
    typer.echo(resources.find("recipes", base).read_text().rstrip())
    if addition is not None:
        typer.echo(f"# with +{addition}")
    console.say(f"\n{recipe.explain()}\ndigest {recipe.digest[:16]}")


@app.command("validate")
def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recipe files.")],
    json: AsJson = False,
) -> int:
    """Check recipe files and list all problems."""
    from quantkit.cli import console
    from quantkit.recipe import GGUFRecipe, read

    faults, good = [], []
    for file in files:
        try:
            recipe = read(file)
            good.append({"file": str(file), "name": recipe.name, "digest": recipe.digest})
            if not json:
                kind = recipe.gguf if isinstance(recipe, GGUFRecipe) else recipe.method
                typer.echo(f"ok  {file}  ({kind}, digest {recipe.digest[:16]})")
        except QuantkitError as error:
            faults.append(str(error))
    if json:
        console.print_json({"ok": good, "faults": faults})
    if faults:
        raise RecipeError("\n".join(faults))
    return EXIT_OK
