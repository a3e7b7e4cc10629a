"""Packing of integers into 32-bit words, and restrictions of the formats built on it."""

from typing import TYPE_CHECKING

from quantkit import numbers
from quantkit.schemes import ActivationScheme, KVCacheScheme, WeightScheme

if TYPE_CHECKING:
    import torch


def pack(values: "torch.Tensor", num_bits: int) -> "torch.Tensor":
    """Signed integers as unsigned fields of int32 words, the first column in the lowest bits.

    Fields are dense: those of 3, 5, 6 or 7 bits may begin in one word and end in the next.
    """
    import torch

    per_word = 32 // num_bits
    offset = 1 << (num_bits - 1)
    fields = (values.to(torch.int16) + offset).to(torch.uint8)
    if num_bits not in (4, 8):
        return _pack_densely(fields, num_bits)
    if missing := -fields.shape[1] % per_word:
        fields = torch.nn.functional.pad(fields, (0, missing))
    if num_bits == 4:
        # Two fields per byte; the bytes of a little-endian word are already in order.
        fields = fields[:, 0::2] | (fields[:, 1::2] << 4)
    # A clone, since `contiguous` leaves the odd strides of a single row as they are.
    return fields.clone(memory_format=torch.contiguous_format).view(torch.int32)


def unpack(packed: "torch.Tensor", num_bits: int, columns: int) -> "torch.Tensor":
    """The inverse of `pack`."""
    import torch

    if num_bits not in (4, 8):
        return _unpack_densely(packed, num_bits, columns)
    fields = packed.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if num_bits == 4:
        fields = torch.stack((fields & 15, fields >> 4), dim=-1).flatten(-2)
    offset = 1 << (num_bits - 1)
    return (fields[:, :columns].to(torch.int16) - offset).to(torch.int8)


def n_words(columns: int, num_bits: int) -> int:
    """Words per row."""
    return -(-columns * num_bits // 32)


def _pack_densely(fields: "torch.Tensor", num_bits: int) -> "torch.Tensor":
    """Eight fields are `num_bits` bytes, stored consecutively in a word of 64 bits."""
    import torch

    rows, columns = fields.shape
    fields = torch.nn.functional.pad(fields, (0, -columns % 32)).view(rows, -1, 8)
    wide = torch.zeros(fields.shape[:2], dtype=torch.int64, device=fields.device)
    for place in range(8):
        wide |= fields[:, :, place].to(torch.int64) << (num_bits * place)
    octets = wide.view(torch.uint8).view(rows, -1, 8)[:, :, :num_bits]
    words = octets.reshape(rows, -1).view(torch.int32)
    return words[:, : n_words(columns, num_bits)].clone(memory_format=torch.contiguous_format)


def _unpack_densely(packed: "torch.Tensor", num_bits: int, columns: int) -> "torch.Tensor":
    import torch

    rows = packed.shape[0]
    missing = -packed.shape[1] % num_bits
    words = torch.nn.functional.pad(packed.contiguous(), (0, missing))
    octets = words.view(torch.uint8).view(rows, -1, num_bits)
    wide = torch.nn.functional.pad(octets, (0, 8 - num_bits)).contiguous().view(torch.int64)
    shifts = torch.arange(0, 8 * num_bits, num_bits, device=packed.device)
    fields = (wide >> shifts) & ((1 << num_bits) - 1)
    return (fields.reshape(rows, -1)[:, :columns] - (1 << (num_bits - 1))).to(torch.int8)


def per_head(name: str, kv_cache: KVCacheScheme | None) -> str | None:
    """Cache scales that only compressed-tensors supports."""
    if kv_cache is not None and kv_cache.strategy == "attn_head":
        return f"with {name} the KV cache has one scale per layer; use +kv-fp8"
    return None


def objection(
    name: str,
    weights: WeightScheme,
    activations: ActivationScheme | None,
    kv_cache: KVCacheScheme | None,
) -> str | None:
    """What AutoGPTQ's and AutoAWQ's formats cannot represent."""
    if weights.type == "float":
        kind = numbers.of(weights).words.partition(" ")[0]
        home = "fp8 or compressed-tensors" if kind == "FP8" else "compressed-tensors"
        return f"{name} holds integers; {kind} weights go into {home}"
    if activations is not None:
        return f"{name} leaves activations in 16 bits; 8-bit ones need compressed-tensors"
    if kv_cache is not None:
        return f"vLLM reads no KV cache scales with {name} weights; use fp8 or compressed-tensors"
    return None


def misfit(name: str, rows: int, columns: int, num_bits: int) -> str | None:
    """They pack whole words in both directions."""
    per_word = 32 // num_bits
    if rows % per_word or columns % per_word:
        return (
            f"{name} packs {per_word} rows and columns at a time; use compressed-tensors for this "
            "model"
        )
    return None
