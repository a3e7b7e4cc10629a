import json
import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from quantkit.errors import ShardError
from quantkit.model.shards import (
    CODES,
    DTYPES,
    ShardWriter,
    StoredTensor,
    TensorSpec,
    as_bytes,
    assign_to_shards,
    index_of,
    read_header,
)

Entries = dict[str, tuple[str, tuple[int, ...], bytes]]
in_one_folder = settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def sample(code: str, *shape: int) -> torch.Tensor:
    """Values that need no care with NaN: small non-negative bytes, bit by bit."""
    size = math.prod(shape) * DTYPES[code].itemsize
    raw = torch.arange(size, dtype=torch.int64).remainder(2 if code == "BOOL" else 59)
    return raw.to(torch.uint8).view(DTYPES[code]).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(as_bytes(tensor.contiguous())) if tensor.numel() else b""


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, CODES[tensor.dtype], tuple(tensor.shape))


def as_library_reads(path: Path) -> Entries:
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        codes = {name: file.get_slice(name).get_dtype() for name in tensors}
    return {name: (codes[name], tuple(t.shape), raw(t)) for name, t in tensors.items()}


def as_we_read(path: Path) -> Entries:
    return {
        name: (stored.dtype, stored.shape, raw(stored.read()))
        for name, stored in read_header(path).items()
    }


def write_raw(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize("code", DTYPES)
def test_read_what_the_library_wrote(tmp_path, code):
    tensors = {"b": sample(code, 3, 5), "a": sample(code, 7), "scalar": sample(code)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, {"format": "pt"})
    assert as_we_read(path) == as_library_reads(path)
    for name, stored in read_header(path).items():
        assert stored.read().dtype == tensors[name].dtype
        assert stored.size_bytes == tensors[name].nbytes


@pytest.mark.parametrize("code", DTYPES)
def test_library_reads_what_we_wrote(tmp_path, code):
    tensors = {"b": sample(code, 3, 5), "a": sample(code, 7), "none": sample(code, 0, 4)}
    writer = ShardWriter(tmp_path / "x", [spec_of(n, t) for n, t in tensors.items()])
    for name in reversed(tensors):
        writer.write(name, tensors[name])
    writer.close()
    loaded = load_file(tmp_path / "x")
    assert {n: (t.dtype, t.shape) for n, t in loaded.items()} == {
        n: (t.dtype, t.shape) for n, t in tensors.items()
    }
    assert {n: raw(t) for n, t in loaded.items()} == {n: raw(t) for n, t in tensors.items()}
    with safe_open(tmp_path / "x", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert list(read_header(tmp_path / "x")) == list(tensors)


def test_header_is_aligned(tmp_path):
    for n in range(1, 9):
        ShardWriter(tmp_path / str(n), [TensorSpec("a" * n, "F32", (0,))]).close()
        assert int.from_bytes((tmp_path / str(n)).read_bytes()[:8], "little") % 8 == 0


def test_a_hash_that_could_not_be_finished_is_an_error(tmp_path, monkeypatch):
    def exhausted(*_):
        raise MemoryError

    monkeypatch.setattr(os, "pread", exhausted)
    tensor = sample("F32", 4)
    writer = ShardWriter(tmp_path / "x", [spec_of("a", tensor)])
    writer.write("a", tensor)
    with pytest.raises(MemoryError):
        writer.close()


def test_transposed_tensor_is_written_in_order(tmp_path):
    tensor = sample("F32", 3, 5).t()
    writer = ShardWriter(tmp_path / "x", [spec_of("a", tensor)])
    writer.write("a", tensor)
    writer.close()
    assert torch.equal(load_file(tmp_path / "x")["a"], tensor)


def test_parts_from_many_threads(tmp_path):
    tensors = {f"t{i}": sample("I16", 64, i + 1) for i in range(8)}
    writer = ShardWriter(tmp_path / "x", [spec_of(n, t) for n, t in tensors.items()])

    def write(part: tuple[str, int]) -> None:
        name, offset = part
        writer.write_bytes(name, as_bytes(tensors[name])[offset : offset + 32], offset)

    with ThreadPoolExecutor(4) as pool:
        parts = [(name, at) for name, t in tensors.items() for at in range(0, t.nbytes, 32)]
        list(pool.map(write, parts))
    writer.close()
    assert all(torch.equal(load_file(tmp_path / "x")[n], t) for n, t in tensors.items())


def test_read_a_part(tmp_path):
    save_file({"first": sample("U8", 9), "second": sample("U8", 50)}, tmp_path / "x")
    buffer = bytearray(5)
    read_header(tmp_path / "x")["second"].read_into(memoryview(buffer), 20)
    assert list(buffer) == [20, 21, 22, 23, 24]


def test_missing_tensor_is_our_own_mistake(tmp_path):
    writer = ShardWriter(tmp_path / "x", [TensorSpec("a", "F32", (2,))])
    with pytest.raises(AssertionError, match="not written in full"):
        writer.close()


@pytest.mark.parametrize("tensor", [torch.zeros(2, 3), torch.zeros(6, dtype=torch.float16)])
def test_writer_refuses_another_shape_or_type(tmp_path, tensor):
    writer = ShardWriter(tmp_path / "x", [TensorSpec("a", "F32", (6,))])
    with pytest.raises(AssertionError):
        writer.write("a", tensor)
    writer.abandon()


def test_writer_never_overwrites(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        ShardWriter(tmp_path / "x", [])
    assert (tmp_path / "x").read_text() == "mine"


def test_shards_and_index_as_the_library_reads_them(tmp_path):
    tensors = {f"t{i}": sample("F16", 10, i) for i in (1, 2, 3, 9)} | {"last": sample("F16", 30)}
    shards = assign_to_shards([spec_of(n, t) for n, t in tensors.items()], 64)
    assert [[s.name for s in part] for part in shards.values()] == [
        ["t1", "t2"],
        ["t3"],
        ["t9"],
        ["last"],
    ]
    assert list(shards) == [f"model-{i:05d}-of-00004.safetensors" for i in (1, 2, 3, 4)]
    loaded = {}
    for file, part in shards.items():
        writer = ShardWriter(tmp_path / file, part)
        for spec in part:
            writer.write(spec.name, tensors[spec.name])
        writer.close()
        loaded |= load_file(tmp_path / file)
    index = index_of(shards)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert index["weight_map"] == {s.name: file for file, part in shards.items() for s in part}
    assert all(torch.equal(loaded[n], t) for n, t in tensors.items())


@pytest.mark.parametrize("limit", [1, 40, 1000])
def test_one_shard_has_the_plain_name(limit):
    assert list(assign_to_shards([TensorSpec("a", "F32", (10,))], limit)) == ["model.safetensors"]


def test_file_cut_after_its_header_was_read(tmp_path):
    path = tmp_path / "x"
    save_file({"a": sample("F32", 100)}, path)
    stored = read_header(path)["a"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardError, match=r"x ends inside tensor a: truncated"):
        stored.read()


def test_file_gone_after_its_header_was_read(tmp_path):
    with pytest.raises(ShardError, match="gone"):
        StoredTensor("a", "F32", (1,), tmp_path / "gone", 0).read()


@pytest.mark.parametrize("size", [0, 7, 8, 9, 40, -1])
def test_truncated_file(tmp_path, size):
    path = tmp_path / "x"
    save_file({"a": sample("F32", 100)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ShardError, match=str(path)):
        read_header(path)


@pytest.mark.parametrize("kind", ["missing", "folder"])
def test_file_that_cannot_be_opened(tmp_path, kind):
    path = tmp_path if kind == "folder" else tmp_path / "missing"
    with pytest.raises(ShardError, match=str(path)):
        read_header(path)


def entry(**changes: object) -> bytes:
    return json.dumps(
        {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], **changes}}
    ).encode()


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"a": "x"}',
        b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b"\xff" * 9,
        entry(dtype="F99"),
        entry(dtype=[]),
        entry(shape=[-1]),
        entry(shape=[True]),
        entry(shape=[1.0]),
        entry(shape=[1 << 70]),
        entry(shape=[2]),
        entry(data_offsets=[1, 2]),
        entry(data_offsets=[1, 0]),
        entry(data_offsets=[0, 1, 1]),
        entry(data_offsets=None),
    ],
    ids=lambda header: header[:50].decode(errors="replace"),
)
def test_corrupt_header(tmp_path, header):
    path = write_raw(tmp_path / "x", header, b"d")
    with pytest.raises(SafetensorError):
        as_library_reads(path)
    with pytest.raises(ShardError, match=str(path)):
        read_header(path)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (entry(shape=""), b"d"),
        (entry(shape={}), b"d"),
        (entry(shape=[1 << 61, 8, 0], data_offsets=[0, 0]), b""),
        (entry().replace(b"[0", b"[-0"), b"d"),
        (entry().replace(b'{"dtype"', b'{"dtype": "I8", "dtype"'), b"d"),
        (entry().replace(b'"a"', rb'"\ud800"'), b"d"),
        (entry(more=float("nan")), b"d"),
        (b"\xef\xbb\xbf" + entry(), b"d"),
        (entry().decode().encode("utf-16-le"), b"d"),
        (b'{"__metadata__": {"a": 1}}', b""),
        (b'{"__metadata__": []}', b""),
    ],
    ids=[
        "shape-string", "shape-object", "overflow", "minus-zero", "key-twice", "lone-surrogate",
        "nan", "bom", "utf-16", "metadata-number", "metadata-list",
    ],
)  # fmt: skip
def test_header_that_only_the_library_refuses(tmp_path, header, data):
    path = write_raw(tmp_path / "x", header, data)
    with pytest.raises(SafetensorError):
        as_library_reads(path)
    with pytest.raises(ShardError):
        read_header(path)


tables = st.dictionaries(
    st.text(max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=3)),
    max_size=5,
)


def file_of(table: dict[str, tuple[str, list[int]]], metadata: bool, spaces: int) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}} if metadata else {}
    end = 0
    for name, (code, shape) in table.items():
        start, end = end, end + math.prod(shape) * DTYPES[code].itemsize
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False).encode() + b" " * spaces
    return struct.pack("<Q", len(text)) + text + bytes(i % 2 for i in range(end))


files = st.builds(file_of, tables, st.booleans(), st.integers(0, 9))


@in_one_folder
@given(files)
def test_any_valid_header_reads_as_the_library_reads_it(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    assert as_we_read(path) == as_library_reads(path)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    content = bytearray(draw(files))
    end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, end - 1))
        byte = draw(st.integers(0, 255) | st.sampled_from(b'0123456789[]{}",: '))
        kind = draw(st.sampled_from(["replace", "insert", "remove"]))
        content[at : at + (kind != "insert")] = b"" if kind == "remove" else bytes([byte])
        end = min(end, len(content))
    if draw(st.booleans()):
        del content[draw(st.integers(0, len(content))) :]
    return bytes(content)


@in_one_folder
@given(damaged())
def test_any_damage_is_seen_or_harmless(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    try:
        ours = as_we_read(path)
    except ShardError:
        return
    assert ours == as_library_reads(path)
