"""The classes and functions that a stored program may name. Any other name is an error, and nothing is looked up."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import fields
from inspect import isfunction
from types import ModuleType
from typing import Any

import torch

from meshweave.chunks.writer import Mark, Ring
from meshweave.gathers.keep import KeepReport
from meshweave.interop.ops import OpOverload, find_operator
from meshweave.ir import blocks, collectives, grouped, local_ops, ops, rank, sparse
from meshweave.ir.graph import Input, Origin, Spec
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.rank import Transfer
from meshweave.movement.plan import MovePlan
from meshweave.movement.steps import Step
from meshweave.movement.within import Request
from meshweave.rings.attention import AttentionReport, AttentionRow
from meshweave.rings.report import DecomposeReport, RingRow
from meshweave.rows.split import SplitReport, Whole
from meshweave.schedule.report import CandidateRow, CollectiveRow, Merge, OverlapReport
from meshweave.search import Candidate
from meshweave.sharding.assign import Assignment, Own, PassedPartial, Shard

CLASSES: Mapping[str, type[Any]] = {
    each.__name__: each
    for each in (
        *(Spec, Origin, Input, DimSharding, Layout, Transfer, Ring, Mark),
        *(Assignment, Shard, PassedPartial, Own, MovePlan, Step, Request),
        *(KeepReport, SplitReport, Whole, DecomposeReport, RingRow, Candidate),
        *(AttentionReport, AttentionRow),
        *(OverlapReport, CandidateRow, CollectiveRow, Merge),
    )
}

# The fields with which they are constructed, in order.
FIELDS: Mapping[str, tuple[str, ...]] = {
    name: tuple(each.name for each in fields(cls) if each.init) for name, cls in CLASSES.items()
}


def _is_own(each: Any) -> bool:
    """Whether a value in `local_ops` is a function that it defines."""
    return isfunction(each) and each.__module__ == local_ops.__name__


_NAMES: Mapping[ModuleType, str] = {
    operator: "getitem",
    ops: "move",
    collectives: "transfer permute",
    sparse: "sparse_gather sparse_scatter",
    rank: "piece_size piece_offset member_pieces axis_index ring_index linear",
    blocks: "sort_piece index_piece put_piece",
    grouped: "mm_piece outer_piece own_rows all_rows readers_piece",
    local_ops: " ".join(name for name, each in vars(local_ops).items() if _is_own(each) and not name.startswith("_")),
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    f"{module.__name__.removeprefix('meshweave.')}.{name}": getattr(module, name)
    for module, names in _NAMES.items()
    for name in names.split()
}
FUNCTION_NAMES: Mapping[Callable[..., Any], str] = {each: name for name, each in FUNCTIONS.items()}

_NAMESPACES = frozenset({"aten", "prims", "_c10d_functional", "meshweave"})
_TORCH: Mapping[str, type[Any]] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def operator_named(name: str, more: Mapping[str, OpOverload]) -> OpOverload:
    """An operator of torch or of meshweave, or one of `more`. ValueError for any other name."""
    if name in more:
        return more[name]
    if name.partition(".")[0] not in _NAMESPACES:
        raise ValueError(f"{name} is not an operator of a stored program")
    try:
        operator = find_operator(name)
    except AttributeError:
        raise ValueError(f"{name} is not an operator") from None
    if not isinstance(operator, OpOverload):
        raise ValueError(f"{name} is not an operator")
    return operator


def is_stored_operator(name: str, more: Mapping[str, OpOverload]) -> bool:
    return name in more or name.partition(".")[0] in _NAMESPACES


def torch_constant(kind: str, name: str) -> Any:
    """A dtype, layout or memory format by its name. ValueError for anything else."""
    value = vars(torch).get(name)
    if not isinstance(value, _TORCH[kind]):
        raise ValueError(f"torch.{name} is not a {kind}")
    return value


def torch_form(value: Any) -> tuple[str, str] | None:
    """(kind, name) of a dtype, layout or memory format; None for any other value."""
    kind = next((kind for kind, cls in _TORCH.items() if isinstance(value, cls)), None)
    return None if kind is None else (kind, str(value).removeprefix("torch."))
