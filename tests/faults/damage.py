"""Ways to damage bytes, JSON, YAML and tensors, each drawn from a generator with a seed."""

import json
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from quantkit.gguf.reader import read_file
from quantkit.model.shards import CODES, ShardWriter, TensorSpec, read_header

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes, which every operation takes."""

DEEP = "[" * 2000 + "]" * 2000
VALUES: tuple[str, ...] = (
    *("null", "true", "false", "0", "-1", "1", "3.5", "1e999", "-1e999", "NaN", "Infinity"),
    *('""', '"x"', '"../../escaped"', '"/etc/passwd"', '"a\\u0000b"', '"\\ud800"', '"日本"'),
    *("[]", "{}", "[null]", '{"a": 1}', '[[["x"]]]', '"%s"' % ("x" * 5000), "1" * 401, "1" * 30),
    *("9007199254740993", "-0.0", "1e-320", '"NaN"', '"1"', DEEP),
)
YAMLS = (
    ".nan",
    ".inf",
    "*nothing",
    "&a [*a]",
    "!!python/object/apply:os.system [x]",
    "2020-99-99",
    "!!binary x",
    "? a",
    "0x" + "f" * 300,
    "1:2:3:4:5",
    "~",
    "[" * 500,
    '"\\ud800"',
    "<<: [x]",
)
BOMB = "\n".join(
    f"b{i}: &b{i} [{', '.join([f'*b{i - 1}'] * 8 if i else ['x'] * 8)}]" for i in range(12)
)


def raw(chance: random.Random, content: bytes) -> bytes:
    """Bytes with something wrong anywhere."""
    data = bytearray(content)
    at = chance.randrange(max(1, len(data)))
    size = min(chance.choice((1, 2, 8, 64, 1024)), len(data) - at)
    kind = chance.randrange(10)
    if kind < 3 and data:
        for _ in range(chance.choice((1, 1, 1, 3, 10))):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == 3:
        data[at : at + size] = bytes(size)
    elif kind == 4:
        data[at : at + size] = chance.randbytes(size)
    elif kind == 5:
        del data[at:]
    elif kind == 6:
        del data[at : at + size]
    elif kind == 7:
        data[at:at] = data[at : at + size] or b"\0"
    elif kind == 8:
        data += chance.randbytes(chance.choice((1, 100)))
    else:
        number = chance.choice((0, 1, 255, 1 << 31, 1 << 63, (1 << 64) - 1))
        data[at : at + 8] = struct.pack("<Q", number)
    return bytes(data)


def text(chance: random.Random, content: bytes) -> bytes:
    """The same for text: also in other encodings, and cut at lines."""
    kind = chance.randrange(12)
    if kind == 0:
        return content.decode(errors="replace").encode("utf-16")
    if kind == 1:
        return b"\xef\xbb\xbf" + content
    if kind == 2:
        at = chance.randrange(len(content) + 1)
        return content[:at] + chance.choice((b"\0", b"\xff", b"\xed\xa0\x80")) + content[at:]
    if kind == 3:
        lines = content.splitlines(keepends=True)
        chance.shuffle(lines)
        return b"".join(lines)
    if kind == 4:
        return b""
    return raw(chance, content)


def json_text(chance: random.Random, content: bytes) -> bytes:
    """JSON with a value, a key or a whole part that is another; or broken as text."""
    if chance.random() < 0.3:
        return text(chance, content)
    data = json.loads(content)
    mark = "@@value@@"
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        holder, key = chance.choice(list(_places(data)) or [(None, None)])
        if holder is None:
            break
        kind = chance.randrange(6)
        value = holder[key]
        if kind == 0 and isinstance(holder, dict):
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            name = chance.choice(("x", "../../escaped", "", "a" * 300, "\u2028"))
            holder[name] = holder.pop(key)
        elif kind == 2 and isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = chance.choice((value + 1, -value, value * 1000, value / 7, value * 2))
        elif kind == 3:
            other, name = chance.choice(list(_places(data)))
            holder[key], other[name] = other[name], holder[key]
            if _is_circular(data):
                return text(chance, content)
        else:
            holder[key] = mark
    made = json.dumps(data, ensure_ascii=chance.random() < 0.5)
    while f'"{mark}"' in made:
        made = made.replace(f'"{mark}"', chance.choice(VALUES), 1)
    return made.encode("utf-8", "surrogatepass")


def _is_circular(data: Any) -> bool:
    try:
        json.dumps(data)
    except (ValueError, RecursionError):
        return True
    return False


def _places(data: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    waiting = [data]
    while waiting:
        part = waiting.pop()
        items = part.items() if isinstance(part, dict) else enumerate(part)
        for key, value in items:
            found.append((part, key))
            if isinstance(value, dict | list):
                waiting.append(value)
    return found


def yaml_text(chance: random.Random, content: bytes) -> bytes:
    """YAML with strange scalars, aliases, tags and keys; or broken as text."""
    kind = chance.randrange(8)
    if kind < 3:
        return text(chance, content)
    if kind == 3:
        return content + b"\n" + BOMB.encode() + b"\n" + b"models: *b11\n"
    lines = content.decode().splitlines()
    at = chance.randrange(len(lines))
    name, colon, _ = lines[at].partition(":")
    value = chance.choice((*YAMLS, *VALUES[:26]))
    if kind == 4 and colon:
        lines[at] = f"{name}: {value}"
    elif kind == 5:
        lines.insert(at, f"{chance.choice(('x', name.strip(), 'models', 'rules'))}: {value}")
    elif kind == 6:
        del lines[at]
    else:
        words = lines[at].split(" ")
        words[chance.randrange(len(words))] = value
        lines[at] = " ".join(words)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def tensors(chance: random.Random, path: Path) -> None:
    """A safetensors file that is well formed and holds something else."""
    header = read_header(path)
    values = {name: stored.read() for name, stored in header.items()}
    name = chance.choice(sorted(values))
    value, kind = values[name], chance.randrange(10)
    flat = value.reshape(-1)
    alike = [n for n in values if n != name and values[n].shape == value.shape]
    alike = [n for n in alike if values[n].dtype == value.dtype]
    if kind == 0 and value.is_floating_point():
        factor = chance.choice((1e-6, 0.01, 0.5, 2.0, 100.0, 1e20, -1.0, math.nan, math.inf))
        values[name] = (value.float() * factor).to(value.dtype)
    elif kind == 1 and value.is_floating_point() and value.dtype.itemsize > 1:
        odd = chance.choice((math.nan, math.inf, -math.inf, 0.0, 1e30, -1.0))
        flat[chance.randrange(len(flat))] = odd
    elif kind == 2 and alike:
        other = chance.choice(sorted(alike))
        values[name], values[other] = values[other], value
    elif kind == 3 and value.dim() > 1:
        # By bytes: torch flips no FP8, and what was there may be any type.
        order = torch.arange(value.shape[axis := chance.randrange(value.dim())] - 1, -1, -1)
        bits = value.view(INTEGERS[value.element_size()])
        values[name] = bits.index_select(axis, order).view(value.dtype).contiguous()
    elif kind == 4:
        values[name] = torch.zeros_like(value.float()).to(value.dtype)
    elif kind == 5:
        del values[name]
    elif kind == 6:
        values[f"{name}.more"] = value.clone()
    elif kind == 7 and value.dim() and len(value) > 1:
        values[name] = value[:-1].contiguous()
    elif kind == 8:
        values[name] = value.reshape(-1).contiguous()
    else:
        raw_bytes = value.reshape(-1).view(torch.uint8)
        for _ in range(chance.choice((1, 4, 100))):
            raw_bytes[chance.randrange(len(raw_bytes))] ^= 1 << chance.randrange(8)
    path.unlink()
    writer = ShardWriter(
        path, [TensorSpec(n, CODES[t.dtype], tuple(t.shape)) for n, t in values.items()]
    )
    for each, tensor in values.items():
        writer.write(each, tensor)
    writer.close()


def gguf(chance: random.Random, path: Path, content: bytes) -> bytes:
    """A GGUF file that is wrong in a value, in its table of tensors, in a tensor or anywhere."""
    file = read_file(path)
    data = bytearray(content)
    kind = chance.randrange(8)
    if kind < 3:
        start, stop = file.spans[chance.choice(sorted(file.spans))]
        at = chance.randrange(start, stop)
        data[at] ^= 1 << chance.randrange(8)
    elif kind < 5:
        entry = file.tensors[chance.choice(sorted(file.tensors))]
        for _ in range(chance.choice((1, 10, 1000))):
            data[entry.offset + chance.randrange(entry.n_bytes)] ^= 1 << chance.randrange(8)
    elif kind == 5:
        one, other = (file.tensors[n] for n in chance.sample(sorted(file.tensors), 2))
        size = min(one.n_bytes, other.n_bytes)
        piece = bytes(data[one.offset : one.offset + size])
        data[one.offset : one.offset + size] = data[other.offset : other.offset + size]
        data[other.offset : other.offset + size] = piece
    elif kind == 6:
        last = max(stop for _, stop in file.spans.values())
        first = min(entry.offset for entry in file.tensors.values())
        at = chance.randrange(last, first)
        data[at] ^= 1 << chance.randrange(8)
    else:
        return raw(chance, content)
    return bytes(data)


Damage = Callable[[random.Random, bytes], bytes]
