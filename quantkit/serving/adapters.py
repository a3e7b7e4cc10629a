"""LoRA adapters beside a model: `--lora NAME=DIR`, checked, and what they take."""

from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.advise.parallel import BY_COLUMNS, NUMBER
from quantkit.advise.shape import ModelShape
from quantkit.advise.split import ONE, Split, stage_of_layers
from quantkit.errors import CheckpointError
from quantkit.home import expanded
from quantkit.parsing import parse_json

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `--max-lora-rank`."""


@dataclass(frozen=True)
class Adapter:
    """One adapter by the name that requests ask for it."""

    name: str
    path: str
    rank: int | None
    """None in a GGUF file, where llama.cpp finds it."""


def parse(texts: Sequence[str], is_gguf: bool) -> tuple[Adapter, ...]:
    """Adapters as they were asked for; each must be there and of the engine's kind."""
    found = [_adapter(text, is_gguf) for text in texts]
    names = [adapter.name for adapter in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise CheckpointError(f"two adapters are called {twice}; give each its own NAME=DIR")
    return tuple(found)


def _adapter(text: str, is_gguf: bool) -> Adapter:
    name, equals, place = text.partition("=")
    if not (name and equals and place):
        raise CheckpointError(f"'{text}' names no adapter; write NAME=DIR")
    path = expanded(place)
    if is_gguf:
        if path.suffix != ".gguf" or not path.is_file():
            raise CheckpointError(
                f"{place} is no GGUF file; llama.cpp takes adapters as such, made by its own "
                "convert_lora_to_gguf.py"
            )
        return Adapter(name, str(path), None)
    try:
        rank = parse_json((path / "adapter_config.json").read_bytes())["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{place} is no LoRA adapter: no rank in its adapter_config.json ({error})"
        ) from error
    if not isinstance(rank, int) or not 0 < rank <= RANKS[-1]:
        raise CheckpointError(f"{place} has rank {rank}; vLLM takes 1 to {RANKS[-1]}")
    if not any(path.glob("adapter_model.*")):
        raise CheckpointError(f"{place} is no LoRA adapter: it has no adapter_model.safetensors")
    return Adapter(name, str(path), rank)


def max_rank(adapters: Sequence[Adapter]) -> int:
    """The smallest of vLLM's ranks that holds all of them."""
    largest = max(adapter.rank or 1 for adapter in adapters)
    return next(rank for rank in RANKS if rank >= largest)


def size_bytes(shape: ModelShape, adapters: Sequence[Adapter], split: Split = ONE) -> int:
    """What vLLM sets aside on the fullest GPU: room for the largest rank at each layer, in 16 bits.

    Of a layer's two factors one is cut with it, and the other is whole on every GPU.
    """
    if not adapters or adapters[0].rank is None:
        return 0
    stage_of = stage_of_layers(int(shape.config["num_hidden_layers"]), split.pipeline)
    widths = [0] * split.pipeline
    for module, (rows, columns) in shape.architecture.linears.items():
        layer = NUMBER.search(f"{module}.")
        by_columns = module.rpartition(".")[2] in BY_COLUMNS
        whole, cut = (rows, columns) if by_columns else (columns, rows)
        stage = -1 if layer is None else stage_of.get(int(layer[1]), -1)
        widths[stage] += whole + -(-cut // split.tensor)
    return 2 * max_rank(adapters) * max(widths) * len(adapters)
