"""Fingerprints of tensors' bytes, which ranks compare instead of the tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshweave.runtime.messages import bytes_of, dense

_CHUNK = 1 << 16  # 8-byte words that are multiplied at a time: 512 KiB, which fit in a core's cache
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, odd: Knuth, TAOCP 6.4
_NEXT_CHUNK = 0x2545F4914F6CDD1D  # odd; Vigna, An experimental exploration of Marsaglia's xorshift generators (2016)


def is_comparable(value: Any) -> bool:
    """Whether a tensor is whole and has values: not a DTensor, and not on the meta device."""
    return isinstance(value, Tensor) and not (value.is_meta or hasattr(value, "placements") or value.is_sparse)


def fingerprint(value: Tensor, most_words: int | None = None) -> Tensor:
    """A 0-dim int64 of the bytes of a dense tensor, on its device: a sum of 8-byte words with odd weights, mod 2^64.

    Tensors that differ in a single word always have different fingerprints, others are equal with a chance of about
    2^-64. Of more than `most_words` words only that many are read, an odd number of words apart. Shape and dtype do not
    enter.
    """
    flat = bytes_of(dense(value.detach()))
    num_words = flat.numel() // 8
    tail = torch.nn.functional.pad(flat[8 * num_words :], (0, 8 * num_words + 8 - flat.numel()))
    body = flat[: 8 * num_words]
    words = (body if body.storage_offset() % 8 == 0 else body.clone()).view(torch.int64)
    if most_words is not None and num_words > most_words:
        words = words[:: -(-num_words // most_words) | 1]  # odd: never aligned with rows of 2^n words
    weights = torch.arange(1, min(_CHUNK, len(words)) + 1, device=value.device) * _FACTOR
    weights = (weights ^ (weights >> 29)) | 1
    total = tail.clone().view(torch.int64)[0] * _FACTOR
    for chunk in words.split(_CHUNK):
        total = total * _NEXT_CHUNK + (chunk * weights[: len(chunk)]).sum()
    return total
