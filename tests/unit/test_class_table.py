"""The table of transformers' classes: the same as transformers reads, read once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.utils import import_utils

from quantkit.model import class_table

MODELS = Path(transformers.__file__).parent / "models"
PROGRAM = """
import sys
opened = set()
def watch(event, arguments):
    if event == "open" and "/transformers/models/" in str(arguments[0]):
        opened.add(str(arguments[0]))
sys.addaudithook(watch)
from quantkit.model import lean_import
lean_import.load()
from transformers import AutoConfig, LlamaForCausalLM, Qwen2Tokenizer
import transformers.models
names = sorted(dir(transformers)) + sorted(dir(transformers.models))
print(len(opened), hash(tuple(names)))
"""


@pytest.fixture
def imported(tmp_path):
    """Import as a command does: how many model files were opened, and what there is to import."""

    def run():
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": "0"}
        answer = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        n_opened, names = answer.stdout.split()
        return int(n_opened), names

    return run


def test_a_table_is_the_same_after_it_was_stored():
    read = import_utils.create_import_structure_from_path(MODELS)
    assert class_table.as_table(class_table.as_rows(read)) == read
    assert len(read) > 100


def test_files_are_read_once(imported):
    first, names = imported()
    second, same = imported()
    assert first > 1000
    assert second < 100
    assert same == names


@pytest.mark.slow
def test_a_damaged_table_is_made_anew(imported, tmp_path):
    _, names = imported()
    (file,) = (tmp_path / "quantkit").iterdir()
    stored = file.read_bytes()
    file.write_text('[["llama"')
    n_opened, same = imported()
    assert n_opened > 1000
    assert same == names
    assert file.read_bytes() == stored


@pytest.mark.slow
def test_without_a_folder_to_keep_it_in_transformers_reads_as_usual(imported, tmp_path):
    (tmp_path / "quantkit").write_text("a file")
    assert imported()[0] > 1000
