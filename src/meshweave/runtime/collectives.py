"""How each collective runs over a process group. Blocks are along dim 0, in the order of the flattened axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.interop.process_groups import all_gather_single, reduce_scatter_single
from meshweave.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    SPARSE_GATHER,
    SPARSE_SCATTER,
    reduce_in_order,
    rows_of,
)
from meshweave.runtime.messages import Message, Messages, bytes_of
from meshweave.runtime.transfer_threads import Job, Posted

_REDUCE = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    """The process group of a list of axes that this rank is in.

    torch sorts the ranks of a process group. `order[i]` is the rank in the process group of member i of the flattened
    axes; blocks are permuted if the two orders differ.
    """

    process_group: dist.ProcessGroup | None
    order: tuple[int, ...]
    is_sorted: bool
    messages: Messages | None = None  # set if collectives run as messages

    @property
    def size(self) -> int:
        return len(self.order)

    @property
    def own(self) -> int:
        """The member that this rank is."""
        assert self.process_group is not None
        return self.order.index(self.process_group.rank())

    @property
    def others(self) -> list[int]:
        return [i for i in range(self.size) if i != self.own]

    def begin(
        self, received: Sequence[Message], sent: Sequence[Message], beside: Callable[[], object] = lambda: None
    ) -> tuple[Job | Posted, ...]:
        """`Messages.begin`, with members of the flattened axes instead of ranks of the process group."""
        assert self.messages is not None
        came, went = ([(self.order[i], x) for i, x in pairs] for pairs in (received, sent))
        return self.messages.begin(came, went, beside)

    def to_ranks(self, blocks: Sequence[T]) -> list[T]:
        """Reorders blocks from the order of the flattened axes to that of the process group."""
        return [blocks[self.order.index(rank)] for rank in range(self.size)]

    def from_ranks(self, blocks: Sequence[T]) -> list[T]:
        """Reorders blocks from the order of the process group to that of the flattened axes."""
        return [blocks[rank] for rank in self.order]


@dataclass(eq=False, slots=True)
class Pending:
    """A started communication. `kept_alive` are buffers that must live until it is done; `finish` computes the value
    from them, once."""

    works: tuple[Any, ...]
    kept_alive: tuple[Tensor, ...]
    finish: Callable[[], Tensor | None]
    is_done: bool = False
    value: Tensor | None = None


def _all_gather(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    """All-gather by messages: the operands of all members along dim 0."""
    out = x.new_empty((group.size, *x.shape))
    works = _gather(group, x, [(i, out[i]) for i in group.others], lambda: out[group.own].copy_(x))
    return Pending(works, (x, out), lambda: out.flatten(0, 1))


def _all_reduce(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    """All-reduce in a single round: every member receives the operands of all others and reduces them."""
    received = {i: torch.empty_like(x) for i in group.others}
    works = _gather(group, x, list(received.items()))
    return _reduced(group, works, x, received, args[0])


def _reduced(group: Group, works: tuple[Any, ...], own: Tensor, received: Mapping[int, Tensor], op: str) -> Pending:
    """What reduces the own part and those received, by member, into the memory of one of these."""
    parts = [received.get(i, own) for i in range(group.size)]
    into = received.get(0, received.get(1))
    return Pending(works, (own, *received.values()), lambda: reduce_in_order(parts, op, into))


def _gather(
    group: Group, x: Tensor, received: Sequence[tuple[int, Tensor]], beside: Callable[[], object] = lambda: None
) -> tuple[Any, ...]:
    """Start receiving the operands of the others into `received`, by member, next to this rank's own."""
    return group.begin(received, [(i, x) for i in group.others], beside)


def exchange(group: Group, x: Tensor, received: Sequence[int], sent: Sequence[int]) -> Pending:
    """All-to-all of rows of `x` by messages: `sent[i]` rows to member i, `received[i]` rows from it. The value is the
    received rows along dim 0."""
    out = x.new_empty((sum(received), *x.shape[1:]))
    came, went, own = out.split(list(received)), x.split(list(sent)), group.own
    pairs = [(i, came[i]) for i in group.others], [(i, went[i]) for i in group.others]
    works = group.begin(*pairs, lambda: came[own].copy_(went[own]))
    return Pending(works, (x, out), lambda: out)


def _all_to_all(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    received, sent = args
    return exchange(group, x, received, sent)


def _reduce_scatter(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    """An exchange of equal blocks, then a local reduction: as many bytes as a ring, in a single round."""
    blocks = x.chunk(group.size) if x.shape[0] else (x,) * group.size
    received = {i: torch.empty_like(blocks[i]) for i in group.others}
    works = group.begin(list(received.items()), [(i, blocks[i]) for i in group.others])
    return _reduced(group, works, blocks[group.own], received, args[0])


def _native_all_gather(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    out = x.new_empty((group.size, *x.shape))
    work = all_gather_single(bytes_of(out), bytes_of(x), group=group.process_group, async_op=True)
    parts = group.from_ranks(out.unbind(0))
    return Pending((work,), (x, out), lambda: out.flatten(0, 1) if group.is_sorted else torch.cat(parts))


def _native_all_to_all(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    row = prod(x.shape[1:]) * x.itemsize
    came, went = map(list, args)
    out, send = x.new_empty((sum(came), *x.shape[1:])), x
    if not group.is_sorted:
        send = torch.cat(group.to_ranks(x.split(went)))
        came, went = group.to_ranks(came), group.to_ranks(went)
    sizes = [n * row for n in came], [n * row for n in went]
    work = dist.all_to_all_single(bytes_of(out), bytes_of(send), *sizes, group.process_group, async_op=True)
    parts = group.from_ranks(out.split(came))
    return Pending((work,), (send, out), lambda: out if group.is_sorted else torch.cat(parts))


def native_all_reduce_in_place(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    """An all-reduce whose result is in the memory of the operand."""
    work = dist.all_reduce(_countable(x), _REDUCE[args[0]], group.process_group, async_op=True)
    return Pending((work,), (x,), lambda: x)


def _native_reduce_scatter(group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    dealt = _countable(x if group.is_sorted else torch.cat(group.to_ranks(x.chunk(group.size))))
    out = dealt.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    work = reduce_scatter_single(out, dealt, _REDUCE[args[0]], group.process_group, async_op=True)
    return Pending((work,), (dealt, out), lambda: out.view(x.dtype))


Begin = Callable[[Group, Tensor, Sequence[Any]], Pending]  # starts a collective, with the arguments of its node


def _sparse_gather(exchange: Begin, group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    """Members are sent the rows that they read; the counts per sender follow from `readers`, which all members have."""
    readers, count = args[:2]
    wanted, mine = _blocks(readers, count)[:, group.own], readers[group.own]
    rows, place = rows_of(x, wanted[0]), wanted.nonzero()[:, 1]
    pending = exchange(group, rows[place], (_counts(mine.view(count, -1)), _counts(wanted)))

    def finish() -> Tensor:
        out = x.new_zeros((count * x.shape[0], *x.shape[1:]))
        rows_of(out, mine)[mine] = _value(pending)
        return out

    return replace(pending, kept_alive=(x, *pending.kept_alive), finish=finish)


def _sparse_scatter(exchange: Begin, group: Group, x: Tensor, args: Sequence[Any]) -> Pending:
    """Members are sent this rank's rows of theirs, and add up what they receive in group order."""
    readers, count = args[:2]
    own_rows, coming = readers[group.own], _blocks(readers, count)[:, group.own].flatten()
    pending = exchange(
        group, rows_of(x, own_rows)[own_rows], (_counts(coming.view(count, -1)), _counts(own_rows.view(count, -1)))
    )

    def finish() -> Tensor:
        parts = x.new_zeros((count, x.shape[0] // count, *x.shape[1:]))
        rows_of(parts, coming)[coming] = _value(pending)
        return reduce_in_order(parts.unbind(0), "sum")

    return replace(pending, kept_alive=(x, *pending.kept_alive), finish=finish)


def _blocks(readers: Tensor, count: int) -> Tensor:
    """Which member reads which rows of whose block: [reader, member, row]."""
    return readers.view(count, count, -1)


def _counts(places: Tensor) -> list[int]:
    """How many rows of each member are marked. On an accelerator this waits for all earlier work."""
    counts: list[int] = places.sum(1).tolist()
    return counts


def _value(pending: Pending) -> Tensor:
    value = pending.finish()
    assert value is not None, "every member receives a block, possibly empty"
    return value


def _countable(x: Tensor) -> Tensor:
    """Booleans as 0 and 1: their maximum is `or`, their minimum `and`."""
    return x.view(torch.uint8) if x.dtype is torch.bool else x


MOVED: dict[Any, Begin] = {
    ALL_GATHER.op: _all_gather,
    ALL_TO_ALL.op: _all_to_all,
    ALL_REDUCE.op: _all_reduce,
    REDUCE_SCATTER.op: _reduce_scatter,
    SPARSE_GATHER.op: partial(_sparse_gather, _all_to_all),
    SPARSE_SCATTER.op: partial(_sparse_scatter, _all_to_all),
}
NATIVE: dict[Any, Begin] = {
    ALL_GATHER.op: _native_all_gather,
    ALL_TO_ALL.op: _native_all_to_all,
    ALL_REDUCE.op: lambda group, x, args: native_all_reduce_in_place(group, x.clone(), args),
    REDUCE_SCATTER.op: _native_reduce_scatter,
    SPARSE_GATHER.op: partial(_sparse_gather, _native_all_to_all),
    SPARSE_SCATTER.op: partial(_sparse_scatter, _native_all_to_all),
}
