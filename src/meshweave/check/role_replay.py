"""Replays a role's rank graph without tensors: which value each local array is a form of, and its contents on the
devices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from meshweave.check.dispatch import check_dispatch, is_sparse, sparse_source
from meshweave.check.numbers import Numbers
from meshweave.errors import VerifyError
from meshweave.ir import local_ops, ops
from meshweave.ir.collectives import STARTS, WAIT
from meshweave.ir.graph import Spec, StepGraph, call_text, map_nodes, op_name, origin_of, spec_of, tensor_inputs
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import SYMBOLS, RankGraph, operands_of
from meshweave.ops.emit import Emitter
from meshweave.ops.factors import Dims, Rule
from meshweave.ops.pieces import AS_IT_IS
from meshweave.ops.registry import result_specs, row_for
from meshweave.replay.holdings import (
    Holding,
    check_is,
    deal_blocks,
    holding_of,
    join_blocks,
    keep_first,
    narrow,
    pad,
    scaled,
)

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ReplayedValue:
    """A form of the value of placed node `root`: in a layout, or in the middle of a move (layout None). `readers`, if
    set, is the mask of the rows that it has: rows that a device does not read are missing."""

    root: fx.Node
    holding: Holding
    layout: Layout | None = None
    readers: fx.Node | None = None


@dataclass(frozen=True, slots=True)
class Several:
    """The results of an op with several: absent results have no layout."""

    root: fx.Node
    layouts: tuple[Layout | None, ...]


class SharedFacts:
    """What the roles share: the meaning of every name, and what has been proven. Equal steps (the twins of repeated
    layers) are proven once, so that depth costs next to nothing."""

    def __init__(self, placed: StepGraph) -> None:
        self.placed = placed
        self.by_name = {n.name: n for n in placed.graph.nodes}
        self.roots: dict[fx.Node, fx.Node] = {}  # through moves to the node that computed the value
        for node in placed.graph.nodes:
            moved = node.args[0] if node.target is ops.move else None
            self.roots[node] = self.roots[moved] if isinstance(moved, fx.Node) else node
        self.partial = check_dispatch(placed, self.roots.__getitem__)
        self.num_values = self.num_steps = self.num_twins = 0
        self._proven: dict[Any, Any] = {}
        self._holdings: dict[Any, Holding] = {}
        self._inferred: dict[Any, tuple[Layout, ...]] = {}
        self._texts: dict[fx.Node, str] = {}

    def meaning(self, node: fx.Node) -> fx.Node | None:
        """The node of the placed graph whose local value this node claims to be."""
        name = node.meta.get("global")
        if name is not None and name not in self.by_name:
            raise VerifyError("is marked as a value that the placed graph lacks", got=str(name))
        return None if name is None else self.by_name[name]

    def once(self, key: Any, prove: Callable[[], Any]) -> Any:
        """The result of `prove`, which is called for the first of equal keys."""
        if key in self._proven:
            self.num_twins += 1
        else:
            self._proven[key] = prove()
            self.num_steps += 1
        return self._proven[key]

    def holding(self, layout: Layout, shape: tuple[int, ...], devices: tuple[int, ...]) -> Holding:
        """`holding_of`, shared by equal arguments: equal steps are identified by their operands."""
        key = (layout, shape, devices)
        if key not in self._holdings:
            self._holdings[key] = holding_of(*key)
        return self._holdings[key]

    def inferred(self, op: fx.Node, layouts: Sequence[Layout]) -> tuple[Layout, ...]:
        """Layouts of an op's results by its rule; the same for equal ops on equally laid out operands."""
        if op not in self._texts:
            self._texts[op] = str(map_nodes(op, lambda n: None))
        specs, placed = tuple(spec_of(n) for n in tensor_inputs(op)), op.meta["layout"]
        placed_results = placed if isinstance(placed, tuple) else (placed,)
        named = op.meta.get("key")
        key = (op.target, self._texts[op], specs, str(op.meta["spec"]), tuple(layouts), placed_results, named)
        if key not in self._inferred:
            mesh = layouts[0].mesh if layouts else first_layout(placed).mesh
            operands: list[Placed] = list(zip(specs, layouts, strict=True))
            self._inferred[key] = infer(row_for(op).rule(op), mesh, operands, result_specs(op), placed_results)
        return self._inferred[key]


@dataclass(slots=True)
class RoleReplay:
    """The progress of a role through its graph: the states of its values, and the meeting that it has reached."""

    rank: RankGraph
    known: SharedFacts
    devices: tuple[int, ...] = ()
    states: dict[fx.Node, Any] = field(default_factory=dict)
    at: fx.Node | None = None
    ran: set[fx.Node] = field(default_factory=set)
    numbers: Numbers = field(init=False)
    _emit: Emitter = field(init=False)
    _any: fx.Node = field(init=False)  # any operand of a call that is written to be compared
    _nodes: Iterator[fx.Node] = field(init=False)

    def __post_init__(self) -> None:
        self.devices = tuple(self.rank.devices)
        self.numbers, self._nodes = Numbers(self.rank), iter(self.rank.graph.nodes)
        self._emit = Emitter(self.rank.meshes)
        self._any = self._emit.graph.placeholder("operand")

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.devices[:4])) + (", ..." if len(self.devices) > 4 else "")
        return f"device{'s' if len(self.devices) > 1 else ''} {shown}"

    def advance(self) -> None:
        """Continue to the next meeting, or to the end."""
        self.at = None
        for node in self._nodes:
            if node.target in MEETINGS:
                self.at = node
                return
            try:
                self.states[node] = self._state(node)
            except VerifyError as error:
                raise self.at_node(node, error) from error

    def settle(self, node: fx.Node, state: Any) -> None:
        """Store this role's result of a meeting."""
        try:
            self.states[node] = self._prove_value(state, self.known.meaning(node))
        except VerifyError as error:
            raise self.at_node(node, error) from error

    def at_node(self, node: fx.Node, error: VerifyError) -> VerifyError:
        """The error with its node and source line."""
        place = ", ".join(filter(None, [str(origin_of(node)), str(self), error.where]))
        called = op_name(node.target) if node.op == "call_function" else node.op
        return VerifyError(f"{node.name} ({called}): {error.what}", where=place, got=error.got, expected=error.expected)

    def in_layout(self, root: fx.Node, layout: Layout) -> ReplayedValue:
        return ReplayedValue(root, self.known.holding(layout, spec_of(root).shape, self.devices), layout)

    def at_hand(self, value: ReplayedValue, wanted: fx.Node) -> None:
        """Raise VerifyError if rows are missing of a value that is used as the placed node `wanted`."""
        rows_given = sparse_source(wanted)
        if value.readers is not None and (rows_given is None or self.known.roots[rows_given] is not value.readers):
            raise VerifyError(
                "rows are missing that others read",
                got=f"the rows that {value.readers.name} says are read",
                expected="all rows" if rows_given is None else f"those of {self.known.roots[rows_given].name}",
            )

    def proven_in(self, value: ReplayedValue, layout: Layout) -> ReplayedValue:
        """The value, proven to be in `layout`."""
        if value.layout == layout:
            return value
        shape = spec_of(value.root).shape
        if not layout.mesh.covers(self.devices):
            raise VerifyError("is needed on other devices", got=str(self), expected=f"{layout} on {layout.mesh}")
        self.known.once(("is", value.holding, layout, shape), lambda: check_is(value.holding, layout, shape))
        return replace(self.in_layout(value.root, layout), readers=value.readers)

    def operand(self, node: fx.Node, wanted: fx.Node) -> ReplayedValue:
        """The value of a consumer's operand, the placed node `wanted`: a form of it, in some layout."""
        value = self.states[node]
        if not isinstance(value, ReplayedValue) or value.root is not self.known.roots[wanted]:
            raise VerifyError(
                f"takes {node.name}, another value", got=_name(value), expected=self.known.roots[wanted].name
            )
        self.at_hand(value, wanted)
        try:
            return self.proven_in(value, wanted.meta["layout"])
        except VerifyError as error:
            if value.layout is not None:
                return value  # in another layout: the rule decides whether the op accepts it
            what = f"takes {node.name} before it has the value of {wanted.name}: {error.what}"
            raise VerifyError(what, where=error.where, got=error.got, expected=error.expected) from error

    def _state(self, node: fx.Node) -> Any:
        if node.op == "output":
            return None
        if node.target in SYMBOLS:
            return self.numbers.add(node)
        mark = self.known.meaning(node)
        operands = [self.states[n] for n in node.all_input_nodes if n.target not in SYMBOLS]
        if node.op == "placeholder":
            assert mark is not None, "inputs are checked earlier"
            source = self.known.roots[mark]
            return self._prove_value(self.in_layout(source, source.meta["layout"]), mark)
        if node.target is WAIT and operands == [None]:
            return None  # this role has sent it, and does not receive it
        if any(v is None for v in operands):
            raise VerifyError("uses a value that only other devices receive")
        if mark is None or node.target in MOVES_ONLY or _is_form(mark, self.known.roots[mark], operands):
            return self._prove_value(self._moved(node, operands), mark)
        return self._prove_value(self._computed(node, self.known.roots[mark]), mark)

    def _prove_value(self, state: Any, mark: fx.Node | None) -> Any:
        """A marked value is exactly the placed graph's value, which is proven here."""
        if mark is None:
            return state
        if state is None:
            raise VerifyError("uses a value that only other devices receive")
        if state.root is not self.known.roots[mark]:
            raise VerifyError("is a form of another value", got=state.root.name, expected=self.known.roots[mark].name)
        self.known.num_values += 1
        self.ran.add(self.known.roots[mark])
        if not isinstance(state, ReplayedValue):
            return state
        if is_sparse(mark) and sparse_source(mark) is None:
            state = self.summed(state, mark)
        self.at_hand(state, mark)
        return self.proven_in(state, mark.meta["layout"])

    def summed(self, value: ReplayedValue, mark: fx.Node) -> ReplayedValue:
        """The value of a sparse sum, which has all rows if those of other devices were zeros."""
        if value.readers is not None and value.readers is not self.known.roots[mark.args[2]]:  # type: ignore[index]
            raise VerifyError("a sum is computed of other rows", got=value.readers.name, expected=str(mark.args[2]))
        return replace(value, readers=None)

    def _moved(self, node: fx.Node, operands: list[Any]) -> Any:
        """The result of a step of a move on its only operand."""
        step = STEPS.get(node.target)
        if step is None or len(operands) != 1 or not isinstance(operands[0], ReplayedValue):
            raise VerifyError("is neither an op of the placed graph nor a known step of a move")
        value: ReplayedValue = operands[0]
        if node.target in UNCHANGED:
            return value
        key = (node.target, value.holding, *(self.numbers.key(a) for a in node.args[1:]))
        holding = self.known.once(key, lambda: step(self.numbers, value.holding, node))
        return replace(value, holding=holding, layout=None)

    def _computed(self, node: fx.Node, op: fx.Node) -> Any:
        """The result of the placed op on the operands in their actual layouts."""
        if node.target is operator.getitem:
            return self._item(node, op)
        wanted = tensor_inputs(op)
        local_operands = operands_of(node)
        if len(local_operands) != len(wanted):
            number, expected = str(len(local_operands)), str(len(wanted))
            raise VerifyError("has another number of operands", got=number, expected=expected)
        operands: list[Placed] = []
        for local, needed in zip(local_operands, wanted, strict=True):
            value = self.operand(local, needed)
            assert value.layout is not None, "operand() gives values in layouts"
            operands.append((spec_of(value.root), value.layout))
        layouts = self.known.inferred(op, [layout for _, layout in operands])
        self._check_call(node, op, [layout for _, layout in operands])
        if not isinstance(op.meta["spec"], tuple):
            return self.in_layout(op, layouts[0])
        rest = iter(layouts)
        return Several(op, tuple(next(rest) if s is not None else None for s in op.meta["spec"]))

    def _check_call(self, node: fx.Node, op: fx.Node, layouts: Sequence[Layout]) -> None:
        """Raise VerifyError unless the node is the call that the expansion writes for the placed op. That this call
        computes the op's pieces is not proven here, but by the tests of every op."""
        on_piece, wanted = row_for(op).on_piece, [n.meta["layout"] for n in tensor_inputs(op)]
        if on_piece is not AS_IT_IS and wanted != list(layouts):
            got, expected = (", ".join(map(str, those)) for those in (layouts, wanted))
            raise VerifyError("is called for operands in other layouts", got=got, expected=expected)
        args, kwargs = map_nodes(op, lambda n: self._any)
        expected_call = on_piece.call(self._emit, op, [self._any] * len(wanted), args, kwargs)
        if node.target is not expected_call.target:
            got, expected = op_name(node.target), op_name(expected_call.target)
            raise VerifyError("another op runs", got=got, expected=f"{expected} for these layouts")
        if _form(node) != _form(expected_call):
            got, expected = call_text(node), call_text(expected_call)
            raise VerifyError("the op runs with other arguments", got=got, expected=expected)

    def _item(self, node: fx.Node, op: fx.Node) -> ReplayedValue:
        local, index = node.args
        source = self.states[local] if isinstance(local, fx.Node) else None
        if not isinstance(source, Several) or (source.root, index) != (op.args[0], op.args[1]):
            raise VerifyError(
                "has another item", got=f"{_name(source)}[{index}]", expected=f"{op.args[0]}[{op.args[1]}]"
            )
        layout = source.layouts[index]  # type: ignore[index]
        assert layout is not None, "the placed graph does not use an absent result"
        return self.in_layout(op, layout)


# Local steps of moves: symbolic integers of the role, contents, node -> contents after it.


def _narrow(numbers: Numbers, holding: Holding, node: fx.Node) -> Holding:
    _, dim, start, size = node.args
    return narrow(holding, dim, numbers.get(start), numbers.get(size))  # type: ignore[arg-type]


def _pad(numbers: Numbers, holding: Holding, node: fx.Node) -> Holding:
    return pad(holding, [numbers.get(a) for a in node.args[1]])  # type: ignore[union-attr]


def _join(numbers: Numbers, holding: Holding, node: fx.Node) -> Holding:
    _, sizes, order, dim, table = node.args
    return join_blocks(holding, sizes, order, dim, numbers.table(table))  # type: ignore[arg-type]


def _deal(numbers: Numbers, holding: Holding, node: fx.Node) -> Holding:
    _, sizes, order, dim, table, block = node.args
    return deal_blocks(holding, sizes, order, dim, numbers.table(table), numbers.get(block))  # type: ignore[arg-type]


def _keep(numbers: Numbers, holding: Holding, node: fx.Node) -> Holding:
    _, index, op = node.args
    return keep_first(holding, *numbers.axes_of(index), str(op))


def _scale(numbers: Numbers, holding: Holding, node: fx.Node) -> Holding:
    factor = node.args[1]
    if not isinstance(factor, (int, float)):
        raise VerifyError("scales by a value that is not a number", got=str(factor))
    return scaled(holding, factor)


def _same(numbers: Numbers, holding: Holding, node: fx.Node) -> Holding:
    return holding


def _is_form(mark: fx.Node, root: fx.Node, operands: Sequence[Any]) -> bool:
    """Whether a node that is marked as a moved value is a step of that move, rather than the op that computed the
    value."""
    return mark.target is ops.move and all(v.root is root for v in operands)


# What is replayed for whole groups at once: communications, and ops that all devices of a group run together.
MEETINGS = STARTS | {local_ops.embed_part}
UNCHANGED = frozenset({aten.contiguous.default, WAIT})
STEPS: dict[Any, Callable[[Numbers, Holding, fx.Node], Holding]] = {
    **dict.fromkeys(UNCHANGED, _same),
    aten.narrow.default: _narrow,
    aten.constant_pad_nd.default: _pad,
    local_ops.join_blocks: _join,
    local_ops.deal_blocks: _deal,
    local_ops.keep_first: _keep,
    aten.mul.Tensor: _scale,
}
MOVES_ONLY = frozenset({WAIT, local_ops.join_blocks, local_ops.deal_blocks, local_ops.keep_first})  # not ops of a model


def _form(call: fx.Node) -> tuple[Any, ...]:
    """The arguments of a call, with its operands left out: equal for equal calls."""
    return _argument_form(call.args), _argument_form(sorted(call.kwargs.items()))


def _argument_form(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return (value.target, _argument_form(value.args)) if value.target in SYMBOLS else "operand"
    if isinstance(value, (list, tuple)):
        return tuple(_argument_form(v) for v in value)
    return type(value), repr(value) if isinstance(value, float) else value  # nan differs from itself


def first_layout(layout: Any) -> Layout:
    """The layout of a value, or of the first of several: an op runs on one mesh."""
    return layout if isinstance(layout, Layout) else next(candidate for candidate in layout if candidate is not None)


def _name(state: Any) -> str:
    return state.root.name if isinstance(state, (ReplayedValue, Several)) else "nothing"


# Infers the layouts of an op's results from the sharding rule and the actual layouts of its operands. The placement is
# not read: every axis must do a single thing in the op, cut a factor or pass partial values in a linear mode of the
# rule, and the layouts of the results follow.

Placed = tuple[Spec, Layout]
Cuts = dict[int, DimSharding]  # factor -> how its loop is cut
Owners = list[tuple[str, int, str]]  # (axis, factor, key), in the form of `Rule.owned`


def infer(
    rule: Rule,
    mesh: Mesh,
    operands: Sequence[Placed],
    results: Sequence[Spec],
    placed_results: Sequence[Layout | None] = (),
) -> tuple[Layout, ...]:
    """Layouts of the results. Raises VerifyError (without a location) if the operands do not fit together.

    Factors that no operand has are cut as in `placed_results`, which also say who owns rows that an op hands out: such
    ops compute any piece on demand, and the caller checks that they are called for these pieces.
    """
    if elsewhere := [layout for _, layout in operands if layout.mesh != mesh]:
        raise VerifyError(
            "operands are on different meshes", got=f"{elsewhere[0]} on {elsewhere[0].mesh}", expected=str(mesh)
        )
    cuts, passed = _cuts(rule, operands), _passing_sums(rule, operands)
    known = {f for dims in rule.operands for dim in dims for f in dim}
    for dims, layout in zip(rule.results, placed_results, strict=False):
        free = {} if layout is None else _dim_cuts(rule, dims, layout)
        cuts |= {f: cut for f, cut in free.items() if f not in known}
    owners = _owners(rule, cuts, [layout for _, layout in operands], placed_results)
    _check_axes(cuts, passed, owners, operands)
    for i, (spec, layout) in enumerate(operands):
        wanted = _layout(rule, rule.operands[i], cuts, mesh, spec)
        if layout.dims != wanted.dims or layout.owned != rule.owned(i, owners):
            wanted = Layout(mesh, wanted.dims, (), rule.owned(i, owners))
            raise VerifyError(f"operand {i} is not cut like the others", got=str(layout), expected=str(wanted))
    return tuple(_result(rule, i, cuts, passed, owners, (mesh, spec)) for i, spec in enumerate(results))


def _result(
    rule: Rule, i: int, cuts: Cuts, passed: dict[str, str], owners: Owners, described: tuple[Mesh, Spec]
) -> Layout:
    inside = {f for dim in rule.results[i] for f in dim}
    owned = rule.owned(len(rule.operands) + i, owners)
    kept = {axis for axis, _, _ in owned}
    partial_axes = [(axis, rule.reduce_op(f)) for f, cut in cuts.items() if f not in inside for axis in cut.axes]
    partial_axes += [(axis, "sum") for axis, f, key in owners if key and f not in inside]
    partial = (*((axis, op) for axis, op in partial_axes if axis not in kept), *passed.items())
    layout = _layout(rule, rule.results[i], cuts, *described)
    return Layout(described[0], layout.dims, partial, owned)


def _owners(rule: Rule, cuts: Cuts, layouts: Sequence[Layout], placed_results: Sequence[Layout | None]) -> Owners:
    """The axes along which devices own rows, in the form of `Rule.owned`, each with its function in this op. Axes that
    distribute the experts of the op cut them: that is recorded in `cuts`."""
    owners: dict[str, tuple[str, int, str]] = {}
    hands_out = rule.keyed is not None and min(rule.keyed.positions) >= len(rule.operands)
    placed = [layout for layout in placed_results if layout is not None] if hands_out else []
    tensors = [*zip(rule.operands, layouts, strict=True), *zip(rule.results, placed, strict=False)]
    for dims, layout in tensors:
        for axis, dim, key in layout.owned:
            factor = rule.rows_in(dims[dim])
            if rule.keyed is not None and (factor, key) == (rule.keyed.rows, rule.keyed.key):
                owners.setdefault(axis, (axis, rule.keyed.experts, ""))
            elif rule.keyed is None and factor >= 0 and rule.can_own(factor):
                owners.setdefault(axis, (axis, factor, key))
            else:
                raise VerifyError("rows that devices own meet in an op that needs all of them", got=str(layout))
    if rule.keyed is not None:
        experts = rule.keyed.experts
        for axis in cuts[experts].axes if experts in cuts else ():
            owners.setdefault(axis, (axis, experts, ""))
        axes = tuple(axis for axis, factor, _ in owners.values() if factor == experts)
        if axes:
            cuts.setdefault(experts, DimSharding(axes))
        if axes and set(cuts[experts].axes) == set(axes):
            return [(axis, experts, "") for axis in cuts[experts].axes]
    return list(owners.values())


def _layout(rule: Rule, dims: Dims, cuts: Cuts, mesh: Mesh, spec: Spec) -> Layout:
    """The layout of a tensor with `dims` when factors are cut."""
    layouts = []
    for d in range(len(dims)):
        factor = rule.loop(dims, d)
        cut = cuts.get(factor, DimSharding()) if factor is not None else DimSharding()
        inner = rule.inner_size(dims, d, factor) if factor is not None else 1
        layouts.append(DimSharding(cut.axes, cut.unit * inner))
    return Layout(mesh, tuple(layouts)).normalized(spec.shape)


def _cuts(rule: Rule, operands: Sequence[Placed]) -> Cuts:
    """The operands' cuts of the factors; a unit that changes nothing in an operand may come from another."""
    cuts: Cuts = {}
    for i, (_, layout) in enumerate(operands):
        for factor, cut in _dim_cuts(rule, rule.operands[i], layout).items():
            if not (rule.is_shardable(factor) or rule.is_single(factor)):
                raise VerifyError(f"operand {i} is cut along a dim that the op needs whole", got=str(layout))
            known = cuts.setdefault(factor, cut)
            if known.axes != cut.axes:
                raise VerifyError(
                    f"operand {i} is not cut like the others",
                    got=f"{layout}: {','.join(cut.axes)} where another operand has {','.join(known.axes)}",
                )
            if known.unit == 1:
                cuts[factor] = cut
    return cuts


def _dim_cuts(rule: Rule, dims: Dims, layout: Layout) -> Cuts:
    cuts: Cuts = {}
    for d, dim in enumerate(layout.dims):
        if not dim.axes:
            continue
        factor = rule.loop(dims, d)
        if factor is None:
            raise VerifyError(f"dim {d} is cut, but the op needs it whole", got=str(layout))
        inner = rule.inner_size(dims, d, factor)
        cuts[factor] = DimSharding(dim.axes, dim.unit // inner if dim.unit % inner == 0 else 1)
    return cuts


def _passing_sums(rule: Rule, operands: Sequence[Placed]) -> dict[str, str]:
    """Axis -> reduce op of the partial values that pass, each in a linear mode of the rule."""
    passed: dict[str, str] = {}
    for axis in dict.fromkeys(a for _, layout in operands for a in layout.partial_axes):
        partial_ops = {i: dict(layout.partial).get(axis) for i, (_, layout) in enumerate(operands)}
        holders = frozenset(i for i, op in partial_ops.items() if op is not None)
        ops = {op for op in partial_ops.values() if op is not None}
        ways = [mode for mode in rule.linear if mode.operands == holders and ops <= mode.ops]
        if len(ops) > 1 or not ways:
            listed = ", ".join(map(str, sorted(holders)))
            raise VerifyError(
                f"operand {listed} is partial over {axis}, and the op is not linear in that operand alone",
                got=", ".join(str(layout) for _, layout in operands),
                expected="every contribution, before the op",
            )
        passed[axis] = ops.pop() or ""
    return passed


def _check_axes(cuts: Cuts, passed: dict[str, str], owners: Owners, operands: Sequence[Placed]) -> None:
    """Check that every axis does a single thing."""
    own = [axis for axis, factor, _ in owners if factor not in cuts or axis not in cuts[factor].axes]
    used = [*passed, *own, *(axis for cut in cuts.values() for axis in cut.axes)]
    twice = sorted({axis for axis in used if used.count(axis) > 1})
    if twice:
        raise VerifyError(
            f"{', '.join(twice)} would do two things in the same op",
            got=", ".join(str(layout) for _, layout in operands),
            expected="an axis that cuts a loop of the op, or passes a partial value",
        )
