"""A calibration set from a million rows of traffic: rows per second and peak memory.

    python benchmarks/million_rows.py --model demo --out benchmarks/results/million_rows.json

Rows are chats of about 1 KB from a vocabulary whose words are as frequent as Zipf's law has it; one
in twenty repeats an earlier row with a few words changed, and one in fifty has an e-mail address.
The build runs in a process of its own with everything on: near-duplicates, redaction, contamination
(against Python's documentation), selection.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from recording import tell

WORDS = 50_000
PER_ROW = 145
"""Words, of both turns together."""
BATCH = 10_000


def vocabulary(rng: np.random.Generator) -> np.ndarray:
    letters = np.array(list("etaoinshrdlcumwfgypbvk"))
    odds = np.linspace(2, 0.3, len(letters))
    lengths = rng.integers(2, 11, WORDS)
    drawn = rng.choice(letters, (WORDS, 11), p=odds / odds.sum())
    return np.array(["".join(row[:n]) for row, n in zip(drawn, lengths, strict=True)])


def generate(path: Path, n_rows: int) -> dict[str, int]:
    """Write the rows; how many of them repeat another."""
    rng = np.random.default_rng(0)
    words = vocabulary(rng)
    odds = 1 / np.arange(1, WORDS + 1)
    edges = np.cumsum(odds / odds.sum())
    n_repeats = 0
    with path.open("w") as stream:
        for first in range(0, n_rows, BATCH):
            n = min(BATCH, n_rows - first)
            drawn = np.searchsorted(edges, rng.random((n, PER_ROW)))
            repeats = rng.random(n) < 0.05
            repeats[0] = False
            for row in np.flatnonzero(repeats):
                drawn[row] = drawn[rng.integers(row)]
                drawn[row, rng.integers(0, PER_ROW, 3)] = rng.integers(0, WORDS, 3)
            n_repeats += int(repeats.sum())
            for row, text in enumerate(words[drawn]):
                question, answer = " ".join(text[:40]), " ".join(text[40:])
                if row % 50 == 0:
                    answer += f" write to {text[0]}.{text[1]}@{text[2]}.org"
                chat = [("user", question), ("assistant", answer)]
                messages = [{"role": role, "content": said} for role, said in chat]
                stream.write(json.dumps({"id": first + row, "messages": messages}) + "\n")
    return {"n_rows": n_rows, "size_bytes": path.stat().st_size, "n_repeats": n_repeats}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data, made = Path(folder, "traffic.jsonl"), Path(folder, "set")
        facts = generate(data, args.rows)
        command = [
            sys.executable, "-m", "quantkit", "calibrate", "build", "--from", str(data),
            "--model", args.model, "-o", str(made), "--redact", "--avoid", "python_docs", "--quiet",
        ]  # fmt: skip
        started = time.monotonic()
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        seconds = time.monotonic() - started
        manifest = json.loads((made / "calibration.json").read_bytes())
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    (source,) = manifest["sources"]
    result = facts | {
        "seconds": seconds,
        "rows_per_second": args.rows / seconds,
        "peak_bytes": peak,
        "samples": [manifest["n_samples"], manifest["length"]],
        "rows": source["rows"],
        "redacted": manifest["redacted"],
        "figures": manifest["figures"],
        "random": manifest["random"],
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }
    tell(result, args.out)


if __name__ == "__main__":
    main()
