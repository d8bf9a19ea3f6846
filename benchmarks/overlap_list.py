"""A plain list scheduler, as a judge of ours: what little code reaches, ours must reach too.

Cheap kernels that feed only a collective belong to its start. Buckets of three sizes: none, or runs of collectives of
the busiest group, merged by torch's own functions, where no part needs another and no two buckets need each other.
Kernels run in the graph's order (window 0), or by the longest way to the end among the first that have not run. A
gather starts early where its link is idle and memory allows, and at the latest when its result is needed in its own
time and a quarter; reductions come before other gathers. It knows nothing of the pass that it judges (it imports
nothing of meshweave.optimize.overlap).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from overlap_judge import (
    Costs,
    Verdict,
    collective_of,
    flops_of,
    group_of,
    is_free,
    judge,
    peak_bytes,
    start_of,
    storage_bytes,
    tensor_bytes,
    value_of,
)
from torch import fx

Seconds = Costs | Callable[[fx.Node], float]
MIB = 2**20
WINDOWS = (0, 64, 128)  # in kernels
BUCKETS = ((0, 0), (32 * MIB, 64 * MIB), (64 * MIB, 128 * MIB))  # bytes of gathers' results, of reductions' operands
ROOM = 1.05  # of the input order's peak
CHEAP = 1e-3  # seconds up to which a kernel may belong to a start
EARLY = 1.25  # a gather starts so many times its seconds before its result is needed


@dataclass(slots=True)
class Item:
    """A kernel, or a start with the cheap kernels that feed it alone. `reads` are starts whose results it needs."""

    nodes: list[fx.Node]
    seconds: float = 0.0  # of compute
    communication: float = 0.0
    group: str = ""  # "": a kernel
    needs: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)
    users: list[int] = field(default_factory=list)
    allocates: dict[int, int] = field(default_factory=dict)  # storage -> bytes
    uses: set[int] = field(default_factory=set)
    level: float = 0.0  # the longest way to the end, in seconds
    need: float = inf  # of a start: seconds of compute before its first reader


@dataclass(slots=True)
class ListScheduler:
    """One pass over a graph under a cap in bytes."""

    graph: fx.Graph
    costs: Seconds
    window: int
    cap: float = inf
    items: list[Item] = field(default_factory=list)
    waits: dict[int, list[fx.Node]] = field(default_factory=dict)  # by start
    counts: dict[int, int] = field(default_factory=dict)  # by storage: items that still use it
    sizes: dict[int, int] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    end: dict[int, float] = field(default_factory=dict)  # of collectives
    free: dict[str, float] = field(default_factory=dict)  # by group: when it is idle
    queues: dict[str, set[int]] = field(default_factory=dict)  # by group: starts that have what they need
    ready: set[int] = field(default_factory=set)  # kernels that have what they need, or wait for collectives alone
    order: list[fx.Node] = field(default_factory=list)
    live: int = 0
    now: float = 0.0
    progress: float = 0.0  # seconds of compute

    def run(self) -> list[fx.Node]:
        self.read()
        self.missing = [len(item.needs) for item in self.items]
        for i, count in enumerate(self.missing):
            if not count:
                self.enter(i)
        rest = [i for i, item in enumerate(self.items) if not item.group]
        while rest or any(self.queues.values()):
            kernel = self.pick(rest)
            if self.issue(self.now + (self.items[kernel].seconds if kernel >= 0 else 0.0)):
                continue  # what it feeds may be more urgent
            if kernel < 0:
                self.now = self.later(rest[: self.window + 1])
                continue
            rest.remove(kernel)
            self.ready.remove(kernel)
            self.finish(kernel)
        return [*self.order, *(wait for waits in self.waits.values() for wait in waits)]

    def read(self) -> None:
        """Items, what they need and use, and what follows from that."""
        feeds = self.feeders()
        sources: dict[fx.Node, tuple[frozenset[int], frozenset[int]]] = {}
        begun: dict[fx.Node, int] = {}
        inside: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            if node in feeds:
                inside.setdefault(feeds[node], []).append(node)
                continue
            if (start := start_of(node)) is not None:
                self.waits.setdefault(begun[start], []).append(node)
                sources[node] = (frozenset(), frozenset((begun[start],)))
                continue
            nodes = [*inside.get(node, ()), node]
            operands = [sources[n] for own in nodes for n in own.all_input_nodes if n in sources]
            needs, reads = (frozenset[int]().union(*(x[k] for x in operands)) for k in (0, 1))
            if collective_of(node) is None and is_free(node):
                sources[node] = (needs, reads)
                continue
            number = len(self.items)
            is_start = collective_of(node) is not None
            item = Item(
                nodes, group=group_of(node) if is_start else "", needs=set(needs) | set(reads), reads=set(reads)
            )
            item.seconds = sum(self.costs(n) for n in nodes if not is_start or n is not node)
            item.communication = self.costs(node) if is_start else 0.0
            for i in item.needs:
                self.items[i].users.append(number)
            self.items.append(item)
            begun[node] = number
            sources[node] = (frozenset((number,)), frozenset())
        for item in reversed(self.items):
            item.level = item.seconds + item.communication + max((self.items[u].level for u in item.users), default=0.0)
        before = 0.0
        for item in self.items:
            for c in item.reads:
                self.items[c].need = min(self.items[c].need, before)
            before += item.seconds
        self.account()

    def feeders(self) -> dict[fx.Node, fx.Node]:
        """By cheap kernel, and view between, the only start that needs it."""
        feeds: dict[fx.Node, fx.Node] = {}
        for node in reversed(self.graph.nodes):
            is_able = node.op == "call_function" and collective_of(node) is None and start_of(node) is None
            if not is_able or not node.users or flops_of(node) or (not is_free(node) and self.costs(node) > CHEAP):
                continue
            starts = {user if collective_of(user) is not None else feeds.get(user) for user in node.users}
            if len(starts) == 1 and (start := starts.pop()) is not None:
                feeds[node] = start
        return feeds

    def account(self) -> None:
        """The storages of items, and how many items use each; those that live from the begin on are there."""
        held = storage_bytes(self.graph)
        lasting = {s for n in self.graph.find_nodes(op="output") for x in n.all_input_nodes for s in held[x]}
        for node in self.graph.find_nodes(op="placeholder"):
            lasting |= set(held[node]) if node.name.startswith("primals") or not node.users else set()
            self.sizes |= held[node]
        self.live = sum(self.sizes.values())
        self.counts = dict.fromkeys(lasting, 1)
        for item in self.items:
            used = {s: size for n in item.nodes for x in (n, *n.all_input_nodes) for s, size in held[x].items()}
            item.allocates = {s: size for s, size in used.items() if s not in self.sizes}
            item.uses = set(used)
            self.sizes |= used
            for s in item.uses:
                self.counts[s] = self.counts.get(s, 0) + 1

    def enter(self, i: int) -> None:
        group = self.items[i].group
        (self.queues.setdefault(group, set()) if group else self.ready).add(i)

    def arrival(self, i: int) -> float:
        """When the collectives are done that an item reads; never, if one has not begun."""
        return max((self.end.get(c, inf) for c in self.items[i].reads), default=0.0)

    def pick(self, rest: list[int]) -> int:
        """The kernel that runs next, -1 if none can now."""
        able = [i for i in rest[: max(1, self.window)] if i in self.ready and self.arrival(i) <= self.now]
        fitting = [i for i in able if i == rest[0] or self.live + sum(self.items[i].allocates.values()) <= self.cap]
        return max(fitting, key=lambda i: (self.items[i].level, -i), default=-1)

    def issue(self, until: float, forced: bool = False) -> bool:
        """Start a collective in a group that is idle before `until`; returns whether one began."""
        for group, queue in list(self.queues.items()):
            if not queue or self.free.get(group, 0.0) > until:
                continue
            able = sorted((i for i in queue if self.arrival(i) <= self.now), key=lambda i: (self.items[i].need, i))
            grows = {i: sum(self.items[i].allocates.values()) for i in able}
            gathers = [i for i in able if collective_of(self.items[i].nodes[-1]) == "all_gather"]
            urgent = [i for i in gathers if self.items[i].need - self.progress <= EARLY * self.items[i].communication]
            others = [i for i in able if i not in gathers]
            early = [i for i in gathers if forced or self.live + grows[i] <= self.cap]
            for start in (*urgent[:1], *others[:1], *early[:1]):
                queue.remove(start)
                self.finish(start)
                return True
        return False

    def finish(self, i: int) -> None:
        """Run a kernel, or begin a collective."""
        item = self.items[i]
        for c in sorted(item.reads):
            self.settle(c)
        self.order += item.nodes
        self.now += item.seconds
        self.progress += item.seconds
        self.live += sum(item.allocates.values())
        if item.group:
            self.free[item.group] = self.end[i] = max(self.now, self.free.get(item.group, 0.0)) + item.communication
        else:
            self.release(item)
        for user in item.users:
            self.missing[user] -= 1
            if not self.missing[user]:
                self.enter(user)

    def settle(self, c: int) -> None:
        """Wait for a collective, which lets go of its operand."""
        if waits := self.waits.pop(c, []):
            self.order += waits
            self.release(self.items[c])

    def release(self, item: Item) -> None:
        for s in item.uses:
            self.counts[s] -= 1
            if not self.counts[s]:
                self.live -= self.sizes[s]

    def later(self, inside: list[int]) -> float:
        """The next time at which something can go on; a gather begins in spite of the cap if nothing else can."""
        times = [self.arrival(i) for i in inside if i in self.ready]
        times += [self.arrival(i) for queue in self.queues.values() for i in queue]
        times += [time for group, time in self.free.items() if self.queues.get(group)]
        following = min((time for time in times if self.now < time < inf), default=inf)
        if following == inf:
            begun = self.issue(inf, forced=True)
            assert begun, "something can go on while any item is left"
            return self.now
        return following


def plan_buckets(graph: fx.Graph, costs: Seconds, most: tuple[int, int]) -> list[list[fx.Node]]:
    """Runs of independent gathers and reductions of the busiest group, at most `most` bytes each."""
    starts = [node for node in graph.nodes if collective_of(node) in ("all_gather", "reduce_scatter")]
    busy: dict[str, float] = {}
    for node in starts:
        busy[group_of(node)] = busy.get(group_of(node), 0.0) + costs(node)
    group = max(busy, key=lambda name: busy[name], default="")
    before, number = dict[fx.Node, int](), {node: k for k, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        before[node] = 0
        for n in node.all_input_nodes:
            before[node] |= before[n] | 1 << number[n]
    runs: dict[object, list[list[fx.Node]]] = {}
    for node in starts:
        is_gather = collective_of(node) == "all_gather"
        if group_of(node) != group or len(node.users) != 1 or start_of(next(iter(node.users))) is None:
            continue
        size = tensor_bytes(node.meta["val"] if is_gather else value_of(node.args[0]))
        key = (node.target, value_of(node.args[0]).dtype, node.args[1:])
        run = runs.setdefault(key, [[]])[-1]
        total = size + sum(tensor_bytes(n.meta["val"] if is_gather else value_of(n.args[0])) for n in run)
        if run and (total > most[not is_gather] or any(before[node] >> number[n] & 1 for n in run)):
            runs[key].append([node])
        else:
            run.append(node)
    buckets = [run for several in runs.values() for run in several if len(run) > 1]
    while (stuck := in_a_cycle(graph, buckets)) is not None:
        buckets.remove(stuck)
    return buckets


def in_a_cycle(graph: fx.Graph, buckets: list[list[fx.Node]]) -> list[fx.Node] | None:
    """A bucket that needs another one that needs it; None if all can be merged. All waits of a bucket are one."""
    unit: dict[fx.Node, fx.Node] = {}
    for bucket in buckets:
        unit |= dict.fromkeys(bucket, bucket[0]) | dict.fromkeys(
            (next(iter(n.users)) for n in bucket), next(iter(bucket[0].users))
        )
    needs: dict[fx.Node, set[fx.Node]] = {}
    for node in graph.nodes:
        needs.setdefault(unit.get(node, node), set()).update(unit.get(n, n) for n in node.all_input_nodes)
    users: dict[fx.Node, list[fx.Node]] = {}
    for node, its in needs.items():
        for n in its:
            users.setdefault(n, []).append(node)
    missing = {node: len(its) for node, its in needs.items()}
    stack = [node for node, count in missing.items() if not count]
    while stack:
        for user in users.get(stack.pop(), ()):
            missing[user] -= 1
            if not missing[user]:
                stack.append(user)
    return next((bucket for bucket in reversed(buckets) if missing[bucket[0]]), None)


def merge(module: fx.GraphModule, costs: Seconds, most: tuple[int, int]) -> fx.Graph:
    """A copy of the graph with its buckets, in an order of its dependencies."""
    from torch._inductor.fx_passes.bucketing import merge_all_gather_bucket, merge_reduce_scatter_bucket

    merged = copy.deepcopy(module)
    for bucket in plan_buckets(merged.graph, costs, most):
        is_gather = collective_of(bucket[0]) == "all_gather"
        (merge_all_gather_bucket if is_gather else merge_reduce_scatter_bucket)(merged.graph, bucket, mode="default")
    return reordered(merged.graph, [])


def reordered(graph: fx.Graph, order: list[fx.Node]) -> fx.Graph:
    """A copy with its nodes in an order; views stand before what first needs them."""
    result, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def place(node: fx.Node) -> None:
        stack = [node]
        while stack:
            missing = [n for n in stack[-1].all_input_nodes if n not in copies]
            stack += missing
            if not missing and (ready := stack.pop()) not in copies:
                copies[ready] = result.node_copy(ready, copies.__getitem__)

    for node in (*graph.find_nodes(op="placeholder", sort=True), *order, *graph.nodes):
        place(node)
    return result


def pool(module: fx.GraphModule, costs: Seconds) -> Iterator[tuple[str, Verdict]]:
    """What the judge says of the order of each set of buckets and window."""
    cap = ROOM * peak_bytes(module.graph)
    for most in BUCKETS:
        graph = merge(module, costs, most) if most[0] else module.graph
        for window in WINDOWS:
            sizes = f"buckets {most[0] // MIB}/{most[1] // MIB}, " if most[0] else ""
            order = ListScheduler(graph, costs, window, cap).run()
            yield f"{sizes}window {window}", judge(reordered(graph, order), costs)
