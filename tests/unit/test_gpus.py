"""The list of GPUs: figures that can be true, names that are found, and what runs where."""

import json
import resource
import subprocess
import sys
from collections import Counter
from math import prod

import pytest
import yaml

from quantkit.errors import HardwareError, UnknownName
from quantkit.hardware import gpus
from quantkit.hardware.gpus import (
    FIGURES,
    KINDS,
    VENDORS,
    describe,
    detect,
    find,
    label,
    load,
    normal,
    parse_bytes,
)
from quantkit.hardware.support import runs

GPUS = load()
NAMED = {gpu.name: gpu for gpu in GPUS}
every_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
# Compute capabilities that chips of a generation have.
CHIPS = {
    "Volta": {"7.0"},
    "Turing": {"7.5"},
    "Ampere": {"8.0", "8.6", "8.7"},
    "Ada": {"8.9"},
    "Hopper": {"9.0"},
    "Blackwell": {"10.0", "11.0", "12.0", "12.1"},
    "Blackwell Ultra": {"10.3"},
    "CDNA 2": {"gfx90a"},
    "CDNA 3": {"gfx942"},
    "CDNA 4": {"gfx950"},
    "RDNA 3": {"gfx1100"},
    "RDNA 3.5": {"gfx1151"},
    "RDNA 4": {"gfx1201"},
}
# Chips whose INT8 is not simply twice as fast as 16 bits, and what it is instead.
INT8 = {
    "B300": 0.0682,
    "MI210": 1,
    "MI250X (one die)": 1,
    "RX 7900 XTX": 1,
    "Radeon PRO W7900": 1,
}


def is_geforce(gpu):
    """Cards whose 16-bit and FP8 rates are halved when sums are kept in FP32."""
    return any("GeForce" in alias for alias in gpu.aliases) or gpu.name == "RTX 3080 12GB"


def value_of(arithmetic):
    """What `a * b / c` comes to."""
    first, *divisors = arithmetic.split("/")
    factors = [part for divisor in divisors for part in divisor.split("*")[1:]]
    product = prod(float(part) for part in (*first.split("*"), *factors))
    return product / prod(float(divisor.split("*")[0]) for divisor in divisors)


def test_there_are_many():
    assert len(GPUS) >= 45
    assert {gpu.vendor for gpu in GPUS} == set(VENDORS) - {"unknown"}


def test_devices_read_one_by_one_are_those_of_the_whole_file():
    entries = yaml.safe_load(gpus.DATA.read_text())
    assert [entry["name"] for entry in entries] == [gpu.name for gpu in GPUS]
    for entry, gpu in zip(entries, GPUS, strict=True):
        assert tuple(entry.get("aliases", ())) == gpu.aliases
        for name in (gpu.name, *gpu.aliases):
            assert gpus.find(name) is gpu
        assert all(getattr(gpu, key) == entry.get(key) for key in FIGURES)


def test_outlines_are_those_of_the_devices():
    for outline, gpu in zip(gpus.outlines(), gpus.load(), strict=True):
        assert outline.gpu is gpu
        for figure in ("name", "vendor", "memory_gb", "bandwidth_gb_s", "year"):
            assert getattr(outline, figure) == getattr(gpu, figure), gpu.name


def test_no_name_stands_for_two_devices():
    names = Counter(n for gpu in GPUS for n in {normal(n) for n in (gpu.name, *gpu.aliases)})
    assert [name for name, count in names.items() if count > 1] == []
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)


@every_gpu
def test_every_figure_says_where_it_comes_from(gpu):
    given = {figure for source in gpu.sources for figure in source.gives}
    origins = [*given, *gpu.derived, *gpu.unverified]
    assert sorted(origins) == sorted(f for f in FIGURES if getattr(gpu, f) is not None)
    assert all(source.url.startswith("https://") and source.gives for source in gpu.sources)


@every_gpu
def test_every_figure_rests_on_a_named_kind_of_thing(gpu):
    assert {source.kind for source in gpu.sources} <= set(KINDS)
    vendors = ("nvidia", "amd", "apple", "intel", "llvm", "generation-robots", "nvd.orangelogic")
    for source in gpu.sources:
        is_vendors = any(name in source.url.split("/")[2] for name in vendors)
        # What others host is the vendor's only as a copy.
        assert is_vendors or source.copied or not source.kind.startswith("vendor"), source.url
        assert source.kind != "third party" or not is_vendors, source.url
    for figure in FIGURES:
        if getattr(gpu, figure) is not None:
            origin = gpu.rests_on(figure)
            named = origin.removesuffix(" (archived copy)") in (*KINDS, "unverified")
            assert named or origin == f"derived: {gpu.derived[figure]}"


def test_the_servers_edition_is_not_the_workstations():
    workstation, server = NAMED["RTX PRO 6000"], NAMED["RTX PRO 6000 Server"]
    assert (workstation.bandwidth_gb_s, server.bandwidth_gb_s) == (1792, 1597)
    assert workstation.fp16_tflops == 503.8
    # NVIDIA prints 120 TFLOPS of FP32 for the one and 126 for the other.
    share = server.fp16_tflops / workstation.fp16_tflops
    assert share == pytest.approx(120 / 126, rel=0.01)
    assert server.rests_on("bandwidth_gb_s").startswith("vendor datasheet")


def test_bridges_join_pairs():
    """NVIDIA sells bridges for two cards of these, and for up to four of the H200 NVL."""
    bridged = {gpu.name: gpu.link_gpus for gpu in GPUS if gpu.link_gpus}
    assert bridged.pop("H200 NVL") == 4
    assert set(bridged.values()) == {2}
    assert set(bridged) == {
        "RTX 2080 Ti", "Quadro RTX 8000", "A30", "A40", "A100 PCIe 40GB", "A100 PCIe 80GB",
        "RTX A5000", "RTX A6000", "RTX 3090", "RTX 3090 Ti", "H100 PCIe", "H100 NVL",
    }  # fmt: skip
    switched = [gpu for gpu in GPUS if gpu.link == "NVLink" and not gpu.link_gpus]
    assert all(gpu.pcie is None or "PCIe" not in gpu.name for gpu in switched)


@every_gpu
def test_derived_figures_follow_from_their_arithmetic(gpu):
    for figure, arithmetic in gpu.derived.items():
        assert getattr(gpu, figure) == pytest.approx(value_of(arithmetic), rel=1e-3), figure


@every_gpu
def test_sizes_are_sane(gpu):
    assert 6 <= gpu.memory_gb <= 768
    assert 15 <= gpu.bandwidth_gb_s <= 8000
    # The whole memory is read in 6 ms to 2 s: figures of two devices got mixed up otherwise.
    assert 0.006 <= gpu.memory_gb / gpu.bandwidth_gb_s <= 2
    assert gpu.year is None or 2017 <= gpu.year <= 2026
    assert gpu.tdp_watts is None or 40 <= gpu.tdp_watts <= 1400
    assert (gpu.link is None) is (gpu.link_gb_s is None)
    if gpu.memory_bytes is not None:
        assert gpu.memory_gb * 1e9 <= gpu.memory_bytes <= gpu.memory_gb * 2**30
        assert gpu.memory_bytes % 2**20 == 0  # nvidia-smi prints whole MiB
    assert gpu.usable_bytes <= gpu.memory_gb * 2**30


@every_gpu
def test_rates_fit_one_another(gpu):
    if gpu.fp8_tflops and gpu.name != "Gaudi 3":
        assert gpu.fp8_tflops / gpu.fp16_tflops == pytest.approx(2, rel=0.02)
    if gpu.int8_tops:
        expected = INT8.get(gpu.name, 4 if is_geforce(gpu) else 2)
        assert gpu.int8_tops / gpu.fp16_tflops == pytest.approx(expected, rel=0.02)
    if gpu.fp4_tflops and gpu.name != "B300":
        expected = 4 if is_geforce(gpu) else 2
        assert gpu.fp4_tflops / gpu.fp8_tflops == pytest.approx(expected, rel=0.02)


@every_gpu
def test_chip_fits_its_generation(gpu):
    if gpu.vendor in ("nvidia", "amd"):
        assert gpu.compute_capability in CHIPS[gpu.generation]
    has_fp8 = gpu.generation == "Gaudi" or (gpu.capability or 0) >= 8.9
    has_fp8 |= gpu.generation in ("CDNA 3", "CDNA 4", "RDNA 4")
    assert (gpu.fp8_tflops is not None) is has_fp8
    assert gpu.fp4_tflops is None or (gpu.capability or 10) >= 10


@pytest.mark.parametrize(
    "line",
    [
        ["V100 SXM2 32GB", "A100 SXM 80GB", "H100 SXM", "B100", "B200", "GB200 (one GPU)"],
        ["T4", "A10", "A30", "L40S"],
        ["RTX 2060", "RTX 2070", "RTX 2080", "RTX 2080 Ti"],
        ["RTX 2080", "RTX 3080", "RTX 4080", "RTX 4080 Super", "RTX 5080"],
        ["RTX 3060 12GB", "RTX 3070", "RTX 3080", "RTX 3090", "RTX 3090 Ti"],
        ["RTX 3090", "RTX 4090", "RTX 5090"],
        ["Quadro RTX 8000", "RTX A6000", "RTX 6000 Ada", "RTX PRO 6000"],
        ["RTX A4000", "RTX A5000", "RTX A6000"],
        ["MI210", "MI300X", "MI350X", "MI355X"],
        ["M1 Max", "M3 Max", "M4 Max"],
    ],
    ids=lambda line: line[-1],
)
def test_rates_rise_along_a_line(line):
    rates = [NAMED[name].fp16_tflops for name in line]
    assert rates == sorted(set(rates))
    years = [NAMED[name].year for name in line]
    one_generation = max(years) - min(years) <= 2  # whose small cards came last
    assert years == sorted(years) or one_generation


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("h100", "H100 SXM"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA L40S", "L40S"),
        ("l40", "L40"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("nvidia geforce rtx 4070 ti super", "RTX 4070 Ti Super"),
        ("NVIDIA GeForce RTX 4070 Ti", "RTX 4070 Ti"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB"),
        ("Tesla T4", "T4"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Radeon RX 7900 XTX", "RX 7900 XTX"),
        ("Intel(R) Arc(TM) A770 Graphics", "Arc A770 16GB"),
        ("Apple M2 Ultra", "M2 Ultra"),
        ("dgx-spark", "DGX Spark"),
    ],
)
def test_names_are_found_however_they_are_written(name, found):
    assert find(name).name == found


@every_gpu
def test_every_name_leads_home(gpu):
    assert all(find(name) is gpu for name in (gpu.name, *gpu.aliases))


def test_unknown_names_get_near_ones():
    with pytest.raises(UnknownName, match=r"unknown GPU 'RTX4095'\. Did you mean RTX 40"):
        find("RTX4095")


@pytest.mark.parametrize("name", ["Mac", "apple", "M3"])
def test_chips_of_apple_are_what_people_mean(name):
    with pytest.raises(UnknownName, match=r"M3 (Max|Ultra)") as caught:
        find(name)
    assert "RTX" not in str(caught.value).partition("`")[0]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24e9),
        ("24 GiB", 24 * 2**30),
        ("24gib", 24 * 2**30),
        ("0.5TB", 5e11),
        ("1536 MiB", 1536 * 2**20),
        (" 80 gb ", 8e10),
        ("7b", 7),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == pytest.approx(size)


@pytest.mark.parametrize(
    ("text", "rate"), [("1008GB/s", 1008e9), ("1.8TB/s", 1.8e12), ("936 GBps", 936e9)]
)
def test_rates(text, rate):
    assert parse_bytes(text, per_second=True) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "24", "GB", "24 gigs", "-24GB", "0GB", "2.4.1GB", "24GB/s"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(HardwareError, match="is not a size of memory; write it like 24GB"):
        parse_bytes(text)


def test_a_size_is_no_bandwidth():
    with pytest.raises(HardwareError, match="'24GB' is not a bandwidth; write it like 1008GB/s"):
        parse_bytes("24GB", per_second=True)


@pytest.mark.parametrize(
    ("text", "size", "is_said"),
    [
        ("24GB", 24 << 30, "24GB is taken as vendors print it, 24 GiB"),
        ("24 gb", 24 << 30, "24 gb is taken as vendors print it, 24 GiB"),
        ("24GiB", 24 << 30, None),
        ("24564MiB", 24564 << 20, None),
        ("24576MB", 24 << 30, "24576MB is taken as vendors print it, 24 GiB"),
    ],
)
def test_memory_is_what_cards_print(text, size, is_said):
    gpu = describe(text, "1008GB/s")
    assert gpu.memory_bytes == size
    assert gpu.usable_bytes == size - gpus.DRIVER_BYTES
    assert gpu.derived.get("memory_bytes") == is_said
    # A rate is printed in powers of ten.
    assert gpu.bandwidth_gb_s == 1008


def test_a_name_that_may_mean_several_is_told():
    assert gpus.siblings("h100") == ["H100 PCIe", "H100 NVL"]
    assert gpus.siblings("H100 SXM") == gpus.siblings("L40S") == gpus.siblings("rtx 4090") == []
    assert "A100 PCIe 80GB" in gpus.siblings("A100")


def test_what_is_no_memory_is_refused_in_the_users_words():
    with pytest.raises(HardwareError, match="'24GB/s' is not a size of memory"):
        describe("24GB/s", "1008GB/s")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_rate_of_computing_is_refused(rate):
    with pytest.raises(HardwareError, match="not a compute rate"):
        describe("24GB", "1008GB/s", fp16_tflops=rate)


def test_what_no_device_can_have_is_refused():
    with pytest.raises(HardwareError, match="not a size of memory"):
        describe("9" * 400 + "GB", "1008GB/s")
    with pytest.raises(HardwareError, match="not a bandwidth"):
        describe("24GB", "9" * 400 + "GB/s")


def test_described_devices():
    gpu = describe("20GB", "640GB/s", compute_capability="8.9", fp16_tflops=104)
    assert (gpu.vendor, gpu.memory_bytes, gpu.bandwidth_gb_s) == ("nvidia", 20 << 30, 640)
    assert runs(gpu, "fp8-w8a8").how == "native"
    assert describe("64GiB", "1.6TB/s", compute_capability="gfx90a").vendor == "amd"
    unknown = describe("20GB", "640GB/s")
    assert runs(unknown, "w4a16").how == "no"
    assert runs(unknown, "gguf", "llama.cpp").how == "native"
    with pytest.raises(HardwareError, match="neither a number as NVIDIA writes it"):
        describe("20GB", "640GB/s", compute_capability="ada")


def smi(monkeypatch, tmp_path, script):
    """Put a program of that name, and no other, before all others."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


def test_own_gpu_is_known_with_its_real_memory(monkeypatch, tmp_path):
    smi(monkeypatch, tmp_path, "echo 'NVIDIA L40S, 46068'; echo 'NVIDIA A10, 23028'")
    monkeypatch.setattr(gpus, "_from_torch", lambda: pytest.fail("torch was asked"))
    assert detect().name == "L40S"
    assert find("auto").memory_bytes == 46068 * 2**20
    assert find("auto").usable_bytes == 46068 * 2**20 - gpus.DRIVER_BYTES  # as programs see it


@pytest.mark.parametrize("script", ["exit 9", "true", "echo 'NVIDIA Thor, [N/A]'"])
def test_torch_answers_where_nvidia_smi_does_not(monkeypatch, tmp_path, script):
    smi(monkeypatch, tmp_path, script)
    monkeypatch.setattr(gpus, "_from_torch", lambda: ("AMD Instinct MI300X", 7 * 2**30, 0))
    assert (detect().name, detect().usable_bytes) == ("MI300X", 7 * 2**30)


def test_no_gpu_and_unknown_gpu_are_clear_errors(monkeypatch, tmp_path):
    smi(monkeypatch, tmp_path, "exit 9")
    monkeypatch.setattr(gpus, "_from_torch", lambda: None)
    with pytest.raises(HardwareError, match="no GPU found on this machine"):
        detect()
    smi(monkeypatch, tmp_path, "echo 'NVIDIA X9000, 1000'")
    with pytest.raises(HardwareError, match="'NVIDIA X9000', is not in the list"):
        detect()


def test_table_shows_all(run_cli):
    result = run_cli(["gpus"])
    assert (result.code, result.stderr) == (0, "")
    assert all(f" {gpu.name} " in result.stdout for gpu in GPUS)
    # Fits an ordinary terminal; the rule below the heading counts three bytes a character.
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_one_in_detail(run_cli):
    result = run_cli(["gpus", "rtx 3090"])
    assert result.code == 0
    for words in (
        "16-bit, TFLOPS",
        "derived: 328 * 1695e6 * 512 / 1e12",
        "vendor white paper (archived copy)",
        "the driver keeps 512.0 MiB",
        "Marlin",
    ):
        assert words in result.stdout
    assert "unverified" not in result.stdout
    assert "unverified" in run_cli(["gpus", "H100 NVL"]).stdout
    assert run_cli(["gpus", "RTX 9999"]).code == 3


def test_formats_of_a_gpu_have_a_recipe(run_cli):
    printed = run_cli(["gpus", "L4"]).stdout
    assert "w7a16" not in printed
    lines = dict(line.split(maxsplit=1) for line in printed.splitlines() if " " in line.strip())
    assert lines["fp8-w8a8"] == "fp8-dynamic, fp8-static, fp8-tensor"
    assert "rtn-w6a16" in lines["w6a16"]


def test_json(run_cli):
    listed = json.loads(run_cli(["gpus", "--json"]).stdout)
    assert [gpu["name"] for gpu in listed] == [gpu.name for gpu in GPUS]
    one = json.loads(run_cli(["gpus", "H200", "--json"]).stdout)
    assert one["memory_bytes"] == 143771 * 2**20
    # vLLM sees 139.80 GiB of it: benchmarks/results/kv_capacity-h200.json
    assert one["usable_bytes"] / 2**30 == pytest.approx(139.80, rel=1e-3)
    assert one["runs"]["vllm"]["fp8-w8a8"]["how"] == "native"
    assert one["rests_on"]["bandwidth_gb_s"] == "vendor datasheet (archived copy)"
    assert one["rests_on"]["memory_bytes"] == "driver report"


def test_command_is_quick_and_needs_no_torch():
    program = (
        "import sys\n"
        "from quantkit.cli.main import main\n"
        "code = main(['gpus'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(code or len(heavy))\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # The processor's time, which a busy machine does not change.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H200", "H200"),
        ("2 x NVIDIA L40S", "2 x L40S"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("cpu (aarch64, 2 threads)", "cpu (aarch64, 2 threads)"),
    ],
)
def test_a_gpu_has_one_label_whatever_its_driver_calls_it(device, expected):
    assert label(device) == expected
