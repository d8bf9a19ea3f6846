"""The problem in which some collectives are merged: its items, and their origin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshweave.optimize.overlap.model import Problem

if TYPE_CHECKING:
    from meshweave.optimize.overlap.merge import Merger

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
    """A problem whose item i is `items[i]`; `buckets` contain starts of the graph."""

    problem: Problem
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]


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
        return Merged(self.problem, tuple(self.items), self.buckets)

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
