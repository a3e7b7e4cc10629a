"""What tests share: the command line in process, and small random models on disk."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
# Answers that tests get are kept away from the user's own.
CACHE = os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="quantkit-tests-")

import gc
import itertools
import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import settings
from processes import free_port
from tiny import SIZES, cut_demo, save_llama, with_tokenizer

if TYPE_CHECKING:
    from quantkit.model.source import ModelSource

# On a submission the same examples every time; chance looks for new ones at home, and for more of
# them in the slow tier.
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, print_blob=True)
settings.register_profile("home", deadline=None, max_examples=25)
settings.register_profile("long", deadline=None, max_examples=100)

SHARED, LONGEST = range(4, 33), 128
"""How many samples of the Python docs tests share, and tokens of each; fewer may be of any kind."""
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


LONG = (
    "test_line", "test_proof", "test_gate_regressions", "test_nothing_left_behind", "test_resume",
    "test_scoring", "test_short", "test_gguf_line", "test_generation", "test_reference",
    "test_ranks", "test_gguf_convert", "test_kvcache", "test_experts", "test_served_scores",
    "test_calibrate", "test_verify", "test_onepass", "test_interrupt", "test_api", "test_padding",
    "test_sweep_ray", "test_families",
)  # fmt: skip
"""Files that take longest: begun first, so that no worker is left alone with one at the end."""


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected: nothing of what comes until then goes again
    is_short = "not slow" in config.getoption("markexpr")
    settings.load_profile("long" if not is_short else "ci" if os.environ.get("CI") else "home")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: no collection of garbage need look at them again."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_unconfigure() -> None:
    shutil.rmtree(CACHE, ignore_errors=True)


class Result(NamedTuple):
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[[list[str]], Result]]:
    """Run a command line in this process: exit code, stdout, stderr."""
    from quantkit.cli.main import main

    handler = signal.getsignal(signal.SIGTERM)

    def run(arguments: list[str]) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="session", autouse=True)
def _python_docs_once() -> Iterator[None]:
    """Choosing samples of the Python docs takes seconds; tests that only need some get the same,
    and tests that need a few get parts of them.

    What chooses them is tested through `calibration.loading.make` and the command line's `build`.
    """
    from quantkit.calibration import loading
    from quantkit.calibration.tokens import CalibrationTokens

    usual, known = loading.load, {}

    def load(name, model, progress, n_samples=None, length=None, evaluation=None):
        if name != "python-docs" or (length is not None and length > model.context):
            return usual(name, model, progress, n_samples, length, evaluation)
        read = tuple(model.tokenizer.encode("def f(): a few words"))
        size = n_samples, length, model.context
        if n_samples in SHARED and length and length <= LONGEST <= model.context:
            size = SHARED[-1], LONGEST, LONGEST
        key = read, len(model.tokenizer), model.n_tokens, *size
        if key not in known:
            known[key] = usual(name, model, progress, *size[:2], evaluation)
        found = known[key]
        assert found.lengths is None, "samples of this set are full, and so are parts of them"
        return CalibrationTokens(found.name, found.ids[:n_samples, :length])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load", load)
        yield


@pytest.fixture(scope="session")
def demo_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of the demo model for both engines, as `quantize` writes them."""
    from quantkit import resources
    from quantkit.model.source import ModelSource
    from quantkit.onepass.run import quantize
    from quantkit.recipe import load

    out = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        # All of it, though the first to ask may be a module where the demo is short.
        patch.setattr(resources, "DEMO_MODEL", resources.PACKAGE / "_data" / "demo-model")
        quantize(ModelSource.open("demo"), [load("fp8-dynamic"), load("gguf-q8_0")], out, "cpu")
    return out


@pytest.fixture(scope="session")
def short_demo(tmp_path_factory: pytest.TempPathFactory) -> "ModelSource":
    """Two of the demo's six blocks, for what each block shows: a third of the work."""
    from quantkit.model.source import ModelSource

    return ModelSource.open(str(cut_demo(tmp_path_factory.mktemp("short") / "demo")))


@pytest.fixture(scope="module")
def demo_is_short(short_demo: "ModelSource") -> Iterator[None]:
    """Whoever opens `demo` in this process gets two of its blocks."""
    from quantkit import resources

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resources, "DEMO_MODEL", short_demo.folder)
        yield


@pytest.fixture(scope="module")
def coarse_awq() -> Iterator[None]:
    """AWQ tries a quarter of its exponents: for modules that ask what is written, not how well."""
    from quantkit.methods import awq

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(awq, "EXPONENTS", 5)
        yield


@pytest.fixture
def port() -> int:
    """One that nobody listens at."""
    return free_port()


@pytest.fixture(scope="session")
def _originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(max_shard_size: str, tied: bool, dtype: str, sizes: dict[str, int]) -> Path:
        key = json.dumps([max_shard_size, tied, dtype, sizes])
        if key not in made:
            folder = tmp_path_factory.mktemp("original") / "model"
            made[key] = save_llama(
                folder, max_shard_size, DTYPES[dtype], tie_word_embeddings=tied, **sizes
            )
        return made[key]

    return make


@pytest.fixture
def tiny_model(tmp_path: Path, _originals: Callable[..., Path]) -> Callable[..., Path]:
    """A factory of Llama folders that the test may change; sizes go by their config names."""
    numbers = itertools.count(1)

    def make(
        max_shard_size: str = "1GB", tied: bool = False, dtype: str = "bf16", **sizes: int
    ) -> Path:
        original = _originals(max_shard_size, tied, dtype, sizes)
        return shutil.copytree(original, tmp_path / f"model-{next(numbers)}")

    return make


@pytest.fixture
def tiny_experts(tmp_path: Path) -> Path:
    """A small random MoE model in the form of Qwen 3."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SIZES | {"vocab_size": 4096},
        head_dim=32,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        dtype="bfloat16",
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path / "experts"
    model.save_pretrained(folder)
    return with_tokenizer(folder)
