"""Layouts that a value's users propose, for dims whose cut no operand of its op determines: dims that an op broadcasts,
and a sum that has to be reduced before it is rounded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from torch import fx

from meshweave.errors import RuleError
from meshweave.ir.graph import Spec, spec_of, tensor_inputs
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.traits import CASTS
from meshweave.ops.registry import row_for

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
