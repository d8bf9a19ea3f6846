"""What operators in the model have pinned: the axes that act on a value, and how far downstream they go on to act."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

from meshweave.ir.graph import op_name, origin_of
from meshweave.ir.layout import Layout
from meshweave.ir.traits import CASTS
from meshweave.sharding.assign import Assignment
from meshweave.sharding.copies import phase_of
from meshweave.sharding.operators import Pin, layout_back, partial_operand


@dataclass(slots=True)
class PinnedAxes:
    """`axes`: by value those that operators pinned, as far as they act. `before`: by an operator's call the layout that
    its operand had."""

    axes: dict[fx.Node, frozenset[str]] = field(default_factory=dict)
    before: dict[int, Layout] = field(default_factory=dict)

    def of(self, node: fx.Node) -> frozenset[str]:
        return self.axes.get(node, frozenset())

    def pin(self, node: fx.Node, value: fx.Node, pin: Pin, source: Layout, is_grad: bool) -> Layout:
        """The layout in which an operator pins `value`; that of its gradient is where its operand was."""
        origin = origin_of(node)
        if is_grad:
            target = layout_back(pin, source, self.before[origin.call])
        else:
            target = pin.layout_for(source, node.meta["spec"].shape, str(origin))
            self.before[origin.call] = source
        self.axes[node] = pin.acting(target, self.of(value))
        return target

    def follow(
        self, node: fx.Node, operands: Sequence[fx.Node], option: Assignment, layout_of: Callable[[fx.Node], Layout]
    ) -> None:
        """What is pinned goes on to hold downstream of an op, as far as the axes go on to act.

        Raises LayoutError where that has made an operand partial and this op, not being linear, needs it whole. Inside
        one op of the model (the pieces of a softmax), for a cast and in backward, partial values come and go.
        """
        pinned: set[str] = set()
        for operand, wanted in zip(operands, option.operands, strict=True):
            axes = self.of(operand)
            pinned |= axes
            is_inside = origin_of(operand).call == origin_of(node).call
            if not axes or is_inside or node.target in CASTS or phase_of(node) != "forward":
                continue
            layout = layout_of(operand)
            lost = [a for a in layout.partial_axes if a in axes and a not in wanted.partial_axes]
            if lost and layout.mesh == wanted.mesh:
                raise partial_operand(op_name(node.target), lost[0], layout, origin_of(node), origin_of(operand))
        acting = {a for layout in option.results for a in (*layout.sharded_axes, *layout.partial_axes)}
        self.axes[node] = frozenset(pinned & acting)
