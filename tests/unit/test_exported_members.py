"""`import quantkit` is light, and what it exports is what it documents."""

import subprocess
import sys

import quantkit

PROBE = """
import sys, time
started = time.perf_counter()
import quantkit
print(round(time.perf_counter() - started, 3))
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "pydantic",
"transformers", "yaml", "typer", "rich"}))
"""


def test_exported_members():
    assert quantkit.__all__ == sorted(quantkit.__all__)
    assert set(quantkit.__all__) == {
        "CalibrationSet",
        "Recipe",
        "Report",
        "calibrate",
        "compare",
        "convert",
        "errors",
        "gate",
        "predict",
        "quantize",
        "recommend",
        "score",
        "verify",
    }
    for name in quantkit.__all__:
        found = getattr(quantkit, name)
        assert found.__doc__, name
        assert callable(found) or name == "errors"
    assert set(quantkit.__all__) <= set(dir(quantkit))


def test_names_stay_functions_when_their_stages_are_imported():
    code = (
        "import quantkit, quantkit.onepass.run, quantkit.scoring.harness, quantkit.gating.judge\n"
    )
    code += "import quantkit.verification.checkpoint, quantkit.conversion\n"
    code += "for name in quantkit.__all__:\n"
    code += "    if name != 'errors': assert callable(getattr(quantkit, name)), name"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1:] == [""]
