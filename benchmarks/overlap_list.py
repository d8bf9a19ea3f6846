"""A plain list scheduler, as a judge of ours: what little code reaches, ours must reach too.

Kernels run by the longest way to the end of the graph (bottom level) among those that have what they need, within a
window of the graph's order; a collective starts as soon as its operand is there and its group is idle, the longest way
first; a kernel waits for a collective only where it reads the result. Nothing is merged, and no memory is counted while
an order is made. It knows nothing of the pass that it judges (it imports nothing of meshweave.optimize.overlap).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf

from overlap_judge import Costs, Verdict, collective_of, group_of, is_free, judge, start_of
from torch import fx

WINDOWS = (0, 8, 64, 256)  # in kernels and starts


@dataclass(slots=True)
class ListScheduler:
    """One pass over a graph; items are its kernels and starts, in its order."""

    graph: fx.Graph
    costs: Costs
    window: int
    nodes: list[fx.Node] = field(default_factory=list)
    needs: list[set[int]] = field(default_factory=list)  # by item: items before it
    reads: list[set[int]] = field(default_factory=list)  # by item: starts whose results it reads
    users: list[list[int]] = field(default_factory=list)
    waits: dict[int, list[fx.Node]] = field(default_factory=dict)  # by start
    level: list[float] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    end: dict[int, float] = field(default_factory=dict)  # of collectives
    free: dict[str, float] = field(default_factory=dict)  # by group: when it is idle
    queues: dict[str, set[int]] = field(default_factory=dict)  # by group: starts that have what they need
    ready: set[int] = field(default_factory=set)  # kernels that have what they need, or wait for collectives alone
    order: list[fx.Node] = field(default_factory=list)
    now: float = 0.0

    def run(self) -> list[fx.Node]:
        self.read()
        seconds = [self.costs(node) for node in self.nodes]
        self.level = [0.0] * len(self.nodes)
        for i in reversed(range(len(self.nodes))):
            self.level[i] = seconds[i] + max((self.level[u] for u in self.users[i]), default=0.0)
        self.missing = [len(needs) for needs in self.needs]
        for i, count in enumerate(self.missing):
            if not count:
                self.enter(i)
        base, done = 0, set[int]()
        while len(done) < len(self.nodes):
            self.issue(seconds, done)
            while base in done or (base < len(self.nodes) and collective_of(self.nodes[base]) is not None):
                base += 1
            inside = [i for i in self.ready if i <= base + self.window] or sorted(self.ready)[:1]
            able = [i for i in inside if self.arrival(i) <= self.now]
            if not able:
                self.now = self.later(inside)
                continue
            kernel = max(able, key=lambda i: (self.level[i], -i))
            self.ready.remove(kernel)
            self.settle(kernel)
            self.now += seconds[kernel]
            self.finish(kernel, done)
        return [*self.order, *(wait for waits in self.waits.values() for wait in waits)]

    def read(self) -> None:
        sources: dict[fx.Node, tuple[frozenset[int], frozenset[int]]] = {}
        begun: dict[fx.Node, int] = {}
        for node in self.graph.nodes:
            inputs = [sources[n] for n in node.all_input_nodes if n in sources]
            items = frozenset[int]().union(*(x[0] for x in inputs))
            starts = frozenset[int]().union(*(x[1] for x in inputs))
            if node.op != "call_function":
                continue
            if (start := start_of(node)) is not None:
                self.waits.setdefault(begun[start], []).append(node)
                sources[node] = (items, frozenset((begun[start],)))
            elif collective_of(node) is None and is_free(node):
                sources[node] = (items, starts)
            else:
                number = len(self.nodes)
                self.nodes.append(node)
                self.needs.append(set(items))
                self.reads.append(set(starts))
                self.users.append([])
                for i in items:
                    self.users[i].append(number)
                begun[node] = number
                sources[node] = (frozenset((number,)), frozenset())

    def enter(self, item: int) -> None:
        is_start = collective_of(self.nodes[item]) is not None
        (self.queues.setdefault(group_of(self.nodes[item]), set()) if is_start else self.ready).add(item)

    def arrival(self, item: int) -> float:
        """When the collectives are done that an item reads."""
        return max((self.end[c] for c in self.reads[item]), default=0.0)

    def issue(self, seconds: list[float], done: set[int]) -> None:
        """Start what can start in each group that is idle, until nothing more can."""
        found = True
        while found:
            found = False
            for group, queue in list(self.queues.items()):  # what is started may feed a group that was not there
                able = (
                    [i for i in queue if self.arrival(i) <= self.now] if self.free.get(group, 0.0) <= self.now else []
                )
                if able:
                    start = max(able, key=lambda i: (self.level[i], -i))
                    queue.remove(start)
                    self.settle(start)
                    self.free[group] = self.end[start] = self.now + seconds[start]
                    self.finish(start, done)
                    found = True

    def settle(self, item: int) -> None:
        for start in sorted(self.reads[item]):
            self.order += self.waits.pop(start, [])

    def finish(self, item: int, done: set[int]) -> None:
        done.add(item)
        self.order.append(self.nodes[item])
        for user in self.users[item]:
            self.missing[user] -= 1
            if not self.missing[user]:
                self.enter(user)

    def later(self, inside: list[int]) -> float:
        """The next time at which something can go on."""
        times = [self.arrival(i) for i in inside]
        times += [self.arrival(i) for queue in self.queues.values() for i in queue]
        times += [time for group, time in self.free.items() if self.queues.get(group)]
        return min((time for time in times if time > self.now), default=inf)


def reordered(graph: fx.Graph, order: list[fx.Node]) -> fx.Graph:
    """A copy with its nodes in an order; views stand before what first needs them."""
    made, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def place(node: fx.Node) -> None:
        stack = [node]
        while stack:
            missing = [n for n in stack[-1].all_input_nodes if n not in copies]
            stack += missing
            if not missing and (one := stack.pop()) not in copies:
                copies[one] = made.node_copy(one, copies.__getitem__)

    for node in (*graph.find_nodes(op="placeholder", sort=True), *order, *graph.nodes):
        place(node)
    return made


def pool(graph: fx.Graph, costs: Costs) -> Iterator[tuple[str, Verdict]]:
    """What the judge says of each window's order."""
    for window in WINDOWS:
        yield f"list, window {window}", judge(reordered(graph, ListScheduler(graph, costs, window).run()), costs)
