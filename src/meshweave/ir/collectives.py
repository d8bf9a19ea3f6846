"""The ops that communicate: a single table, a row per op.

`_c10d_functional` collectives and two ops of meshweave start a communication; `WAIT` returns its result. Rank graphs
contain the rows of `OURS`, other graphs any row. An op that looks like a collective but has no row is an error, never
compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, fx

from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir.graph import argument, op_name, place_of, wide_dtype

# Communications that move only some rows, which are known only at run time.


def sparse_gather(x: Tensor, readers: Tensor, count: int, share: float, group: str) -> Tensor:
    """Start an all-gather in which every member gets the rows that it reads, and zeros for the others.

    `readers` [count, rows] says which rows of the gathered array each of the `count` members reads; all members have
    it. Rows are such that all blocks together have `rows` of them. `share`: the part of all rows that a member reads
    under a balanced load, which prices the op.
    """
    raise AssertionError("a sparse gather is run by a communicator")


def sparse_scatter(x: Tensor, readers: Tensor, count: int, share: float, group: str) -> Tensor:
    """Start a reduce-scatter (a sum) to which member m contributes the rows `readers[m]` of its operand; its other rows
    count as zeros. The inverse of a sparse gather, with the same arguments."""
    raise AssertionError("a sparse scatter is run by a communicator")


def rows_of(x: Tensor, is_kept: Tensor) -> Tensor:
    """x as a matrix of as many rows as `is_kept` has elements."""
    return x.reshape(len(is_kept), x.numel() // max(len(is_kept), 1))


def kept(x: Tensor, is_kept: Tensor) -> Tensor:
    """x with zeros in all other rows."""
    return torch.where(is_kept.unsqueeze(1), rows_of(x, is_kept), 0).view(x.shape)


functional = torch.ops._c10d_functional
WAIT = functional.wait_tensor.default
Args = Sequence[Any]  # of a node or a call: the arguments between the operand and the group
Shape = tuple[int, ...]
Blocks = Literal["", "operand", "result", "both"]
Bucket = Literal["", "gather", "scatter", "reduce"]


def transfer(x: Tensor | None, key: str) -> Any:
    """Start the transfer `RankGraph.transfers[key]`. `x` is this device's piece of the source, or None. Its wait
    returns this device's piece of the target, or None.
    """
    raise AssertionError("a transfer is run by a communicator")


def permute(x: Tensor, to: int | Sequence[int], group: str) -> Any:
    """Start a permute: every member of a group gets `x` of another member, or its own; all have the same shape.

    Member i sends to member (i + to) mod n, or to member to[i]; `to` is then a permutation of 0 .. n-1. Members count
    along the flattened axes of the group. A member that sends to itself moves nothing. The inverse brings a gradient
    back: see `inverse`.
    """
    raise AssertionError("a permute is run by a communicator")


def destinations(to: int | Sequence[int], size: int) -> tuple[int, ...]:
    """For each member of a group of `size`, the member that it sends to. Raises MeshweaveError if it is not a
    permutation."""
    if isinstance(to, int):
        return tuple((i + to) % size for i in range(size))
    if sorted(to) != list(range(size)):
        raise MeshweaveError(
            "a permute must send every member of its group exactly one block",
            got=f"destinations {list(to)}",
            expected=f"each of 0 to {size - 1} once, in a group of {size}",
        )
    return tuple(to)


# What every member of a group gets, from the operands of all members in group order.


def reduce_in_order(parts: Sequence[Tensor], op: str, into: Tensor | None = None) -> Tensor:
    """Reduce in group order: sums of half-precision values are accumulated in float32. A sum may be written into
    `into`: memory that no part has, or that of one of the first two, which is not read afterwards."""
    if op == "sum":
        wide = wide_dtype(parts[0].dtype)
        if len(parts) == 1:
            return parts[0].clone()
        # Two reads and a write: a copy to accumulate into would cost three more.
        total = torch.add(parts[0].to(wide), parts[1], out=into if wide is parts[0].dtype else None)
        for part in parts[2:]:
            total += part
        return total.to(parts[0].dtype)
    combine = {"max": torch.maximum, "min": torch.minimum}[op]
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


def _all_gather(parts: Sequence[Tensor], args: Args) -> list[Any]:
    return [torch.cat(list(parts), 0)] * len(parts)


def _all_reduce(parts: Sequence[Tensor], args: Args) -> list[Any]:
    return [reduce_in_order(parts, args[0])] * len(parts)


def _reduce_scatter(parts: Sequence[Tensor], args: Args) -> list[Any]:
    dealt = [part.chunk(len(parts), 0) for part in parts]
    return [reduce_in_order([row[i] for row in dealt], args[0]) for i in range(len(parts))]


def _all_to_all(parts: Sequence[Tensor], args: Args) -> list[Any]:
    dealt = [part.chunk(len(parts), 0) for part in parts]  # blocks are equal within a group, though not across groups
    return [torch.cat([row[i] for row in dealt], 0) for i in range(len(parts))]


def _sparse_gather(parts: Sequence[Tensor], args: Args) -> list[Any]:
    whole = torch.cat(list(parts), 0)
    return [kept(whole, is_read) for is_read in args[0]]


def _sparse_scatter(parts: Sequence[Tensor], args: Args) -> list[Any]:
    return _reduce_scatter([kept(part, is_given) for part, is_given in zip(parts, args[0], strict=True)], ["sum"])


def _permute(parts: Sequence[Tensor], args: Args) -> list[Any]:
    """A block from another device is a copy; a member's own block is returned as it is."""
    received: list[Any] = [None] * len(parts)
    for sender, receiver in enumerate(destinations(args[0], len(parts))):
        received[receiver] = parts[sender] if sender == receiver else _own(parts[sender])
    return received


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


# Defaults of a row.


def _not_within_a_group(parts: Sequence[Tensor], args: Args) -> list[Any]:
    raise AssertionError("no collective of rank graphs")


def _whole(args: Args, group_size: int, num_bytes: float) -> float:
    return num_bytes


def _permuted(args: Args, group_size: int, num_bytes: float) -> float:
    """A permute in which every member keeps its own block moves nothing."""
    return 0.0 if destinations(args[0], group_size) == tuple(range(group_size)) else num_bytes


def _not_a_permutation(args: Args, group_size: int) -> str:
    try:
        destinations(args[0], group_size)
    except MeshweaveError as error:
        return f"is not a permutation of its group: {error.got} of {group_size}"
    return ""


@dataclass(frozen=True, slots=True)
class Collective:
    """An op that starts a communication; `name` is that of its kind, equal for all ops that move the same bytes.

    `group`, `operands` and `size` are positions of arguments: the group, the tensors, and the size of the group if the
    op has it (else -1). `shape(operand's shape, args)` is the shape of the result, `blocks` says whether operand or
    result consist of the members' blocks along dim 0. `exchange(operands, args)` returns what every member gets.
    `problem(args, n)` describes invalid members in `args`.

    Cost: `received(n, b)` are the bytes that one device of a group of n receives with operands of b bytes; it sends as
    many. A profile prices the op on the curve of the kind `curve` (by default its own), for operands of
    `curve_bytes(args, n, b)` bytes. `sample(rows, n)` are arguments to measure it with: equal blocks of so many rows.

    Passes: `bucket` says how several are merged ("" : never), `may_cut` whether it may run in chunks of rows,
    `may_decompose` whether rings may replace it. `is_ordered`: it is matched with its partner by its order in the group
    (point to point), so that order is kept.
    """

    op: Any
    name: str
    group: int
    received: Callable[[int, float], float]
    operands: tuple[int, ...] = (0,)
    size: int = -1
    shape: Callable[[Shape, Args], Shape] = lambda shape, args: shape
    blocks: Blocks = ""
    exchange: Callable[[Sequence[Tensor], Args], list[Any]] = _not_within_a_group
    problem: Callable[[Args, int], str] = lambda args, group_size: ""
    curve: str = ""
    curve_bytes: Callable[[Args, int, float], float] = _whole
    sample: Callable[[int, int], list[Any]] | None = None
    bucket: Bucket = ""
    may_cut: bool = False
    may_decompose: bool = False
    is_ordered: bool = False

    @property
    def cost_name(self) -> str:
        """The curve of profiles that prices the op."""
        return self.curve or self.name

    def cost_bytes(self, node: fx.Node, group_size: int, num_bytes: float) -> float:
        """The bytes at which the curve prices a node of this row, for operands of `num_bytes`."""
        return self.curve_bytes(node.args[1:-1], group_size, num_bytes)


# Bytes received are those of ring and pairwise algorithms, which are optimal in bytes (Thakur, Rabenseifner and Gropp,
# IJHPCA 2005).
ALL_GATHER = Collective(
    functional.all_gather_into_tensor.default,
    "all_gather",
    group=2,
    received=lambda n, b: (n - 1) * b,
    size=1,
    shape=lambda shape, args: ((shape[0] if shape else 1) * args[0], *shape[1:]),
    blocks="result",
    exchange=_all_gather,
    sample=lambda rows, n: [n],
    bucket="gather",
    may_cut=True,
    may_decompose=True,
)
REDUCE_SCATTER = Collective(
    functional.reduce_scatter_tensor.default,
    "reduce_scatter",
    group=3,
    received=lambda n, b: (n - 1) * b / n,
    size=2,
    shape=lambda shape, args: (shape[0] // args[1], *shape[1:]),
    blocks="operand",
    exchange=_reduce_scatter,
    sample=lambda rows, n: ["sum", n],
    bucket="scatter",
    may_cut=True,
    may_decompose=True,
)
ALL_REDUCE = Collective(
    functional.all_reduce.default,
    "all_reduce",
    group=2,
    received=lambda n, b: 2 * (n - 1) * b / n,
    exchange=_all_reduce,
    sample=lambda rows, n: ["sum"],
    bucket="reduce",
    may_cut=True,
    may_decompose=True,
)
ALL_TO_ALL = Collective(
    functional.all_to_all_single.default,
    "all_to_all",
    group=3,
    received=lambda n, b: (n - 1) * b / n,
    shape=lambda shape, args: (sum(args[0]), *shape[1:]),
    blocks="both",
    exchange=_all_to_all,
    sample=lambda rows, n: [[rows // n] * n] * 2,
    may_cut=True,
)
# Every member except the source receives all b bytes, in a chain of hops (NCCL's broadcast is a ring:
# src/device/broadcast.h). A ring all-gather of pieces of b/(n-1) sends as many bytes over as many hops. Pieces of b/n
# would send (n-1)/n of what a member must receive: between two devices half of it, faster than their link.
BROADCAST = Collective(
    functional.broadcast.default,
    "broadcast",
    group=2,
    received=lambda n, b: b,
    curve="all_gather",
    curve_bytes=lambda args, n, b: b / max(n - 1, 1),
)
PERMUTE = Collective(
    permute,
    "permute",
    group=2,
    received=lambda n, b: b,
    exchange=_permute,
    problem=_not_a_permutation,
    curve_bytes=_permuted,
)
# Priced as an all-to-all of the rows that move.
SPARSE_GATHER = Collective(
    sparse_gather,
    "sparse_gather",
    group=4,
    received=lambda n, b: (n - 1) * b,
    size=2,
    shape=lambda shape, args: (shape[0] * args[1], *shape[1:]),
    exchange=_sparse_gather,
    curve="all_to_all",
    curve_bytes=lambda args, n, b: args[2] * n * b,
)
SPARSE_SCATTER = Collective(
    sparse_scatter,
    "sparse_scatter",
    group=4,
    received=lambda n, b: (n - 1) * b / n,
    size=2,
    shape=lambda shape, args: (shape[0] // args[1], *shape[1:]),
    exchange=_sparse_scatter,
    curve="all_to_all",
    curve_bytes=lambda args, n, b: args[2] * b,
)
TRANSFER = Collective(transfer, "transfer", group=1, received=lambda n, b: b, is_ordered=True)
OURS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, PERMUTE, SPARSE_GATHER, SPARSE_SCATTER, TRANSFER)
# ops of rank graphs: their last argument is a group
COLLECTIVES = frozenset(row.op for row in OURS if row is not TRANSFER)
STARTS = COLLECTIVES | {transfer}
RECEIVED: Mapping[str, Callable[[int, float], float]] = {row.name: row.received for row in OURS if not row.curve}
_MESSAGE = replace(PERMUTE, group=3, curve_bytes=_whole)  # an all-to-all that is a single message
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d")


def _table() -> Mapping[Any, Collective]:
    """The rows of `OURS`, and the ops of other graphs that move the same bytes; some do not exist in every torch."""
    message = replace(TRANSFER, group=3, curve="permute")
    foreign_ops = {
        "all_gather_into_tensor_out": ALL_GATHER,
        "all_gather_into_tensor_coalesced": ALL_GATHER,
        "reduce_scatter_tensor_out": REDUCE_SCATTER,
        "reduce_scatter_tensor_coalesced": REDUCE_SCATTER,
        "all_reduce_": ALL_REDUCE,
        "all_reduce_coalesced": ALL_REDUCE,
        "all_reduce_coalesced_": ALL_REDUCE,
        "broadcast": BROADCAST,
        "broadcast_": BROADCAST,
        "isend": message,
        "irecv": message,
        "batch_p2p_ops": replace(message, group=4, operands=(3,)),
    }
    rows = [*OURS]
    for name, row in foreign_ops.items():
        if hasattr(functional, name):
            op = getattr(functional, name).default
            rows.append(replace(row, op=op, bucket="", may_cut=False, may_decompose=False))
    autograd = torch.ops._c10d_functional_autograd
    for row in (ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL):
        name = row.op.overloadpacket.__name__
        if hasattr(autograd, name):
            rows.append(replace(row, op=getattr(autograd, name).default, may_cut=False, may_decompose=False))
    return {row.op: row for row in rows}


TABLE = _table()


def collective_of(node: fx.Node) -> Collective | None:
    """The row of a node that starts a communication, None for any other. Raises VerifyError for a collective without a
    row."""
    row = TABLE.get(node.target)
    if row is not None:
        return _MESSAGE if row.name == ALL_TO_ALL.name and _is_message(node) else row
    if node.target is not WAIT and communicates(node.target):
        raise VerifyError(
            f"{op_name(node.target)} is a collective that has no row in the table of collectives",
            where=place_of(node),
            expected="one of " + ", ".join(sorted({op_name(target) for target in TABLE})),
            hint="add its row to ir/collectives.py, or remove it from the graph",
        )
    return None


def communicates(target: Any) -> bool:
    """Whether an op is a functional collective of torch, with or without a row."""
    return getattr(target, "namespace", "") in _NAMESPACES


def _is_message(node: fx.Node) -> bool:
    """Whether an all-to-all over several ranks sends each a block of a single other rank, as in torch's permute_tensor
    and meshweave's rings. It is priced as a single message."""
    splits = [argument(node, position) for position in (1, 2)]
    return all(
        isinstance(sizes, (list, tuple))
        and len(sizes) > 1
        and all(type(size) is int for size in sizes)
        and sum(size > 0 for size in sizes) == 1
        for sizes in splits
    )


def group_of(node: fx.Node, row: Collective) -> Any:
    """The group argument of a start: a name, or a process group."""
    return argument(node, row.group)
