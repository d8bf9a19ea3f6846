"""The symbolic integers of a rank graph on all devices of its role at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import fx

from meshweave.errors import VerifyError
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph, axis_index, linear, member_pieces, qualified, ring_index
from meshweave.replay.holdings import coordinates


class Numbers:
    """Values of symbols, one per device, and keys that identify equal values. A symbol is computed once for every
    combination of the coordinates that it depends on."""

    def __init__(self, rank: RankGraph) -> None:
        self.rank, self.devices = rank, tuple(rank.devices)
        self.values: dict[fx.Node, Any] = {}
        self.keys: dict[fx.Node, Any] = {}
        self._known: dict[Any, Any] = {}
        self._at: dict[str, Any] = {}
        for i, mesh in enumerate(rank.meshes):
            if mesh.covers(self.devices):
                self._at |= {qualified(i, axis): at for axis, at in coordinates(mesh, self.devices).items()}

    def add(self, node: fx.Node) -> Any:
        """Compute a symbol from known operands."""
        self.keys[node] = (node.target, *(self.key(a) for a in node.args))
        if self.keys[node] not in self._known:
            try:
                self._known[self.keys[node]] = self._computed(node)
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise VerifyError("a number cannot be computed", got=f"{type(error).__name__}: {error}") from error
        self.values[node] = self._known[self.keys[node]]
        return self.values[node]

    def _computed(self, node: fx.Node) -> Any:
        args: Any = fx.map_arg(node.args, lambda n: self.values[n])
        function: Any = node.target
        if function is linear:
            return np.broadcast_to(linear({}, *args), len(self.devices))
        axes: Sequence[str] = args[0] if function in (axis_index, ring_index) else args[1]
        if function is member_pieces:
            axes = axes[: len(axes) - args[-1]]  # equal for all members of a group
        if unknown := [a for a in axes if a not in self._at]:
            raise VerifyError("a number depends on axes that the role does not have", got=", ".join(unknown))
        at = np.stack([np.zeros(len(self.devices), np.int64), *(self._at[a] for a in axes)], 1)
        each, where = np.unique(at, axis=0, return_inverse=True)
        values = [function(dict(zip(axes, row[1:], strict=True)), *args) for row in each.tolist()]
        return np.array(values, np.int64)[where.reshape(-1)]

    def get(self, value: Any) -> Any:
        """A number, or one per device."""
        number = self.values[value] if isinstance(value, fx.Node) else value
        if not isinstance(number, (int, np.ndarray)) or np.ndim(number) > 1:
            raise VerifyError("has an argument that is not a number", got=str(value))
        return number

    def table(self, value: Any) -> Any:
        """A table of pieces per device, or None."""
        entry = self.values[value] if isinstance(value, fx.Node) else value
        if entry is not None and np.ndim(entry) != 3:
            raise VerifyError("has an argument that is not a table of pieces", got=str(value))
        return entry

    def key(self, value: Any) -> Any:
        """A hashable key that is equal for equal arguments of the same role, and differs between roles."""
        if isinstance(value, fx.Node):
            return (self.devices[0], self.keys[value])
        return tuple(self.key(v) for v in value) if isinstance(value, (list, tuple)) else value

    def axes_of(self, index: Any) -> tuple[Mesh, tuple[str, ...]]:
        """The mesh and axes of an index in a group."""
        if not isinstance(index, fx.Node) or index.target is not axis_index:
            raise VerifyError("keeps a part by a number that is not an index in a group", got=str(index))
        return self.rank.group_axes(",".join(index.args[0]))  # type: ignore[arg-type]

    def wide(self, value: Any) -> Any:
        """A number per device."""
        return np.broadcast_to(np.asarray(self.get(value)), len(self.devices))


def concatenate_roles(parts: Sequence[tuple[Numbers, Any]]) -> Any:
    """An argument of a communication from all its roles: text and plain numbers, which must be equal, or a value per
    device."""
    values = [value for _, value in parts]
    if isinstance(values[0], (list, tuple)):
        return [concatenate_roles([(n, v[i]) for n, v in parts]) for i in range(len(values[0]))]
    if any(isinstance(v, fx.Node) for v in values) or len(set(values)) > 1:
        return np.concatenate([numbers.wide(v) for numbers, v in parts])
    return values[0]
