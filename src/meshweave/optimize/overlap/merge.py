"""Merges collectives of the same kind and group: which may be merged, and the resulting problem.

The operand of a merged gather is the concatenation of its parts (a copy before), and its results are copied out (a copy
each after); a merged reduction concatenates its parts side by side (a copy before), and its results are views of the
whole, except those whose storage the graph may observe (an output, an op in place, `as_strided`): these are copied out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import inf
from typing import Any

import torch
from torch import fx

from meshweave.ir.collectives import WAIT
from meshweave.ir.graph import origin_of
from meshweave.ir.values import Value
from meshweave.optimize.overlap.figures import MergeCosts
from meshweave.optimize.overlap.merged import Bucket, Merged, MergedWriter
from meshweave.optimize.overlap.model import Problem
from meshweave.optimize.overlap.observers import observed_storages
from meshweave.optimize.overlap.prices import Curve
from meshweave.optimize.overlap.read import Reading

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
        # starts of every microbatch are not merged with those of only the last
        is_last = origin_of(node).phase == "reduce"
        return node.target, self.reading.problem.channel[start], rest, dtype, is_last

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
        """Seconds of compute between parts of a bucket of `most` bytes at most."""
        return _SPAN * self.curve(start)(most) if most < inf else inf

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
