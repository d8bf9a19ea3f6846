"""Ops on lists of tensors (`_foreach_*` of torch) as calls for each element: an update is recorded parameter by
parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshweave.interop.ops import arguments_of, is_operator, operator_name

_PREFIX = "_foreach_"
_OTHER_NAMES = {"norm": "linalg_vector_norm"}
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # where the other operand is a number
_VALUED = ("addcmul", "addcdiv")  # their last operand is `value=` of the op on tensors

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


def calls_by_element(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Call] | None:
    """For an op on lists, the calls (op, args, kwargs) that do the same for each element; None for any other op, and
    for those that have no counterpart on tensors."""
    name, are_lists = _on_lists(func)
    if not name:
        return None
    name, is_written = name.rstrip("_"), name.endswith("_")

    def call(i: int) -> Call:
        own = [x[i] if is_list else x for x, is_list in zip(args, are_lists, strict=False)]
        names = _OF_NUMBERS if len(own) > 1 and not isinstance(own[1], Tensor) else {}
        op = _op({**_OTHER_NAMES, **names}.get(name, name), is_written)
        if name not in _VALUED or len(own) < 4:
            return op, tuple(own), dict(kwargs)
        value = own[3].tolist()[i] if isinstance(own[3], Tensor) and own[3].dim() else own[3]
        return op, tuple(own[:3]), {**kwargs, "value": value}

    return [call(i) for i in range(len(args[are_lists.index(True)]))]


@cache  # asked for every op of every update
def _on_lists(func: Any) -> tuple[str, tuple[bool, ...]]:
    """The name of the op on tensors, for an op on lists, and which of its arguments are lists; "" for other ops."""
    if not is_operator(func) or not operator_name(func).startswith(_PREFIX):
        return "", ()
    name = operator_name(func).removeprefix(_PREFIX)
    base = name.rstrip("_")
    if getattr(torch.ops.aten, _OTHER_NAMES.get(base, base), None) is None:
        return "", ()
    return name, tuple(str(argument.type).startswith("List[") for argument in arguments_of(func))


def _op(name: str, is_written: bool) -> Any:
    """The op on tensors; one that writes its first operand, if asked for, also where torch has none."""
    op = getattr(torch.ops.aten, name)
    if not is_written:
        return op
    return getattr(torch.ops.aten, f"{name}_", lambda x, *args, **kwargs: x.copy_(op(x, *args, **kwargs)))
