"""Importance matrices are exchanged with llama.cpp, and a matrix of another model is refused."""

import ctypes
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantkit.errors import DataError, QuantkitError, StorageError
from quantkit.gguf.imatrix import ImportanceMatrix

Q, DOWN, EXPERTS = "blk.0.attn_q.weight", "blk.0.ffn_down.weight", "blk.0.ffn_up_exps.weight"
SQUARES = {Q: [8.0, 2.0, 0.0, 6.0], DOWN: [3000.0, 1.5]}
"""Sums of squares of two dense weights, of 2 and of 3000 inputs."""
SEEN = {Q: 2, DOWN: 3000}


def as_the_tool_writes(
    path: Path, tensors: dict[str, np.ndarray] | None = None, **metadata: object
) -> Path:
    """A file with the keys and tensors that llama.cpp's tool writes, in its order."""
    writer = gguf.GGUFWriter(path, "none")
    writer.kv_data[0].clear()
    writer.add_type(str(metadata.get("type", "imatrix")))
    writer.add_array("imatrix.datasets", ["wiki.train.raw", "code.txt"])
    writer.add_uint32("imatrix.chunk_count", 11)
    writer.add_uint32("imatrix.chunk_size", 256)
    if tensors is None:
        tensors = {}
        for name, sums in SQUARES.items():
            tensors[f"{name}.in_sum2"] = np.array(sums, np.float32)
            tensors[f"{name}.counts"] = np.array([SEEN[name]], np.float32)
        # Two experts of three columns, one of them never called.
        tensors[f"{EXPERTS}.in_sum2"] = np.array([[4, 8, 12], [0, 0, 0]], np.float32)
        tensors[f"{EXPERTS}.counts"] = np.array([[4], [0]], np.float32)
        tensors[f"{EXPERTS}.in_sum"] = np.array([[1, 1, 1], [0, 0, 0]], np.float32)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_the_tool(tmp_path):
    matrix = ImportanceMatrix.read(as_the_tool_writes(tmp_path / "x.gguf"))
    assert list(matrix.values) == [Q, DOWN, EXPERTS]
    assert matrix.values[Q].tolist() == [4, 1, 0, 3]
    assert matrix.values[Q].dtype == torch.float32
    assert matrix.values[DOWN].tolist() == [1, pytest.approx(0.0005)]
    assert matrix.values[EXPERTS].tolist() == [[1, 2, 3], [1, 1, 1]]
    assert {name: count.tolist() for name, count in matrix.counts.items()} == {
        Q: [2],
        DOWN: [3000],
        EXPERTS: [4, 0],
    }
    assert matrix.datasets == ("wiki.train.raw", "code.txt")
    assert matrix.chunk_size == 256


def random_matrix() -> ImportanceMatrix:
    generator = torch.Generator().manual_seed(0)
    shapes = {"blk.1.a.weight": (7,), "blk.0.b.weight": (64,), "blk.0.c_exps.weight": (3, 5)}
    values = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
    counts = {
        "blk.1.a.weight": torch.tensor([123_457]),
        "blk.0.b.weight": torch.tensor([513]),
        "blk.0.c_exps.weight": torch.tensor([5, 1, 40_000]),
    }
    return ImportanceMatrix(values, counts, ("text.txt",))


def test_what_is_written_is_read_again(tmp_path):
    matrix = random_matrix()
    matrix.write(tmp_path / "x.gguf")
    found = ImportanceMatrix.read(tmp_path / "x.gguf")
    assert list(found.values) == sorted(matrix.values)
    for name, values in matrix.values.items():
        torch.testing.assert_close(found.values[name], values, rtol=1e-6, atol=0)
        assert torch.equal(found.counts[name], matrix.counts[name])
    assert (found.datasets, found.chunk_size) == (("text.txt",), 512)
    assert list(tmp_path.iterdir()) == [tmp_path / "x.gguf"]


def test_a_written_file_has_the_form_of_the_tool(tmp_path):
    random_matrix().write(tmp_path / "x.gguf")
    file = gguf.GGUFReader(tmp_path / "x.gguf")
    fields = {k: v.contents() for k, v in file.fields.items() if not k.startswith("GGUF.")}
    assert fields == {
        "general.type": "imatrix",
        "imatrix.datasets": ["text.txt"],
        "imatrix.chunk_count": 241,
        "imatrix.chunk_size": 512,
    }
    # The file's order of dimensions: columns first.
    assert {t.name: t.shape.tolist() for t in file.tensors} == {
        "blk.0.b.weight.in_sum2": [64],
        "blk.0.b.weight.counts": [1],
        "blk.0.c_exps.weight.in_sum2": [5, 3],
        "blk.0.c_exps.weight.counts": [1, 3],
        "blk.1.a.weight.in_sum2": [7],
        "blk.1.a.weight.counts": [1],
    }
    assert {t.tensor_type for t in file.tensors} == {gguf.GGMLQuantizationType.F32}


def test_no_dataset_is_no_dataset(tmp_path):
    matrix = random_matrix()
    ImportanceMatrix(matrix.values, matrix.counts).write(tmp_path / "x.gguf")
    assert "imatrix.datasets" in gguf.GGUFReader(tmp_path / "x.gguf").fields
    assert ImportanceMatrix.read(tmp_path / "x.gguf").datasets == ()


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(StorageError, match="cannot write"):
        random_matrix().write(tmp_path / "gone" / "x.gguf")


class Memory(ctypes.Structure):
    """ggml_init_params"""

    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("bare", ctypes.c_bool))


class Opening(ctypes.Structure):
    """gguf_init_params"""

    _fields_ = (("bare", ctypes.c_bool), ("context", ctypes.POINTER(ctypes.c_void_p)))


@pytest.fixture(scope="module")
def ggml():
    package = pytest.importorskip("libggml")
    library = ctypes.CDLL(str(next(Path(package.__path__[0]).rglob("libggml-base.so"))))
    pointer, text, size, u32 = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int64, ctypes.c_uint32
    signatures = {
        "ggml_init": (pointer, [Memory]),
        "ggml_new_tensor_2d": (pointer, [pointer, ctypes.c_int, size, size]),
        "ggml_set_name": (pointer, [pointer, text]),
        "ggml_get_data": (pointer, [pointer]),
        "ggml_get_tensor": (pointer, [pointer, text]),
        "ggml_free": (None, [pointer]),
        "gguf_init_empty": (pointer, []),
        "gguf_init_from_file": (pointer, [text, Opening]),
        "gguf_set_val_str": (None, [pointer, text, text]),
        "gguf_set_arr_str": (None, [pointer, text, ctypes.POINTER(text), ctypes.c_size_t]),
        "gguf_set_val_u32": (None, [pointer, text, u32]),
        "gguf_add_tensor": (None, [pointer, pointer]),
        "gguf_write_to_file": (ctypes.c_bool, [pointer, text, ctypes.c_bool]),
        "gguf_find_key": (size, [pointer, text]),
        "gguf_get_val_u32": (u32, [pointer, size]),
        "gguf_get_arr_str": (text, [pointer, size, ctypes.c_size_t]),
        "gguf_get_n_tensors": (size, [pointer]),
        "gguf_free": (None, [pointer]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def floats_at(address: int, n: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * n).from_address(address))


def test_a_file_that_ggml_wrote(ggml, tmp_path):
    memory = ggml.ggml_init(Memory(1 << 20, None, False))
    file = ggml.gguf_init_empty()
    ggml.gguf_set_val_str(file, b"general.type", b"imatrix")
    ggml.gguf_set_arr_str(file, b"imatrix.datasets", (ctypes.c_char_p * 1)(b"wiki.txt"), 1)
    ggml.gguf_set_val_u32(file, b"imatrix.chunk_count", 1)
    ggml.gguf_set_val_u32(file, b"imatrix.chunk_size", 512)
    entries = {
        f"{Q}.in_sum2": [[8, 2, 0, 6]],
        f"{Q}.counts": [[2]],
        f"{EXPERTS}.in_sum2": [[4, 8, 12], [0, 0, 0]],
        f"{EXPERTS}.counts": [[4], [0]],
    }
    for name, rows in entries.items():
        new = ggml.ggml_new_tensor_2d(memory, 0, len(rows[0]), len(rows))
        ggml.ggml_set_name(new, name.encode())
        floats_at(ggml.ggml_get_data(new), len(rows) * len(rows[0]))[:] = np.ravel(rows)
        ggml.gguf_add_tensor(file, new)
    assert ggml.gguf_write_to_file(file, str(tmp_path / "x").encode(), False)
    ggml.gguf_free(file)
    ggml.ggml_free(memory)
    matrix = ImportanceMatrix.read(tmp_path / "x")
    assert matrix.values[Q].tolist() == [4, 1, 0, 3]
    assert matrix.values[EXPERTS].tolist() == [[1, 2, 3], [1, 1, 1]]
    assert matrix.counts[EXPERTS].tolist() == [4, 0]
    assert matrix.datasets == ("wiki.txt",)


def test_ggml_reads_what_is_written(ggml, tmp_path):
    matrix = random_matrix()
    matrix.write(tmp_path / "x")
    context = ctypes.c_void_p()
    path = str(tmp_path / "x").encode()
    file = ggml.gguf_init_from_file(path, Opening(False, ctypes.pointer(context)))
    assert file
    assert ggml.gguf_get_n_tensors(file) == 6
    at = ggml.gguf_find_key(file, b"imatrix.chunk_count")
    assert ggml.gguf_get_val_u32(file, at) == 241
    at = ggml.gguf_find_key(file, b"imatrix.datasets")
    assert ggml.gguf_get_arr_str(file, at, 0) == b"text.txt"
    for name, values in matrix.values.items():
        count = matrix.counts[name]
        found = {
            part: floats_at(
                ggml.ggml_get_data(ggml.ggml_get_tensor(context, f"{name}.{part}".encode())), n
            )
            for part, n in (("in_sum2", values.numel()), ("counts", len(count)))
        }
        assert found["counts"].tolist() == count.tolist()
        means = found["in_sum2"].reshape(len(count), -1) / found["counts"][:, None]
        np.testing.assert_allclose(means.ravel(), values.flatten(), rtol=1e-6)
    ggml.gguf_free(file)
    ggml.ggml_free(context)


def old_text(text: str) -> bytes:
    return struct.pack("<i", len(text)) + text.encode()


def old_entry(name: str, chunks: int, values: list[float]) -> bytes:
    return old_text(name) + struct.pack(f"<ii{len(values)}f", chunks, len(values), *values)


OLD = struct.pack("<i", 2) + old_entry(Q, 2, [8, 2, 0, 6]) + old_entry(DOWN, 3, [3, 1.5])
TRAILER = struct.pack("<i", 3) + old_text("wiki.train.raw")


@pytest.mark.parametrize("trailer", [b"", TRAILER[:4], TRAILER])
def test_a_file_of_the_old_form(tmp_path, trailer):
    (tmp_path / "x.dat").write_bytes(OLD + trailer)
    matrix = ImportanceMatrix.read(tmp_path / "x.dat")
    assert {name: values.tolist() for name, values in matrix.values.items()} == {
        Q: [4, 1, 0, 3],
        DOWN: [1, 0.5],
    }
    assert {name: int(count) for name, count in matrix.counts.items()} == {Q: 1024, DOWN: 1536}
    assert matrix.datasets == (("wiki.train.raw",) if trailer == TRAILER else ())


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "4 bytes should follow where 0"),
        (b"PK\3\4" + bytes(40), "it claims 67324752 entries"),
        (struct.pack("<i", 0), "it claims 0 entries"),
        (struct.pack("<i", -1) + bytes(40), "it claims -1 entries"),
        (struct.pack("<ii", 1, 1 << 30) + bytes(40), "1073741824 bytes should follow"),
        (struct.pack("<ii", 1, -4) + bytes(40), "-4 bytes should follow"),
        (struct.pack("<i", 1) + old_text("abc") + struct.pack("<iiq", 1, 1 << 30, 0), "4294967296"),
        (struct.pack("<i", 1) + old_entry("abc", 1, []) + bytes(9), "entry 'abc' is empty"),
        (struct.pack("<i", 1) + old_entry("abc", -1, [1]), "entry 'abc' is empty"),
        (struct.pack("<i", 2) + old_entry("abc", 1, [1]) * 2, "'abc' occurs twice"),
        (struct.pack("<i", 1) + old_entry("abc", 1, [float("nan")]), "abc has a value"),
        (struct.pack("<i", 1) + old_entry("abc", 1, [-1]), "abc has a value that is neg"),
        (OLD[:-1], "8 bytes should follow where 7"),
        (OLD + TRAILER + b"x", "after its end"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_damaged_file_of_the_old_form(tmp_path, content, reason):
    path = tmp_path / "x.dat"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as caught:
        ImportanceMatrix.read(path)
    assert str(path) in str(caught.value)


ONE, FOUR = np.ones(1, np.float32), np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"a.weight": FOUR}, "it has no tensor named"),
        ({"a.in_sum2": FOUR}, r"has a\.in_sum2 but no a\.counts"),
        ({"a.in_sum2": FOUR.astype(np.float16), "a.counts": ONE}, r"a\.in_sum2 is not in F32"),
        ({"a.in_sum2": FOUR, "a.counts": ONE.astype(np.float16)}, r"a\.counts is not in F32"),
        ({"a.in_sum2": FOUR, "a.counts": FOUR[:3]}, "4 sums for 3 counts"),
        ({"a.in_sum2": FOUR * np.inf, "a.counts": ONE}, "a has a value that is negative"),
        ({"a.in_sum2": -FOUR, "a.counts": ONE}, "a has a value that is negative"),
        ({"a.in_sum2": FOUR, "a.counts": ONE * np.nan}, "a has a value that is negative"),
        ({"a.in_sum2": FOUR, "a.counts": ONE * 1e30}, "a was observed 1e[+]30 times"),
    ],
)
def test_a_gguf_file_that_is_no_matrix(tmp_path, tensors, reason):
    with pytest.raises(DataError, match=reason):
        ImportanceMatrix.read(as_the_tool_writes(tmp_path / "x.gguf", tensors))


def test_a_model_is_no_matrix(tmp_path):
    with pytest.raises(DataError, match="a GGUF file of type 'model'"):
        ImportanceMatrix.read(as_the_tool_writes(tmp_path / "x.gguf", type="model"))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        ImportanceMatrix.read(tmp_path / "gone")


def matrix_of(columns: dict[str, int], observations: int = 5000) -> ImportanceMatrix:
    values = {name: torch.ones(n) for name, n in columns.items()}
    return ImportanceMatrix(values, {name: torch.tensor([observations]) for name in columns})


COLUMNS = {f"blk.{layer}.ffn_up.weight": 64 for layer in range(10)}


def test_a_matrix_of_the_same_model_has_no_problems():
    needed = COLUMNS | {"token_embd.weight": 64, "output.weight": 64}
    matrix = matrix_of(COLUMNS | {"blk.99.other.weight": 3})
    assert matrix.check(needed) == []
    assert matrix.missing(needed) == ["token_embd.weight", "output.weight"]


def test_other_columns_mean_another_model():
    with pytest.raises(DataError, match=r"64 columns for blk\.3\.ffn_up\.weight, which has 128"):
        matrix_of(COLUMNS).check(COLUMNS | {"blk.3.ffn_up.weight": 128})


def test_most_tensors_missing_means_another_model():
    needed = COLUMNS | {f"blk.{layer}.ffn_up.weight": 64 for layer in range(10, 21)}
    with pytest.raises(DataError, match=r"lacks 11 of 21 tensors, such as blk\.10\.ffn_up"):
        matrix_of(COLUMNS).check(needed)
    with pytest.raises(DataError, match="lacks 10 of 10"):
        matrix_of({"model.layers.0.mlp.up_proj.weight": 64}).check(COLUMNS)


def test_half_of_the_tensors_may_be_missing():
    needed = COLUMNS | {f"blk.{layer}.ffn_up.weight": 64 for layer in range(10, 20)}
    assert len(matrix_of(COLUMNS).check(needed)) == 10


def test_a_few_tensors_missing_are_named():
    needed = COLUMNS | {"blk.10.ffn_up.weight": 64, "blk.11.ffn_up.weight": 64}
    assert matrix_of(COLUMNS).check(needed) == [
        "the importance matrix has no entry for blk.10.ffn_up.weight",
        "the importance matrix has no entry for blk.11.ffn_up.weight",
    ]


def test_few_observations_are_told():
    matrix = matrix_of(COLUMNS)
    name = "blk.7.ffn_up.weight"
    few = {"blk.2.ffn_up.weight": torch.tensor([999]), name: torch.tensor([12])}
    scarce = ImportanceMatrix(matrix.values, {**matrix.counts, **few})
    assert scarce.check(COLUMNS) == [
        "the importance matrix has fewer than 1000 observations for 2 tensors, "
        "the fewest for blk.7.ffn_up.weight: 12; compute it from more text"
    ]


def test_the_expert_that_was_called_least_counts(tmp_path):
    matrix = ImportanceMatrix.read(as_the_tool_writes(tmp_path / "x.gguf"))
    (problem,) = matrix.check({DOWN: 2, EXPERTS: 3})
    assert "for 1 tensors, the fewest for blk.0.ffn_up_exps.weight: 0" in problem


def test_stacked_experts_of_the_old_form_are_one_row(tmp_path):
    (tmp_path / "x.dat").write_bytes(struct.pack("<i", 1) + old_entry(EXPERTS, 9, [1] * 6))
    matrix = ImportanceMatrix.read(tmp_path / "x.dat")
    assert matrix.check({EXPERTS: 3}) == []
    with pytest.raises(DataError, match="another model"):
        matrix.check({EXPERTS: 4})


@settings(
    max_examples=150,
    deadline=2000,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    old=st.booleans(),
    at=st.floats(0, 1, exclude_max=True),
    new=st.binary(max_size=5),
    end=st.floats(0.5, 1) | st.just(1.0),
)
def test_any_damage_is_refused_or_harmless(tmp_path, old, at, new, end):
    path = tmp_path / "x"
    content = OLD + TRAILER if old else as_the_tool_writes(path).read_bytes()
    raw = bytearray(content)
    start = int(at * len(raw))
    raw[start : start + len(new)] = new
    path.write_bytes(raw[: int(end * len(raw))])
    try:
        matrix = ImportanceMatrix.read(path)
    except QuantkitError:
        return
    for name, values in matrix.values.items():
        assert bool((values.isfinite() & (values >= 0)).all())
        assert bool((matrix.counts[name] >= 0).all())
