"""Every measured figure of the documents: which result file, which value, how it is written.

One module per subject. A function with `@region` returns the Markdown between
`<!-- figures: ITS-NAME -->` and `<!-- /figures -->`; scripts/write_figures.py puts it there.
"""

from figures import (
    best_bits,
    calibration,
    data_free,
    demo,
    engines,
    estimates,
    faults,
    fp4,
    gguf,
    mixed,
    one_pass,
    peers,
    readme,
    registries,
    scaling,
    scoring,
    serving,
    sources,
    suite,
    wild,
)
from figures.regions import REGIONS

__all__ = [
    "REGIONS",
    "best_bits",
    "calibration",
    "data_free",
    "demo",
    "engines",
    "estimates",
    "faults",
    "fp4",
    "gguf",
    "mixed",
    "one_pass",
    "peers",
    "readme",
    "registries",
    "scaling",
    "scoring",
    "serving",
    "sources",
    "suite",
    "wild",
]
