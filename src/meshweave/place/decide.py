"""From a resolved plan to the layouts of all inputs of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import fx

from meshweave.capture.batch import batch_size
from meshweave.ir.graph import Input, Spec, StepGraph, origin_of, spec_of, tensor_inputs
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import is_even
from meshweave.ops.factors import Rule
from meshweave.ops.registry import TABLE, results_of, row_for
from meshweave.place.mapping import Homes
from meshweave.place.plans import Resolved
from meshweave.place.sequences import has_sequence, sequence_length


@dataclass(frozen=True, slots=True)
class Placement:
    """The decisions of a plan: the layouts of every input as stored and of parameters as used, and the mesh of every op
    of the captured step."""

    mesh: Mesh
    stored: Mapping[tuple[str, str], Layout]
    used: Mapping[str, Layout]
    homes: Homes
    kept: frozenset[str] = frozenset()  # parameters that stay gathered from forward to backward
    microbatches: int = 1
    accumulate_in: str = "whole"  # where their gradients are added up, see `place.sums`
    casts_once: bool = True  # under accumulation: casts of parameters are those of the first microbatch
    attention: str = "auto"  # see `Plan.cp`

    def keeping(self, other: Placement) -> Placement:
        """The same, with the layouts of parameters, buffers and optimizer state of `other`: for a second program on the
        same state."""
        lasting = {key: layout for key, layout in other.stored.items() if key[0] in ("param", "buffer", "state")}
        return replace(self, stored={**self.stored, **lasting}, used={**self.used, **other.used})

    def layout(self, kind: str, name: str, spec: Spec) -> Layout:
        """Layout of an input or output: new values are stored like old values, gradients like their parameters."""
        stored = self.stored.get(("param" if kind == "grad" else kind, name))
        return stored if stored is not None else Layout.replicated(self.mesh, len(spec.shape))


Units = Mapping[str, tuple[int, ...]]


def decide(
    resolved: Resolved, step: StepGraph, mesh: Mesh, units: Units, homes: Homes, microbatches: int = 1
) -> Placement:
    """The layouts that the plan requires.

    A parameter is used in its tensor-parallel layout and stored with the state axes added, both as far as its mesh has
    these axes; gradients and optimizer state are stored like it. Batch tensors are on the whole mesh, sharded on dim 0
    if they have the batch's size, and over context axes on dim 1 if they have a sequence (unless the sequence is
    reordered first: then it is whole). A single row is on every device, as no op is cut over it.
    """
    stored: dict[tuple[str, str], Layout] = {}
    used: dict[str, Layout] = {}
    at = {(i.kind, i.name): homes[n] for n, i in step.sources.items()}
    for item in (i for i in step.inputs if i.kind == "param"):
        layout = _used_layout(resolved, item, at["param", item.name], units.get(item.name, ()))
        used[item.name] = layout.normalized(item.spec.shape)
        stored["param", item.name] = _with_state_axes(layout, resolved.state_axes, item.spec).normalized(
            item.spec.shape
        )
    size = batch_size(i.spec.shape for i in step.inputs if i.kind == "batch")
    axes = resolved.cutting_batch(mesh) if size != 1 else ()
    context = tuple(a for a in mesh.axis_names if a in resolved.context_axes)
    length = sequence_length(step) if context else 0
    context = () if resolved.is_balanced else context
    params = {i.name: i.spec.shape for i in step.inputs if i.kind == "param"}
    for item in step.inputs:
        rank = len(item.spec.shape)
        if item.kind == "state":
            stored["state", item.name] = _state_layout(stored["param", item.name.partition("/")[2]], params, item)
        elif item.kind == "buffer":
            stored["buffer", item.name] = Layout.replicated(at["buffer", item.name], rank)
        elif item.kind == "batch" and rank and item.spec.shape[0] == size:
            along = context if context and has_sequence(item, size, length) else ()
            stored["batch", item.name] = Layout.of(mesh, rank, {0: axes, **({1: along} if along else {})}).normalized(
                item.spec.shape
            )
    return Placement(mesh, stored, used, homes, frozenset(resolved.kept), microbatches, attention=resolved.attention)


def _state_layout(layout: Layout, params: Mapping[str, tuple[int, ...]], item: Input) -> Layout:
    """The layout of optimizer state whose parameter is stored in `layout`: the same in dims of equal size.

    Adafactor keeps a row and a column of each matrix: a dim of size 1, or a missing dim, is replicated.
    """
    shape, of_param = item.spec.shape, params[item.name.partition("/")[2]]
    if shape == of_param:
        return layout
    if len(shape) != len(of_param):
        return Layout.replicated(layout.mesh, len(shape))
    dims = [dim if a == b else DimSharding() for a, b, dim in zip(shape, of_param, layout.dims, strict=True)]
    return Layout(layout.mesh, tuple(dims)).normalized(shape)


def _used_layout(resolved: Resolved, item: Input, mesh: Mesh, units: Sequence[int]) -> Layout:
    dims = [DimSharding()] * len(item.spec.shape)
    for axis, dim in resolved.shards.get(item.name, {}).items():
        if dim >= 0 and axis in mesh.axis_names:
            dims[dim] = DimSharding((*dims[dim].axes, axis), units[dim] if dim < len(units) else 1)
    return Layout(mesh, tuple(dims))


def _with_state_axes(layout: Layout, axes: Sequence[str], spec: Spec) -> Layout:
    """Add each state axis to the first dim that it divides evenly, else to the largest dim."""
    for axis in (a for a in axes if a in layout.mesh.axis_names and a not in layout.sharded_axes):
        if not spec.shape or layout.mesh.size(axis) == 1:
            continue
        pieces = layout.local_shape(spec.shape)
        even = [
            d
            for d in range(len(pieces))
            if is_even(spec.shape[d], (*layout.parts(d), layout.mesh.size(axis)), layout.dims[d].unit)
        ]
        dim = even[0] if even else max(range(len(pieces)), key=lambda d: pieces[d] // layout.dims[d].unit)
        layout = layout.with_dim(dim, DimSharding((*layout.dims[dim].axes, axis), layout.dims[dim].unit))
    return layout


def infer_units(step: StepGraph) -> dict[str, tuple[int, ...]]:
    """For each parameter dim the block size in which to cut it, so that views of results keep whole heads.

    The output dim of a query projection that is viewed as (heads, head_dim) gets unit head_dim. Computed by propagating
    units through rules, forward and backward, to a fixed point; a unit never exceeds its dim.
    """
    forward = [n for n in step.graph.nodes if n.op == "call_function" and origin_of(n).phase in ("forward", "loss")]
    ruled = [(row_for(n).rule(n), [*tensor_inputs(n), *results_of(n)]) for n in forward if n.target in TABLE]
    units: dict[fx.Node, list[int]] = {
        n: [1] * len(spec_of(n).shape) for n in step.graph.nodes if isinstance(n.meta.get("spec"), Spec)
    }
    for _ in range(8):
        changed = False
        for rule, values in [*ruled, *reversed(ruled)]:
            changed |= _carry(rule, values, units)
        if not changed:
            break
    names = {n: i for n, i in step.sources.items() if i.kind == "param"}
    return {item.name: tuple(units[node]) for node, item in names.items()}


def _carry(rule: Rule, values: Sequence[fx.Node | None], units: dict[fx.Node, list[int]]) -> bool:
    """Make all dims whose outermost factor is this factor agree on its unit: the largest unit among them."""
    count: dict[int, int] = {}
    places = []
    for node, dims in zip(values, (*rule.operands, *rule.results), strict=True):
        for d in range(len(dims)):
            factor = rule.outer(dims, d)
            if factor is None or node is None:
                continue
            inner = rule.inner_size(dims, d, factor)
            places.append((node, d, factor, inner))
            if units[node][d] % inner == 0:
                count[factor] = max(count.get(factor, 1), units[node][d] // inner)
    changed = False
    for node, d, factor, inner in places:
        unit = count.get(factor, 1) * inner
        if unit > units[node][d] and unit < spec_of(node).shape[d]:
            units[node][d] = unit
            changed = True
    return changed
