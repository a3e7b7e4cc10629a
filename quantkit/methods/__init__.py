"""The quantisation methods by name, one file each; other packages can add theirs.

A package adds a method with an entry point in the group `quantkit.methods` that names a
`quantkit.methods.contract.Method`. Entry points are read only when a name is not in the table, or
when all are listed. Listing and checking do not need torch.
"""

from functools import cache
from importlib import import_module, metadata

from quantkit.errors import MethodError, UnknownName
from quantkit.methods.contract import Method

GROUP = "quantkit.methods"
METHODS = {
    "rtn": "quantkit.methods.rtn:RTN",
    "gptq": "quantkit.methods.gptq:GPTQ",
    "awq": "quantkit.methods.awq:AWQ",
    "awq-gptq": "quantkit.methods.awq:AWQ_GPTQ",
    "smoothquant-gptq": "quantkit.methods.smoothquant:SMOOTHQUANT_GPTQ",
}


def names() -> list[str]:
    """All methods, including those of other packages."""
    return [*METHODS, *_added()]


def find(name: str) -> Method:
    """A method by name."""
    if name in METHODS:
        module, _, attribute = METHODS[name].partition(":")
        found: Method = getattr(import_module(module), attribute)
        return found
    if name not in _added():
        raise UnknownName("method", name, names())
    return _load(name)


@cache
def _added() -> dict[str, metadata.EntryPoint]:
    added: dict[str, metadata.EntryPoint] = {}
    for entry in metadata.entry_points(group=GROUP):
        if entry.name in METHODS or entry.name in added:
            owner = "quantkit" if entry.name in METHODS else _package(added[entry.name])
            raise MethodError(
                f"{_package(entry)} adds a method {entry.name}, but {owner} has one of that name; "
                f"rename it in the entry points of {_package(entry)}, or uninstall that"
            )
        added[entry.name] = entry
    return added


@cache
def _load(name: str) -> Method:
    entry = _added()[name]
    where = f"method {name} ({entry.value} of {_package(entry)})"
    try:
        method = entry.load()
    except Exception as error:  # another package's code can fail in any way
        raise MethodError(f"{where} cannot be loaded: {error}; fix or uninstall it") from error
    if not isinstance(method, Method):
        raise MethodError(f"{where} is not a quantkit.methods.contract.Method")
    return method


def _package(entry: metadata.EntryPoint) -> str:
    return entry.dist.name if entry.dist else "an installed package"
