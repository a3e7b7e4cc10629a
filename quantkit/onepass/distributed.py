"""Several ranks: processes that torchrun started, over torch.distributed.

NCCL between GPUs, gloo between CPUs. Every collective is polled rather than waited for: meanwhile
the process handles signals, and learns from the lifeline when a rank is gone. The library computes
sums in an order that depends only on the number of ranks, and each result of a decision comes from
one rank, so all continue with exactly the same numbers.
"""

import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from quantkit import device as devices
from quantkit import launch
from quantkit.errors import HardwareError, QuantkitError, RankLost
from quantkit.onepass.lifeline import KEPT, Lifeline
from quantkit.onepass.ranks import Ranks

PATIENCE_SECONDS = 600.0
"""For one collective; blocks and their solves take seconds."""
NEWS_SECONDS = 2.0
"""After a collective failed, until the lifeline says why."""
ALIGNMENT = 16
PREPARED = "quantkit/prepared"

T = TypeVar("T")


@contextmanager
def joined(place: launch.Place, device: str) -> Iterator["DistributedRanks"]:
    """The ranks of this run, connected until everything that is shared is done.

    A failure of this rank is sent to the others. One of another is raised here.
    """
    try:
        where = own_device(place, device)
    except QuantkitError as error:
        error.is_reported = place.local_rank > 0  # once per machine is enough
        raise
    store, _, _ = next(rendezvous("env://", place.rank, place.size))
    line = Lifeline.open(place.rank, place.size, store, launch.address())
    ranks = DistributedRanks(place, where, store, line)
    try:
        yield ranks
        ranks.part()
    except SystemExit as error:
        # torchrun stops all remaining processes of a failed run: say why.
        sentence = line.news(NEWS_SECONDS)
        ranks.give_up()
        if sentence is None:
            raise
        raise line.mark_reported(RankLost(sentence)) from error
    except QuantkitError as error:
        if line.lost is None:
            line.fail(str(error))
        ranks.give_up()
        raise line.mark_reported(error) from error.__cause__
    except Exception as error:
        line.fail(_words(error))
        ranks.give_up()
        raise
    finally:
        line.close()


def _words(error: Exception) -> str:
    if isinstance(error, OSError):
        return str(error)
    return f"stopped by {type(error).__name__}, which is a bug in quantkit"


def own_device(place: launch.Place, name: str) -> torch.device:
    """Every rank has its own GPU, by its number on its machine; or all compute on CPUs."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        count = torch.cuda.device_count()
        if 0 < count < place.local_size:
            raise HardwareError(
                f"{place.local_size} ranks were started but this machine has {count} GPUs; start "
                f"torchrun with --nproc-per-node {count}"
            )
        name = f"cuda:{place.local_rank}"
    elif place.size > 1 and name.startswith("cuda:"):
        raise HardwareError(
            f"--device {name} is one GPU, and {place.size} ranks need one each; leave --device out"
        )
    return devices.choose(name)


@dataclass
class DistributedRanks(Ranks):
    """One of several processes."""

    place: launch.Place
    device: torch.device
    store: Any
    line: Lifeline
    _group: Any = field(default=None, init=False)
    _parted: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.rank, self.size = self.place.rank, self.place.size
        self.local_size = self.place.local_size

    def _join(self) -> Any:
        """The process group, created when it is first needed.

        The first rank joins last, once it has prepared the run, which may take long: until then the
        others only wait for its message, without a time-out.
        """
        if self._group is None:
            if self.is_first:
                self.store.set(PREPARED, "yes")
            self.line.wait(lambda: self.store.check([PREPARED]), None, "to prepare")
            on_gpu = self.device.type == "cuda"
            if on_gpu:
                torch.cuda.set_device(self.device)
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=self.store,
                rank=self.rank,
                world_size=self.size,
                # Our time-out comes first, and ends in a clear error.
                timeout=timedelta(seconds=2 * PATIENCE_SECONDS),
                device_id=self.device if on_gpu else None,
            )
            self._group = dist.group.WORLD
        return self._group

    def _finish(self, work: Any) -> None:
        try:
            self.line.wait(work.is_completed, PATIENCE_SECONDS, "to exchange results")
            work.wait()
        except RuntimeError as error:
            sentence = self.line.news(NEWS_SECONDS)
            words = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RankLost(
                sentence or f"rank {self.rank} lost its connection to the others ({words}); {KEPT}"
            ) from error

    def sum_(self, tensors: Sequence[torch.Tensor]) -> None:
        self._reduce(tensors, dist.ReduceOp.SUM)

    def max_(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            # Libraries differ in what the maximum of a number and NaN is.
            tensor.nan_to_num_(nan=float("inf"), posinf=float("inf"))
        self._reduce(tensors, dist.ReduceOp.MAX)

    def _reduce(self, tensors: Sequence[torch.Tensor], how: Any) -> None:
        self._join()
        for work in [dist.all_reduce(tensor, op=how, async_op=True) for tensor in tensors]:
            self._finish(work)

    def share(self, value: T | None, owner: int = 0) -> T:
        self._join()
        packed = Packed.of(value) if owner == self.rank else None
        sizes = torch.zeros(2, dtype=torch.int64, device=self.device)
        if packed is not None:
            sizes = torch.tensor([len(packed.text), packed.n_bytes]).to(self.device)
        self._broadcast(sizes, owner)
        n_text, n_bytes = sizes.tolist()
        text = torch.empty(n_text, dtype=torch.uint8, device=self.device)
        if packed is not None:
            text = torch.frombuffer(bytearray(packed.text), dtype=torch.uint8).to(self.device)
        self._broadcast(text, owner)
        raw = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        if packed is not None:
            packed.fill(raw)
        if n_bytes:
            self._broadcast(raw, owner)
        if packed is not None:
            return value  # type: ignore[return-value]
        return unpack(text.cpu().numpy().tobytes(), raw)

    def _broadcast(self, tensor: torch.Tensor, owner: int) -> None:
        self._finish(dist.broadcast(tensor, owner, async_op=True))

    def part(self) -> None:
        if self._group is not None:
            self.sum_([torch.zeros(1, device=self.device)])  # once all have come this far
            self.line.done()
            dist.destroy_process_group()
            self._group = None
        elif not self._parted:
            self.line.done()
        self._parted = True

    def give_up(self) -> None:
        """Leave a failed run, without waiting for anybody."""
        if self._group is not None and self.device.type == "cuda":
            with suppress(Exception):  # what hangs is dropped; the process ends anyway
                self._group.abort()


@dataclass
class Packed:
    """A value as bytes, with its tensors separate."""

    text: bytes
    tensors: list[torch.Tensor]

    @classmethod
    def of(cls, value: Any) -> "Packed":
        stream = io.BytesIO()
        pickler = _Pickler(stream)
        pickler.dump(value)
        return cls(stream.getvalue(), pickler.tensors)

    @property
    def n_bytes(self) -> int:
        return sum(_room(tensor.nbytes) for tensor in self.tensors)

    def fill(self, raw: torch.Tensor) -> None:
        """Concatenate the tensors."""
        start = 0
        for tensor in self.tensors:
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            raw[start : start + len(flat)].copy_(flat)
            start += _room(len(flat))


def unpack(text: bytes, raw: torch.Tensor) -> Any:
    """The inverse; tensors are where the bytes are, or in host memory if they came from there."""
    return _Unpickler(io.BytesIO(text), raw).load()


def _room(n_bytes: int) -> int:
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and records their dtypes and shapes."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.tensors: list[torch.Tensor] = []
        self._start = 0

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        start, self._start = self._start, self._start + _room(value.nbytes)
        return start, tuple(value.shape), value.dtype, value.nbytes, value.device.type == "cpu"


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, raw: torch.Tensor) -> None:
        super().__init__(stream)
        self._raw = raw

    def persistent_load(self, place: Any) -> torch.Tensor:
        start, shape, dtype, n_bytes, from_host = place
        found = self._raw[start : start + n_bytes].view(dtype).view(shape)
        return found.cpu() if from_host else found
