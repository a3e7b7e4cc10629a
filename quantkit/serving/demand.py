"""The requirements for a server, and the engine flags that express them."""

from dataclasses import dataclass

from quantkit.advise import sizing
from quantkit.advise.split import Split
from quantkit.hardware.gpus import GPU
from quantkit.serving import adapters as loras
from quantkit.serving.adapters import Loras
from quantkit.serving.draft import Draft


@dataclass(frozen=True)
class Flag:
    """One flag of an engine with its values."""

    words: tuple[str, ...]
    why: str

    @property
    def name(self) -> str:
        return self.words[0]


def reachable(host: str, server: str) -> str:
    """Who can reach a server at this address."""
    if host in ("127.0.0.1", "localhost", "::1"):
        return "this machine only; 0.0.0.0 accepts other machines"
    return f"reachable from other machines; {server} asks for no key unless --api-key is given"


@dataclass(frozen=True)
class Demand:
    """The requirements for a server."""

    gpu: GPU
    count: int = 1
    split: Split | None = None
    """How GPUs share the model; None: tensor parallel over all of them, or what else fits."""
    context: int | None = None
    """None: the model's maximum, at most 8,192 tokens, or less where that does not fit."""
    users: int | None = None
    """None: as many as fit."""
    profile: str = "chat"
    kv_bits: int | None = None
    """None: as the checkpoint says, otherwise 16."""
    utilisation: float = sizing.UTILISATION
    draft: Draft | None = None
    adapters: Loras = loras.NONE
    host: str = "127.0.0.1"
    port: int = 8000
