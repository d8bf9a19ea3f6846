"""A rank graph as a device program: fences between the parts of a step, a fixed order of communications between roles;
and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from meshweave.ir.collectives import STARTS, WAIT, transfer
from meshweave.ir.device_program import DeviceProgram, Fence, Group, R, Rewrite
from meshweave.ir.graph import Spec, copied_graph, origin_of, output_node
from meshweave.ir.rank import SYMBOLS, RankGraph, copied
from meshweave.ir.values import NOTHING, Values, local_values, uneven_dims
from meshweave.ir.verify import verify_rank

_BETWEEN = "between roles"  # the channel of communications between roles
# phases that begin a part of the step, and the phases before them
_BEFORE = {"backward": "forward", "update": "backward"}
_REPLACED = ("param", "state", "acc", "carry")  # kinds of inputs that an output of the same name replaces


def begin(phase: str, *needed: Any) -> None:
    """Marks where a part of the step begins, for the scheduler; its operands are available by then."""
    raise AssertionError("a fence is removed before the graph is run")


@dataclass(frozen=True, slots=True)
class RoleForm:
    """A role as a device program. `nodes`: for each node of the role that of the program.

    Fences mark where backward and update begin; communications between roles are messages of a single channel, which
    keep their order. Gradients that are not kept are not among the outputs, and the program is that of the last
    microbatch, which has no sums of gradients.
    """

    program: DeviceProgram
    nodes: Mapping[fx.Node, fx.Node]
    marks: _PhaseMarks

    def role(self) -> RankGraph:
        """The role with the program's present graph, in any order; the program is used up."""
        self.marks.restore()
        return self.marks.role


@dataclass(slots=True)
class _PhaseMarks:
    """The marks in a role's graph when it is a device program, and how to remove them."""

    role: RankGraph
    values: dict[fx.Node, Values]
    lines: Mapping[fx.Node, str]  # of starts: the queue of each
    shared: Collection[fx.Node]  # starts in which several roles take part
    microbatches: int
    keeps_gradients: bool
    fences: dict[str, fx.Node] = field(default_factory=dict)
    was: dict[fx.Node, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict)  # starts before the change
    dropped: dict[int, fx.Node] = field(default_factory=dict)  # by index of an output: a view that replaces it

    @property
    def end(self) -> fx.Node:
        return output_node(self.role.graph)

    def mark(self) -> None:
        update = self.first("update", None)
        firsts = {"backward": self.first("backward", update), "update": update}
        for phase, first in firsts.items():
            if first is not None:
                self.fence(phase, first)
        for node in self.role.graph.nodes:
            if node in self.shared or node.target is transfer:
                self.was[node] = (node.target, node.args)
                node.args = (node.args[0], _BETWEEN if node in self.shared else self.lines[node])
                node.target = transfer
        self.drop()

    def first(self, phase: str, until: fx.Node | None) -> fx.Node | None:
        """The node before which `runtime.executor` cuts the step: the first of a phase, or the cut after it."""
        for node in self.role.graph.nodes:
            is_run = node.op == "call_function" and node.target not in SYMBOLS
            if node is until or (is_run and origin_of(node).phase == phase):
                return node
        return until

    def fence(self, phase: str, first: fx.Node) -> None:
        """Make the values that the session reads after a part available there: the loss, buffers, sums of gradients,
        and with several microbatches all pending communications, because the next microbatch begins with none."""
        kinds = ("loss",) if phase == "backward" else ("buffer", "acc")
        read = {n for key, n in self.role.results.items() if key[0] in kinds}
        before = list(takewhile(lambda n: n is not first, self.role.graph.nodes))
        if phase == "update" and self.microbatches > 1:
            waits = (n for n in before if n.target is WAIT and origin_of(n).phase != "reduce")
            read |= {n for n in waits if set(before).isdisjoint(n.users)}
        needed = [n for n in before if n.op == "call_function" and n in read]
        with self.role.graph.inserting_before(first):
            fence_node = self.role.graph.call_function(begin, (phase, *needed))
        self.values[fence_node] = NOTHING
        self.fences[phase] = fence_node

    def drop(self) -> None:
        """Let gradients that are not kept die at their last use."""
        graph, kept = self.role.graph, []
        for i, ((kind, _), node) in enumerate(self.role.results.items()):
            is_dropped = kind == "acc" or (kind == "grad" and not self.keeps_gradients)
            if not is_dropped or node.op != "call_function":
                kept.append(node)
                continue
            with graph.inserting_before(self.end):
                self.dropped[i] = graph.call_function(torch.ops.aten.alias.default, (node,))
            self.values[self.dropped[i]] = self.values[node]
        self.end.args = (kept,)

    def group_of(self, start: fx.Node) -> Group:
        return self.role.group_axes(str(start.args[-1]))

    def releasable(self) -> Callable[[fx.Node], bool]:
        """Which inputs die at their last use: those replaced by an output of the same name (`runtime.executor`). Values
        carried from the previous step serve all microbatches."""
        keys = {n: (i.kind, i.name) for n, i in self.role.sources.items()}
        kinds = [kind for kind in _REPLACED if kind != "carry" or self.microbatches == 1]
        replaced = {key for key in self.role.outputs if key[0] in kinds}
        return lambda node: keys[node] in replaced

    def restore(self) -> None:
        """Remove the marks from the graph, in any order."""
        kept = iter(self.role.output_values)
        numbers = range(len(self.role.outputs))
        self.end.args = ([self.dropped[i].args[0] if i in self.dropped else next(kept) for i in numbers],)
        for view in self.dropped.values():
            self.role.graph.erase_node(view)
        for node, (target, args) in self.was.items():
            node.target, node.args = target, (node.args[0], *args[1:])
        for phase, fence in self.fences.items():
            _settle(self.role.graph, phase, fence)
        for fence in self.fences.values():
            self.role.graph.erase_node(fence)


def rewrite_role(role: RankGraph, rewrite: Rewrite[R]) -> tuple[RankGraph, R]:
    """The role with the graph that `rewrite` returns, verified; `role` itself, unchanged, if it returns none."""
    own = copied(role)
    graph, report = rewrite(role_program(own))
    if graph is None:
        return role, report
    rewritten = replace(own, graph=graph)
    for node, values in local_values(rewritten).values.items():
        if "spec" not in node.meta and values and node.target not in SYMBOLS:
            specs = tuple(Spec(x.shape, x.dtype) for x in values)
            node.meta["spec"] = specs[0] if len(specs) == 1 else specs
    return verify_rank(rewritten), report


def role_program(role: RankGraph) -> DeviceProgram:
    """A role with its symbols and transfers, for passes that add ops to its graph."""
    sources = role.sources
    local = local_values(role)

    def refused(start: fx.Node) -> str:
        """Devices of other roles would not know of its new messages."""
        return "" if role.has_all_of(str(start.args[-1])) else "its group has devices of other roles"

    return DeviceProgram(
        role.graph,
        local.values,
        lambda start: role.group_axes(str(start.args[-1])),
        lambda node: False,
        uneven=uneven_dims(role, local),
        is_whole=True,
        sources=frozenset(node for node, item in sources.items() if item.kind != "batch"),
        refused=refused,
        symbols=local.symbols,
        batch=tuple(node for node, item in sources.items() if item.kind == "batch"),
    )


def role_form(
    role: RankGraph,
    lines: Mapping[fx.Node, str],
    shared: Collection[fx.Node],
    microbatches: int = 1,
    keeps_gradients: bool = False,
    with_uneven: bool = True,
) -> RoleForm:
    """A role as a device program; the role itself is not changed. `lines`: the queues of starts; `shared`: starts in
    which several roles take part; `with_uneven`: whether to find the nodes whose shapes differ between devices."""
    nodes: dict[fx.Node, fx.Node] = {}
    own = replace(role, graph=copied_graph(role.graph, nodes))
    local = local_values(own)
    uneven = uneven_dims(own, local) if with_uneven else {}
    marks = _PhaseMarks(
        own,
        dict(local.values),
        {nodes[start]: line for start, line in lines.items() if start in nodes},
        frozenset(nodes[start] for start in shared if start in nodes),
        microbatches,
        keeps_gradients,
    )
    marks.mark()
    fences = tuple(Fence(marks.fences[phase], phase == "backward") for phase in _BEFORE if phase in marks.fences)
    program = DeviceProgram(own.graph, marks.values, marks.group_of, marks.releasable(), fences, uneven, is_whole=True)
    return RoleForm(program, nodes, marks)


def _settle(graph: fx.Graph, phase: str, fence: fx.Node) -> None:
    """Move nodes that belong after a fence there: views, and kernels grouped with their consumers. Communications of
    backward that start before the fence stay there with their operands: they then belong to forward."""
    later = list(_BEFORE)[list(_BEFORE).index(phase) :]
    ahead, before = set[fx.Node](), dict[fx.Node, None]()
    for node in graph.nodes:
        if node is fence:
            break
        ahead.add(node)
        if node.op == "call_function" and node.target not in SYMBOLS and origin_of(node).phase in later:
            before[node] = None
    early = set[fx.Node]()
    for node in reversed(before):
        is_needed = any(user in early or (user in ahead and user not in before) for user in node.users)
        if is_needed or (phase == "backward" and node.target in STARTS):
            early.add(node)
            node.meta["origin"] = replace(origin_of(node), phase=_BEFORE[phase])
    cursor = fence
    for node in before:
        if node not in early:
            cursor.append(node)
            cursor = node
