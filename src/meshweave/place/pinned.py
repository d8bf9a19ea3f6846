"""The layouts that operators in the model have pinned: which axes are pinned on a value, and how far downstream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import fx

from meshweave.ir.graph import op_name, origin_of
from meshweave.ir.layout import Layout
from meshweave.ir.traits import CASTS
from meshweave.place.assign import Assignment
from meshweave.place.copies import phase_of
from meshweave.place.operators import Pin, layout_back, partial_operand


@dataclass(slots=True)
class PinnedAxes:
    """`axes`: for each value the axes that operators pinned and that are still in effect. `before`: for each operator
    call the layout of its operand."""

    axes: dict[fx.Node, frozenset[str]] = field(default_factory=dict)
    before: dict[int, Layout] = field(default_factory=dict)

    def of(self, node: fx.Node) -> frozenset[str]:
        return self.axes.get(node, frozenset())

    def pin(self, node: fx.Node, value: fx.Node, pin: Pin, source: Layout, is_grad: bool) -> Layout:
        """Pin `value` to the operator's layout; its gradient goes back to the operand's layout."""
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
        """Propagate pinned axes downstream of an op, as far as they stay in effect.
        Raises LayoutError if they have made an operand partial and this op is not linear. Partial values are allowed
        inside a single op of the model (the parts of a softmax), for a cast and in backward."""
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
