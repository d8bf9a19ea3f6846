"""Operators registered in torch, and their schemas.

Holds for torch 2.11 to 2.13 (torch/_ops.py). `torch.ops` is public, the class of its members and the schema are not;
`torch.library` shows schemas only as text.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload as OpOverload


def is_operator(target: Any) -> TypeGuard[OpOverload]:
    """Whether a node's target is an overload of a registered operator (`aten.add.Tensor`), not a Python function."""
    return isinstance(target, OpOverload)


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
