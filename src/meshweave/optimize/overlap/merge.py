"""Merges collectives of the same kind and group: which may be merged, and the resulting problem.

The operand of a merged gather is the concatenation of its parts (a copy before), and its results are copied out (a copy
each after); a merged reduction concatenates its parts side by side (a copy before), and its results are views of the
whole, except those whose storage the graph may observe (an output, an op in place, `as_strided`): these are copied out.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import torch
from torch import fx

from meshweave.interop.ops import is_operator, operator_name
from meshweave.ir.aliases import written_of
from meshweave.ir.collectives import WAIT, collective_of
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import SYMBOLS
from meshweave.ir.values import Value
from meshweave.optimize.overlap.model import Problem
from meshweave.optimize.overlap.prices import Curve, MergeCosts
from meshweave.optimize.overlap.read import Reading, begin

# Namespaces whose ops see only elements, and the exceptions among them: ops that use an offset into the storage,
# exchange or resize it, or need an offset that is a multiple of a larger element.
_PLAIN = ("aten", "prims", "meshweave")
_SEEING = re.compile(r"as_strided|storage|resize|^set(_|$)|_nested|view_as_complex")
_INDIFFERENT = frozenset({WAIT, operator.getitem, begin, *SYMBOLS})


def observed_storages(program: DeviceProgram) -> frozenset[int]:
    """The storages that must not be replaced by views: those of outputs, those that an op writes, and those of an
    operand of an op that may see more than elements. A tensor in any other storage may become a view into a larger
    storage."""
    seen = program.results()
    for node in program.graph.nodes:
        is_plain = node.op in ("placeholder", "get_attr") or (node.op == "call_function" and _sees_elements(node))
        if not is_plain and node.op != "output":
            seen += node.all_input_nodes
    return frozenset(x.storage for node in seen for x in program.values[node])


def _sees_elements(node: fx.Node) -> bool:
    return _is_plain(node.target) or (not written_of(node.target) and collective_of(node) is not None)


@cache
def _is_plain(target: Any) -> bool:
    """Whether an op only reads the elements of its operands, or makes a view relative to them."""
    if not is_operator(target):
        return target in _INDIFFERENT
    if target is WAIT:
        return True
    is_known = target.namespace in _PLAIN and target is not torch.ops.aten.view.dtype
    return is_known and not written_of(target) and not _SEEING.search(operator_name(target))


Bucket = tuple[int, ...]  # starts, in the order of their parts
Ends = tuple[tuple[int, ...], Sequence[int]]  # storages that a kernel allocates, and that it uses


@dataclass(frozen=True, slots=True)
class Item:
    """An item of a merged problem: item `of` of the graph, or, for bucket `bucket`, its `pack`, its `start` or the
    `unpack` of its part `of`."""

    kind: str  # "node", "pack", "start", "unpack"
    of: int
    bucket: int = -1


@dataclass(frozen=True, slots=True)
class Merged:
    """A problem whose item i is `items[i]`; `buckets` contain starts of the graph; `busy` is the work of links and of
    the copies of merging, in seconds."""

    problem: Problem
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]
    busy: float


@dataclass(slots=True)
class MergedWriter:
    """Writes items in the order of the graph, a bucket after the last dependency of its parts. Items whose dependencies
    are missing wait for them."""

    merger: Merger
    buckets: tuple[Bucket, ...]
    problem: Problem = field(default_factory=Problem)
    items: list[Item] = field(default_factory=list)
    of: dict[int, int] = field(default_factory=dict)  # start -> its bucket
    number: list[int] = field(default_factory=list)  # by item of the graph: the item that computes its result, -1
    begun: dict[int, int] = field(default_factory=dict)  # start of the graph -> its communication
    packed: dict[int, int] = field(default_factory=dict)  # results that are still to be copied out of their bucket
    storage: dict[int, int] = field(default_factory=dict)  # by storage of a part of a reduction: that of the whole
    waiting: dict[int, list[int]] = field(default_factory=dict)  # unit -> units that wait for it

    def run(self) -> Merged | None:
        """The merged problem; None if buckets wait for each other (then `stuck` names one of them)."""
        source, merger = self.merger.reading.problem, self.merger
        self.problem.sizes, self.problem.kept = list(source.sizes), list(source.kept)
        self.problem.before, self.problem.channels = list(source.before), source.channels
        self.of = {c: b for b, bucket in enumerate(self.buckets) for c in bucket}
        self.packed = {c: b for c, b in self.of.items() if merger.is_copied(c)}
        self.number = [-1] * source.num_items
        skipped = {m for c in self.of for m in merger.preludes[c]}
        places: dict[int, list[int]] = {}
        for b, bucket in enumerate(self.buckets):
            places.setdefault(max(max(merger.after[c] for c in bucket), min(bucket) - 1), []).append(b)
        for b in places.get(-1, ()):
            self.enter(~b)
        for i in range(source.num_items):
            if i not in self.of and i not in skipped:
                self.enter(i)
            for b in places.get(i, ()):
                self.enter(~b)
        if self.waiting:
            return None
        for c in sorted(self.packed):
            self.unpack(c)
        self.problem.order = self.order()
        copies = [s for s, x in zip(self.problem.seconds, self.items, strict=True) if x.kind in ("pack", "unpack")]
        return Merged(self.problem, tuple(self.items), self.buckets, sum(self.problem.copy) + sum(copies))

    def stuck(self) -> int:
        """The last waiting bucket."""
        return max(~u for units in self.waiting.values() for u in units if u < 0)

    def enter(self, unit: int) -> None:
        """Write item `unit`, or bucket ~unit, if its dependencies are written, and then everything that waited for
        it."""
        stack = [unit]
        while stack:
            entry = stack.pop()
            missing = self.missing(entry)
            if missing is not None:
                self.waiting.setdefault(missing, []).append(entry)
                continue
            if entry < 0:
                self.bucket(~entry)
            else:
                self.node(entry)
            stack += reversed(self.waiting.pop(entry, ()))

    def missing(self, unit: int) -> int | None:
        """A missing dependency of this unit."""
        problem, number = self.merger.reading.problem, self.number
        if unit >= 0:
            for d in problem.deps[unit]:
                if number[d] < 0:
                    return ~self.of[d] if d in self.of else d
            return None
        bucket = self.buckets[~unit]
        inside = {m for c in bucket for m in self.merger.preludes[c]}
        for c in bucket:
            for d in problem.deps[c]:
                if number[d] < 0 and d not in inside:
                    return ~self.of[d] if d in self.of else d
        return None

    def node(self, i: int) -> None:
        p, problem, number = self.merger.reading.problem, self.problem, self.number
        if self.packed:
            for d in p.deps[i]:
                if d in self.packed:
                    self.unpack(d)
        waits = tuple([self.begun[c] for c in p.waits[i]]) if p.waits[i] else ()
        deps = [number[d] for d in p.deps[i]]
        uses = p.uses[i]
        if self.storage:
            uses = tuple(dict.fromkeys([self.storage.get(s, s) for s in uses]))
        number[i] = len(self.items)
        if p.channel[i] >= 0:
            self.begun[i] = number[i]
        self.items.append(Item("node", i))
        problem.names.append(p.names[i])
        problem.seconds.append(p.seconds[i])
        problem.deps.append(tuple(sorted({*deps, *waits})))
        problem.waits.append(waits)
        problem.channel.append(p.channel[i])
        problem.copy.append(p.copy[i])
        problem.host.append(p.host[i])
        problem.startup.append(p.startup[i])
        problem.usage.append(p.usage[i])
        problem.allocs.append(p.allocs[i])
        problem.uses.append(uses)
        problem.is_waited.append(p.is_waited[i])

    def add(self, item: Item, name: str, seconds: float, deps: Sequence[int], waits: Sequence[int], ends: Ends) -> int:
        """Add a kernel for merging; its storages are `ends`."""
        problem = self.problem
        problem.names.append(name)
        problem.seconds.append(seconds)
        problem.deps.append(tuple(sorted({*deps, *waits})))
        problem.waits.append(tuple(sorted(set(waits))))
        problem.channel.append(-1)
        problem.copy.append(0.0)
        problem.host.append(0.0)
        problem.startup.append(0.0)
        problem.usage.append(())
        problem.allocs.append(ends[0])
        problem.uses.append(tuple(dict.fromkeys([self.storage.get(s, s) for s in ends[1]])))
        problem.is_waited.append(False)
        self.items.append(item)
        return len(self.items) - 1

    def bucket(self, b: int) -> None:
        p, merger, bucket = self.merger.reading.problem, self.merger, self.buckets[b]
        for d in sorted({d for c in bucket for d in p.deps[c]}):
            if d in self.packed:
                self.unpack(d)
        for c in bucket:
            for m in merger.preludes[c]:
                self.node(m)
        moved = sum(merger.costs.moved[c] for c in bucket)
        deps = [self.number[d] for c in bucket for d in p.deps[c]]
        waits = [self.begun[w] for c in bucket for w in p.waits[c]]
        name = "+".join(p.names[c] for c in bucket)
        handed = self.store(int(moved), kept=False)
        ends = ((handed,), [s for c in bucket for s in p.uses[c]])
        pack = self.add(Item("pack", b, b), f"pack {name}", 2 * moved / merger.costs.copy_rate, deps, waits, ends)
        first = bucket[0]
        views = [s for c in bucket if c not in self.packed for s in p.allocs[c]]
        size = sum(p.sizes[s] for c in bucket for s in p.allocs[c])
        whole = self.store(size, any(p.kept[s] for s in views))
        self.storage |= dict.fromkeys(views, whole)
        start = self.add(Item("start", b, b), name, 0.0, (pack,), (), ((whole,), (handed,)))
        self.problem.channel[start], self.problem.usage[start] = p.channel[first], p.usage[first]
        self.problem.copy[start] = max(merger.curve(first)(moved), max(p.copy[c] for c in bucket))
        self.problem.host[start] = merger.host(first)(moved)
        self.problem.startup[start] = max(p.startup[c] for c in bucket)
        self.problem.is_waited[start] = True
        for c in bucket:
            self.begun[c] = self.number[c] = start

    def unpack(self, c: int) -> None:
        """Copy result c out of its bucket."""
        b = self.packed.pop(c)
        p, start = self.merger.reading.problem, self.begun[c]
        seconds = 2 * sum(p.sizes[s] for s in p.allocs[c]) / self.merger.costs.copy_rate
        ends = (p.allocs[c], self.problem.allocs[start])
        self.number[c] = self.add(Item("unpack", c, b), f"unpack {p.names[c]}", seconds, (start,), (start,), ends)

    def store(self, size: int, kept: bool) -> int:
        self.problem.sizes.append(size)
        self.problem.kept.append(kept)
        self.problem.before.append(False)
        return len(self.problem.sizes) - 1

    def order(self) -> list[int]:
        """The order in which the items were written, with waits in their places, those of buckets at their first
        use."""
        problem, waited, entries = self.merger.reading.problem, set[int](), list[int]()
        after: dict[int, list[int]] = {}
        last = -1
        for x in problem.order:
            if x >= 0:
                last = self.number[x] if x not in self.of else last
            elif ~x not in self.of:
                after.setdefault(max(last, self.begun[~x]), []).append(self.begun[~x])
        for i in range(self.problem.num_items):
            for c in (*self.problem.waits[i], ~i, *after.get(i, ())):
                if c < 0:
                    entries.append(i)
                elif c not in waited:
                    waited.add(c)
                    entries.append(~c)
        rest = [c for c in self.problem.starts if self.problem.is_waited[c] and c not in waited]
        return [*entries, *(~c for c in rest)]


_SPAN = 1.5  # parts of a bucket become ready within this multiple of its communication time


@dataclass(slots=True)
class Merger:
    """What merging needs to know of a graph: which starts are of the same kind, and the range of positions of each."""

    reading: Reading
    costs: MergeCosts
    kinds: dict[Any, list[int]] = field(init=False)  # (op, channel, arguments, dtype) -> starts in order
    preludes: dict[int, tuple[int, ...]] = field(init=False)  # by start: kernels for it alone, without operands
    after: dict[int, int] = field(init=False)  # by start: the last item that it needs, -1
    sizes: dict[int, float] = field(default_factory=dict)
    when: list[float] = field(init=False)  # by item: seconds of compute up to it in the graph's order
    before: list[int] = field(init=False)  # by item: a bit for each item that must come before it
    observed: frozenset[int] = field(init=False)  # storages that must not change

    def __post_init__(self) -> None:
        problem = self.reading.problem
        users = problem.users()
        self.kinds, self.preludes, self.after = {}, {}, {}
        for c, row in self.reading.rows.items():
            key = self.key(c) if row.bucket and problem.is_waited[c] else None
            if key is None:
                continue
            self.kinds.setdefault(key, []).append(c)
            self.preludes[c] = tuple(sorted(self.alone(c, users)))
            needs = [d for m in (c, *self.preludes[c]) for d in problem.deps[m] if d not in self.preludes[c]]
            self.after[c] = max(needs, default=-1)
        self.before = _ancestors(problem)
        self.observed = observed_storages(self.reading.program)
        self.when = list(accumulate(problem.seconds))

    def key(self, start: int) -> Any:
        """Equal for starts that may be merged; None for a start that must not be."""
        node, row = self.reading.nodes[start], self.reading.rows[start]
        operand = node.args[0] if node.args and not node.kwargs else None
        if not isinstance(operand, fx.Node) or len(self.reading.values[operand]) != 1 or is_symbolic(node, operand):
            return None
        x = self.reading.values[operand][0]
        if (row.bucket != "reduce" and not x.shape) or not x.num_elements or not self.is_waited_alone(start):
            return None
        rest = tuple(str(a) for p, a in enumerate(node.args[1:], 1) if p != row.group)
        dtype = None if row.bucket == "gather" else x.dtype
        # starts of every microbatch are not merged with those of only the first or the last, nor those of two stages,
        # which a schedule runs at different times
        origin = origin_of(node)
        run = origin.phase if origin.phase in ("prepare", "reduce") else ""
        return node.target, self.reading.problem.channel[start], rest, dtype, run, origin.stage

    def is_waited_alone(self, start: int) -> bool:
        """Whether only waits read the result of a start: views of it, and outputs, need this very tensor."""
        node = self.reading.nodes[start]
        return all(user.target is WAIT for user in node.users) and all(
            x.is_contiguous for x in self.reading.values[node]
        )

    def is_copied(self, start: int) -> bool:
        """Whether the result of a start is copied out of its bucket, instead of being a view of the bucket."""
        is_gather = self.reading.rows[start].bucket == "gather"
        return is_gather or any(s in self.observed for s in self.reading.problem.allocs[start])

    def alone(self, start: int, users: Sequence[Sequence[int]]) -> set[int]:
        """Kernels that only this start needs, and that need nothing else."""
        problem, exclusive = self.reading.problem, set[int]()
        waiting = list(problem.deps[start])
        while waiting:
            i = waiting.pop()
            only = set(users[i]) <= exclusive | {start}
            if problem.channel[i] < 0 and only and not problem.waits[i] and i not in exclusive:
                exclusive.add(i)
                waiting += problem.deps[i]
        while lost := {
            i for i in exclusive if not set(problem.deps[i]) <= exclusive or not set(users[i]) <= exclusive | {start}
        }:
            exclusive -= lost
        return exclusive

    def operand(self, start: int) -> Value:
        node = self.reading.nodes[start].args[0]
        assert isinstance(node, fx.Node)
        return self.reading.values[node][0]

    def can_join(self, bucket: Sequence[int], start: int) -> str:
        """Why a start cannot join a bucket, "" if it can: no part may depend on another."""
        names = self.reading.problem.names
        for c in bucket:
            if self.before[start] >> c & 1 or self.before[c] >> start & 1:
                first, last = (c, start) if self.before[start] >> c & 1 else (start, c)
                users = self.reading.problem.users()[first]
                via = next((u for u in users if u != last and self.before[last] >> u & 1), -1)
                by_way = f", by way of {names[via]}" if via >= 0 else ""
                return f"{names[last]} needs the result of {names[first]}{by_way}"
        return ""

    def neighbours(self) -> Iterator[tuple[int, int]]:
        for starts in self.kinds.values():
            yield from pairwise(starts)

    def buckets(self, gathers: float, reductions: float, ramp: int = 0, tail: int = 0) -> tuple[Bucket, ...]:
        """Runs of neighbours with at most `most` bytes at the larger end.

        With a `ramp` the first gathers, which nothing hides yet, are smaller: from a 2^ramp-th of the size each run may
        be twice as large as the previous. The last runs are, too, if no reductions follow in their group: their users
        have nothing else to hide behind. With a `tail` the last reductions are smaller, down to a 2^tail-th: nothing
        follows them either.
        """
        result: list[Bucket] = []
        channel = self.reading.problem.channel
        reducing = {channel[c] for c, row in self.reading.rows.items() if row.bucket in ("scatter", "reduce")}
        for starts in self.kinds.values():
            is_gather = self.reading.rows[starts[0]].bucket == "gather"
            most = gathers if is_gather else reductions
            span = self.span(starts[0], most)
            halvings = ramp if is_gather else 0
            is_last = channel[starts[0]] not in reducing if halvings else tail and not is_gather
            left = sum(map(self.size, starts)) if is_last else inf
            run: list[int] = []
            for c in starts:
                limit = min(most / 2**halvings, max(most / 2 ** max(ramp, tail), left / 2))
                if run and self.why_apart(run, c, limit, span):
                    result += [tuple(run)] if len(run) > 1 else []
                    left -= sum(map(self.size, run))
                    run, halvings = [], max(halvings - 1, 0)
                run.append(c)
            result += [tuple(run)] if len(run) > 1 else []
        return tuple(result)

    def why_apart(self, run: Sequence[int], start: int, most: float, span: float) -> str:
        """Why a start does not join a run of buckets of `most` bytes, whose parts are ready within `span` seconds."""
        total = sum(self.size(c) for c in run) + self.size(start)
        if total > most:
            return f"together {total / 1e6:.1f} MB, more than {most / 1e6:.0f} MB"
        apart = self.when[start] - self.when[run[0]]
        if apart > span:
            return f"{apart * 1e3:.3f} ms of compute are between them, more than {span * 1e3:.3f} ms"
        return self.can_join(run, start)

    def span(self, start: int, most: float) -> float:
        """Seconds of compute between parts of a bucket of `most` bytes at most, or of all of its kind if they are
        fewer."""
        if most == inf:
            return inf
        alike = next(starts for starts in self.kinds.values() if start in starts)
        return _SPAN * self.curve(start)(min(most, sum(map(self.size, alike))))

    def curve(self, start: int) -> Curve:
        """Seconds of a collective of the kind of `start` as a function of a rank's operand bytes."""
        target, channel = self.reading.nodes[start].target, self.reading.problem.channel[start]
        return self.costs.curves[str(target), channel]

    def host(self, start: int) -> Curve:
        """Seconds that the wait for such a collective takes of the stream, over the same bytes."""
        target, channel = self.reading.nodes[start].target, self.reading.problem.channel[start]
        return self.costs.hosts[str(target), channel]

    def size(self, start: int) -> float:
        """Bytes at the larger end of a collective."""
        if start not in self.sizes:
            results = self.reading.values[self.reading.nodes[start]]
            self.sizes[start] = max(self.costs.moved[start], float(sum(x.bytes for x in results)))
        return self.sizes[start]

    def merged(self, buckets: Sequence[Bucket]) -> Merged:
        """The problem in which each bucket is a communication. Buckets whose parts depend on each other through other
        buckets are omitted."""
        candidates = list(buckets)
        while True:
            writer = MergedWriter(self, tuple(candidates))
            problem = writer.run()
            if problem is not None:
                return problem
            candidates.remove(writer.buckets[writer.stuck()])


def is_symbolic(*nodes: fx.Node) -> bool:
    """Whether a size of the nodes is symbolic: constants written into a graph would be right for a single size only."""
    values = [node.meta.get("val") for node in nodes]
    return any(isinstance(x, torch.Tensor) and any(type(size) is not int for size in x.shape) for x in values)


def _ancestors(problem: Problem) -> list[int]:
    """By item the items that it needs, directly or indirectly, as bits of a number."""
    ancestors = [0] * problem.num_items
    for i, deps in enumerate(problem.deps):
        bits = 0
        for d in deps:
            bits |= ancestors[d] | 1 << d
        ancestors[i] = bits
    return ancestors
