"""Shapes that depend on constants: masks and positions that forward makes of numbers are computed while it is captured.

`sim[~torch.eye(n, dtype=torch.bool)]` has a fixed shape although `aten.nonzero` has none: the mask is no data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshweave.capture.record import tensors_in
from meshweave.interop.fake import FakeTensor, without_modes
from meshweave.interop.ops import arguments_of
from meshweave.ir.traits import has_dynamic_shape

aten = torch.ops.aten

# Elements of a constant that is computed at capture: a mask of 8,192 positions squared. Larger ones, such as masks that
# are repeated for each sequence of a batch, are described only, like data; control flow cannot depend on them.
_MOST_COMPUTED = 1 << 26

_LOOKUPS = frozenset({aten.index.Tensor, aten._unsafe_index.Tensor})
_WRITES = frozenset({aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default})
_OF_NUMBERS = frozenset(
    {aten.triu_indices.default, aten.tril_indices.default}
    | {aten.hann_window.periodic, aten.hamming_window.periodic, aten.blackman_window.periodic}
    | {aten.hann_window.default, aten.hamming_window.default, aten.blackman_window.default}
)


def is_computed_at_capture(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the result of an op is a constant of the graph: positions that are made of numbers alone, and what has a
    shape that depends on the elements of constants."""
    if func in _OF_NUMBERS:
        return True
    is_dynamic = has_dynamic_shape(func) and func not in _LOOKUPS
    return is_dynamic and not any(isinstance(x, FakeTensor) for x in tensors_in((args, kwargs)))


def is_large(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an op on constants has operands, or a result, that are too large to compute."""
    shapes: list[Sequence[int]] = [x.shape for x in tensors_in(args)]
    if not shapes and any(argument.name == "device" for argument in arguments_of(func)):  # a range has no operands
        with without_modes():  # which would record the op
            shapes += [x.shape for x in tensors_in(func(*args, **{**kwargs, "device": "meta"}))]
    shapes += [a for a in args if isinstance(a, (list, tuple)) and all(isinstance(size, int) for size in a)]
    return prod(map(max, zip_longest(*(reversed(shape) for shape in shapes), fillvalue=1))) > _MOST_COMPUTED


def with_positions(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The operands of an op, with positions in the place of masks that are constants.

    Where one number is written under a mask, the op stays: it is pointwise.
    """
    if func not in _LOOKUPS and func not in _WRITES:
        return args
    x, indices, *rest = args
    if func in _WRITES and rest[0].numel() == 1 and not any(rest[1:2]):
        return args
    return x, [part for index in indices for part in _positions(index)], *rest


def _positions(index: Tensor | None) -> Iterator[Tensor | None]:
    is_mask = index is not None and index.dtype in (torch.bool, torch.uint8) and index.dim() > 0
    if index is None or not is_mask or isinstance(index, FakeTensor):
        yield index
    else:
        yield from index.nonzero().unbind(1)
