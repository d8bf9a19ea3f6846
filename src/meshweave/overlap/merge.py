"""Collectives of one kind and group as one: which may become one, and the problem in which they are.

A merged gather hands in its parts one after the other (one copy before) and takes the results apart (one copy each after); a
merged reduction puts its parts side by side (one copy before), and its results are views of the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import floor, inf
from typing import Any

from torch import fx

from meshweave.overlap.figures import Costs
from meshweave.overlap.problem import Problem
from meshweave.overlap.read import Reading
from meshweave.simulate.shapes import Value

_BEHIND = 1e-6  # of two buckets behind one item, the one that needs the other stands this much further

Bucket = tuple[int, ...]  # starts, in the order in which their parts stand


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why two neighbours of one kind stay apart."""

    first: int
    second: int
    reason: str


@dataclass(frozen=True, slots=True)
class Item:
    """What an item of a merged problem is: item `of` of the graph, or of bucket `bucket` its `pack`, its `start` or the
    `unpack` of its part `of`."""

    kind: str  # "node", "pack", "start", "unpack"
    of: int
    bucket: int = -1


@dataclass(frozen=True, slots=True)
class Merged:
    """A problem whose item i is `items[i]`; `buckets` are those of starts of the graph."""

    problem: Problem
    items: tuple[Item, ...]
    buckets: tuple[Bucket, ...]


@dataclass(slots=True)
class Merger:
    """What merging needs to know of a graph: which starts are of one kind, and between which items each may stand."""

    reading: Reading
    costs: Costs
    kinds: dict[Any, list[int]] = field(init=False)  # (op, channel, arguments, dtype) -> starts in order
    preludes: dict[int, tuple[int, ...]] = field(
        init=False
    )  # by start: kernels that it alone needs, which need nothing
    after: dict[int, int] = field(init=False)  # by start: the last item that it needs, -1
    until: dict[int, int] = field(init=False)  # by start: the first item that needs it
    users: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        problem = self.reading.problem
        users = self.users = problem.users()
        self.kinds, self.preludes, self.after, self.until = {}, {}, {}, {}
        for c, row in self.reading.rows.items():
            key = self.key(c) if row.bucket and problem.is_waited[c] else None
            if key is None:
                continue
            self.kinds.setdefault(key, []).append(c)
            self.preludes[c] = tuple(sorted(self.alone(c, users)))
            needs = [d for m in (c, *self.preludes[c]) for d in problem.deps[m] if d not in self.preludes[c]]
            self.after[c] = max(needs, default=-1)
            self.until[c] = min(users[c], default=problem.num_items)

    def key(self, start: int) -> Any:
        """What is equal in starts that may become one; None for one that stays as it is."""
        node, row = self.reading.nodes[start], self.reading.rows[start]
        operand = node.args[0]
        if node.kwargs or not isinstance(operand, fx.Node) or len(self.reading.values[operand]) != 1:
            return None
        x = self.reading.values[operand][0]
        if (row.bucket != "reduce" and not x.shape) or not x.num_elements:
            return None
        rest = tuple(str(a) for p, a in enumerate(node.args[1:], 1) if p != row.group)
        dtype = None if row.bucket == "gather" else x.dtype
        return node.target, self.reading.problem.channel[start], rest, dtype

    def alone(self, start: int, users: Sequence[Sequence[int]]) -> set[int]:
        """Kernels that only this start needs, and that need nothing else."""
        problem, found = self.reading.problem, set[int]()
        waiting = list(problem.deps[start])
        while waiting:
            i = waiting.pop()
            only = set(users[i]) <= found | {start}
            if problem.channel[i] < 0 and only and not problem.waits[i] and i not in found:
                found.add(i)
                waiting += problem.deps[i]
        while lost := {i for i in found if not set(problem.deps[i]) <= found or not set(users[i]) <= found | {start}}:
            found -= lost
        return found

    def operand(self, start: int) -> Value:
        node = self.reading.nodes[start].args[0]
        assert isinstance(node, fx.Node)
        return self.reading.values[node][0]

    def can_join(self, bucket: Sequence[int], start: int) -> str:
        """Why a start cannot join a bucket, "" where it can."""
        names = self.reading.problem.names
        members = (*bucket, start)
        last = max(members, key=lambda c: self.after[c])
        first = min(members, key=lambda c: self.until[c])
        if self.after[last] < self.until[first]:
            return ""
        return (
            f"{names[first]} is used by {names[self.until[first]]}, which stands before {names[self.after[last]]}, "
            f"which {names[last]} needs"
        )

    def neighbours(self) -> Iterator[tuple[int, int]]:
        for starts in self.kinds.values():
            yield from zip(starts, starts[1:], strict=False)

    def buckets(self, most_bytes: float, most: int = 1 << 30) -> tuple[tuple[Bucket, ...], tuple[Refusal, ...]]:
        """Runs of neighbours of at most `most_bytes` that cross (as one rank hands them in or takes them out, whichever
        is more), and `most` parts."""
        found: list[Bucket] = []
        refused: list[Refusal] = []
        for starts in self.kinds.values():
            run, total = [starts[0]], self.size(starts[0])
            for c in starts[1:]:
                size = self.size(c)
                reason = self.can_join(run, c)
                if not reason and total + size > most_bytes:
                    reason = f"together {(total + size) / 1e6:.1f} MB, more than {most_bytes / 1e6:.0f} MB"
                if not reason and len(run) < most:
                    run.append(c)
                    total += size
                    continue
                refused.append(Refusal(run[-1], c, reason or f"{most} parts at most"))
                found += [tuple(run)] if len(run) > 1 else []
                run, total = [c], size
            found += [tuple(run)] if len(run) > 1 else []
        return tuple(found), tuple(refused)

    def size(self, start: int) -> float:
        """Bytes of the larger end of a collective."""
        made = self.reading.values[self.reading.nodes[start]]
        return max(self.costs.moved[start], float(sum(x.bytes for x in made)))

    def places(self, buckets: Sequence[Bucket]) -> list[float]:
        """By bucket where it stands: behind item floor(place), buckets of one item in the order of their places. Infinite
        where it would have to stand behind what needs it."""
        problem = self.reading.problem
        of = {c: b for b, bucket in enumerate(buckets) for c in bucket}
        places, needs, until = [], [], []
        for bucket in buckets:
            deps = [d for c in bucket for m in (c, *self.preludes[c]) for d in problem.deps[m]]
            inside = {m for c in bucket for m in self.preludes[c]}
            outside = [d for d in deps if d not in of and d not in inside]
            places.append(float(max([min(bucket) - 1, *outside])))
            needs.append({of[d] for d in deps if d in of})
            until.append(min([u for c in bucket for u in self.users[c] if u not in of], default=problem.num_items))
        for _ in range(len(buckets) + 1):
            moved = False
            for b, held in enumerate(needs):
                least = max([places[d] + _BEHIND for d in held], default=-1.0)
                if places[b] < least:
                    places[b], moved = least, True
            if not moved:
                break
        else:
            return [inf] * len(buckets)
        return [inf if place >= last else place for place, last in zip(places, until, strict=True)]

    def able(self, buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
        """The buckets without those that cannot stand anywhere beside the others."""
        held = list(buckets)
        while wrong := [b for b, place in enumerate(self.places(held)) if place == inf]:
            del held[wrong[-1]]
        return tuple(held)

    def merged(self, buckets: Sequence[Bucket]) -> Merged:
        """The problem in which each bucket is one communication. All of them can stand beside each other (`able`)."""
        return _Writer(self, tuple(buckets)).run()


@dataclass(slots=True)
class _Writer:
    merger: Merger
    buckets: tuple[Bucket, ...]
    made: Problem = field(default_factory=Problem)
    items: list[Item] = field(default_factory=list)
    number: dict[int, int] = field(default_factory=dict)  # item of the graph -> what stands for its result
    begun: dict[int, int] = field(default_factory=dict)  # start of the graph -> its communication
    packed: dict[int, int] = field(default_factory=dict)  # results of merged gathers that are still in their bucket
    storage: dict[int, int] = field(default_factory=dict)  # of parts of reductions -> that of the whole

    def run(self) -> Merged:
        problem = self.merger.reading.problem
        self.made.sizes, self.made.kept = list(problem.sizes), list(problem.kept)
        self.made.before, self.made.channels = list(problem.before), problem.channels
        of = {c: b for b, bucket in enumerate(self.buckets) for c in bucket}
        skipped = {m for c in of for m in self.merger.preludes[c]}
        places: dict[int, list[int]] = {}
        for place, b in sorted((place, b) for b, place in enumerate(self.merger.places(self.buckets))):
            places.setdefault(floor(place), []).append(b)
        self.packed = {c: b for c, b in of.items() if self.merger.reading.rows[c].bucket == "gather"}
        open_at: dict[int, list[int]] = {}
        for c in self.packed:
            open_at.setdefault(min(self.merger.users[c], default=problem.num_items), []).append(c)
        for b in places.pop(-1, ()):
            self.bucket(b)
        for i in range(problem.num_items):
            for c in sorted(open_at.pop(i, ())):
                self.unpack(c)
            if i not in of and i not in skipped:
                self.node(i)
            for b in places.pop(i, ()):
                self.bucket(b)
        for c in sorted(c for rest in open_at.values() for c in rest):
            self.unpack(c)
        self.made.order = self.order(of)
        return Merged(self.made, tuple(self.items), self.buckets)

    def order(self, of: dict[int, int]) -> list[int]:
        """The order in which the items were written, each wait where it was, those of buckets at their first use."""
        problem, waited, found = self.merger.reading.problem, set[int](), list[int]()
        after: dict[int, list[int]] = {}
        last = -1
        for x in problem.order:
            if x >= 0:
                last = self.number.get(x, last) if x not in of else last
            elif ~x not in of:
                after.setdefault(max(last, self.begun[~x]), []).append(self.begun[~x])
        for i in range(self.made.num_items):
            for c in self.made.waits[i]:
                if c not in waited:
                    waited.add(c)
                    found.append(~c)
            found.append(i)
            for c in after.get(i, ()):
                if c not in waited:
                    waited.add(c)
                    found.append(~c)
        rest = [c for c in self.made.starts if self.made.is_waited[c] and c not in waited]
        return [*found, *(~c for c in rest)]

    def add(
        self,
        item: Item,
        name: str,
        seconds: float,
        deps: Sequence[int],
        waits: Sequence[int],
        allocs: Sequence[int],
        uses: Sequence[int],
        channel: int = -1,
        copy: float = 0.0,
        startup: float = 0.0,
        usage: tuple[tuple[str, float], ...] = (),
        is_waited: bool = False,
    ) -> int:
        made = self.made
        made.names.append(name)
        made.seconds.append(seconds)
        made.deps.append(tuple(sorted(set(deps))))
        made.waits.append(tuple(sorted(set(waits))))
        made.allocs.append(tuple(allocs))
        made.uses.append(tuple(dict.fromkeys(self.storage.get(s, s) for s in uses)))
        made.channel.append(channel)
        made.copy.append(copy)
        made.startup.append(startup)
        made.usage.append(usage)
        made.is_waited.append(is_waited)
        self.items.append(item)
        return len(self.items) - 1

    def needs(self, items: Sequence[int]) -> list[int]:
        return [self.number[d] for d in items]

    def node(self, i: int) -> None:
        p = self.merger.reading.problem
        waits = [self.begun[c] for c in p.waits[i]]
        deps = [*self.needs(p.deps[i]), *waits]
        self.number[i] = self.add(
            Item("node", i), p.names[i], p.seconds[i], deps, waits, p.allocs[i], p.uses[i], p.channel[i], p.copy[i],
            p.startup[i], p.usage[i], p.is_waited[i],
        )  # fmt: skip
        if p.channel[i] >= 0:
            self.begun[i] = self.number[i]

    def bucket(self, b: int) -> None:
        p, merger, bucket = self.merger.reading.problem, self.merger, self.buckets[b]
        for d in sorted({d for c in bucket for d in p.deps[c]}):
            self.unpack(d)
        for c in bucket:
            for m in merger.preludes[c]:
                self.node(m)
        moved = sum(merger.costs.moved[c] for c in bucket)
        outside = [d for c in bucket for d in p.deps[c]]
        waits = [self.begun[w] for c in bucket for w in p.waits[c]]
        name = "+".join(p.names[c] for c in bucket)
        packed = self.store(int(moved), kept=False)
        uses = [s for c in bucket for s in p.uses[c]]
        pack = self.add(
            Item("pack", b, b), f"pack {name}", 2 * moved / merger.costs.copy_rate, [*self.needs(outside), *waits],
            waits, (packed,), uses,
        )  # fmt: skip
        first, row = bucket[0], merger.reading.rows[bucket[0]]
        results = [s for c in bucket for s in p.allocs[c]]
        whole = self.store(
            sum(p.sizes[s] for s in results), kept=row.bucket != "gather" and any(p.kept[s] for s in results)
        )
        if row.bucket != "gather":
            self.storage |= dict.fromkeys(results, whole)
        curve = merger.costs.curves[str(merger.reading.nodes[first].target), p.channel[first]]
        seconds = max(curve(moved), max(p.copy[c] for c in bucket))
        start = self.add(
            Item("start", b, b), name, 0.0, (pack,), (), (whole,), (packed,), p.channel[first], seconds,
            max(p.startup[c] for c in bucket), p.usage[first], True,
        )  # fmt: skip
        for c in bucket:
            self.begun[c] = self.number[c] = start

    def unpack(self, c: int) -> None:
        """Take result c out of its bucket, if it is one of a gather and still in it."""
        if c not in self.packed:
            return
        b = self.packed.pop(c)
        p, start = self.merger.reading.problem, self.begun[c]
        size = sum(p.sizes[s] for s in p.allocs[c])
        whole = self.made.allocs[start]
        self.number[c] = self.add(
            Item("unpack", c, b), f"unpack {p.names[c]}", 2 * size / self.merger.costs.copy_rate, (start,), (start,),
            p.allocs[c], whole,
        )  # fmt: skip

    def store(self, size: int, kept: bool) -> int:
        self.made.sizes.append(size)
        self.made.kept.append(kept)
        self.made.before.append(False)
        return len(self.made.sizes) - 1
