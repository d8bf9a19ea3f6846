"""A call in a rank graph: a function with its arguments, on all devices that make it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from meshweave.check.holdings import Ints, boxes
from meshweave.check.infer import Placed
from meshweave.ir.graph import map_nodes

Number = Any  # an int, or one per device


class _OperandMark:
    def __repr__(self) -> str:
        return "operand"


OPERAND = _OperandMark()  # represents a tensor in the arguments of a call


@dataclass(frozen=True, slots=True)
class LocalCall:
    """A function and its arguments, with OPERAND for tensors and arrays for numbers that differ between devices."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Context:
    """An op of the placed graph with the layouts of its operands and results on some devices."""

    node: fx.Node
    operands: tuple[Placed, ...]
    results: tuple[Placed, ...]
    devices: tuple[int, ...]

    def plain(self) -> LocalCall:
        """The op as in the placed graph."""
        args, kwargs = map_nodes(self.node, lambda n: OPERAND)
        return LocalCall(self.node.target, args, kwargs)

    def offsets(self, placed: Placed) -> list[Number]:
        return _numbers(boxes(placed[1], placed[0].shape, self.devices)[0])

    def sizes(self, placed: Placed) -> list[Number]:
        return _numbers(boxes(placed[1], placed[0].shape, self.devices)[1])


def _numbers(table: Ints) -> list[Number]:
    return [table[:, d] for d in range(table.shape[1])]
