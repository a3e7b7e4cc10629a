"""The model of a config as transformers builds it, without weights, and its parts."""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import SourceError
from quantkit.model import lean_import
from quantkit.model.headers import StoredTensor
from quantkit.model.source import is_native, native_class, read_config
from quantkit.quiet import only_errors

if TYPE_CHECKING:
    import torch

COUNTED = re.compile(r"(?:^|_)(?:layers?|blocks|experts)$")
"""Keys of a config that say how many modules are built."""
MOST_MODULES = 10_000


def skeleton(
    folder: Path, trust_remote_code: bool = False, dtype: "torch.dtype | None" = None
) -> Any:
    """The model in `folder` with parameters on the meta device and real buffers.

    Some families compute constants in the dtype they are built in (Gemma's embedding scale), so a
    skeleton that will be run is built in the dtype it will run in.
    """
    from accelerate import init_empty_weights

    require_countable(folder)
    arguments = {} if dtype is None else {"dtype": dtype}
    try:
        with (
            only_errors("transformers"),
            init_empty_weights(include_buffers=False),
            lean_import.without_compiler(),
            _without_values(),
        ):
            model = _described(folder, trust_remote_code, arguments)
    except Exception as error:  # a config is untrusted input; anything may be wrong with it
        _explain(folder)
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if "trust_remote_code" in str(error):
            raise SourceError(
                f"{folder} ships its own code, which quantkit does not run by default; read it, "
                "then give --trust-remote-code if you trust it"
            ) from error
        raise SourceError(
            f"transformers cannot build the model that {folder / 'config.json'} describes: {reason}"
        ) from error
    model.tie_weights()
    return model.eval()


@contextmanager
def _without_values() -> Iterator[None]:
    """Initialisers leave parameters on the meta device alone.

    torch runs them in Python there, for nothing, and imports sympy for that: more than a second.
    """
    from torch.nn import init
    from transformers import initialization

    usual = {name: each for name, each in vars(init).items() if name.endswith("_")}
    known: dict[str, Any] = getattr(initialization, "TORCH_INIT_FUNCTIONS", {})
    taken = dict(known)
    vars(init).update({name: _skips_meta(each) for name, each in usual.items() if callable(each)})
    known.update({name: _skips_meta(each) for name, each in taken.items()})
    try:
        yield
    finally:
        vars(init).update(usual)
        known.update(taken)


def _skips_meta(initialise: Callable[..., Any]) -> Callable[..., Any]:
    def checked(tensor: "torch.Tensor", *given: Any, **named: Any) -> Any:
        return tensor if tensor.is_meta else initialise(tensor, *given, **named)

    return checked


def _described(folder: Path, trust_remote_code: bool, arguments: dict[str, Any]) -> Any:
    """The model of a config; one that is another family's, by that family's class."""
    import transformers

    given = read_config(folder)
    if (own := native_class(given)) is not None:
        return _build(_plain(own.config_class.from_pretrained(folder)), False, arguments)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    return _build(_plain(config), trust_remote_code, arguments)


def _plain(config: Any) -> Any:
    """Without what makes transformers build quantised layers."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return config


def _explain(folder: Path) -> None:
    """Refuse a model type that nobody here knows, with the way out."""
    path, config = folder / "config.json", read_config(folder)
    codes = config.get("auto_map")
    if isinstance(codes, dict) and not is_native(config):
        # A name with -- is a file of another repository.
        classes = [c for c in codes.values() if isinstance(c, str) and "--" not in c]
        files = dict.fromkeys(f"{c.rpartition('.')[0].replace('.', '/')}.py" for c in classes)
        if gone := [file for file in files if not (folder / file).is_file()]:
            raise SourceError(
                f"{path} has its code in {gone[0]} (auto_map), which is missing; download it again"
            )
    elif config.get("model_type") and not is_native(config):
        from transformers import __version__

        raise SourceError(
            f"{path} has model_type {config['model_type']}, which transformers {__version__} does "
            "not know, and names no code of its own (auto_map); upgrade transformers, or download "
            "the model with its code and give --trust-remote-code"
        )


def require_countable(folder: Path) -> None:
    """Refuse a config with an absurd number of layers or experts."""
    parts: list[Any] = [read_config(folder)]
    for part in parts:  # grows as nested configs are found
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, value in part.items():
            if COUNTED.search(key) and isinstance(value, int) and value > MOST_MODULES:
                raise SourceError(
                    f"{folder / 'config.json'}: {key} is {value:,}, and no model has more than "
                    f"{MOST_MODULES:,}; use the model's original config"
                )


def _build(config: Any, trust_remote_code: bool, arguments: dict[str, Any]) -> Any:
    """With fused attention if the family supports it, otherwise with its own plain one."""
    import transformers

    named = (getattr(config, "architectures", None) or [""])[0]
    own = getattr(transformers, named, None)
    brings_code = trust_remote_code and hasattr(config, "auto_map")
    if hasattr(own, "_from_config") and not brings_code:
        build = own._from_config  # type: ignore[union-attr]
    else:
        # Published configs may use another name for the class than transformers.
        auto, seeing = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
        sees = type(config) in seeing._model_mapping and type(config) not in auto._model_mapping
        build = (seeing if sees else auto).from_config
        arguments = arguments | {"trust_remote_code": trust_remote_code}
    # Fused attention silently drops soft-capping (Gemma 2).
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if not capped:
        try:
            return build(config, attn_implementation="sdpa", **arguments)
        except (ValueError, ImportError) as error:
            if "attention" not in str(error).lower():
                raise
    return build(config, attn_implementation="eager", **arguments)


def text_part(model: Any) -> tuple[str, Any]:
    """The name and module of the text part: the decoder, without head and towers."""
    import torch

    found = model.get_decoder() if hasattr(model, "get_decoder") else None
    if not isinstance(found, torch.nn.Module) or found is model:
        found = model.base_model
    names = {id(module): name for name, module in model.named_modules()}
    return names.get(id(found), ""), found


def find_blocks(model: Any) -> tuple[str, Any]:
    """The name and the list of a model's decoder blocks."""
    import torch

    prefix, text = text_part(model)
    n_blocks = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    lists = [
        (f"{prefix}.{name}".strip("."), module)
        for name, module in text.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == n_blocks
    ]
    # Lists within blocks, such as experts, may happen to have the same length.
    outer = [(n, m) for n, m in lists if not any(n.startswith(f"{o}.") for o, _ in lists)]
    if len(outer) != 1:
        raise SourceError(
            f"{type(model).__name__} is not supported: {len(outer)} of its lists of modules have "
            f"the {n_blocks} entries that its config gives as num_hidden_layers, where one is "
            "needed to find its decoder blocks"
        )
    return outer[0]


def usual_names(model: Any) -> dict[str, tuple[int, ...]]:
    """The names that transformers would save this model with, and those of separate experts."""
    from quantkit.model import fused

    separate = fused.separated(saved(model), model.config.to_dict())
    return {name: tensor.shape for name, tensor in separate.items()}


def saved(model: Any) -> dict[str, StoredTensor]:
    """The tensors that transformers would save this model as."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(model, model.state_dict())
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    shapes = {name: tuple(t.shape) for name, t in found.items() if name not in tied}
    return {n: StoredTensor(n, "BF16", shape, Path(), 0) for n, shape in shapes.items()}


def cache_argument(module: "torch.nn.Module") -> str | None:
    """The name of a module's KV cache argument; None: it takes none."""
    taken = inspect.signature(module.forward).parameters
    return next((name for name in ("past_key_values", "layer_past") if name in taken), None)


def attentions(module: "torch.nn.Module") -> "dict[str, torch.nn.Module]":
    """The modules that write keys and values to a cache: the innermost ones that take one.

    Neither what DeepSeek V4 compresses nor attention with an index of keys (V3.2) counts: engines
    keep them in formats of their own, without scales.
    """
    takers = {
        name: part for name, part in module.named_modules() if cache_argument(part) is not None
    }
    return {
        name: part
        for name, part in takers.items()
        if name
        and not name.endswith((".compressor", ".indexer"))
        and not any(other.startswith(f"{name}.") for other in takers)
    }
