"""Arranges the moves of a whole placed graph: past casts and views to where less has to move, and shared where they
have common steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, prod

import torch
from torch import fx

from meshweave.ir import ops
from meshweave.ir.graph import PARTS, Spec, StepGraph, copy_meta, origin_of, replace_inputs, spec_of, tensor_inputs
from meshweave.ir.layout import Layout
from meshweave.ir.traits import CASTS, VIEWS
from meshweave.ops.registry import row_for
from meshweave.place.assign import Assignment, candidates, follow_result
from meshweave.place.movement.plan import MovePlan
from meshweave.place.stages import in_stage, stage_of_move

aten = torch.ops.aten
Price = Callable[[Layout, Layout, Spec], float]
PlanMove = Callable[[Layout, Layout, tuple[int, ...], torch.dtype], MovePlan]

_Read = tuple[fx.Node, Assignment]  # an op that reads a value, and how

_ROUND_PARTS = torch.ops.meshweave.round_parts.default
_GAIN = 1e-12  # seconds below which two prices are equal


def arrange(step: StepGraph, plan_move: PlanMove, *, reduce_after_cast: bool = False) -> StepGraph:
    """The placed graph `step`, changed in place, so that its moves take less time by the plans of `plan_move`.

    If an op is linear in all its operands and these have just been moved, its result is moved instead: the sum of three
    gradients is reduced once, not each of them. A move goes before a cast up and after a cast down, and past views, if
    the value is smaller there. A sum over devices never gets a smaller dtype than in the graph, unless
    `reduce_after_cast` is set, because that rounds each contribution.

    Moves of several views of a value become moves of the value, where these have more in common. Moves of a value to
    several layouts share the common steps of their plans: a copy is moved from another copy, or
    both from a layout on the way. (If an operator pins an intermediate layout, the value goes through it.) Backward may
    reuse a copy of forward that is no larger than the value itself, because that needs no memory; a larger copy does
    not outlive its phase.
    """
    arranger = _Arranger(step, plan_move, reduce_after_cast)
    arranger.merge()
    arranger.pass_light_ops()
    arranger.lift()
    arranger.share()
    step.graph.lint()
    return step


@dataclass(slots=True)
class _Arranger:
    step: StepGraph
    plan_move: PlanMove
    reduce_after_cast: bool
    graph: fx.Graph = field(init=False)

    def __post_init__(self) -> None:
        self.graph = self.step.graph

    def price(self, source: Layout, target: Layout, spec: Spec) -> float:
        return self.plan_move(source, target, spec.shape, spec.dtype).seconds if source != target else 0.0

    def price_of(self, move: fx.Node) -> float:
        return self.price(_source(move).meta["layout"], move.meta["layout"], spec_of(move))

    # past ops that are linear in all operands

    def merge(self) -> None:
        for node in list(self.graph.nodes):
            if node.op == "call_function" and len(tensor_inputs(node)) > 1 and "assignment" in node.meta:
                self._merge(node)

    def _merge(self, node: fx.Node) -> None:
        """Apply an op to the operands as they were before their moves, and move its result, if that is cheaper."""
        pulled = [self._before_its_move(operand, node) for operand in tensor_inputs(node)]
        moves = {pull.move: None for pull in pulled if pull is not None}
        if any(pull is None for pull in pulled) or not isinstance(node.meta["layout"], Layout):
            return
        layouts = [pull.layout for pull in pulled if pull is not None]
        meshes = {layout.mesh for layout in (*layouts, node.meta["layout"])}
        option = _on(node, layouts) if len(meshes) == 1 else None  # an op stays on its devices
        if option is None:
            return
        cost = self.price(option.results[0], node.meta["layout"], spec_of(node))
        if cost > sum(map(self.price_of, moves)) - _GAIN:
            return
        with self.graph.inserting_before(node):
            values = [self._unmoved_value(pull) for pull in pulled if pull is not None]
            args, kwargs = replace_inputs(node, values)
            new = copy_meta(node, self.graph.call_function(node.target, args, kwargs))  # type: ignore[arg-type]
            new.meta.update(layout=option.results[0], assignment=option)
            moved = self._new_move(new, node.meta["layout"], next(iter(moves)))
            moved.meta["origin"] = origin_of(node)
        node.replace_all_uses_with(moved)
        self.graph.erase_node(node)
        for unused in dict.fromkeys(n for pull in pulled if pull is not None for n in (*pull.chain, pull.move)):
            self.graph.erase_node(unused)

    def _before_its_move(self, operand: fx.Node, user: fx.Node) -> _UnmovedOperand | None:
        """The operand without its move, if nothing else uses the moved value; casts and views in between stay."""
        chain: list[fx.Node] = []
        while _is_light(operand) and _phase(operand) == _phase(user) and len(operand.users) == 1:
            chain.append(operand)
            (operand,) = tensor_inputs(operand)
        if operand.target is not ops.move or len(operand.users) != 1 or _phase(operand) != _phase(user):
            return None
        layout: Layout = _source(operand).meta["layout"]
        options = []
        for light in reversed(chain):
            option = _on(light, [layout])
            if option is None:
                return None
            options.append(option)
            layout = option.results[0]
        return _UnmovedOperand(operand, tuple(chain), tuple(options), layout)

    def _unmoved_value(self, operand: _UnmovedOperand) -> fx.Node:
        value = _source(operand.move)
        for light, option in zip(reversed(operand.chain), operand.options, strict=True):
            value = self._again(light, value, option)
        return value

    # past casts and views

    def pass_light_ops(self) -> None:
        """Terminates, because every rewrite makes the moves cheaper."""
        waiting = [node for node in self.graph.nodes if node.target is ops.move]
        while waiting:
            move = waiting.pop()
            if move.users and self.price_of(move) > _GAIN:
                risen = self._rise(move)
                waiting += self._sink(move) if risen is None else risen

    def _rise(self, move: fx.Node) -> list[fx.Node] | None:
        """Move an operand of the ops that computed the value instead, the nearest that is cheaper to move, and repeat
        these ops where the value is needed. Returns the new move, if needed; None if nothing is cheaper."""
        reads: list[_Read] = []
        value, wanted = _source(move), move.meta["layout"]
        while _is_light(value) and _phase(value) == _phase(move) and self._may_pass(value, move):
            option = _giving(value, wanted)
            if option is None:
                return None
            reads.append((value, option))
            (value,), wanted = tensor_inputs(value), option.operands[0]
            if self.price(value.meta["layout"], wanted, spec_of(value)) <= self.price_of(move) - _GAIN:
                break
        else:
            return None
        first = self._raise(move, value, wanted, reads)
        return [first] if first is not value else []

    def _raise(
        self, move: fx.Node, value: fx.Node, wanted: Layout, reads: Sequence[_Read], known: fx.Node | None = None
    ) -> fx.Node:
        """Move `value` instead, unless its copy in that layout is `known`, and repeat the ops that read it (the last
        first) on the copy, which is returned."""
        stage = stage_of_move(move)
        with self.graph.inserting_before(move):
            first = copy = known or self._new_move(value, wanted, move)
            for op, option in reversed(reads):
                copy = in_stage(self._again(op, copy, option), stage)
                copy.meta["origin"] = replace(origin_of(copy), phase=origin_of(move).phase)
        move.replace_all_uses_with(copy)
        for unused in (move, *(op for op, _ in reads)):
            if not unused.users:
                self.graph.erase_node(unused)
        return first

    def _sink(self, move: fx.Node) -> list[fx.Node]:
        """Apply the ops that use the value before it moves, and move their results."""
        users = list(move.users)
        if not all(_is_light(u) and _phase(u) == _phase(move) and self._may_pass(u, move) for u in users):
            return []
        early = [self._early(user, move) for user in users]
        cost = sum(
            self.price(new.meta["layout"], user.meta["layout"], spec_of(user)) if new is not None else inf
            for user, new in zip(users, early, strict=True)
        )
        if cost > self.price_of(move) - _GAIN:
            for unused in filter(None, early):
                self.graph.erase_node(unused)
            return []
        moves = []
        for user, new in zip(users, early, strict=True):
            assert new is not None, "otherwise the cost is infinite"
            with self.graph.inserting_before(user):
                moved = self._new_move(new, user.meta["layout"], move)
            user.replace_all_uses_with(moved)
            self.graph.erase_node(user)
            moves += [moved] if moved is not new else []
        self.graph.erase_node(move)
        return moves

    def _early(self, user: fx.Node, move: fx.Node) -> fx.Node | None:
        """A cast or view of a value before its move; None if it is not possible there. A cast of parts is marked
        `round_parts`."""
        value = _source(move)
        with self.graph.inserting_before(user):
            if user.target in CASTS and "sum" in _reduced(move):
                new = self.graph.call_function(_ROUND_PARTS, (value, spec_of(user).dtype))
                copy_meta(user, new)
            else:
                new = self._again(user, value, None)
        option = _on(new, [value.meta["layout"]])
        if option is None:
            self.graph.erase_node(new)
            return None
        new.meta.update(layout=option.results[0], assignment=option)
        return in_stage(new, origin_of(value).stage)

    def _may_pass(self, op: fx.Node, move: fx.Node) -> bool:
        """Whether cast and move commute bit for bit (or `reduce_after_cast` allows other bits)."""
        if op.target not in CASTS:
            return True
        if not all(spec_of(value).dtype.is_floating_point for value in (op, *tensor_inputs(op))):
            return False
        reduced = _reduced(move)  # rounding is monotonic
        return reduced <= {"max", "min"} or (reduced <= {"sum"} and self.reduce_after_cast)

    def _new_move(self, value: fx.Node, target: Layout, like: fx.Node) -> fx.Node:
        """The value in a layout, for the consumers of the move `like`."""
        if value.meta["layout"] == target:
            return value
        new = self.graph.call_function(ops.move, (value, str(target)))
        new.meta.update(spec=spec_of(value), origin=origin_of(like), layout=target)
        return new

    def _again(self, op: fx.Node, operand: fx.Node, option: Assignment | None) -> fx.Node:
        args, kwargs = replace_inputs(op, [operand])
        new = copy_meta(op, self.graph.call_function(op.target, args, kwargs))  # type: ignore[arg-type]
        if option is not None:
            new.meta.update(layout=option.results[0], assignment=option)
        return new

    # what several moves have in common

    def lift(self) -> None:
        """Move a value, not several views of it, where these moves have more in common: each of three matmuls has its
        own view of its operand."""
        groups: dict[fx.Node, list[_Lifted]] = {}
        for move in self.graph.nodes:
            if move.target is ops.move and _phase(move) < 2 and not (_is_station(move) or _is_station(_source(move))):
                lifted = _Lifted.of(move)
                if lifted is not None:
                    groups.setdefault(lifted.value, []).append(lifted)
        for value, several in groups.items():
            sources = dict.fromkeys(_source(lifted.move) for lifted in several)
            if len(sources) > 1:
                of_each = [[lifted.move for lifted in several if _source(lifted.move) is source] for source in sources]
                now = sum(self._tree_of(source, moves) for source, moves in zip(sources, of_each, strict=True))
                copies = [_Copy(lifted.wanted, _phase(lifted.move)) for lifted in several]
                _, cost = self._tree(_Copy(value.meta["layout"], -1, value), copies, spec_of(value))
                if cost < now - _GAIN:
                    self._lift(value, several)

    def _lift(self, value: fx.Node, several: Sequence[_Lifted]) -> None:
        """Move the value in place of its views, once in a phase to each layout."""
        known: dict[tuple[Layout, int], fx.Node] = {}
        for lifted in several:
            key = lifted.wanted, _phase(lifted.move)
            if lifted.reads:
                moved = self._raise(lifted.move, value, lifted.wanted, lifted.reads, known.get(key))
            else:
                moved = lifted.move
            known.setdefault(key, moved)

    def _tree_of(self, value: fx.Node, moves: Sequence[fx.Node]) -> float:
        """The price of the moves of a value, with what they share."""
        return self._tree(_Copy(value.meta["layout"], -1, value), list(map(_Copy.of, moves)), spec_of(value))[1]

    def share(self) -> None:
        moves: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.target is ops.move and _phase(node) < 2 and not (_is_station(node) or _is_station(_source(node))):
                moves.setdefault(ops.unmoved(node), []).append(node)
        for root, several in moves.items():
            if len(several) > 1:
                self._share(root, several)

    def _share(self, root: fx.Node, moves: list[fx.Node]) -> None:
        """Move the copies of a value along the cheapest tree over their layouts and intermediate layouts."""
        spec, wanted = spec_of(root), [_Copy.of(move) for move in moves]
        start = _Copy(root.meta["layout"], -1, root)
        now = sum(self.price_of(move) for move in moves)
        tree, cost = self._tree(start, wanted, spec)
        extra: list[_Copy] = []
        while better := self._with_extra_copy(start, wanted, extra, spec, cost):
            extra, tree, cost = better
        if cost < now - _GAIN:
            self._rebuild(start, wanted, extra, tree)

    def _with_extra_copy(
        self, start: _Copy, wanted: Sequence[_Copy], extra: list[_Copy], spec: Spec, cost: float
    ) -> tuple[list[_Copy], dict[int, int], float] | None:
        """The tree through another intermediate layout, if that is cheaper."""
        best = None
        for layout, phase in self._on_the_way(start, wanted, spec):
            more = [*extra, _Copy(layout, phase)]
            tree, total = self._tree(start, [*wanted, *more], spec)
            if total < cost - _GAIN and _ready_in_time([*wanted, *more], tree):
                best, cost = (more, tree, total), total
        return best

    def _on_the_way(self, start: _Copy, wanted: Sequence[_Copy], spec: Spec) -> Iterator[tuple[Layout, int]]:
        """Layouts that the plans of the copies pass through, in each phase that has copies."""
        plans = [self.plan_move(start.layout, copy.layout, spec.shape, spec.dtype) for copy in wanted]
        seen = dict.fromkeys(step.target for plan in plans for step in plan.steps[:-1])
        ends = {start.layout, *(copy.layout for copy in wanted)}
        phases = sorted({copy.phase for copy in wanted})
        yield from ((layout, phase) for layout in seen if layout not in ends for phase in phases)

    def _tree(self, start: _Copy, copies: Sequence[_Copy], spec: Spec) -> tuple[dict[int, int], float]:
        """The parent of each copy (-1: the value itself) in the cheapest tree, and its price."""
        import networkx as nx

        size = prod(start.layout.local_shape(spec.shape))
        graph = nx.DiGraph()
        for i, copy in enumerate(copies):
            graph.add_edge(-1, i, weight=self.price(start.layout, copy.layout, spec))
            for j, source in enumerate(copies):
                lasts = source.phase == copy.phase or prod(source.layout.local_shape(spec.shape)) <= size
                if i != j and source.phase <= copy.phase and lasts:
                    graph.add_edge(j, i, weight=self.price(source.layout, copy.layout, spec))
        tree = nx.minimum_spanning_arborescence(graph)
        return {i: parent for parent, i in tree.edges}, sum(weight for *_, weight in tree.edges(data="weight"))

    def _rebuild(self, start: _Copy, wanted: Sequence[_Copy], extra: Sequence[_Copy], tree: dict[int, int]) -> None:
        """Give every copy its parent, and put each before the first copy that is moved from it."""
        import networkx as nx

        copies, order = [*wanted, *extra], {node: i for i, node in enumerate(self.graph.nodes)}
        anchors = {i: copy.node for i, copy in enumerate(wanted)}
        for i in tree:
            at = i
            while at >= 0:  # up the tree: every copy comes after its source
                first, mine = anchors.get(i), anchors.get(at)
                if first is not None and (mine is None or order[first] < order[mine]):
                    anchors[at] = first
                at = tree[at]
        done: dict[int, fx.Node] = {-1: _node(start)}
        for i in nx.topological_sort(nx.DiGraph([(parent, i) for i, parent in tree.items()])):
            if i < 0 or anchors.get(i) is None:
                continue
            anchor, source, copy = anchors[i], done[tree[i]], copies[i]
            assert anchor is not None, "checked above"
            if copy.node is None:
                with self.graph.inserting_before(anchor):
                    done[i] = self._new_move(source, copy.layout, anchor)
                continue
            if source.meta["layout"] == copy.layout:  # a copy of an earlier phase that needs no memory
                copy.node.replace_all_uses_with(source)
                self.graph.erase_node(copy.node)
                done[i] = source
                continue
            copy.node.args = (source, *copy.node.args[1:])
            if anchor is not copy.node:
                anchor.prepend(copy.node)
                copy.node.meta["origin"] = replace(origin_of(copy.node), phase=origin_of(anchor).phase)
            done[i] = copy.node


@dataclass(frozen=True, slots=True)
class _UnmovedOperand:
    """An operand without its move: the casts and views between the move and the consumer (last first), the assignment
    of each on the unmoved value (first first), and the resulting layout."""

    move: fx.Node
    chain: tuple[fx.Node, ...]
    options: tuple[Assignment, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class _Lifted:
    """A move as one of the value that its own is a view of: the views in between (the last first), and the layout in
    which the value is then needed."""

    move: fx.Node
    value: fx.Node
    wanted: Layout
    reads: tuple[_Read, ...]

    @staticmethod
    def of(move: fx.Node) -> _Lifted | None:
        """None if a view cannot give the layout."""
        reads: list[_Read] = []
        value, wanted = _source(move), move.meta["layout"]
        while value.target in VIEWS and len(tensor_inputs(value)) == 1 and not value.meta["layout"].partial:
            option = _giving(value, wanted)
            if option is None:
                return None
            reads.append((value, option))
            (value,), wanted = tensor_inputs(value), option.operands[0]
        return _Lifted(move, value, wanted, tuple(reads))


@dataclass(frozen=True, slots=True)
class _Copy:
    """A layout in which a value is needed, the phase since which it is, and its move (if any)."""

    layout: Layout
    phase: int
    node: fx.Node | None = None

    @staticmethod
    def of(move: fx.Node) -> _Copy:
        return _Copy(move.meta["layout"], _phase(move), move)


def _ready_in_time(copies: Sequence[_Copy], tree: dict[int, int]) -> bool:
    """Whether every copy that has no move yet is the source of a copy in its own phase, where it is moved."""
    needed: dict[int, int] = {}
    for i, parent in tree.items():
        needed[parent] = min(needed.get(parent, copies[i].phase), copies[i].phase)
    return all(copy.node is not None or needed.get(i) == copy.phase for i, copy in enumerate(copies))


def _node(copy: _Copy) -> fx.Node:
    assert copy.node is not None
    return copy.node


def _source(move: fx.Node) -> fx.Node:
    source = move.args[0]
    assert isinstance(source, fx.Node)
    return source


def _reduced(move: fx.Node) -> set[str]:
    """The reduce ops of a move."""
    before, after = dict(_source(move).meta["layout"].partial), dict(move.meta["layout"].partial)
    return {op for axis, op in before.items() if after.get(axis) != op}


def _is_station(node: fx.Node) -> bool:
    """Whether a value is only moved on from this layout: an operator in the model pins this intermediate layout."""
    return node.target is ops.move and all(user.target is ops.move for user in node.users)


def _phase(node: fx.Node) -> int:
    return PARTS[origin_of(node).phase]


def _is_light(node: fx.Node) -> bool:
    return (node.target in CASTS or node.target in VIEWS) and len(tensor_inputs(node)) == 1


def _on(op: fx.Node, layouts: Sequence[Layout]) -> Assignment | None:
    """The op's assignment with its operands in exactly these layouts, if it accepts them."""
    specs = [spec_of(operand) for operand in tensor_inputs(op)]
    options = candidates(row_for(op).rule(op), layouts[0].mesh, [[layout] for layout in layouts], specs, [spec_of(op)])
    return next((option for option in options if option.operands == tuple(layouts)), None)


def _giving(op: fx.Node, layout: Layout) -> Assignment | None:
    """The op's assignment that gives its result `layout`."""
    (x,), rule = tensor_inputs(op), row_for(op).rule(op)
    if op.target in CASTS:
        option = _on(op, [layout])
    else:
        option = None if layout.partial else follow_result(rule, layout, [spec_of(x)], [spec_of(op)])
    return option if option is not None and option.results[0] == layout else None
