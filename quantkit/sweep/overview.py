"""One page over everything."""

from quantkit.sweep.graph import Graph
from quantkit.sweep.place import Place


def write(place: Place, graph: Graph, records: object, errors: object) -> None:
    return None
