"""A role as the scheduler takes it: fences between the parts of a step, a fixed order of communications between roles;
and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile

from torch import fx

from meshweave.ir.collectives import STARTS, WAIT, transfer
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.graph import PARTS, copied_graph, origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph, prepared_values
from meshweave.ir.values import NOTHING, local_values, uneven_dims
from meshweave.optimize.overlap.read import begin

_BETWEEN = "between roles"  # the queue of communications between roles
# phases that begin a part of the step, and the phases before them
_BEFORE = {"backward": "forward", "update": "backward"}
_REPLACED = ("param", "state", "acc")  # kinds of inputs that an output of the same name replaces


@dataclass(slots=True)
class RoleForm:
    """A copy of a role with fences where backward and update begin. `nodes`: for each node of the role that of the
    copy.

    Communications between roles keep their order in a single queue. Gradients that are not kept die at their last use,
    and the program is that of the last microbatch, which has no sums of gradients.
    """

    copy: RankGraph
    nodes: Mapping[fx.Node, fx.Node]
    microbatches: int = 1
    keeps_gradients: bool = False
    fences: dict[str, fx.Node] = field(default_factory=dict)

    def program(self, lines: Mapping[fx.Node, str], shared: Collection[fx.Node], with_uneven: bool) -> DeviceProgram:
        """The copy as a device program. `lines`: the queues of the role's starts; `shared`: those in which several
        roles take part; `with_uneven`: whether to find the nodes whose shapes differ between devices."""
        graph, local = self.copy.graph, local_values(self.copy)
        queues = {
            own: _BETWEEN if node in shared else lines[node]
            for node, own in self.nodes.items()
            if node in shared or node.target is transfer
        }
        uneven = uneven_dims(self.copy, local) if with_uneven else {}
        self._mark()
        return DeviceProgram(
            graph,
            local.values | dict.fromkeys(self.fences.values(), NOTHING),
            lambda start: self.copy.group_axes(str(start.args[-1])),
            self._releasable(),
            {self.fences[phase]: phase == "backward" for phase in _BEFORE if phase in self.fences},
            uneven,
            is_whole=True,
            queues=queues,
            dropped=frozenset(i for i, item in enumerate(self.copy.results.items()) if self._is_dropped(*item)),
            prepared=frozenset(prepared_values(graph)),
        )

    def role(self) -> RankGraph:
        """The role with the program's present graph, in any order; the program is used up."""
        for phase, fence in self.fences.items():
            _settle(self.copy.graph, phase, fence)
        for fence in self.fences.values():
            self.copy.graph.erase_node(fence)
        return self.copy

    def _is_dropped(self, key: tuple[str, str], value: fx.Node) -> bool:
        is_gradient = key[0] == "acc" or (key[0] == "grad" and not self.keeps_gradients)
        return is_gradient and value.op == "call_function"

    def _mark(self) -> None:
        update = self._first("update", None)
        for phase, first in {"backward": self._first("backward", update), "update": update}.items():
            if first is not None:
                self.fences[phase] = self._fence(phase, first)

    def _first(self, phase: str, until: fx.Node | None) -> fx.Node | None:
        """The node before which `runtime.executor` cuts the step: the first of a phase, or the cut after it."""
        for node in self.copy.graph.nodes:
            is_run = node.op == "call_function" and node.target not in SYMBOLS
            if node is until or (is_run and PARTS[origin_of(node).phase] == PARTS[phase]):
                return node
        return until

    def _fence(self, phase: str, first: fx.Node) -> fx.Node:
        """Make the values that the session reads after a part available there: loss and metrics, buffers, sums and
        norm of gradients; with several microbatches all pending communications, because the next one begins with
        none."""
        kinds = ("loss", "metric") if phase == "backward" else ("buffer", "acc", "norm")
        read = {n for key, n in self.copy.results.items() if key[0] in kinds}
        before = list(takewhile(lambda n: n is not first, self.copy.graph.nodes))
        if phase == "update" and self.microbatches > 1:
            waits = (n for n in before if n.target is WAIT and origin_of(n).phase != "reduce")
            read |= {n for n in waits if set(before).isdisjoint(n.users)}
        needed = [n for n in before if n.op == "call_function" and n in read]
        with self.copy.graph.inserting_before(first):
            return self.copy.graph.call_function(begin, (phase, *needed))

    def _releasable(self) -> Callable[[fx.Node], bool]:
        """Which inputs die at their last use: those replaced by an output of the same name (`runtime.executor`)."""
        keys = {n: (i.kind, i.name) for n, i in self.copy.sources.items()}
        replaced = {key for key in self.copy.outputs if key[0] in _REPLACED}
        return lambda node: keys[node] in replaced


def form_of(role: RankGraph, microbatches: int = 1, keeps_gradients: bool = False) -> RoleForm:
    nodes: dict[fx.Node, fx.Node] = {}
    return RoleForm(replace(role, graph=copied_graph(role.graph, nodes)), nodes, microbatches, keeps_gradients)


def _settle(graph: fx.Graph, phase: str, fence: fx.Node) -> None:
    """Move nodes that belong after a fence there: views, and kernels grouped with their consumers. Communications of
    backward that start before the fence stay there with their operands: they then belong to forward."""
    ahead, before = set[fx.Node](), dict[fx.Node, None]()
    for node in graph.nodes:
        if node is fence:
            break
        ahead.add(node)
        is_run = node.op == "call_function" and node.target not in SYMBOLS
        if is_run and PARTS[origin_of(node).phase] >= PARTS[phase]:
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
