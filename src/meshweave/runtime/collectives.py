"""What each collective becomes over a process group. Blocks are along dim 0, in the order of the flattened axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.interop.collectives import all_gather_single, reduce_scatter_single
from meshweave.ir.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, REDUCE_SCATTER, reduce_in_order
from meshweave.runtime.buffers import Buffers

_REDUCE = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
T = TypeVar("T")
Reduce = Callable[[Sequence[Tensor]], Tensor]  # of the members' parts, in the order of the group


@dataclass(frozen=True, slots=True)
class Group:
    """The process group of one axis list that this rank is in.

    torch sorts the ranks of a process group. `order[i]` is the rank in the process group of member i of the flattened
    axes; blocks are permuted where the two orders differ.
    """

    process_group: dist.ProcessGroup | None
    order: tuple[int, ...]
    is_sorted: bool
    buffers: Buffers = field(default_factory=Buffers)

    @property
    def size(self) -> int:
        return len(self.order)

    def to_ranks(self, blocks: Sequence[T]) -> list[T]:
        """Blocks in the order of the flattened axes, put in the order of the process group."""
        return [blocks[self.order.index(rank)] for rank in range(self.size)]

    def from_ranks(self, blocks: Sequence[T]) -> list[T]:
        """Blocks in the order of the process group, put in the order of the flattened axes."""
        return [blocks[rank] for rank in self.order]


@dataclass(eq=False, slots=True)
class Pending:
    """A started communication. `held` are buffers that must live until it is done; `finish` makes the value of them,
    and `release` is called when it has."""

    works: tuple[Any, ...]
    held: tuple[Tensor, ...]
    finish: Callable[[], Tensor | None]
    release: Callable[[], None] | None = None
    is_done: bool = False
    value: Tensor | None = None


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, which share its memory. One of a single element may have any stride."""
    assert x.is_contiguous(), f"a tensor of strides {x.stride()}"
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def gather(group: Group, x: Tensor, reduce: Reduce | None = None) -> Pending:
    """All-gather: the operands of all members along dim 0, or what `reduce` makes of them."""
    shape = (group.size, *x.shape)
    out = x.new_empty(shape) if reduce is None else group.buffers.take(shape, x)
    work = all_gather_single(bytes_of(out), bytes_of(x), group=group.process_group, async_op=True)
    parts = group.from_ranks(out.unbind(0))
    if reduce is not None:
        return Pending((work,), (x, out), lambda: reduce(parts), lambda: group.buffers.give_back(out))
    return Pending((work,), (x, out), lambda: out.flatten(0, 1) if group.is_sorted else torch.cat(parts))


def exchange(
    group: Group, x: Tensor, received: Sequence[int], sent: Sequence[int], reduce: Reduce | None = None
) -> Pending:
    """All-to-all of rows of `x`: `sent[i]` rows to member i, `received[i]` rows from it. The value is what came along
    dim 0, or what `reduce` makes of the parts."""
    row = prod(x.shape[1:]) * x.itemsize
    shape = (sum(received), *x.shape[1:])
    out = x.new_empty(shape) if reduce is None else group.buffers.take(shape, x)
    send, came, went = x, list(received), list(sent)
    if not group.is_sorted:
        send = torch.cat(group.to_ranks(x.split(went)))
        came, went = group.to_ranks(came), group.to_ranks(went)
    work = dist.all_to_all_single(
        bytes_of(out),
        bytes_of(send),
        [n * row for n in came],
        [n * row for n in went],
        group.process_group,
        async_op=True,
    )
    parts = group.from_ranks(out.split(came))
    if reduce is not None:
        return Pending((work,), (send, out), lambda: reduce(parts), lambda: group.buffers.give_back(out))
    return Pending((work,), (send, out), lambda: out if group.is_sorted else torch.cat(parts))


def _all_gather(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    return gather(group, x)


def _all_to_all(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    received, sent = args
    return exchange(group, x, received, sent)


def _reduce_scatter(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    """An exchange, then a local reduction: as many bytes as a ring, in one round."""
    rows = [x.shape[0] // group.size] * group.size
    return exchange(group, x, rows, rows, lambda parts: reduce_in_order(parts, args[0]))


def _all_reduce(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    return gather(group, x, lambda parts: reduce_in_order(parts, args[0]))


def _broadcast(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    out = x.clone()  # the source keeps its operand, which torch would take for the result
    work = dist.broadcast(bytes_of(out), group=group.process_group, group_src=group.order[args[0]], async_op=True)
    return Pending((work,), (out,), lambda: out)


def _native_all_reduce(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    out = _countable(x).clone()
    work = dist.all_reduce(out, _REDUCE[args[0]], group.process_group, async_op=True)
    return Pending((work,), (out,), lambda: out.view(x.dtype))


def _native_reduce_scatter(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    dealt = _countable(x if group.is_sorted else torch.cat(group.to_ranks(x.chunk(group.size))))
    out = dealt.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    work = reduce_scatter_single(out, dealt, _REDUCE[args[0]], group.process_group, async_op=True)
    return Pending((work,), (dealt, out), lambda: out.view(x.dtype))


def _countable(x: Tensor) -> Tensor:
    """Booleans as 0 and 1: their maximum is `or`, their minimum `and`."""
    return x.view(torch.uint8) if x.dtype is torch.bool else x


MOVED: dict[Any, Callable[[Group, Tensor, Sequence[Any]], Pending]] = {
    ALL_GATHER.op: _all_gather,
    ALL_TO_ALL.op: _all_to_all,
    ALL_REDUCE.op: _all_reduce,
    REDUCE_SCATTER.op: _reduce_scatter,
    BROADCAST.op: _broadcast,
}
NATIVE = {
    **MOVED,
    ALL_REDUCE.op: _native_all_reduce,
    REDUCE_SCATTER.op: _native_reduce_scatter,
}
