"""Writes the page on a whole sweep, and the pages of each model."""

import json
from collections.abc import Mapping

from quantkit.sweep import page
from quantkit.sweep.graph import Graph
from quantkit.sweep.overview import DATA, FILES, PAGE, PAGES, Overview, gather
from quantkit.sweep.place import Place
from quantkit.sweep.result import FOLDER, Record


def write(
    place: Place, graph: Graph, records: Mapping[str, Record], errors: Mapping[str, str]
) -> Overview:
    """Write the page on everything, and the pages of each model next to it."""
    found = gather(place, graph, records, errors)
    for step in graph.of_kind("report"):
        if (record := records.get(step.name)) is not None:
            for name in FILES:
                if name in record.files:
                    content = place.read(f"{FOLDER}/{step.name}/{record.folder}/{name}")
                    place.write(f"{PAGES}/{step.title}/{name}", content or b"")
    text = json.dumps(found.to_json(), indent=2, ensure_ascii=False)
    place.write(DATA, text.encode() + b"\n")
    place.write(PAGE, page.render(found).encode())
    return found
