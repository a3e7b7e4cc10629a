"""LoRA adapters of a model: `--lora NAME=DIR` or a folder of them, checked, and their memory.

vLLM keeps as many on the GPU as can be used in one step (`--max-loras`), each in a slot of the
largest rank, and the others in host memory (`--max-cpu-loras`), from where a slot is filled when a
request needs it. llama.cpp keeps all of them in memory and sums those that a request names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.advise.parallel import BY_COLUMNS
from quantkit.advise.shape import NUMBER, ModelShape
from quantkit.advise.split import ONE, Split, stage_of_layers
from quantkit.errors import CheckpointError
from quantkit.home import expanded
from quantkit.parsing import parse_json

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values of vLLM's `--max-lora-rank`."""
SLOTS = 8
"""Default number of adapters with a slot on the GPU: few are used in the same step."""
CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Adapter:
    """One adapter by its name in requests."""

    name: str
    path: str
    rank: int | None
    """None for a GGUF file, where llama.cpp finds it."""


@dataclass(frozen=True)
class Loras:
    """All adapters of a server, and where they are kept."""

    adapters: tuple[Adapter, ...] = ()
    slots: int = 0
    """On the GPU at the same time."""
    on_host: int = 0
    """In host memory, including those with a slot, as vLLM counts."""

    def __bool__(self) -> bool:
        return bool(self.adapters)

    def __iter__(self) -> Iterator[Adapter]:
        return iter(self.adapters)

    def __len__(self) -> int:
        return len(self.adapters)


NONE = Loras()


def parse(
    texts: Sequence[str], is_gguf: bool, slots: int | None = None, on_host: int | None = None
) -> Loras:
    """The requested adapters; each must exist and be of the engine's kind."""
    found = [adapter for text in texts for adapter in _adapters(text, is_gguf)]
    names = [adapter.name for adapter in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise CheckpointError(f"two adapters are called {twice}; give each its own NAME=DIR")
    if not found:
        if slots or on_host:
            raise CheckpointError("--max-loras and --max-cpu-loras go with --lora")
        return NONE
    wanted = min(slots or SLOTS, len(found))
    waiting = len(found) if on_host is None else on_host
    if waiting < wanted:
        raise CheckpointError(
            f"--max-cpu-loras {waiting} is less than the {wanted} adapters with a slot on the GPU; "
            "lower --max-loras, or raise it"
        )
    return Loras(tuple(found), wanted, waiting)


def _adapters(text: str, is_gguf: bool) -> list[Adapter]:
    """One adapter, or all in a folder."""
    name, equals, place = text.partition("=")
    if name and equals and place:
        return [_adapter(name, place, is_gguf)]
    folder = expanded(text)
    if equals or not folder.is_dir():
        raise CheckpointError(
            f"'{text}' is not an adapter; write NAME=DIR, or a folder of adapters"
        )
    inside = sorted(folder.glob("*.gguf") if is_gguf else _folders(folder))
    if not inside:
        kind = "GGUF files" if is_gguf else f"folders with an {CONFIG}"
        raise CheckpointError(f"{text} holds no adapters: no {kind} in it")
    return [_adapter(path.stem if is_gguf else path.name, str(path), is_gguf) for path in inside]


def _folders(folder: Path) -> list[Path]:
    if (folder / CONFIG).is_file():
        return [folder]
    return [path for path in folder.iterdir() if (path / CONFIG).is_file()]


def _adapter(name: str, place: str, is_gguf: bool) -> Adapter:
    path = expanded(place)
    if is_gguf:
        if path.suffix != ".gguf" or not path.is_file():
            raise CheckpointError(
                f"{place} is not a GGUF file; llama.cpp needs adapters as GGUF files; convert with "
                "its convert_lora_to_gguf.py"
            )
        return Adapter(name, str(path), None)
    try:
        rank = parse_json((path / CONFIG).read_bytes())["r"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{place} is not a LoRA adapter: no rank in its {CONFIG} ({error})"
        ) from error
    if not isinstance(rank, int) or not 0 < rank <= RANKS[-1]:
        raise CheckpointError(f"{place} has rank {rank}; vLLM takes 1 to {RANKS[-1]}")
    if not any(path.glob("adapter_model.*")):
        raise CheckpointError(f"{place} is not a LoRA adapter: it has no adapter_model.safetensors")
    return Adapter(name, str(path), rank)


def max_rank(adapters: Loras) -> int:
    """The smallest of vLLM's ranks that fits all of them."""
    largest = max(adapter.rank or 1 for adapter in adapters)
    return next(rank for rank in RANKS if rank >= largest)


def size_bytes(shape: ModelShape, adapters: Loras, split: Split = ONE) -> int:
    """Memory that vLLM reserves on the fullest GPU for all slots."""
    return adapters.slots * slot_bytes(shape, adapters, split)


def slot_bytes(shape: ModelShape, adapters: Loras, split: Split = ONE) -> int:
    """Bytes per slot: room for the largest rank at each layer, in 16 bits.

    Of a layer's two factors one is sharded with it, and the other is replicated on every GPU.
    """
    if not adapters or adapters.adapters[0].rank is None:
        return 0
    stage_of = stage_of_layers(int(shape.config["num_hidden_layers"]), split.pipeline)
    widths = [0] * split.pipeline
    for module, (rows, columns) in shape.architecture.linears.items():
        layer = NUMBER.search(f"{module}.")
        by_columns = module.rpartition(".")[2] in BY_COLUMNS
        whole, cut = (rows, columns) if by_columns else (columns, rows)
        stage = -1 if layer is None else stage_of.get(int(layer[1]), -1)
        widths[stage] += whole + -(-cut // split.tensor)
    return 2 * max_rank(adapters) * max(widths)
