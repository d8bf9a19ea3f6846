"""Random numbers that are functions of (seed, step, call, global index): the same on every mesh.

A key is computed from seed, step and call by the splitmix64 finaliser (Steele, Lea and Flood, OOPSLA 2014). `uniform`
mixes the index of every element with it. `chance`, which dropout draws, mixes rows and columns separately (a row: all
dims except the last), and mixes each pair by two rounds of multiplication and shift in 32 bits, of which it uses 16 per
element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_WORD = 1 << 64


def _as_signed(value: int) -> int:
    return value - _WORD if value >= _WORD >> 1 else value


_GOLDEN = _as_signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _as_signed(0xBF58476D1CE4E5B9), _as_signed(0x94D049BB133111EB)
_MIX_32 = 0x7FEB352D  # of lowbias32 (C. Wellons, Prospecting for Hash Functions, 2018)

# Words of `chance` that are mixed at a time: 256 KiB and as much again fit in a core's cache. The fastest of 2**13,
# 2**14, 2**15, 2**16 and 2**18 for 8 x 128 x 768 on one core (2.3, 1.6, 1.1, 0.9 and 2.2 ns an element; torch's own
# bernoulli_ takes 4.7).
_WORDS_AT_ONCE = 1 << 16
# An element uses 16 bits of a word, unless the probability then has a relative error above this (also for its
# complement).
_COARSEST = 1e-3


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_number(x: int) -> int:
    """`_mix` of a Python number, signed."""
    x %= _WORD
    x = (x ^ (x >> 30)) * _MIX_1 % _WORD
    x = (x ^ (x >> 27)) * _MIX_2 % _WORD
    return _as_signed(x ^ (x >> 31))


def _key(step: Tensor, seed: int, call: int) -> Tensor | int:
    if step.device.type == "cpu":  # a Python number costs 2 us, 0-dim tensors 50
        return _mix_number(_mix_number(_mix_number(int(step) + _GOLDEN) ^ seed) ^ call)
    return _mix(_mix(_mix(step.to(torch.int64) + _GOLDEN) ^ seed) ^ call)


@dataclass(frozen=True, slots=True)
class _Share:
    """Which part of a larger tensor a shape is: number `part` of `count`, of each of the equal `stretches` of `dim`."""

    part: Tensor
    dim: int
    count: int
    stretches: int

    def places(self, along: Tensor, size: int) -> Tensor:
        """Where places along the dim, of `size` in this part, are in the whole."""
        own = size // self.stretches
        return torch.div(along, own, rounding_mode="floor") * (own * self.count) + self.part * own + along % own


def _share(step: Tensor, cut: Sequence[int] | None) -> tuple[Tensor, _Share | None]:
    """The step, and the part of a microbatch, from the number of the microbatch among all."""
    if cut is None:
        return step, None
    return torch.div(step, cut[1], rounding_mode="floor"), _Share(step % cut[1], *cut)


def _index(
    shape: Sequence[int],
    offset: Sequence[int],
    size: Sequence[int],
    device: torch.device,
    share: _Share | None = None,
) -> Tensor:
    """The index of every element of a box in the global shape."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        along, count = torch.arange(offset[dim], offset[dim] + size[dim], device=device), shape[dim]
        if share is not None and dim == share.dim:
            along, count = share.places(along, count), count * share.count
        index = index + (along * stride).view(-1, *(1,) * (len(shape) - 1 - dim))
        stride *= count
    return index


def uniform(
    step: Tensor,
    seed: int,
    call: int,
    shape: list[int],
    offset: list[int],
    size: list[int],
    cut: list[int] | None = None,
) -> Tensor:
    """float32 in [0, 1) for the box at `offset` of extent `size` in a tensor of global `shape`, by 24 bits of two
    rounds. `step`: 0-dim int64. `cut`: this tensor is a microbatch's part of another: a dim, the number of parts, and
    in how many equal stretches of the dim each has a share; `step` then counts microbatches."""
    step, share = _share(step, cut)
    index = _index(shape, offset, size, step.device, share)
    bits = _mix(_mix(index * _GOLDEN + _key(step, seed, call)))
    return ((bits >> 40) & 0xFFFFFF).to(torch.float32) * 2.0**-24


def chance(
    step: Tensor,
    seed: int,
    call: int,
    shape: list[int],
    offset: list[int],
    size: list[int],
    p: float,
    cut: list[int] | None = None,
) -> Tensor:
    """bool, True with probability `p`, for such a box."""
    if not 0.0 < p < 1.0:
        return torch.full(list(size), p >= 1.0, device=step.device)
    step, share = _share(step, cut)
    if share is not None and share.dim == len(shape) - 1:  # elements of a row share words: draw whole rows
        wide, places = shape[-1] * share.count, torch.arange(offset[-1], offset[-1] + size[-1], device=step.device)
        drawn = chance(step, seed, call, [*shape[:-1], wide], [*offset[:-1], 0], [*size[:-1], wide], p)
        return drawn.index_select(share.dim, share.places(places, shape[-1]))
    last, device, key = (size[-1] if size else 1), step.device, _key(step, seed, call)
    bits, threshold = _threshold(p)
    per_word = 32 // bits
    first, skip = divmod(offset[-1], per_word) if offset else (0, 0)
    rows = _mix(_index(shape[:-1], offset[:-1], size[:-1], device, share).reshape(-1, 1) * _GOLDEN + key)
    added, times = rows.to(torch.int32), (rows >> 32).to(torch.int32) | 1
    columns = torch.arange(first, first - (-(skip + last) // per_word), device=device)
    columns = _mix(columns * _GOLDEN - key).to(torch.int32)
    drawn = torch.empty((len(rows), last), dtype=torch.bool, device=device)
    at_once = max(1, _WORDS_AT_ONCE // max(len(columns), 1)) if device.type == "cpu" else max(len(rows), 1)
    word = torch.empty((min(at_once, len(rows)), len(columns)), dtype=torch.int32, device=device)
    shifted = torch.empty_like(word)
    for i in range(0, len(rows), at_once):
        some = slice(0, min(at_once, len(rows) - i))
        own = torch.add(columns, added[i : i + at_once], out=word[some])
        _fold(own.mul_(times[i : i + at_once]), shifted[some])
        _fold(own.mul_(_MIX_32), shifted[some])
        elements = own if bits == 32 else own.view(torch.int16)
        torch.lt(elements[:, skip : skip + last], threshold, out=drawn[i : i + at_once])
    return drawn.view(list(size))


def _fold(x: Tensor, space: Tensor) -> None:
    """x ^ (x >> 15) in place, with a logical shift."""
    torch.bitwise_right_shift(x, 15, out=space)
    space &= (1 << 17) - 1
    x ^= space


def _threshold(p: float) -> tuple[int, int]:
    """How many bits an element uses, and the signed threshold below which it is True."""
    coarse = round(p * (1 << 16))
    bits = 16 if abs(coarse / (1 << 16) - p) <= _COARSEST * min(p, 1 - p) else 32
    half = 1 << (bits - 1)
    return bits, min(round(p * (1 << bits)) - half, half - 1)
