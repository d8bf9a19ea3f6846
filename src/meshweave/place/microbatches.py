"""Writes the step on a microbatch from that on the whole batch (`over_time`), so that the sum over microbatches of its
loss, metrics and gradients is that of the whole batch."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir.graph import (
    Input,
    Origin,
    Spec,
    StepGraph,
    erase_unused,
    map_nodes,
    op_name,
    origin_of,
    spec_of,
    tensor_inputs,
    with_ancestors,
)
from meshweave.ir.layout import Layout
from meshweave.ir.pieces import is_even
from meshweave.ir.traits import RANDOM
from meshweave.ops.emit import Emitter
from meshweave.ops.registry import result_specs, row_for
from meshweave.place.assign import Assignment, follow_result
from meshweave.place.over_time import CutOverTime, adds_number, as_sum, is_op, rule_over_time

aten = torch.ops.aten
_SUMS = ("loss", "metric", "grad")  # outputs that are added up over the microbatches


class NoCutError(MeshweaveError):
    """A step that has no exact form on microbatches."""


@dataclass(frozen=True, slots=True)
class Microbatches:
    """`step`: the step on a microbatch, of equal shapes for all. `ahead`: what it needs of the whole batch, as outputs
    of a graph on the whole batch; `step` has them as inputs of kind ahead with the same names."""

    step: StepGraph
    ahead: StepGraph | None


def microbatches_of(step: StepGraph, cut: CutOverTime, own_parts: int = 1) -> Microbatches:
    """The step on a microbatch; of the rows of each of `own_parts` ranks it has a part. Raises NoCutError if ops couple
    microbatches."""
    if cut.couplings:
        first = cut.couplings[0]
        got, where = f"{op_name(first.node.target)} of {op_name(first.value.target)}", str(origin_of(first.node))
        raise NoCutError("an op needs a value of the rows of all microbatches", got=got, where=where)
    if not cut.rows:
        raise NoCutError("no entry of the batch has rows", got="0 entries that forward reads", where="the batch")
    sources = {(item.kind, item.name): node for node, item in step.sources.items()}
    for (kind, name), node in step.results.items():
        if kind == "buffer" and node is not sources[kind, name] and node not in cut.ahead:
            raise NoCutError("forward changes a buffer in each microbatch", got=name, where=str(origin_of(node)))
    ahead = _ahead(step, cut) if cut.ahead else None
    return Microbatches(_MicrobatchWriter(step, cut, own_parts).run(), ahead)


def _ahead(step: StepGraph, cut: CutOverTime) -> StepGraph:
    """What the microbatches need of the whole batch, on the whole batch."""
    needed = with_ancestors(cut.ahead)
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in step.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
            copies[node].meta["origin"] = replace(origin_of(node), phase="forward")
    graph.output([copies[value] for value in cut.ahead])
    inputs = tuple(item for node, item in step.sources.items() if node in needed)
    constants = {item.name: step.constants[item.name] for item in inputs if item.kind == "constant"}
    return StepGraph(graph, inputs, tuple(("output", value.name) for value in cut.ahead), constants)


@dataclass(slots=True)
class _MicrobatchWriter:
    step: StepGraph
    cut: CutOverTime
    own_parts: int
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[tuple[fx.Node, Layout | None], fx.Node] = field(default_factory=dict)
    errors: dict[fx.Node, NoCutError] = field(default_factory=dict)  # of values without a form on a microbatch
    places: dict[tuple[int, str], fx.Node] = field(default_factory=dict)  # of a microbatch's rows, by their number
    number: fx.Node | None = None  # of the microbatch, among all
    phase: str = "forward"  # of the node that is being written

    def run(self) -> StepGraph:
        inputs = [self.input(node, item) for node, item in self.step.sources.items()]
        inputs += [self.whole_value(value) for value in self.cut.ahead]
        self.count()
        sums = {value for (kind, _), value in self.step.results.items() if kind in _SUMS}
        for node in self.step.graph.nodes:
            if node.op == "call_function":
                self.phase = origin_of(node).phase
                try:
                    self.node(node)
                except NoCutError as error:
                    self.errors[node] = error  # for who needs it: of what is known ahead, nobody
            if node in sums:
                self.result(node)
        results = [
            self.result(value) if value in sums else self.any_form(value) for value in self.step.results.values()
        ]
        self.graph.output(results)
        erase_unused(self.graph, list(self.graph.nodes))  # parts of what is known ahead
        return StepGraph(self.graph, tuple(inputs), self.step.outputs, self.step.constants)

    def input(self, node: fx.Node, item: Input) -> Input:
        layout = self.cut.layouts[node]
        local = self.graph.placeholder(node.name)
        spec = Spec(self.local_shape(item.spec, layout), item.spec.dtype)
        local.meta.update(node.meta, spec=spec)
        self.values[node, layout] = local
        return replace(item, spec=spec)

    def whole_value(self, value: fx.Node) -> Input:
        local = self.graph.placeholder(f"ahead_{value.name}")
        local.meta.update(value.meta)
        self.values[value, self.whole(value)] = local
        return Input("ahead", value.name, spec_of(value))

    def whole(self, value: fx.Node) -> Layout:
        return Layout.replicated(self.cut.mesh, len(spec_of(value).shape))

    def node(self, node: fx.Node) -> None:
        if node.target is operator.getitem or node not in self.cut.calls:
            args, kwargs = map_nodes(node, self.any_form)
            layout = self.cut.layouts.get(node)
            self.values[node, layout] = self.call(node, args, kwargs, layout)
            return
        chosen = self.cut.calls[node]
        operands = [
            self.value(value, layout) for value, layout in zip(tensor_inputs(node), chosen.operands, strict=True)
        ]
        if node in self.cut.averaged:
            operands = [self.estimate(x, at) for x, at in zip(operands, chosen.operands, strict=True)]
        layout = self.cut.layouts.get(node)  # None: it has several results
        self.values[node, layout] = local = self.written(node, operands, layout, chosen)
        if adds_number(node) and layout is not None and layout.partial:
            count = self.cut.mesh.num_devices
            shares = (arg if isinstance(arg, fx.Node) else arg / count for arg in local.args[:2])  # type: ignore[operator]
            local.args = (*shares, *local.args[2:])

    def estimate(self, local: fx.Node, layout: Layout) -> fx.Node:
        """What a microbatch takes for a value of the whole batch: its sum times their number."""
        if not layout.partial:
            return local
        return self.scaled(aten.mul.Scalar, local)

    def scaled(self, target: Any, local: fx.Node) -> fx.Node:
        """A value times, or divided by, the number of microbatches."""
        new = self.graph.call_function(target, (local, self.cut.mesh.num_devices))
        new.meta.update(local.meta)
        return new

    def any_form(self, node: fx.Node) -> fx.Node:
        """A value as it is: after backward gradients are sums over all microbatches."""
        if node in self.cut.ahead:
            return self.values[node, self.whole(node)]
        if node in self.errors:
            raise self.errors[node]
        return self.values[node, self.cut.layouts.get(node)]

    def result(self, value: fx.Node) -> fx.Node:
        """A microbatch's share of a result that is added up."""
        layout = self.cut.layouts.get(value)
        if layout is not None and not layout.partial:
            return self.value(value, as_sum(layout))
        return self.any_form(value)

    def value(self, value: fx.Node, wanted: Layout) -> fx.Node:
        """A value of the whole step in a layout over time."""
        if (value, wanted) not in self.values:
            self.values[value, wanted] = local = self.formed(value, wanted)
            local.meta["origin"] = replace(origin_of(value), phase=self.phase)
        return self.values[value, wanted]

    def count(self) -> None:
        """The runtime counts microbatches over all steps: random numbers are those of the step."""
        for node, item in self.step.sources.items():
            if (item.kind, item.name) == ("scalar", "draw"):
                draw, parts = self.any_form(node), self.cut.mesh.num_devices
                self.number = self.emit(aten.remainder.Scalar, (draw, parts), spec_of(draw))
                step = self.emit(aten.floor_divide.default, (draw, parts), spec_of(draw))
                self.values[node, self.cut.layouts[node]] = step

    def emit(self, target: Any, args: Any, spec: Spec) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update(spec=spec, origin=Origin(self.phase))
        return node

    def formed(self, value: fx.Node, wanted: Layout) -> fx.Node:
        if value in self.errors and (value, self.whole(value)) not in self.values:
            raise self.errors[value]
        if wanted.partial:  # each microbatch has its share of a value that all have
            return self.scaled(aten.div.Scalar, self.values[value, self.whole(value)])
        try:
            return self.computed(value, wanted)
        except NoCutError:
            if (value, self.whole(value)) not in self.values or self.number is None:
                raise
            return self.taken(self.values[value, self.whole(value)], wanted)

    def taken(self, whole: fx.Node, wanted: Layout) -> fx.Node:
        """The rows of a microbatch of a value of the whole batch, by their places in it."""
        spec, (d, dim) = spec_of(whole), next((d, dim) for d, dim in enumerate(wanted.dims) if dim.axes)
        self.local_shape(spec, wanted)
        stretches, parts, size = dim.stretches * self.own_parts, self.cut.mesh.num_devices, spec.shape[d]
        if size % (stretches * parts):
            raise NoCutError("microbatches of different sizes", got=f"{size} rows in {stretches} x {parts}")
        before, after, each = spec.shape[:d], spec.shape[d + 1 :], size // stretches
        wide = Spec((*before, stretches, each, *after), spec.dtype)
        rows = Spec((*before, stretches, each // parts, *after), spec.dtype)
        own = Spec((*before, size // parts, *after), spec.dtype)
        if stretches == 1:
            return self.emit(aten.index_select.default, (whole, d, self.place(each // parts)), own)
        view = self.emit(aten.view.default, (whole, list(wide.shape)), wide)
        taken = self.emit(aten.index_select.default, (view, d + 1, self.place(each // parts)), rows)
        return self.emit(aten.view.default, (taken, list(own.shape)), own)

    def place(self, count: int) -> fx.Node:
        """The places of the `count` rows of a microbatch."""
        key = count, self.phase
        if key not in self.places:
            spec = Spec((count,), torch.int64)
            line = self.graph.call_function(aten.arange.start_step, (0, count, 1), {"dtype": torch.int64})
            line.meta.update(spec=spec, origin=Origin(self.phase))
            first = self.emit(aten.mul.Scalar, (self.number, count), Spec((), torch.int64))
            self.places[key] = self.emit(aten.add.Tensor, (line, first), spec)
        return self.places[key]

    def computed(self, value: fx.Node, wanted: Layout) -> fx.Node:
        """A value of the whole batch, computed on rows."""
        operands, option = tensor_inputs(value), None
        if is_op(value) and isinstance(value.meta["spec"], Spec):
            option = follow_result(rule_over_time(value), wanted, list(map(spec_of, operands)), result_specs(value))
        if option is None or option.results[0] != wanted:
            where = str(origin_of(value))
            raise NoCutError("an op needs its rows of a value of the whole batch", got=value.name, where=where)
        rows = [self.value(n, layout) for n, layout in zip(operands, option.operands, strict=True)]
        return self.written(value, rows, wanted, option)

    def written(self, node: fx.Node, operands: Sequence[fx.Node], layout: Layout | None, chosen: Assignment) -> fx.Node:
        """An op on the rows of a microbatch."""
        rest = iter(operands)
        args, kwargs = map_nodes(node, lambda n: next(rest) if isinstance(n.meta.get("spec"), Spec) else n)
        if not any(each.sharded_axes for each in (*chosen.operands, *chosen.results)):
            return self.call(node, args, kwargs, layout)
        shape_at = row_for(node).on_piece.shape_at
        if node.target in RANDOM:
            assert layout is not None
            size = list(self.local_shape(spec_of(node), layout))
            d, dim = next((d, dim) for d, dim in enumerate(layout.dims) if dim.axes)
            cut = [d, self.cut.mesh.num_devices, dim.stretches * self.own_parts]
            step = self.emit(aten.mul.Scalar, (args[0], self.cut.mesh.num_devices), spec_of(args[0]))
            step = self.emit(aten.add.Tensor, (step, self.number), spec_of(step))
            args = (step, *args[1:3], size, [0] * len(size), size, *args[6:], cut)
        elif shape_at >= 0 and layout is not None:
            args = (*args[:shape_at], list(self.local_shape(spec_of(node), layout)), *args[shape_at + 1 :])
        elif node not in self.cut.averaged:
            args, kwargs = self.on_piece(node, operands, args, kwargs, chosen)
        return self.call(node, args, kwargs, layout)

    def on_piece(
        self, node: fx.Node, operands: Sequence[fx.Node], args: Any, kwargs: Any, chosen: Assignment
    ) -> tuple[Any, Any]:
        """The arguments of an op on the rows of a microbatch, as on a device's piece. A call with the place of the
        piece is another for each microbatch."""
        scratch, emit = fx.Graph(), Emitter((self.cut.mesh,), fx.Graph())
        shadows = [scratch.placeholder(value.name) for value in operands]
        for shadow, value, layout in zip(shadows, tensor_inputs(node), chosen.operands, strict=True):
            shadow.meta.update(value.meta, layout=layout)
        rest = iter(shadows)
        copied = map_nodes(node, lambda n: next(rest) if isinstance(n.meta.get("spec"), Spec) else n)
        shadow = scratch.create_node("call_function", node.target, *copied)
        layouts, specs = iter(chosen.results), node.meta["spec"]
        is_single = isinstance(specs, Spec)
        shadow.meta.update(node.meta, layout=next(layouts) if is_single else [s and next(layouts) for s in specs])
        local = row_for(node).on_piece.call(emit, shadow, operands, args, kwargs)
        if emit.symbols or local.target is not node.target:
            raise NoCutError(
                "an op depends on which rows of the batch it gets", got=node.name, where=str(origin_of(node))
            )
        written = local.args, local.kwargs
        local.args, local.kwargs = (), {}  # no longer a user of the microbatch's values
        return written

    def call(self, node: fx.Node, args: Any, kwargs: Any, layout: Layout | None) -> fx.Node:
        local = self.graph.create_node("call_function", node.target, args, kwargs)
        local.meta.update(node.meta)
        specs = node.meta["spec"]
        if layout is not None and isinstance(specs, Spec):
            local.meta["spec"] = Spec(self.local_shape(specs, layout), specs.dtype)
        elif node in self.cut.calls and not isinstance(specs, Spec):
            layouts = iter(self.cut.calls[node].results)
            local.meta["spec"] = tuple(
                None if s is None else Spec(self.local_shape(s, next(layouts)), s.dtype) for s in specs
            )
        return local

    def local_shape(self, spec: Spec, layout: Layout) -> tuple[int, ...]:
        for d, dim in enumerate(layout.dims):
            if dim.axes and not is_even(spec.shape[d] // dim.stretches, layout.parts(d), dim.unit):
                raise NoCutError(
                    "microbatches of different sizes", got=f"{spec.shape[d]} rows in {self.cut.mesh.num_devices}"
                )
        return layout.local_shape(spec.shape)
