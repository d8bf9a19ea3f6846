"""Operators registered in torch, and their schemas.

Holds for torch 2.11 to 2.13 (torch/_ops.py, torch/_library/custom_ops.py). `torch.ops` and `torch.library.custom_op`
are public, the classes of what they return and the schema are not; `torch.library` shows schemas only as text.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket


def is_operator(target: Any) -> TypeGuard[OpOverload]:
    """Whether a node's target is an overload of a registered operator (`aten.add.Tensor`), not a Python function."""
    return isinstance(target, OpOverload)


def only_overload(target: Any) -> Any:
    """The overload that a user means: of a function decorated by `torch.library.custom_op`, or of an operator
    that has a single overload and is named without it (`torch.ops.my.op`). Anything else as it is."""
    if isinstance(target, CustomOpDef):
        return target._opoverload
    if isinstance(target, OpOverloadPacket) and len(names := target.overloads()) == 1:
        return getattr(target, names[0])
    return target


def operator_name(target: OpOverload) -> str:
    """The name without namespace and overload: `sum` of `aten.sum.dim_IntList`."""
    return target._schema.name.partition("::")[2]


def arguments_of(target: OpOverload) -> list[Any]:
    """The arguments of the schema, in order: each has `name`, `default_value`, `type` and, if it is written or a result
    is a view of it, `alias_info`."""
    return target._schema.arguments


def returns_of(target: OpOverload) -> list[Any]:
    """The results of the schema, in order: each has `type` and, if it is a view or an operand, `alias_info`."""
    return target._schema.returns


def is_mutable(target: OpOverload) -> bool:
    """Whether the operator writes to any of its operands."""
    return target._schema.is_mutable


def find_operator(name: str) -> OpOverload:
    """The operator whose text is `name` (`aten.add.Tensor`). AttributeError if none of that name is registered."""
    namespace, operator, overload = name.split(".")
    target: OpOverload = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
    return target


def aten_ops(names: str) -> list[Any]:
    """Overloads of ATen by their names: "any.dim"; "silu" is `silu.default`."""
    return [find_operator(f"aten.{name}" if "." in name else f"aten.{name}.default") for name in names.split()]
