"""GPUs and what they can do: known ones by name, this machine's own, or one the user describes.

`gpus.yaml` next to this file holds the figures and the source of each.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from quantkit.errors import HardwareError, UnknownName

DATA = Path(__file__).with_name("gpus.yaml")
KINDS = (
    "vendor datasheet", "vendor white paper", "vendor documentation", "driver report",
    "third party",
)  # fmt: skip
"""Kinds of pages that figures are taken from. Product briefs and product pages are datasheets."""
VENDORS = {
    "nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel", "apple": "Apple", "cpu": "CPU",
    "unknown": "unknown vendor",
}  # fmt: skip
"""Vendors, and their labels."""
# Brands, trade marks and the like, which people write or leave out.
NOISE = re.compile(
    r"\((r|tm)\)|nvidia|geforce|quadro|tesla|rtx|amd|instinct|radeon|rx(?=\s?\d)"
    r"|intel|graphics|data center gpu|apple|generation|[^a-z0-9]"
)
UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
DRIVER_BYTES = 1 << 29
"""The part of the memory reported by nvidia-smi that torch does not see."""
MOST = 1e18
"""No device exceeds this; guards against infinite input."""
ENTRY = re.compile(r"^- name: (.+)\n", re.MULTILINE)
ALIASES = re.compile(r"^  aliases: \[(.*)\]$", re.MULTILINE)
OUTLINED = re.compile(r"^  (vendor|memory_gb|bandwidth_gb_s|year): (.+)$", re.MULTILINE)
QUANTITY = re.compile(r"([\d.]+)\s*([kmgtp]?)(i?)b(/s|ps)?", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """A public page, and which figures it gives."""

    url: str
    gives: tuple[str, ...]
    kind: str
    """One of KINDS."""
    copied: bool = False
    """Read in a public transcription, not at its own address."""
    note: str = ""


@dataclass(frozen=True)
class GPU:
    """One device as programs see it. Rates are dense peaks; None: unsupported, or not known."""

    name: str
    vendor: str
    """One of VENDORS."""
    memory_gb: float
    """As printed by the vendor."""
    bandwidth_gb_s: float
    generation: str = ""
    year: int | None = None
    memory_bytes: int | None = None
    """As reported by the driver, where known; see `usable_bytes`."""
    driver_bytes: int = 0
    """The part of it that the driver reserves and no program sees."""
    fp16_tflops: float | None = None
    """FP16, and BF16 where supported, accumulated in FP32."""
    fp8_tflops: float | None = None
    int8_tops: float | None = None
    fp4_tflops: float | None = None
    link: str | None = None
    """The interconnect between such GPUs, besides PCIe."""
    link_gb_s: float | None = None
    """Both directions together, per GPU."""
    link_gpus: int | None = None
    """How many GPUs the link joins; None: all in a machine. Bridges join two or four."""
    pcie: str | None = None
    """PCIe generation and lanes."""
    tdp_watts: float | None = None
    compute_capability: str | None = None
    """NVIDIA's compute capability or AMD's gfx name; others have none."""
    aliases: tuple[str, ...] = ()
    note: str = ""
    sources: tuple[Source, ...] = ()
    derived: Mapping[str, str] = field(default_factory=dict)
    """Figures derived from others, and how."""
    unverified: tuple[str, ...] = ()
    """Figures for which no page was found."""

    @property
    def maker(self) -> str:
        """The vendor's label."""
        return VENDORS[self.vendor]

    @property
    def usable_bytes(self) -> int:
        """Memory to plan with: what programs see, else the printed number in decimal units."""
        return (self.memory_bytes or int(self.memory_gb * 1e9)) - self.driver_bytes

    @property
    def capability(self) -> float | None:
        """NVIDIA's compute capability as a comparable number; None for others."""
        if self.vendor != "nvidia" or self.compute_capability is None:
            return None
        return float(self.compute_capability)

    def rests_on(self, figure: str) -> str:
        """The source of a figure: a kind of document, arithmetic, or nothing."""
        if figure in self.derived:
            return f"derived: {self.derived[figure]}"
        for source in self.sources:
            if figure in source.gives:
                return f"{source.kind} (archived copy)" if source.copied else source.kind
        return "unverified" if figure in self.unverified else "given by you"


# Fields that need a source; the rest are names and words.
FIGURES = (
    "year", "memory_gb", "memory_bytes", "bandwidth_gb_s", "fp16_tflops", "fp8_tflops",
    "int8_tops", "fp4_tflops", "link_gb_s", "link_gpus", "pcie", "tdp_watts", "compute_capability",
)  # fmt: skip


@cache
def _entries() -> dict[str, str]:
    """The YAML text of every device by its name; most lookups need only one of them."""
    parts = ENTRY.split(DATA.read_text(encoding="utf-8"))[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@cache
def load() -> tuple[GPU, ...]:
    """All devices in the file, in order."""
    return tuple(map(_named, _entries()))


@dataclass(frozen=True)
class Outline:
    """Enough of a device to decide whether it is worth reading the rest."""

    name: str
    vendor: str
    memory_gb: float
    bandwidth_gb_s: float
    year: int | None = None

    @property
    def gpu(self) -> GPU:
        return _named(self.name)


@cache
def outlines() -> tuple[Outline, ...]:
    """All devices in the file, in order, without parsing it."""
    found = []
    for name, text in _entries().items():
        known = dict(OUTLINED.findall(text))
        year = int(known["year"]) if "year" in known else None
        rate = float(known["bandwidth_gb_s"])
        found.append(Outline(name, known["vendor"], float(known["memory_gb"]), rate, year))
    return tuple(found)


@cache
def _named(name: str) -> GPU:
    """A device by its full name."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the other is ten times slower
    return _device(yaml.load(f"  name: {name}\n{_entries()[name]}", loader))


def _device(entry: dict[str, Any]) -> GPU:
    sources = tuple(
        Source(**source | {"gives": tuple(source["gives"])}) for source in entry.pop("sources", ())
    )
    for key in ("aliases", "unverified"):
        entry[key] = tuple(entry.get(key, ()))
    kept = DRIVER_BYTES if entry["vendor"] == "nvidia" and "memory_bytes" in entry else 0
    return GPU(**entry, driver_bytes=kept, sources=sources)


def normal(name: str) -> str:
    """A name without case, spacing, brands and trade marks."""
    return NOISE.sub("", name.lower()) or name.lower()


APPLE = ("mac", "macbook", "apple", "imac", "mac studio")
"""Common names of devices that are listed here by their chip."""


@cache
def _names() -> dict[str, str]:
    """Full names by all of a device's aliases."""
    found: dict[str, str] = {}
    for name, text in _entries().items():
        aliases = ALIASES.search(text)
        listed = aliases[1].split(",") if aliases else []
        found |= {normal(one.strip()): name for one in (name, *listed)}
    return found


def _by_name(name: str) -> GPU | None:
    found = _names().get(normal(name))
    return None if found is None else _named(found)


def is_known(name: str) -> bool:
    """Whether a device has this name."""
    return normal(name) in _names()


def find(name: str) -> GPU:
    """A device by any of its names; `auto` means this machine's own."""
    if name == "auto":
        return detect()
    if found := _by_name(name):
        return found
    known = list(_entries())
    if name.lower() in APPLE:
        known = [one for one in known if _named(one).vendor == "apple"]
    raise UnknownName(
        "GPU",
        name,
        known,
        "`quantkit gpus` lists them. For one that is not listed, give `quantkit recommend` its "
        "figures: --memory 24GB --bandwidth 1008GB/s.",
    )


def label(device: str) -> str:
    """A device's label: drivers say `NVIDIA H200`, and tables `H200`, also of `2 x NVIDIA H200`."""
    count, times, name = device.rpartition(" x ")
    found = _by_name(name)
    return device if found is None else f"{count}{times}{found.name}"


def siblings(name: str) -> list[str]:
    """Other devices that a name may have meant: `H100` is resolved to one of three."""
    taken, asked = find(name).name, normal(name)
    alike = [known for known in _entries() if normal(known).startswith(asked)]
    return [one for one in alike if one != taken] if asked != normal(taken) else []


def describe(
    memory: str,
    bandwidth: str | None,
    compute_capability: str | None = None,
    name: str = "your GPU",
    **rates: Any,
) -> GPU:
    """A device that is not in the file, from the figures on its data sheet.

    `rates` are those of a `GPU`, such as `fp16_tflops`. The vendor follows from the compute
    capability: NVIDIA writes it `8.9`, AMD `gfx942`. Without a bandwidth only the memory fit can be
    computed.
    """
    for rate in rates.values():
        if rate is not None and not 0 < rate < MOST:  # NaN is refused too
            raise HardwareError(f"{rate:g} is not a compute rate; give TFLOPS, such as 165")
    size = printed_bytes(memory)
    read = f"{memory.strip()} is taken as vendors print it, {size / (1 << 30):.4g} GiB"
    found = GPU(
        name=name,
        vendor=_vendor_of(compute_capability),
        memory_gb=size / 1e9,
        memory_bytes=size,
        driver_bytes=min(DRIVER_BYTES, size // 16),  # small devices cannot spare half a GiB
        derived={} if "i" in memory.lower() else {"memory_bytes": read},
        bandwidth_gb_s=parse_bytes(bandwidth, per_second=True) / 1e9 if bandwidth else 0.0,
        compute_capability=compute_capability,
    )
    return replace(found, **rates)


def _vendor_of(compute_capability: str | None) -> str:
    if compute_capability is None:
        return "unknown"
    if compute_capability.startswith("gfx"):
        return "amd"
    if re.fullmatch(r"\d+\.\d", compute_capability):
        return "nvidia"
    raise HardwareError(
        f"compute capability '{compute_capability}' is neither a number as NVIDIA writes it (8.9) "
        "nor a gfx name of AMD's (gfx942)"
    )


def printed_bytes(text: str) -> int:
    """Memory in bytes as printed on a card or by nvidia-smi, where `24GB` and `24GiB` are the same.

    Memory is made in powers of two, so a 24 GB card has 24 x 2^30 bytes. Drivers reserve some of
    it: half a GiB, and 6% more where ECC uses the same memory.
    """
    size = parse_bytes(text)
    return int(size if "i" in text.lower() else parse_bytes(re.sub("[bB]", "iB", text)))


def parse_bytes(text: str, per_second: bool = False) -> float:
    """Bytes in `24GB` (10^9 each) or `24 GiB` (2^30 each); with `/s` where a rate is expected."""
    match = QUANTITY.fullmatch(text.strip())
    rate = bool(match and match[4])
    try:
        number = float(match[1]) if match else 0.0
    except ValueError:  # two dots
        number = 0.0
    if match is None or rate is not per_second or not 0 < number < MOST:
        what, example = ("bandwidth", "1008GB/s") if per_second else ("size of memory", "24GB")
        raise HardwareError(f"'{text}' is not a {what}; write it like {example}")
    return float(number * (1024 if match[3] else 1000) ** UNITS[match[2].lower()])


def detect() -> GPU:
    """This machine's first GPU, with the memory that it reports.

    nvidia-smi answers at once; torch, which also knows AMD's GPUs, is only asked without it.
    """
    name, memory_bytes, kept = _from_nvidia_smi() or _from_torch() or (None, 0, 0)
    if name is None:
        raise HardwareError(
            "no GPU found on this machine, neither by nvidia-smi nor by torch; name one of "
            "`quantkit gpus`"
        )
    if (known := _by_name(name)) is None:
        raise HardwareError(
            f"this machine's GPU, '{name}', is not in the list of `quantkit gpus`; give its memory "
            "and bandwidth"
        )
    return replace(known, memory_bytes=memory_bytes, driver_bytes=kept)


def _from_nvidia_smi() -> tuple[str, int, int] | None:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        name, mebibytes = answer.stdout.splitlines()[0].rsplit(",", 1)
        return name.strip(), int(mebibytes) << 20, DRIVER_BYTES
    # Missing, failing, slow, or without an answer: boards with shared memory answer [N/A].
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None


def _from_torch() -> tuple[str, int, int] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return properties.name, properties.total_memory, 0
