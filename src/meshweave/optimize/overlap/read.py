"""Reads an fx graph as a problem: dependencies (data, mutations, random numbers, point-to-point order) and storages."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from meshweave.errors import MeshweaveError, VerifyError
from meshweave.interop.ops import is_operator, operator_name
from meshweave.ir.aliases import is_view_op, written_of
from meshweave.ir.collectives import TRANSFER, WAIT, Collective, collective_of, group_of
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.graph import place_of
from meshweave.ir.rank import SYMBOLS
from meshweave.ir.traits import is_random
from meshweave.ir.values import Values
from meshweave.optimize.overlap.model import Problem

Sources = tuple[frozenset[int], frozenset[int]]  # items, and starts whose communication must be complete
_NONE: Sources = (frozenset(), frozenset())


@dataclass(slots=True)
class Reading:
    """A graph as a problem. `nodes[i]` is item i; `rows[i]` its row if it starts a communication; `waits[i]` its wait
    nodes. Other nodes are free: views, symbols and the like, which are placed where they are needed."""

    program: DeviceProgram
    problem: Problem = field(default_factory=Problem)
    nodes: list[fx.Node] = field(default_factory=list)
    rows: dict[int, Collective] = field(default_factory=dict)
    waits: dict[int, list[fx.Node]] = field(default_factory=dict)
    groups: list[Any] = field(default_factory=list)  # by channel: its name argument
    free: dict[fx.Node, None] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.program.graph

    @property
    def values(self) -> Mapping[fx.Node, Values]:
        return self.program.values


@dataclass(frozen=True, slots=True)
class _Op:
    """Properties of an op, independent of its operands."""

    is_symbolic: bool
    is_impure: bool
    is_harmless: bool
    is_random: bool
    writes: tuple[tuple[int, str], ...]  # arguments: (position, name)


@dataclass(slots=True)
class _GraphReader:
    reading: Reading
    priced_views: Collection[Any] = ()
    sources: dict[fx.Node, Sources] = field(default_factory=dict)
    begun: dict[fx.Node, int] = field(default_factory=dict)  # nodes with the result of a communication, before its wait
    mutated: set[int] = field(default_factory=set)
    writer: dict[int, int] = field(default_factory=dict)  # mutated storage -> the last item that wrote it
    readers: dict[int, list[int]] = field(default_factory=dict)
    flying: dict[int, set[int]] = field(
        default_factory=dict
    )  # storage -> communications that read it, until their waits
    landing: dict[int, set[int]] = field(default_factory=dict)  # storage -> communications that write it
    ops: dict[Any, _Op] = field(default_factory=dict)  # by target
    channels: dict[Any, int] = field(default_factory=dict)
    last: dict[Any, int] = field(default_factory=dict)  # per chain of items that keep their order: the latest
    # by channel: starts since the last that is matched by its place, and that
    unmatched: dict[int, list[int]] = field(default_factory=dict)
    fence: int = -1  # the latest item that everything has to follow
    since: list[int] = field(default_factory=list)  # items after it
    storages: set[int] = field(default_factory=set)
    waited: set[int] = field(default_factory=set)  # storages whose communication has been waited for
    coming: set[fx.Node] = field(default_factory=set)  # inputs that have a wait
    owners: Counter[int] = field(default_factory=Counter)  # storage -> inputs that live in it

    def run(self) -> Reading:
        graph = self.reading.graph
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.owners.update(x.storage for x in self.reading.values[node])
            elif node.target is WAIT:
                self.mutated |= self.storages_of_wait(node)
                base = _base(node.args[0])
                self.coming.update([base] if base.op in ("placeholder", "get_attr") else [])
            elif node.op == "call_function" and (written := self.written(node, self.op_of(node))):
                self.mutated |= written
        for node in graph.nodes:
            if node.op == "placeholder":
                self.sources[node] = _NONE
                self.place(node, before=True, kept=not self.reading.program.is_releasable(node))
            elif node.op == "get_attr":
                self.sources[node] = _NONE
                self.reading.free[node] = None
                self.place(node, before=True, kept=True)
            elif node.op == "output":
                self.finish()
            elif node.target is WAIT:
                self.wait(node)
            else:
                row, op = self.row_of(node), self.op_of(node)
                if row is None and self.is_free(node, op) and not self.is_priced(node):
                    self.pass_through(node)
                else:
                    self.item(node, row, op)
        return self.reading

    def row_of(self, node: fx.Node) -> Collective | None:
        """The row of the communication that a node starts, if any."""
        if node in self.reading.program.queues:
            return TRANSFER
        return collective_of(node) if node.op == "call_function" else None

    def place(self, node: fx.Node, before: bool, kept: bool) -> tuple[int, ...]:
        """Register the storages that a node allocates; returns their numbers."""
        problem = self.reading.problem
        storages = []
        for x in self.reading.values[node]:
            while len(problem.sizes) <= x.storage:
                problem.sizes.append(0)
                problem.kept.append(False)
                problem.before.append(False)
            if x.storage not in self.storages:
                self.storages.add(x.storage)
                problem.sizes[x.storage], problem.before[x.storage] = x.storage_bytes, before
                storages.append(x.storage)
            problem.kept[x.storage] |= kept
        return tuple(storages)

    def op_of(self, node: fx.Node) -> _Op:
        target = node.target
        op = self.ops.get(target)
        if op is None:
            op = self.ops[target] = _Op(
                target is operator.getitem or target in SYMBOLS,
                node.op == "call_function" and node.is_impure(impure_random=False),
                _is_harmless(target),
                is_random(target) or (not is_operator(target) and "rng" in str(target)),
                written_of(target),
            )
        return op

    def written(self, node: fx.Node, op: _Op) -> set[int]:
        """The storages that a node writes."""
        if getattr(node.target, "__name__", "") == "triton_kernel_wrapper_mutation":  # which torch may not have loaded
            return {x.storage for n in node.all_input_nodes for x in self.reading.values[n]}
        storages: set[int] = set()
        for position, name in op.writes:
            operand = node.kwargs.get(name, node.args[position] if position < len(node.args) else None)
            for item in operand if isinstance(operand, (list, tuple)) else (operand,):
                if isinstance(item, fx.Node):
                    storages |= {x.storage for x in self.reading.values[item]}
        return storages

    def is_free(self, node: fx.Node, op: _Op) -> bool:
        """Whether a node does no work: it returns no tensor, or one in an operand's storage, and writes none."""
        if node.op != "call_function":
            return False
        if op.is_symbolic:
            return True
        results = self.reading.values[node]
        if not results:
            return not op.is_impure and "val" in node.meta
        operands = {x.storage for n in node.all_input_nodes for x in self.reading.values[n]}
        return all([x.storage in operands for x in results]) and not op.writes and not op.is_impure

    def is_priced(self, node: fx.Node) -> bool:
        """Whether a view is a kernel with a cost; a view of a pending result keeps its place."""
        is_flying = _base(node) in self.coming or any(n in self.begun for n in node.all_input_nodes)
        return node.target in self.priced_views and not is_flying

    def pass_through(self, node: fx.Node) -> None:
        self.reading.free[node] = None
        if any(n in self.begun for n in node.all_input_nodes):  # a part of a coalesced collective's result
            self.begun[node] = next(self.begun[n] for n in node.all_input_nodes if n in self.begun)
        self.sources[node] = _join([self.sources[n] for n in node.all_input_nodes])

    def wait(self, node: fx.Node) -> None:
        operand = node.args[0] if node.args else None
        start = self.begun.get(operand) if isinstance(operand, fx.Node) else None
        if start is None and isinstance(operand, fx.Node) and self.is_landed(operand):
            self.pass_free_wait(node)
            return
        if start is None:
            raise VerifyError(
                "a wait has no start: its operand is not the result of a collective in this graph",
                where=place_of(node),
                got=f"{operand}",
                hint="the result of a start, or an input whose communication an earlier graph began",
            )
        problem = self.reading.problem
        if not problem.is_waited[start]:
            problem.is_waited[start] = True
            problem.order.append(~start)
            for s in problem.holds(start):
                self.flying.get(s, set()).discard(start)
                self.landing.get(s, set()).discard(start)
        self.waited.update(x.storage for x in self.reading.values[node])
        self.reading.waits[start].append(node)
        self.sources[node] = (frozenset((start,)), frozenset((start,)))

    def is_landed(self, operand: fx.Node) -> bool:
        """Whether a wait is for a communication that has finished or that an earlier graph began."""
        while operand in self.reading.free and operand.target is not WAIT and operand.all_input_nodes:
            operand = operand.all_input_nodes[0]
        return operand.target is WAIT or operand.op in ("placeholder", "get_attr")

    def storages_of_wait(self, node: fx.Node) -> set[int]:
        """The storages of inputs that become readable by a wait, unless other nodes read them: in that case it is
        placed like a view."""
        operand = node.args[0] if node.args else None
        storages = {x.storage for x in self.reading.values[operand]} if isinstance(operand, fx.Node) else set[int]()
        is_alone = isinstance(operand, fx.Node) and operand.op == "placeholder" and len(operand.users) == 1
        is_read = any(user.target is not WAIT for user in node.users)
        return {s for s in storages if self.owners[s] > (is_alone and is_read)}

    def pass_free_wait(self, node: fx.Node) -> None:
        """A wait that costs nothing. If other nodes read its input, they keep their side of it."""
        storages = self.storages_of_wait(node) & self.mutated
        if not storages:
            self.pass_through(node)
            return
        number = self.reading.problem.num_items
        deps, waits = map(set, _join([self.sources[n] for n in node.all_input_nodes]))
        self.mutation(number, storages, storages, deps, waits)
        self.enter(node, None, deps, waits, tuple(sorted(storages)), storages)

    def item(self, node: fx.Node, row: Collective | None, op: _Op) -> None:
        number = self.reading.problem.num_items
        inputs = node.all_input_nodes
        items, starts = _join([self.sources[n] for n in inputs])
        deps, waits = set(items), set(starts)
        for n in inputs:
            if n in self.begun:
                waits.add(self.complete(n, node))
        reads = tuple(sorted({x.storage for n in inputs for x in self.reading.values[n]}))
        writes = self.written(node, op)
        self.check_flight(node, reads, writes)
        self.mutation(number, reads, writes, deps, waits)
        self.chain(node, row, op, number, deps)
        self.enter(node, row, deps - {number}, waits - {number}, reads, writes)

    def complete(self, result: fx.Node, user: fx.Node) -> int:
        """The start whose result is used directly. Raises VerifyError if no wait for it comes before."""
        if not self.waited.issuperset(x.storage for x in self.reading.values[result]):
            raise VerifyError(
                "the result of a collective is used before its wait",
                where=place_of(user),
                got=f"{result.name}, which has no wait before it",
                hint="use the result of wait_tensor",
            )
        return self.begun[result]

    def check_flight(self, node: fx.Node, reads: Iterable[int], writes: set[int]) -> None:
        for s in reads:
            writers = self.landing.get(s) or (self.flying.get(s) if s in writes else None)
            if writers:
                name = self.reading.nodes[min(writers)].name
                raise VerifyError(
                    "a buffer is accessed while a communication is in flight",
                    where=place_of(node),
                    got=f"it {'writes' if s in writes else 'reads'} what {name} still uses",
                    expected=f"the wait for {name} before it",
                    hint="move the op after the wait, or pass a copy to the collective",
                )

    def mutation(self, number: int, reads: Iterable[int], writes: set[int], deps: set[int], waits: set[int]) -> None:
        """Reads stay after the last write of a storage, writes after the accesses before them."""
        problem = self.reading.problem
        for s in self.mutated.intersection(reads):
            before = [self.writer[s]] if s in self.writer else []
            if s in writes:
                before += self.readers.pop(s, [])
                self.writer[s] = number
            else:
                self.readers.setdefault(s, []).append(number)
            deps.update(before)
            waits.update(b for b in before if problem.channel[b] >= 0)

    def chain(self, node: fx.Node, row: Collective | None, op: _Op, number: int, deps: set[int]) -> None:
        """Random ops keep their order, and a communication that is matched by its place that to all others of its
        channel; nothing passes an op with arbitrary side effects."""
        chains: list[Any] = []
        if row is not None:
            starts = self.unmatched.setdefault(self.channel(node, row), [])
            if row.is_ordered:
                deps.update(starts)
                starts.clear()
            deps.update(i for i in starts[:1] if self.reading.rows[i].is_ordered)
            starts.append(number)
        elif op.is_random:
            chains.append("random")
        chains += [("generator", n) for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Generator)]
        is_fence = node.op in ("call_module", "call_method") or (
            row is None and op.is_impure and not op.writes and not op.is_harmless
        )
        for key in chains:
            if key in self.last:
                deps.add(self.last[key])
            self.last[key] = number
        if is_fence:
            deps.update(self.since)
            self.fence, self.since = number, []
        elif self.fence >= 0:
            deps.add(self.fence)
        self.since.append(number)

    def channel(self, node: fx.Node, row: Collective) -> int:
        group = self.reading.program.queues.get(node) or group_of(node, row)
        key = getattr(group, "group_name", group)
        if not isinstance(key, str) or not key:
            raise MeshweaveError("a collective has no group", where=place_of(node), got=f"{group!r}", expected="a name")
        if key not in self.channels:
            self.channels[key] = len(self.channels)
            self.reading.problem.channels.append(key)
            self.reading.groups.append(group)
        return self.channels[key]

    def enter(
        self,
        node: fx.Node,
        row: Collective | None,
        deps: set[int],
        waits: set[int],
        reads: tuple[int, ...],
        writes: set[int],
    ) -> None:
        problem, number = self.reading.problem, self.reading.problem.num_items
        problem.names.append(node.name)
        problem.deps.append(tuple(sorted(deps)))
        problem.waits.append(tuple(sorted(waits)))
        problem.channel.append(self.channel(node, row) if row is not None else -1)
        problem.allocs.append(self.place(node, before=False, kept=False))
        problem.uses.append(reads)
        problem.is_waited.append(False)
        problem.order.append(number)
        self.reading.nodes.append(node)
        self.sources[node] = (frozenset((number,)), frozenset())
        if row is None:
            return
        self.reading.rows[number] = row
        self.reading.waits[number] = []
        self.begun[node] = number
        self.waited.difference_update(x.storage for x in self.reading.values[node])
        for users, storages in ((self.flying, reads), (self.landing, (*problem.allocs[number], *writes))):
            for s in storages:
                users.setdefault(s, set()).add(number)

    def finish(self) -> None:
        for n in self.reading.program.results():
            for x in self.reading.values[n]:
                self.reading.problem.kept[x.storage] = True
        for start in self.reading.rows:
            if not self.reading.problem.is_waited[start]:  # never freed
                for s in self.reading.problem.holds(start):
                    self.reading.problem.kept[s] = True


def _base(node: Any) -> Any:
    """What a node is a view of."""
    while isinstance(node, fx.Node) and node.args and (node.target is operator.getitem or is_view_op(node.target)):
        node = node.args[0]
    return node


def _is_harmless(target: Any) -> bool:
    """Ops that torch keeps because they check or order, not because they change anything: their operands determine
    their place."""
    name = operator_name(target) if is_operator(target) else str(target)
    return name.startswith(("_assert", "sym_constrain", "control_deps"))


def _join(sources: Sequence[Sources]) -> Sources:
    if len(sources) == 1:
        return sources[0]
    return frozenset().union(*[s[0] for s in sources]), frozenset().union(*[s[1] for s in sources])


def read_problem(program: DeviceProgram, priced_views: Collection[Any] = ()) -> Reading:
    """The problem of a program, without costs; ops among `priced_views` are kernels although they return views. Raises
    VerifyError, naming the node, for an unknown collective, a wait without a start, a result that is used before its
    wait, and for a buffer that is accessed while a communication is in flight."""
    reading = _GraphReader(Reading(program), priced_views).run()
    fences = [(reading.nodes.index(node), gathers_pass) for node, gathers_pass in program.fences.items()]
    hold_fences(reading.problem, fences)
    return reading


def begin(phase: str, *needed: Any) -> None:
    """Marks where a part of the step begins; its operands are available by then."""
    raise AssertionError("a fence is removed before the graph is run")


def hold_fences(problem: Problem, fences: Sequence[tuple[int, bool]]) -> None:
    """Keep items on their side of the fences, which are items themselves, in order, each with whether gathers may pass
    it."""
    first = -1
    for fence, gathers_pass in fences:
        _hold(problem, first, fence, gathers_pass)
        first = fence


def _hold(problem: Problem, first: int, fence: int, gathers_pass: bool) -> None:
    """Keep item `fence` after all items from `first` on that precede it, and before all later items.

    Kernels that depend only on inputs and have a single user, as the cast of a parameter before its gather, stay with
    that user: if they were fenced themselves, they could not be folded. `gathers_pass`: communications that depend on
    nothing else may start before the fence.
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
