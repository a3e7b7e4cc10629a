"""A source model: its location, config and tensors, without loading weights.

`demo` is the model that ships with quantkit, a path is a folder in Hugging Face format, anything
else is a hub id, downloaded through huggingface_hub with its cache and its offline switches.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from quantkit import families, resources
from quantkit.errors import SourceError, near_matches
from quantkit.home import expanded
from quantkit.model.config import method_of, plain_config
from quantkit.model.description import README
from quantkit.model.headers import WEIGHT_TYPES as WEIGHT_TYPES
from quantkit.model.headers import StoredTensor, read_header
from quantkit.nearby import similar, within
from quantkit.parsing import parse_json

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOKENIZER_FILES = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "special_tokens_map.json")
FINGERPRINT_BYTES = 64 << 10
HUB_NAME = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
HUB_FILE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+):(?P<kind>[\w.-]+)", re.ASCII)
"""A GGUF file on the hub by a part of its name, in llama.cpp's notation: org/repo:Q4_K_M."""
# Everything that a model folder needs besides its weights.
SIDE_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", "LICENSE*", "*.py")


@dataclass(frozen=True)
class ModelSource:
    """A model on disk."""

    name: str
    """The name that the user gave."""
    folder: Path
    revision: str | None
    """The commit of a hub model; None for a folder."""
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    trust_remote_code: bool = False
    is_temporary: bool = False
    """Its folder is deleted after the run: it holds a model that was in memory."""
    quantized_by: str | None = None
    """The method that its files were quantised with, if any; `tensors` are dequantised."""
    files: Mapping[str, StoredTensor] | None = None
    """What its files hold, where `tensors` presents it in another form (experts one by one)."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.stored.values())

    @property
    def stored(self) -> Mapping[str, StoredTensor]:
        """The tensors of its files, as stored."""
        return self.tensors if self.files is None else self.files

    @cached_property
    def fingerprint(self) -> str:
        """A hash of config, tokenizer, tensor table and 192 KiB of every tensor.

        Small tensors count in full, large ones by their start, middle and end: training changes all
        of a tensor, and reading all of a large model would take minutes. So this distinguishes
        models; it does not protect against somebody who changes single bytes on purpose.
        """
        digest = hashlib.sha256()
        for pattern in ("config.json", *TOKENIZER_FILES):
            for path in sorted(self.folder.glob(pattern)):
                digest.update(path.name.encode() + path.read_bytes())
        for tensor in sorted(self.stored.values(), key=lambda t: t.name):
            digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
            part = bytearray(min(tensor.size_bytes, FINGERPRINT_BYTES))
            last = tensor.size_bytes - len(part)
            for offset in sorted({0, last // 2, last}):
                tensor.read_into(memoryview(part), offset)
                digest.update(part)
        return digest.hexdigest()

    @property
    def place(self) -> str:
        """A name that finds the model again from anywhere on this machine."""
        if self.revision is not None or self.name == "demo" or self.is_temporary:
            return self.name
        return str(self.folder.resolve())

    @property
    def context(self) -> int:
        """The model's maximum context length."""
        return context_of(self.config)

    @property
    def digest(self) -> str:
        """What identifies the model."""
        return self.fingerprint

    @property
    def label(self) -> str:
        """A short name for tables: the last part of a path or hub id."""
        return self.name if self.name == "demo" else Path(self.name).resolve().name or self.name

    @classmethod
    def open(
        cls,
        name: str,
        revision: str | None = None,
        trust_remote_code: bool = False,
        cached_only: bool = False,
        requantize: bool = False,
    ) -> "ModelSource":
        """Find a model and read its config and tensor index, checking both.

        With `requantize`, a model that is already quantised is read as its dequantised weights.
        """
        from quantkit.model import dequantized, fused

        folder, commit = _locate(name, revision, cached_only)
        _refuse_links(folder)
        given = read_config(folder)
        method = method_of(given)
        config = plain_config(given) if method and requantize else given
        check_kind(config, folder, trust_remote_code)
        stored = read_tensors(folder)
        tensors = dequantized.dequantized(stored, given) if method else stored
        tensors = fused.separated(tensors, config)
        return cls(name, folder, commit, config, tensors, trust_remote_code, False, method, stored)


def side_files(folder: Path) -> list[Path]:
    """Config, tokenizer and everything else that a model folder needs besides its weights."""
    paths = {path for pattern in SIDE_FILES for path in folder.glob(pattern)}
    return sorted(path for path in paths if path.is_file())


def _refuse_links(folder: Path) -> None:
    """Refuse links to files elsewhere: their contents would be copied into every checkpoint.

    Snapshots of the hub are links into the same model's part of its cache.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots":
        home = home.parent.parent
    for path in side_files(folder):
        if path.is_symlink() and not path.resolve().is_relative_to(home):
            raise SourceError(
                f"{path} is a link to outside {folder}; put the file itself there, or "
                "remove the link"
            )


def hub_file(name: str) -> Path | None:
    """The GGUF file that `org/repo:Q4_K_M` means, downloaded if necessary; None for other names."""
    match = HUB_FILE.fullmatch(name)
    if match is None or Path(name).exists():
        return None
    repo, kind = match["repo"], match["kind"]
    wanted = [f"*{spelt}*.gguf" for spelt in dict.fromkeys((kind, kind.upper(), kind.lower()))]
    folder, _ = _download(repo, None, patterns=wanted)
    files = sorted(path.name for path in folder.glob("*.gguf"))
    found = [one for one in files if kind.lower() in one.lower() and not one.startswith("mmproj")]
    if len(found) == 1:
        return folder / found[0]
    what = "several GGUF files" if found else "no GGUF file"
    there = f"; it has: {', '.join(files[:8])}" if files else ""
    raise SourceError(f"{repo} has {what} with {kind} in the name{there}; give more of the name")


def placed(name: str | Path) -> Path:
    """Resolve a name here: a path stays a path, a hub id becomes the path of its snapshot.

    A path below an existing folder is not a hub id but a typo; opening it will report that.
    """
    text, path = str(name), Path(name)
    if path.exists() or not is_hub_id(text):
        return path
    return hub_file(text) or locate(text)


def is_hub_id(name: str) -> bool:
    """Whether a name looks like a hub id rather than a local path."""
    owner, _, rest = name.partition("/")
    if not rest or "/" in rest or ".." in name or Path(name).exists() or Path(owner).is_dir():
        return False
    return bool(HUB_FILE.fullmatch(name) or HUB_NAME.fullmatch(name))


def is_local(name: str) -> bool:
    """Whether a model needs no hub."""
    return name == "demo" or Path(name).exists()


def locate(name: str, revision: str | None = None, weights: bool = True) -> Path:
    """The folder of a model, downloaded if necessary; without its weights where they are not
    needed.
    """
    return _locate(name, revision, weights=weights)[0]


def _locate(
    name: str, revision: str | None, cached_only: bool = False, weights: bool = True
) -> tuple[Path, str | None]:
    if name == "demo":
        return resources.DEMO_MODEL, None
    path = expanded(name)
    if path.is_dir():
        return path, None
    if path.exists():
        raise SourceError(f"{name} is a file; MODEL is a folder, a hub id or `demo`")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SourceError(
            f"there is no folder {name}; MODEL is a folder, a hub id or `demo`{similar(path)}"
        )
    return _download(name, revision, cached_only, weights)


def _download(
    name: str,
    revision: str | None,
    cached_only: bool = False,
    weights: bool = True,
    patterns: Sequence[str] = (),
) -> tuple[Path, str | None]:
    """The snapshot of a hub model, and its commit; with `patterns`, only matching files."""
    for word in (name, revision or "main"):
        if not HUB_NAME.fullmatch(word) or ".." in word:
            raise SourceError(f"{word!r} is not a model or revision in the hub; check the name")
    if _is_offline() and not _cache_of(name).is_dir():  # importing the library takes a second
        raise _not_here(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(
            snapshot_download(
                name,
                revision=revision,
                # The model's card as well, for its licence; it is read, never copied.
                allow_patterns=[*patterns]
                or [*SIDE_FILES, README, *(["*.safetensors"] if weights else [])],
                # Second copies of the weights that some models include.
                ignore_patterns=["consolidated*", "*/*"],
                local_files_only=cached_only,
            )
        )
    except LocalEntryNotFoundError as error:
        raise _not_here(name) from error
    except (HfHubHTTPError, HFValidationError) as error:
        first = str(error).strip().splitlines()[0]
        raise SourceError(
            f"cannot get {name} from the hub: {first}; "
            "check the name, and `hf auth login` for gated models"
        ) from error
    # Snapshots are stored in the cache under their commit.
    return folder, folder.name


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")


def _cache_of(name: str) -> Path:
    """Where huggingface_hub caches a model; by the same variables as there."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    hub = hub or str(Path(os.environ.get("HF_HOME") or home) / "hub")
    return Path(os.path.expandvars(hub)).expanduser() / f"models--{name.replace('/', '--')}"


def _not_here(name: str) -> SourceError:
    why = "HF_HUB_OFFLINE is set" if _is_offline() else "the hub cannot be reached"
    hint = ". Did you mean demo?" if near_matches(name, ["demo"]) else similar(Path(name))
    return SourceError(
        f"{name} is neither a folder here nor in the hub cache, and {why}; "
        f"give a folder, or connect and try again{hint}"
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`."""
    path = folder / "config.json"
    if not path.is_file():
        hint = "; a GGUF file in a hub is named as org/repo:Q4_K_M"
        hint = hint if folder.resolve().parent.name == "snapshots" else within(folder, path.name)
        raise SourceError(f"{folder} is not a model folder: it has no config.json{hint}")
    try:
        config = parse_json(path.read_bytes(), finite=False)
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except OSError as error:
        raise SourceError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not valid JSON: {error}") from error
    return config


def context_of(config: Mapping[str, Any]) -> int:
    """The maximum context length in a config."""
    keys = ("max_position_embeddings", "n_positions", "model_max_length")
    parts = (config, text_config(config))
    return next((int(part[key]) for part in parts for key in keys if part.get(key)), 2048)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    for key in ("text_config", "llm_config", "language_config"):
        if isinstance(part := config.get(key), dict):
            return part
    return config


def check_kind(config: Mapping[str, Any], folder: Path, trust_remote_code: bool = False) -> None:
    """Refuse anything but a plain decoder, and models that are already quantised."""
    if method := method_of(config):
        raise SourceError(
            f"{folder} is already quantised ({method}); give the original model, since a second "
            "rounding adds to the error, or --requantize to start from the dequantised values"
        )
    named = config.get("architectures") or []
    architectures = [str(a) for a in (named if isinstance(named, list) else [named])]
    kind = ", ".join(architectures) or str(config.get("model_type", "unnamed"))
    if config.get("is_encoder_decoder"):
        raise SourceError(
            f"{folder} has an unsupported architecture ({kind}): an encoder beside its decoder "
            "(is_encoder_decoder in config.json), and quantkit supports decoders that generate "
            "text; serve it unquantised, or take a decoder"
        )
    if not any(
        a.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
        for a in architectures
    ):
        raise SourceError(
            f"{folder} has an unsupported architecture ({kind} in config.json); quantkit supports "
            "decoders that generate text, alone (…ForCausalLM) or with a tower "
            "(…ForConditionalGeneration): give a model with a language head, or serve this one "
            "unquantised"
        )
    if config.get("auto_map") and not trust_remote_code and not is_native(config):
        raise SourceError(
            f"{folder} ships its own modelling code; read it, then allow it with "
            "--trust-remote-code"
        )


def refuse_experts(config: Mapping[str, Any], folder: Path, reason: str) -> None:
    """Refuse MoE models where only dense ones work; `reason` ends the sentence."""
    if key := experts_key(config):
        raise SourceError(f"{folder} is an MoE model ({key} in its config), {reason}")


def experts_key(config: Mapping[str, Any]) -> str | None:
    """The key that makes a config that of an MoE model; None for dense models."""
    nested = [v for v in config.values() if isinstance(v, dict)]
    return next((k for c in (config, *nested) for k in EXPERTS if c.get(k)), None)


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether transformers itself has this architecture, so that shipped code can be ignored."""
    return _is_known_type(config) or native_class(config) is not None


def native_class(config: Mapping[str, Any]) -> Any:
    """transformers' class of a model whose type it does not know, where that is another's model."""
    named = families.other_class(config)
    if named is None or _is_known_type(config):
        return None
    import transformers

    return getattr(transformers, named, None)


def _is_known_type(config: Mapping[str, Any]) -> bool:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return str(config.get("model_type")) in CONFIG_MAPPING_NAMES


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder, from one file or from an index, each header checked."""
    tensors: dict[str, StoredTensor] = {}
    for file, names in _shard_files(folder).items():
        header = read_header(folder / file)
        if names is not None and (gone := [n for n in names if n not in header]):
            raise SourceError(f"{folder / file} lacks {gone[0]}, which {INDEX} places there")
        for name, tensor in header.items():
            if name in tensors:
                raise SourceError(f"{name} is in {tensors[name].file.name} and in {file}")
            tensors[name] = tensor
    return tensors


def _shard_files(folder: Path) -> dict[str, list[str] | None]:
    index = folder / INDEX
    if index.is_file():
        try:
            weight_map = parse_json(index.read_bytes())["weight_map"]
            files: dict[str, list[str] | None] = {}
            for name, file in weight_map.items():
                if Path(file).name != file:
                    raise ValueError(f"{file!r} is not a plain file name")
                names = files.setdefault(file, [])
                assert names is not None
                names.append(name)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SourceError(f"{index} is not a valid index: {error}") from error
        for file in files:
            if not (folder / file).is_file():
                raise SourceError(f"{index} names {file}, which is missing; download it again")
        return files
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors": None}
    if single := sorted(p.name for p in folder.glob("*.safetensors")):
        raise SourceError(
            f"{folder} has {single[0]} but neither model.safetensors nor {INDEX}; "
            "a shard or the index is missing"
        )
    if pickles := sorted(p.name for pattern in PICKLES for p in folder.glob(pattern)):
        raise SourceError(
            f"{folder} has pickled weights only ({pickles[0]}), which can run code when loaded; "
            "convert them where you trust them: AutoModelForCausalLM.from_pretrained(DIR)"
            ".save_pretrained(NEW)"
        )
    raise SourceError(f"{folder} is not a model folder: it has no safetensors weights")
