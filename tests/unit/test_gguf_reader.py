"""GGUF files are read as the official package reads them, or refused in one sentence."""

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.errors import CheckpointError, QuantkitError
from quantkit.gguf import reader
from quantkit.gguf.reader import read_file

SCALARS = {
    Type.UINT8: 200,
    Type.INT8: -5,
    Type.UINT16: 60_000,
    Type.INT16: -5,
    Type.UINT32: 4_000_000_000,
    Type.INT32: -5,
    Type.FLOAT32: 0.5,
    Type.BOOL: True,
    Type.STRING: "täxt",
    Type.UINT64: 1 << 63,
    Type.INT64: -(1 << 62),
    Type.FLOAT64: 0.1,
}
# What the package can quantise to; the rest is read but not made here.
QUANTISED = (Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.BF16, Kind.MXFP4)


def values(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def write(path: Path, alignment: int | None = None) -> Path:
    """A file with every type of value and tensors of several types."""
    writer = gguf.GGUFWriter(path, "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    for kind, value in SCALARS.items():
        writer.add_key_value(f"one.{kind.name}", value, kind)
        writer.add_key_value(f"many.{kind.name}", [value, value, value], Type.ARRAY, kind)
    writer.add_tensor("norm", values(7))
    writer.add_tensor("half", values(3, 5).astype(np.float16))
    writer.add_tensor("experts", values(2, 3, 4))
    for kind in QUANTISED:
        data = gguf.quants.quantize(values(4, 64), kind)
        writer.add_tensor(kind.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "x.gguf")


@pytest.mark.parametrize("alignment", [None, 8, 256])
def test_a_file_reads_as_the_package_reads_it(tmp_path, alignment):
    path = write(tmp_path / "x.gguf", alignment)
    ours, theirs = read_file(path), gguf.GGUFReader(path)
    fields = {name: f for name, f in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == {name: field.contents() for name, field in fields.items()}
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.kind, entry.n_bytes) == (tensor.tensor_type, tensor.n_bytes)
        assert entry.offset == tensor.data_offset
        assert ours.read(tensor.name).numpy().tobytes() == tensor.data.tobytes()
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = ours.dequantized(tensor.name)
        assert found.shape == entry.shape
        assert found.dtype == torch.float32
        assert np.array_equal(found.numpy(), expected.reshape(entry.shape))


def test_bytes_come_row_by_row(sample):
    file = read_file(sample)
    assert file.read("Q4_0").shape == (4, 36)
    assert file.read("experts").shape == (6, 16)
    assert file.read("norm").shape == (1, 28)


def test_values_are_the_same_in_any_chunks(sample, monkeypatch):
    whole = read_file(sample).dequantized("Q8_0")
    monkeypatch.setattr(reader, "CHUNK_VALUES", 130)
    assert torch.equal(read_file(sample).dequantized("Q8_0"), whole)


def test_a_tensor_that_is_not_there(sample):
    with pytest.raises(CheckpointError, match="has no tensor gone"):
        read_file(sample).read("gone")


def test_a_file_cut_after_its_header_was_read(tmp_path):
    file = read_file(write(tmp_path / "x.gguf"))
    file.path.write_bytes(file.path.read_bytes()[:-300])
    with pytest.raises(QuantkitError, match="ends inside tensor MXFP4"):
        file.read("MXFP4")


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_a_file_that_cannot_be_opened(tmp_path, kind):
    path = tmp_path if kind == "folder" else tmp_path / "missing"
    with pytest.raises(CheckpointError, match=f"cannot read {path}"):
        read_file(path)


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str = "t", shape: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


def assemble(
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: int = 64,
    version: int = 3,
) -> bytes:
    keys, tensors = keys or [], tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + bytes(data)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


HUGE = struct.pack("<Q", 1 << 62)
MALFORMED = {
    "empty": (b"", "its magic takes 4 bytes where 0 are left"),
    "another magic": (b"GGML" + bytes(60), "is not a GGUF file"),
    "version 1": (assemble(version=1), "is GGUF version 1"),
    "version 0": (assemble(version=0), "is GGUF version 0"),
    "version of tomorrow": (assemble(version=4), "is GGUF version 4"),
    "big-endian": (assemble(version=3 << 24), "big-endian"),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40) + bytes(64), "it claims"),
    "many tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0) + bytes(64), "it claims"),
    "long key": (assemble([HUGE]), "a key is 4611686018427387904 bytes long"),
    "long text": (assemble([key("k", 8, HUGE)]), "key 'k' is 46116860184"),
    "long array": (assemble([key("k", 9, u32(10) + HUGE)]), "key 'k' takes 368934"),
    "many texts": (assemble([key("k", 9, u32(8) + HUGE)]), "key 'k' claims 46116860"),
    "key twice": (assemble([key("k", 0, b"\1")] * 2), "key 'k' occurs twice"),
    "long key twice": (assemble([key("k" * 999, 0, b"\1")] * 2), "key 'kkk"),
    "unknown value type": (assemble([key("k", 13, b"")]), "'k' has the unknown type 13"),
    "unknown array type": (assemble([key("k", 9, u32(99) + HUGE)]), "unknown type 99"),
    "array in array": (assemble([key("k", 9, u32(9) + HUGE)]), "nested arrays"),
    "key of no text": (assemble([key(b"\xff", 0, b"\1")]), "a key is not UTF-8"),
    "value of no text": (assemble([key("k", 8, text(b"\xff"))]), "key 'k' is not UTF-8"),
    "half true": (assemble([key("k", 7, b"\2")]), "other than 0 and 1"),
    "alignment 0": (assemble([key("general.alignment", 4, u32(0))]), "not a power of two"),
    "alignment 48": (assemble([key("general.alignment", 4, u32(48))]), "alignment 48"),
    "alignment text": (assemble([key("general.alignment", 8, text("8"))]), "alignment '8'"),
    "alignment true": (assemble([key("general.alignment", 7, b"\1")]), "alignment True"),
    "tensor twice": (assemble(tensors=[tensor()] * 2), "tensor 't' occurs twice"),
    "long name": (assemble(tensors=[tensor("n" * 64)]), "a tensor's name is 64 bytes"),
    "unknown tensor type": (assemble(tensors=[tensor(kind=4)]), "'t' has the unknown type 4"),
    "five dimensions": (assemble(tensors=[tensor(shape=(1,) * 5)]), "has 5 dimensions"),
    "no values": (assemble(tensors=[tensor(shape=(0, 1 << 62))]), "no values"),
    "overflow": (assemble(tensors=[tensor(shape=(1 << 62, 1 << 62))]), "more than the whole"),
    "half a block": (assemble(tensors=[tensor(shape=(2, 16), kind=2)]), "blocks of 32"),
    "scalar of blocks": (assemble(tensors=[tensor(shape=(), kind=8)]), "has 1 columns"),
    "unaligned": (assemble(tensors=[tensor(offset=16)]), "multiple of 32"),
    "outside": (assemble(tensors=[tensor(offset=64)]), "ends at byte"),
    "far outside": (assemble(tensors=[tensor(offset=(1 << 64) - 32)]), "ends at byte"),
    "overlap": (
        assemble(tensors=[tensor("a", (9,)), tensor("b", offset=32)]),
        "tensors 'a' and 'b' overlap",
    ),
    "one place": (assemble(tensors=[tensor("a"), tensor("b")]), "overlap"),
    "no data": (assemble(tensors=[tensor()], data=0), "ends at byte"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_file_is_refused_with_its_reason_and_in_little_memory(tmp_path, name):
    content, reason = MALFORMED[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=reason) as caught:
            read_file(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    assert len(message) < len(str(path)) + 300


def test_what_is_assembled_here_is_otherwise_sound(tmp_path):
    path = tmp_path / "x.gguf"
    keys = [key("k", 9, u32(8) + struct.pack("<Q", 0)), key("general.alignment", 4, u32(32))]
    tensors = [tensor("a", (8,)), tensor("b", (), offset=32)]
    path.write_bytes(assemble(keys, tensors, version=2))
    file = read_file(path)
    assert file.metadata == {"k": [], "general.alignment": 32}
    assert file.dequantized("a").shape == (8,)
    assert file.dequantized("b").shape == ()


def test_a_long_header_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 40)
    path = tmp_path / "x.gguf"
    path.write_bytes(assemble([key("k", 9, u32(0) + struct.pack("<Q", 100) + bytes(100))]))
    with pytest.raises(CheckpointError, match="damaged"):
        read_file(path)


def test_integers_have_no_values_to_dequantise(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(assemble(tensors=[tensor(kind=Kind.I32)]))
    with pytest.raises(CheckpointError, match="tensor t is of type I32"):
        read_file(path).dequantized("t")


def test_every_truncation_is_refused(sample, tmp_path):
    content = sample.read_bytes()
    last = max(read_file(sample).tensors.values(), key=lambda e: e.offset)
    end = last.offset + last.n_bytes
    path = tmp_path / "x.gguf"
    # All of the header, then some places in the data.
    for size in [*range(0, last.offset, 7), *range(last.offset, end, 31), end - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            read_file(path)
    path.write_bytes(content[:end])
    assert read_file(path).tensors[last.name].n_bytes == last.n_bytes


@st.composite
def damage(draw: st.DrawFn) -> list[tuple[str, float, bytes]]:
    kinds = st.sampled_from(["flip", "cut", "insert", "number"])
    places = st.floats(0, 1, exclude_max=True)
    numbers = st.sampled_from([0, 1, 3, 8, 9, 63, 64, 255, 1 << 31, (1 << 32) - 1, 1 << 63])
    content = st.binary(min_size=1, max_size=9)
    content |= numbers.map(lambda n: struct.pack("<Q", n)) | numbers.map(
        lambda n: struct.pack("<I", n & 0xFFFFFFFF)
    )
    return draw(st.lists(st.tuples(kinds, places, content), min_size=1, max_size=3))


def damaged(content: bytes, header: int, blows: list[tuple[str, float, bytes]]) -> bytes:
    """Blows fall on the header, where they can mislead; cuts fall anywhere."""
    raw = bytearray(content)
    for kind, place, new in blows:
        at = int(place * min(header, len(raw)))
        if kind == "flip" and raw:
            raw[at] ^= new[0] or 1
        elif kind == "insert":
            raw[at:at] = new
        elif kind == "number":
            raw[at : at + len(new)] = new
        elif kind == "cut":
            del raw[int(place * len(raw)) :]
    return bytes(raw)


@settings(
    max_examples=400,
    deadline=2000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(blows=damage())
def test_any_damage_is_refused_or_harmless(sample, tmp_path, blows):
    content = sample.read_bytes()
    header = min(entry.offset for entry in read_file(sample).tensors.values())
    path = tmp_path / "x.gguf"
    path.write_bytes(damaged(content, header, blows))
    try:
        file = read_file(path)
    except CheckpointError:
        return
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert list(file.tensors) == list(theirs)
    for name, entry in file.tensors.items():
        assert file.read(name).numpy().tobytes() == theirs[name].data.tobytes()
        if entry.kind in (*reader.FLOATS, *QUANTISED):
            assert file.dequantized(name).shape == entry.shape
