"""A rank graph as the scheduler may see it: fences between the parts of a step, one order of what roles meet in."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from meshweave.ir.collectives import STARTS, WAIT, transfer
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.ir.values import NOTHING, Values
from meshweave.overlap.problem import Problem
from meshweave.overlap.read import Reading

_BETWEEN = "between roles"  # the channel of communications that several roles meet in
_BEFORE = {"backward": "forward", "update": "backward"}  # phases that begin a part of the step, and those before them
_REPLACED = ("param", "state", "acc", "carry")  # kinds of inputs that an output of their name replaces


def begin(phase: str, *needed: Any) -> None:
    """Where a part of the step begins, while the scheduler looks at the graph; what it needs is there by then."""
    raise AssertionError("a fence is taken out before the graph is run")


@dataclass(slots=True)
class Marked:
    """A role whose graph is marked: with a fence where backward and where update begin; with what roles meet in as
    messages of one channel, which keep their order; without gradients that nobody keeps among its outputs, and as the
    last microbatch runs it, which leaves no sums of gradients."""

    role: RankGraph
    values: dict[fx.Node, Values]
    lines: Mapping[fx.Node, str]  # of starts: the queue that they go into
    shared: Collection[fx.Node]  # starts that several roles meet in
    microbatches: int
    keeps_gradients: bool
    fences: dict[str, fx.Node] = field(default_factory=dict)
    was: dict[fx.Node, tuple[Any, tuple[Any, ...]]] = field(default_factory=dict)  # starts as they were
    dropped: dict[int, fx.Node] = field(default_factory=dict)  # by number of an output: a view that stands for it

    @property
    def end(self) -> fx.Node:
        return next(iter(reversed(self.role.graph.nodes)))

    @property
    def outputs(self) -> list[fx.Node]:
        return list(self.end.args[0])  # type: ignore[arg-type]

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
        """Let what the session reads after a part be there then: the loss, buffers, sums of gradients, and with several
        microbatches all that is under way, for the next one begins with nothing."""
        kinds = ("loss",) if phase == "backward" else ("buffer", "acc")
        read = {n for key, n in zip(self.role.outputs, self.outputs, strict=True) if key[0] in kinds}
        before = list(takewhile(lambda n: n is not first, self.role.graph.nodes))
        if phase == "update" and self.microbatches > 1:
            waits = (n for n in before if n.target is WAIT and origin_of(n).phase != "reduce")
            read |= {n for n in waits if set(before).isdisjoint(n.users)}
        needed = [n for n in before if n.op == "call_function" and n in read]
        with self.role.graph.inserting_before(first):
            made = self.role.graph.call_function(begin, (phase, *needed))
        self.values[made] = NOTHING
        self.fences[phase] = made

    def drop(self) -> None:
        """Let gradients that are not kept die with their last use."""
        graph, kept = self.role.graph, []
        for i, ((kind, _), node) in enumerate(zip(self.role.outputs, self.outputs, strict=True)):
            is_dropped = kind == "acc" or (kind == "grad" and not self.keeps_gradients)
            if not is_dropped or node.op != "call_function":
                kept.append(node)
                continue
            with graph.inserting_before(self.end):
                self.dropped[i] = graph.call_function(torch.ops.aten.alias.default, (node,))
            self.values[self.dropped[i]] = self.values[node]
        self.end.args = (kept,)

    def releasable(self) -> Callable[[fx.Node], bool]:
        """Which inputs die with their last use: those that an output of their name replaces (`runtime.executor`). What
        is carried from the step before serves all microbatches."""
        sources = (n for n in self.role.graph.nodes if n.op == "placeholder")
        keys = {n: (i.kind, i.name) for n, i in zip(sources, self.role.inputs, strict=True)}
        kinds = [kind for kind in _REPLACED if kind != "carry" or self.microbatches == 1]
        replaced = {key for key in self.role.outputs if key[0] in kinds}
        return lambda node: keys[node] in replaced

    def hold(self, reading: Reading) -> None:
        """Let fences hold in the problem of the graph."""
        first = -1
        for phase in (phase for phase in _BEFORE if phase in self.fences):
            fence = reading.nodes.index(self.fences[phase])
            _hold(reading.problem, first, fence, gathers_pass=phase == "backward")
            first = fence

    def restore(self) -> None:
        """Take the marks out of the graph, in whatever order it is by now."""
        kept = iter(self.outputs)
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


@contextmanager
def marking(marked: Marked) -> Iterator[Marked]:
    """The role's graph is marked within the block."""
    marked.mark()
    try:
        yield marked
    finally:
        marked.restore()


def _hold(problem: Problem, first: int, fence: int, gathers_pass: bool) -> None:
    """Let item `fence` stand behind all after item `first`, and before all behind it.

    Kernels that need nothing but inputs and lead to one other item, as the cast of a parameter to its gather, go with
    that: held themselves, they could be folded into nothing. `gathers_pass`: communications that need no more than that
    may start before the fence.
    """
    users: list[set[int]] = [set() for _ in problem.names]
    for i, (deps, waits) in enumerate(zip(problem.deps, problem.waits, strict=True)):
        for d in (*deps, *waits):
            users[d].add(i)
    last = (i for i in range(first + 1, fence) if all(u > fence for u in users[i]))
    problem.deps[fence] = tuple(sorted({*problem.deps[fence], *last}))
    loose = set[int]()
    for i in range(fence + 1, problem.num_items):
        deps = problem.deps[i]
        passes = gathers_pass if problem.channel[i] >= 0 else len(users[i]) == 1
        if passes and not problem.waits[i] and all(d in loose for d in deps):
            loose.add(i)
        elif all(d < fence or d in loose for d in deps):
            problem.deps[i] = tuple(sorted({*deps, fence}))


def _settle(graph: fx.Graph, phase: str, fence: fx.Node) -> None:
    """Put what belongs behind a fence behind it: views, and kernels that went with what they lead to.

    Communications of backward that start before it stay there with what they need: they are of forward then.
    """
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
