"""Which ops communicate, by op: one table. A name that sounds like a collective and is no row is an error, never
compute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from meshweave.errors import VerifyError
from meshweave.ir.graph import op_name
from meshweave.ir.rank import WAIT, collectives, permute, transfer

Bucket = Literal["", "gather", "scatter", "reduce"]  # how several become one; "" where they stay as they are


@dataclass(frozen=True, slots=True)
class Collective:
    """One op that starts a communication. `name` is that of profiles.

    `operands` and `group` are positions of arguments; `bucket` says how several of it become one. `is_ordered`: it
    meets its partner by its place among those of its group (point to point), so that it stays where it is among them.
    """

    name: str
    group: int
    bucket: Bucket = ""
    is_ordered: bool = False
    operands: tuple[int, ...] = (0,)


def _table() -> Mapping[Any, Collective]:
    rows = {
        "all_gather_into_tensor": Collective("all_gather", 2, "gather"),
        "all_gather_into_tensor_out": Collective("all_gather", 2),
        "all_gather_into_tensor_coalesced": Collective("all_gather", 2),
        "reduce_scatter_tensor": Collective("reduce_scatter", 3, "scatter"),
        "reduce_scatter_tensor_out": Collective("reduce_scatter", 3),
        "reduce_scatter_tensor_coalesced": Collective("reduce_scatter", 3),
        "all_reduce": Collective("all_reduce", 2, "reduce"),
        "all_reduce_": Collective("all_reduce", 2),
        "all_reduce_coalesced": Collective("all_reduce", 2),
        "all_reduce_coalesced_": Collective("all_reduce", 2),
        "all_to_all_single": Collective("all_to_all", 3),
        "broadcast": Collective("broadcast", 2),
        "broadcast_": Collective("broadcast", 2),
        "isend": Collective("transfer", 3, is_ordered=True),
        "irecv": Collective("transfer", 3, is_ordered=True),
        "batch_p2p_ops": Collective("transfer", 4, is_ordered=True, operands=(3,)),
    }
    found = {getattr(collectives, name).default: row for name, row in rows.items() if hasattr(collectives, name)}
    autograd = torch.ops._c10d_functional_autograd
    plain = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    found |= {getattr(autograd, name).default: rows[name] for name in plain if hasattr(autograd, name)}
    return {**found, transfer: Collective("transfer", 1, is_ordered=True), permute: Collective("permute", 2)}


TABLE = _table()
_PERMUTE = Collective("permute", 3)
_EXCHANGES = frozenset(target for target, row in TABLE.items() if row.name == "all_to_all")
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d")


def collective_of(node: fx.Node) -> Collective | None:
    """The row of a node that starts a communication, None for any other. Raises VerifyError for one without a row."""
    found = TABLE.get(node.target)
    if found is not None:
        return _PERMUTE if node.target in _EXCHANGES and is_permute(node) else found
    if node.target is not WAIT and getattr(node.target, "namespace", "") in _NAMESPACES:
        raise VerifyError(
            f"{op_name(node.target)} is a collective that the overlap pass does not know",
            where=place_of(node),
            expected="one of " + ", ".join(sorted({op_name(target) for target in TABLE})),
            hint="add its row to overlap/vocabulary.py, or take it out of the graph",
        )
    return None


def is_permute(node: fx.Node) -> bool:
    """Whether an all-to-all over several ranks brings every one a block of one other: as torch's permute_tensor, and
    rings of ours, have it. It is priced as one message."""
    splits = [argument(node, position) for position in (1, 2)]
    return all(
        isinstance(one, (list, tuple))
        and len(one) > 1
        and all(type(size) is int for size in one)
        and sum(size > 0 for size in one) == 1
        for one in splits
    )


def argument(node: fx.Node, position: int) -> Any:
    """An argument by its position in the op's schema, whether it was handed over by position or by name."""
    if position < len(node.args):
        return node.args[position]
    if isinstance(node.target, torch._ops.OpOverload) and position < len(node.target._schema.arguments):
        return node.kwargs.get(node.target._schema.arguments[position].name)
    return None


def group_of(node: fx.Node, row: Collective) -> Any:
    """The group argument of a start: a name, or a process group."""
    return argument(node, row.group)


def place_of(node: fx.Node) -> str:
    """A node as messages name it: its name, its op and, where known, the module and line that it comes from."""
    origin = node.meta.get("origin")
    told = str(origin) if origin is not None else _stack_line(node)
    return f"node {node.name} ({op_name(node.target)})" + (f", {told}" if told else "")


def _stack_line(node: fx.Node) -> str:
    """The innermost line of a node's stack trace: `model.py:12`."""
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    parts = lines[-1].split('"')
    number = parts[2].split("line", 1)[-1].split(",")[0].strip() if len(parts) > 2 else ""
    return f"{parts[1]}:{number}" if number else parts[1]
