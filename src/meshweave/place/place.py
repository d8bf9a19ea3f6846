"""Placement: every value gets a layout, and a move is inserted wherever producer and consumer disagree."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from meshweave.errors import RuleError
from meshweave.ir import ops
from meshweave.ir.graph import (
    Input,
    Spec,
    StepGraph,
    copy_meta,
    map_nodes,
    op_name,
    origin_of,
    replace_inputs,
    spec_of,
    tensor_inputs,
)
from meshweave.ir.grouped import BY_ROWS, key_of
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.traits import CASTS, VIEWS
from meshweave.ir.verify import check_captured
from meshweave.ops.registry import result_specs, results_of, row_for
from meshweave.place.assign import Assignment, Operand, OpPrices, Price, as_asked, cheapest, follow_result, homes
from meshweave.place.decide import Placement
from meshweave.place.forms import Forms, due_at_casts
from meshweave.place.operators import Pin, layout_back, partial_operand, translate
from meshweave.place.owned import by_rows, ends_by_key, ends_cut, expert_axes, lookup_cut, narrow_rows, owned_price
from meshweave.place.rates import Rates, default_rates
from meshweave.place.stages import in_stage
from meshweave.place.sums import Sums

# The copies of a value while a step is placed.


@dataclass(slots=True)
class Copy:
    """A layout in which a value exists, and the phase since which it does."""

    node: fx.Node
    layout: Layout
    phase: str


def phase_of(node: fx.Node) -> str:
    """Forward and loss share copies; backward and update do not."""
    phase = origin_of(node).phase
    return "forward" if phase == "loss" else phase


def is_no_larger(copy: Layout, original: Layout, spec: Spec) -> bool:
    """Whether a device has no more elements in the copy's layout than in the original's."""

    def elements(layout: Layout) -> int:
        return torch.Size(layout.local_shape(spec.shape)).numel()

    return elements(copy) <= elements(original)


ours = torch.ops.meshweave
PIN = torch.ops.meshweave.pin.default
ROUND_PARTS = torch.ops.meshweave.round_parts.default

# Factor on the price of moving a parameter away from the layout that the plan uses it in, a value away from its
# operator's layout, or a part of a sum that is cast before the sum or added up over microbatches: such layouts are kept
# wherever possible.
PINNED_WEIGHT = 100.0


# The layouts that operators in the model have pinned: which axes are pinned on a value, and how far downstream.


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


@dataclass(slots=True)
class _Placer:
    step: StepGraph
    placement: Placement
    price: Price
    rates: Rates = default_rates
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, list[Copy]] = field(default_factory=dict)
    tuples: dict[fx.Node, tuple[fx.Node, tuple[Layout | None, ...]]] = field(default_factory=dict)
    # results that are moved right after their op
    homes: dict[tuple[fx.Node, int], Layout] = field(default_factory=dict)
    items: dict[fx.Node, Input] = field(default_factory=dict)
    decided: dict[Any, Assignment] = field(default_factory=dict)
    due: dict[fx.Node, list[tuple[Layout, str]]] = field(default_factory=dict)  # outputs moved right after their op
    stored: dict[tuple[fx.Node, str], Copy] = field(default_factory=dict)
    used: dict[tuple[fx.Node, str, int], Copy] = field(default_factory=dict)  # the stage is of what uses it
    abroad: dict[tuple[fx.Node, str, str], Copy] = field(default_factory=dict)
    pinned: PinnedAxes = field(default_factory=PinnedAxes)
    forms: Forms = field(init=False)
    sums: Sums = field(init=False)
    ends: dict[str, fx.Node] = field(init=False)  # by key, if rows are owned
    expert_axes: frozenset[str] = frozenset()
    line: str = ""  # source of the op being placed: a moved input is attributed to this line

    def run(self) -> StepGraph:
        self.items = self.step.sources
        outputs = self.step.results.items()
        self.ends = ends_by_key(self.step)
        self.forms = Forms(self.items, frozenset(self.ends.values()))
        self.sums = Sums(self.step, self.placement.accumulate_in, self.placement.microbatches)
        self.expert_axes = expert_axes(self.step, self.forms, self.placement.used)
        for (kind, name), value in outputs:
            if kind in ("grad", "norm", "loss", "metric", "buffer", "output"):
                wanted = self.placement.layout(kind, name, spec_of(value))
                self.due.setdefault(value, []).append((wanted, self._output_phase(kind, value)))
        self.due |= due_at_casts(self.due)
        for node in self.items:
            self._input(node)
        for node in self.sums.order():
            if node.op == "call_function":
                self._node(node)
            for total in self.sums.of_gradient.get(node, ()):
                self._lay_out_sum(total)
            for layout, phase in self.due.get(node, ()):
                self.fetch(node, layout, phase)
        results = [self._output(kind, name, value) for (kind, name), value in outputs]
        self.graph.output(results)
        narrow_rows(self.graph)
        # A copy (a gathered parameter, say) that was offered to an op, which then used another copy.
        self.graph.eliminate_dead_code(is_impure_node=lambda n: n.op in ("placeholder", "output"))
        return replace(self.step, graph=self.graph)

    def _input(self, node: fx.Node) -> None:
        item = self.items[node]
        layout = self.placement.layout("param" if item.kind == "acc" else item.kind, item.name, item.spec)
        new = copy_meta(node, self.graph.placeholder(node.name), layout=layout.normalized(item.spec.shape))
        self.copies[node] = [Copy(new, new.meta["layout"], phase_of(new))]

    def _output(self, kind: str, name: str, value: fx.Node) -> fx.Node:
        if kind == "acc":
            return self.copies[value][0].node
        return self.fetch(value, self.placement.layout(kind, name, spec_of(value)), self._output_phase(kind, value))

    def _output_phase(self, kind: str, value: fx.Node) -> str:
        if kind == "grad":
            return "reduce" if value in self.sums.operands else "backward"
        return phase_of(value) if kind in ("norm", "loss", "metric", "buffer", "output") else "update"

    def _node(self, node: fx.Node) -> None:
        if node.target is operator.getitem and node.args[0] in self.tuples:
            self._item(node)
        elif node.target is PIN:
            self._pin(node)
        elif not self.forms.is_created_on_demand(node) and not self.forms.is_of_parameter(node):
            self._op(node)  # these are computed where they are needed, in the layout needed

    # parameters, their casts and views

    def _stored_form(self, node: fx.Node, phase: str) -> Copy:
        """The parameter, cast where the graph casts it, in its stored layout."""
        if node.op == "placeholder":
            return self.copies[node][0]
        node = self.forms.first_of(node)
        phase = "prepare" if self.sums.operands and self.placement.casts_once else phase
        key = (node, phase)
        if key not in self.stored:
            source = self._stored_form(tensor_inputs(node)[0], phase)
            self.stored[key] = self._copy(node, [source.node], source.layout, phase)
            in_stage(self.stored[key].node, origin_of(source.node).stage)
        return self.stored[key]

    def _used_form(self, node: fx.Node, phase: str) -> Copy:
        """The parameter in the form that `phase` uses: gathered, then viewed."""
        if self.forms.name(node) in self.placement.kept:
            phase = "prepare" if self.sums.operands else "forward"
        key = (self.forms.first_of(node), phase, origin_of(node).stage)
        if key in self.used:
            return self.used[key]
        if self.forms.is_stored(node):
            stored = self._stored_form(node, phase)
            target = self.placement.used.get(self.forms.name(node), stored.layout).normalized(spec_of(node).shape)
            used = self._move(stored, target, node, phase)
        else:
            source = self._used_form(tensor_inputs(node)[0], phase)
            spec = spec_of(source.node)
            option = self._choose(node, [Operand(spec, (source.layout,))], source.layout.mesh)
            operand = self._move(source, option.operands[0], node, phase)
            used = self._copy(node, [operand.node], option.results[0], phase, option)
        self.used[key] = used
        return used

    # values and their copies

    def copies_in(self, node: fx.Node, phase: str) -> list[Copy]:
        """The copies of a value that a consumer in `phase` may use, the original first.

        Larger copies do not outlive their phase, except the first copy on each other mesh: the value is not sent twice.
        """
        if self.forms.is_of_parameter(node) and phase != "update":
            original, others, spec = self._used_form(node, phase), self.copies.get(node, [])[1:], None
        else:
            (original, *others), spec = self.copies[node], spec_of(node)
        if phase in ("reduce", "update") and node in self.due:  # a gradient is used in its stored layout
            wanted = [layout.normalized(spec_of(node).shape) for layout, _ in self.due[node]]
            return [c for c in (original, *others) if c.layout in wanted] or [original]
        usable, meshes = [original], {original.layout.mesh}
        for copy in others:
            lasts = copy.layout.mesh not in meshes or (spec and is_no_larger(copy.layout, original.layout, spec))
            meshes.add(copy.layout.mesh)
            usable += [copy] if lasts or copy.phase == phase else []
        return usable

    def fetch(self, node: fx.Node, wanted: Layout, phase: str) -> fx.Node:
        """The value in the layout `wanted`: an existing copy, or a new move from the cheapest copy."""
        wanted = wanted.normalized(spec_of(node).shape)
        if wanted.owned:
            return self._owned(node, wanted, phase)
        if self.forms.is_created_on_demand(node):
            return self._created(node, wanted, phase).node
        if self._is_view_abroad(node, wanted, phase) and (moved := self._viewed_abroad(node, wanted, phase)):
            return moved.node
        copies = self.copies_in(node, phase)
        for copy in copies:
            if copy.layout == wanted:
                return copy.node
        source = min(copies, key=lambda c: (self.price(c.layout, wanted, spec_of(node)), bool(c.layout.owned)))
        if source.layout.owned:
            source = self._by_rows(ours.leave_rows.default, source.node, source.layout.owned_as_parts(), node, phase)
            return self.fetch(node, wanted, phase)
        moved = self._move(source, wanted, node, phase)
        self.copies.setdefault(node, [source]).append(moved)
        return moved.node

    def _owned(self, node: fx.Node, wanted: Layout, phase: str) -> fx.Node:
        """The value with owned rows: an existing copy, or its whole rows narrowed to owned rows."""
        known = [] if self.forms.is_created_on_demand(node) else self.copies_in(node, phase)
        for copy in (*known, *self.copies.get(node, ())):
            if copy.layout == wanted and (copy in known or copy.phase == phase):
                return copy.node
        value = self.fetch(node, wanted.without_owned(), phase)
        return self._by_rows(ours.enter_rows.default, value, wanted, node, phase).node

    def _by_rows(self, target: Any, value: fx.Node, layout: Layout, node: fx.Node, phase: str) -> Copy:
        _, dim, key = (*layout.owned, *value.meta["layout"].owned)[0]
        ends = self.fetch(self.ends[key], ends_cut(layout, dim, self.ends[key]), phase)
        new = by_rows(target, value, ends, layout, node)
        new.meta["origin"] = replace(origin_of(node), phase=phase)
        copy = Copy(new, layout, phase)
        self.copies.setdefault(node, []).append(copy)
        return copy

    def _is_view_abroad(self, node: fx.Node, wanted: Layout, phase: str) -> bool:
        """Whether a view of a parameter is needed on another mesh than the parameter's."""
        return (
            node.op == "call_function"
            and node.target in VIEWS
            and phase != "update"
            and self.forms.is_of_parameter(node)
            and wanted.mesh != self.placement.homes[self.forms.parameter(node)]
        )

    def _viewed_abroad(self, node: fx.Node, wanted: Layout, phase: str) -> Copy | None:
        """A view of a parameter's copy on another mesh, which forward and backward share; None if the view is not
        possible there in the layout needed."""
        key = (node, str(wanted), phase)
        if key not in self.abroad:
            (source,) = tensor_inputs(node)
            option = follow_result(row_for(node).rule(node), wanted, [spec_of(source)], [spec_of(node)])
            if option.results[0] != wanted:
                return None
            value = self.fetch(source, option.operands[0], phase)
            self.abroad[key] = self._copy(node, [value], wanted, phase, option)
        return self.abroad[key]

    def _created(self, node: fx.Node, wanted: Layout, phase: str) -> Copy:
        """A value computed on demand in the layout needed: nothing moves, except to make it partial. It is recomputed
        in each phase; random values are shared by forward and backward, because drawing them again costs more."""
        operands = tensor_inputs(node)
        rule = row_for(node).rule(node)
        option = follow_result(rule, wanted, [spec_of(n) for n in operands], result_specs(node))
        plain = option.results[0]
        stays = self.forms.is_random(node)
        same = (c for c in self.copies.get(node, ()) if c.layout == plain and (stays or c.phase == phase))
        known = next(same, None)
        if known is None:
            values = [self.fetch(n, layout, phase) for n, layout in zip(operands, option.operands, strict=True)]
            known = self._copy(node, values, plain, phase, option)
            self.copies.setdefault(node, []).append(known)
        return self._move(known, wanted, node, phase)

    def _copy(
        self, node: fx.Node, values: list[fx.Node], layout: Layout, phase: str, option: Assignment | None = None
    ) -> Copy:
        new = self._emit(node, values, phase)
        new.meta.update({"layout": layout} if option is None else {"layout": layout, "assignment": option})
        return Copy(new, layout, phase)

    def _move(self, source: Copy, target: Layout, value: fx.Node, phase: str) -> Copy:
        if source.layout == target:
            return source
        new = self.graph.call_function(ops.move, (source.node, str(target)))
        origin = replace(origin_of(value), phase=phase, source=origin_of(value).source or self.line)
        new.meta.update(spec=spec_of(source.node), origin=origin, layout=target)
        return Copy(new, target, phase_of(new))

    # ops

    def _emit(self, node: fx.Node, values: list[fx.Node], phase: str) -> fx.Node:
        args, kwargs = replace_inputs(node, values)
        new = copy_meta(node, self.graph.call_function(node.target, args, kwargs))  # type: ignore[arg-type]
        if origin_of(new).phase != phase:
            new.meta["origin"] = replace(origin_of(new), phase=phase)
        if node.target in BY_ROWS:
            new.meta["key"] = key_of(node)
        return new

    def _choose(self, node: fx.Node, operands: list[Operand], mesh: Mesh) -> Assignment:
        """The cheapest assignment; decided once for equal nodes (the twins in repeated layers)."""
        due = [due for value in (node, *self.sums.of_gradient.get(node, ())) for due, _ in self.due.get(value, ())]
        # A sum of gradients has the layout of its operands; it is moved in the last microbatch.
        wanted = operands[0].layouts if node in self.sums.operands else tuple(dict.fromkeys(due))
        is_summed = bool(wanted) or self.sums.where == "whole"
        parts = tuple(is_summed and result in self.sums.parts for result in results_of(node))
        proposed = () if wanted else proposed_by_users(node, mesh, self.forms.is_created_on_demand, self._layout_of)
        if not wanted:
            proposed += lookup_cut(node, operands[0].layouts if operands else (), self.expert_axes)
        named = key_of(node) if node.target in BY_ROWS else ""
        attention = self.placement.attention
        uses = self._uses(node) if any(parts) else ()
        if uses and not wanted and self._has_parameter_shape(results_of(node)[0]):
            proposed += tuple(layout for layout in uses if layout.mesh == mesh)
        used = frozenset(axis for layout in uses for dim in layout.dims for axis in dim.axes)
        once = (self.sums.where, self.sums.microbatches, parts, used) if any(parts) else None
        fixed = (node.target, str(map_nodes(node, lambda n: None)), node.meta["spec"], mesh, named, attention, once)
        key = (*fixed, tuple(operands), wanted, proposed)
        if key not in self.decided:
            rule = as_asked(row_for(node).rule(node), attention)
            specs = result_specs(node)
            moved = tuple(self.sums.price(self.price, self.rates, used) if is_part else self.price for is_part in parts)
            prices = OpPrices(self.price, moved, self.rates)
            self.decided[key] = cheapest(rule, mesh, operands, specs, prices, wanted, proposed)
        return self.decided[key]

    def _uses(self, node: fx.Node) -> tuple[Layout, ...]:
        """The layouts in which parameters are used whose gradients a node computes, or parts of them."""
        names = (self.sums.names[result] for result in results_of(node) if result in self.sums.names)
        return tuple(dict.fromkeys(self.placement.used[name] for name in names))

    def _has_parameter_shape(self, part: fx.Node | None) -> bool:
        """Whether a part of a gradient has the dims of its parameter: casts and views may be between them."""
        if part is None or part not in self.sums.names:
            return False
        return spec_of(self.step.results["acc", self.sums.names[part]]).shape == spec_of(part).shape

    def _layout_of(self, node: fx.Node) -> Layout | None:
        return self.copies[node][0].layout if node in self.copies else None

    def _op(self, node: fx.Node) -> None:
        phase = phase_of(node)
        self.line = origin_of(node).source
        operands, mesh = tensor_inputs(node), self.placement.homes[node]
        described = [self._operand(n, phase, mesh) for n in operands]
        if node.target is ROUND_PARTS or node in self.sums.paths:
            described = [replace(h, weight=PINNED_WEIGHT) for h in described]
        try:
            option = self._choose(node, described, mesh)
        except RuleError as error:
            if error.where:
                raise
            got = f"{op_name(node.target)}: {error.got}"
            raise RuleError(error.what, where=str(origin_of(node)), got=got) from error
        if phase != "update":
            self.pinned.follow(node, operands, option, lambda n: self.copies[n][0].layout)
        values = [self.fetch(n, wanted, phase) for n, wanted in zip(operands, option.operands, strict=True)]
        new = self._emit(node, values, origin_of(node).phase)
        new.meta["assignment"] = option
        if isinstance(node.meta["spec"], tuple):
            rest = iter(option.results)
            layouts = tuple(next(rest) if s is not None else None for s in node.meta["spec"])
            new.meta["layout"] = layouts
            self.tuples[node] = (new, layouts)
            kept = homes(row_for(node).rule(node), node.meta["spec"], described)
            self.homes |= {(node, at): layout for at, layout in kept.items()}
            return
        new.meta["layout"] = option.results[0]
        self.copies[node] = [Copy(new, option.results[0], phase_of(new))]

    def _lay_out_sum(self, total: fx.Node) -> None:
        """Give an accumulated gradient its layout as soon as that of the microbatch's gradient is known, and start the
        move of this microbatch's gradient to it. The sum stays where it is added up."""
        so_far, gradient = self.sums.operands[total]
        stored = self.copies[so_far][0]
        if not self.forms.is_created_on_demand(gradient):
            shape = spec_of(so_far).shape
            produced = translate(self.copies_in(gradient, "backward")[0].layout, self.placement.homes[total])
            layout = self.sums.layout(produced, stored.layout, shape)
            stored.layout = stored.node.meta["layout"] = layout.normalized(shape)
            self.fetch(gradient, stored.layout, "backward")

    def _operand(self, node: fx.Node, phase: str, mesh: Mesh) -> Operand:
        """A value as an op on `mesh` sees it: in its layouts on that mesh, else as it would arrive from another."""
        spec = spec_of(node)
        if self.forms.is_created_on_demand(node):
            return Operand(spec, (Layout.replicated(mesh, len(spec.shape)),), 0.0)
        copies = self.copies_in(node, phase)
        here = [c.layout for c in copies if c.layout.mesh == mesh]
        here += [layout.owned_as_parts() for layout in here if layout.owned]
        layouts = tuple(dict.fromkeys(here or [translate(copies[0].layout, mesh).normalized(spec.shape)]))
        is_pinned = bool(self.pinned.of(node)) or (self.forms.is_of_parameter(node) and phase != "update")
        return Operand(spec, layouts, PINNED_WEIGHT if is_pinned else 1.0, len(node.users))

    def _item(self, node: fx.Node) -> None:
        source, layouts = self.tuples[node.args[0]]  # type: ignore[index]
        layout = layouts[node.args[1]]  # type: ignore[index]
        assert layout is not None
        self.pinned.axes[node] = self.pinned.of(node.args[0])  # type: ignore[arg-type]
        new = copy_meta(node, self.graph.call_function(operator.getitem, (source, node.args[1])), layout=layout)
        own = Copy(new, layout, phase_of(new))
        self.copies[node] = [own]
        target = self.homes.get((node.args[0], node.args[1]), layout).normalized(spec_of(node).shape)  # type: ignore[arg-type]
        if target != layout and node.users:
            self.copies[node] = [self._move(own, target, node, own.phase), *([] if layout.partial else [own])]

    def _pin(self, node: fx.Node) -> None:
        """A pin is its operand in the pinned layout; the gradient of an operator goes back to the operand's layout."""
        value, text, is_grad = node.args
        assert isinstance(value, fx.Node)
        pin, phase, spec = Pin.parse(str(text)), phase_of(node), spec_of(node)
        self.line = origin_of(node).source
        whole = Layout.replicated(self.placement.mesh, len(spec.shape))
        is_created = self.forms.is_created_on_demand(value)
        source = self._created(value, whole, phase) if is_created else self.copies_in(value, phase)[0]
        layout = source.layout if pin.mesh is not None else translate(source.layout, self.placement.homes[node])
        source_layout = target = layout.without_owned()
        if not pin.is_operator:
            target = pin.layout(source_layout, bool(is_grad))
        elif self.placement.mesh.num_devices > 1:
            target = self.pinned.pin(node, value, pin, source_layout, bool(is_grad))
        pinned = self.fetch(value, target.normalized(spec.shape), phase)
        self.copies[node] = [Copy(pinned, pinned.meta["layout"], phase_of(pinned))]


def place(
    step: StepGraph,
    placement: Placement,
    price: Price,
    decided: dict[Any, Assignment] | None = None,
    rates: Rates = default_rates,
) -> StepGraph:
    """The placed graph: every node has a layout (`meta["layout"]`), every op an assignment, every disagreement a move.

    `price(source, target, spec)` is the time in seconds of a move, `rates` are the compute rates for repeated work.
    `decided` may be passed on from an earlier placement by the same price and rates: decisions for equal ops are then
    reused. Raises RuleError for an op without a rule.
    """
    check_captured(step)
    return _Placer(step, placement, owned_price(price), rates, decided={} if decided is None else decided).run()


# Layouts that a value's users propose, for dims whose cut no operand of its op determines: dims that an op broadcasts,
# and a sum that has to be reduced before it is rounded.

_MOST_VALUES = 32  # visited per op: the relevant users are inside the same composite (a softmax, a loss)

Map = tuple[int | None, ...]  # for each dim of a value, the dim of the op's result that it runs along


def proposed_by_users(
    node: fx.Node, mesh: Mesh, is_free: Callable[[fx.Node], bool], layout_of: Callable[[fx.Node], Layout | None]
) -> tuple[Layout, ...]:
    """The layout in which users need broadcast dims of a node's result, or those of a sum that has to be reduced before
    it is rounded: none, or a single layout.

    `is_free`: whether a value is computed on demand, in any piece. `layout_of`: the layout of a placed value.
    """
    dims = _spread_dims(node, lambda n: not is_free(n)) or _rounded_dims(node, layout_of)
    proposed = _layout_of_users(node, dims, lambda n: None if is_free(n) else layout_of(n)) if dims else None
    return (proposed,) if proposed is not None and proposed.mesh == mesh else ()


def _spread_dims(node: fx.Node, is_stored: Callable[[fx.Node], bool]) -> frozenset[int]:
    """Dims of a node's result that none of its stored operands has: no layout of theirs can shard them."""
    spec, operands = node.meta["spec"], tensor_inputs(node)
    if not isinstance(spec, Spec) or spec.num_elements < 2:
        return frozenset()
    if max((spec_of(n).num_elements for n in operands if is_stored(n)), default=0) >= spec.num_elements:
        return frozenset()
    rule = row_for(node).rule(node)
    known = {f for n, dims in zip(operands, rule.operands, strict=True) if is_stored(n) for dim in dims for f in dim}
    outer = {d: rule.outer(rule.results[0], d) for d in range(len(spec.shape))}
    return frozenset(d for d, f in outer.items() if f is not None and f not in known and rule.is_shardable(f))


def _rounded_dims(node: fx.Node, layout_of: Callable[[fx.Node], Layout | None]) -> frozenset[int]:
    """The dims of a cast that its operand, a partial sum, does not pass."""
    layout = layout_of(tensor_inputs(node)[0]) if node.target in CASTS else None
    if layout is None or not layout.partial or any("sum" in term.ops for term in row_for(node).rule(node).linear):
        return frozenset()
    return frozenset(range(len(spec_of(node).shape)))


def _layout_of_users(
    node: fx.Node, dims: frozenset[int], layout_of: Callable[[fx.Node], Layout | None]
) -> Layout | None:
    """How the values that a node's result meets are sharded along `dims`; None if they are not sharded, or not yet
    placed. Breadth-first search from the result to its users, and their other operands and results."""
    start: Map = tuple(d if d in dims else None for d in range(len(spec_of(node).shape)))
    queue, seen = deque([(node, start)]), {node}
    while queue and len(seen) < _MOST_VALUES:
        value, along = queue.popleft()
        for other, mapped in _neighbours(value, along, is_start=value is node):
            if other in seen or all(d is None for d in mapped):
                continue
            seen.add(other)
            layout = layout_of(other)
            if layout is None:
                queue.append((other, mapped))
            elif any(layout.dims[d].axes for d, to in enumerate(mapped) if to is not None):
                cut = {to: layout.dims[d] for d, to in enumerate(mapped) if to is not None}
                return Layout(layout.mesh, tuple(cut.get(d, DimSharding()) for d in range(len(start))))
    return None


def _neighbours(value: fx.Node, along: Map, is_start: bool) -> Iterator[tuple[fx.Node, Map]]:
    """The operands and results of the ops that use a value, and of the op that computes it."""
    for op in [*value.users, *([] if is_start else [value])]:
        if op.op != "call_function" or not isinstance(op.meta.get("spec"), Spec):
            continue
        try:
            rule = row_for(op).rule(op)
        except RuleError:  # placement raises it again
            continue
        places = list(zip([*tensor_inputs(op), op], (*rule.operands, *rule.results), strict=True))
        to = {rule.outer(dims, d): r for n, dims in places if n is value for d, r in enumerate(along) if r is not None}
        to.pop(None, None)
        yield from ((n, tuple(to.get(rule.outer(dims, d)) for d in range(len(dims)))) for n, dims in places)
