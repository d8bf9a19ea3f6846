"""A graph in the scheduler's form: items with seconds, dependencies, channels and storages, all as small integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Order = Sequence[int]  # item i, or ~i: the wait for the communication that item i starts
Integers = NDArray[np.int64]


@dataclass(slots=True)
class Problem:
    """Items 0 .. n-1 of a compute stream. Lists are by item unless noted.

    An item is a kernel, which takes `seconds`, or the start of a communication, which takes no time on the stream and
    `copy` seconds on its channel (`channel` -1: a kernel). Once the channel is done, its wait takes `host` seconds on
    the stream, where a processor sums up what has arrived. `deps` are the items before it, `waits` the starts whose
    communication is complete before it. It allocates the storages `allocs` and reads or writes the storages `uses`; a
    communication occupies both until its wait. A storage is freed after its last use unless `kept`; `base_bytes` are
    those of storages that live before the first item. `order` is the order of the graph. `rate` is the share of a
    communication's `copy` that depends on bytes, the rest is start-up.
    """

    names: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    deps: list[tuple[int, ...]] = field(default_factory=list)
    waits: list[tuple[int, ...]] = field(default_factory=list)
    channel: list[int] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    startup: list[float] = field(default_factory=list)
    usage: list[tuple[tuple[str, float], ...]] = field(default_factory=list)
    allocs: list[tuple[int, ...]] = field(default_factory=list)
    uses: list[tuple[int, ...]] = field(default_factory=list)
    is_waited: list[bool] = field(default_factory=list)  # for a start: whether it has a wait
    order: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # by storage, bytes
    kept: list[bool] = field(default_factory=list)  # by storage
    before: list[bool] = field(default_factory=list)  # by storage: lives before the first item
    channels: list[str] = field(default_factory=list)
    extra: list[int] = field(default_factory=list)  # of folded items: bytes that live only inside, beside `allocs`
    _users: list[list[int]] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _lasting: list[int] = field(default_factory=list)
    _accesses: _Accesses | None = None

    @property
    def num_items(self) -> int:
        return len(self.names)

    @property
    def base_bytes(self) -> int:
        return sum(size for size, is_before in zip(self.sizes, self.before, strict=True) if is_before)

    @property
    def starts(self) -> list[int]:
        return [i for i, channel in enumerate(self.channel) if channel >= 0]

    def work(self) -> list[float]:
        """Seconds of all communications by channel, and last those of all kernels."""
        work = [0.0] * (len(self.channels) + 1)
        for channel, seconds, copy in zip(self.channel, self.seconds, self.copy, strict=True):
            work[channel] += copy if channel >= 0 else seconds
        return work

    def busiest_link(self) -> float:
        """Seconds of the channel with the most work; 0 without channels."""
        return max(self.work()[:-1], default=0.0)

    def users(self) -> list[list[int]]:
        """Per item the items that come after it or need its communication complete (twice, if both). Computed once,
        when the problem is complete."""
        if not self._users:
            self._users = [[] for _ in self.names]
            for i, (deps, waits) in enumerate(zip(self.deps, self.waits, strict=True)):
                for d in deps:
                    self._users[d].append(i)
                for c in waits:
                    self._users[c].append(i)
        return self._users

    def counts(self) -> list[int]:
        """Per storage how many events use it: kernels, and waits of communications; one more if it is kept. A new list,
        for the caller to count down."""
        if not self._counts:
            uses_of = [int(kept) for kept in self.kept]
            for i, uses in enumerate(self.uses):
                storages = {*uses, *self.allocs[i]} if self.channel[i] >= 0 else uses
                for s in storages:
                    uses_of[s] += 1
            self._counts = uses_of
        return self._counts.copy()

    def holds(self, start: int) -> tuple[int, ...]:
        """The storages that a communication occupies until its wait."""
        return tuple(dict.fromkeys((*self.uses[start], *self.allocs[start])))

    def lasting(self) -> list[int]:
        """The storages that are never freed: kept storages, and those of a communication without a wait."""
        if not self._lasting:
            unwaited = [c for c in self.starts if not self.is_waited[c]]
            self._lasting = [
                *(s for s, is_kept in enumerate(self.kept) if is_kept),
                *(s for c in unwaited for s in self.holds(c)),
            ]
        return self._lasting

    def live_ranges(self, order: Order) -> tuple[Integers, Integers]:
        """By storage the entries of `order` at which it is allocated and after which it is freed: a kernel's results
        live beside its operands, a communication's operands and results from its start until its wait. Entry len(order)
        is the end, the next entry means never."""
        if self._accesses is None:
            self._accesses = _accesses_of(self)
        accesses, never = self._accesses, len(order) + 1
        place = np.full(2 * self.num_items + 1, never)  # by entry, waits from the end on; the middle is no entry
        place[np.asarray(order, dtype=np.int64)] = np.arange(len(order))
        begin = np.where(self.before, 0, place[accesses.owner])
        end = np.where(begin < len(order), np.where(self.before, 0, begin + 1), never)
        np.maximum.at(end, accesses.storages, np.minimum(place[accesses.entries] + 1, never))
        end[self.lasting()] = never
        end[end == 0] = never
        return begin, end

    def live_bytes(self, order: Order) -> Integers:
        """The live bytes at each entry of `order`, and at its end."""
        changes, sizes = np.zeros(len(order) + 2, np.int64), np.asarray(self.sizes, dtype=np.int64)
        begin, end = self.live_ranges(order)
        np.add.at(changes, begin, sizes)
        np.subtract.at(changes, end, sizes)
        return np.cumsum(changes[:-1])

    def slower(self, factor: float) -> Problem:
        """The same problem with communications that take `factor` times as long."""
        return replace(self, copy=[c * factor for c in self.copy], startup=[s * factor for s in self.startup])

    def check(self, order: Order) -> str:
        """Why `order` is not a valid order of this problem: "" if each item and each wait occurs once, after its
        dependencies."""
        done = [False] * self.num_items
        waited = [False] * self.num_items
        for x in order:
            i = x if x >= 0 else ~x
            seen = done if x >= 0 else waited
            if not 0 <= i < self.num_items or seen[i]:
                return f"{self.names[i] if 0 <= i < self.num_items else i} occurs twice, or does not exist"
            if x < 0:
                if not done[i]:
                    return f"the wait for {self.names[i]} comes before its start"
            elif missing := [self.names[d] for d in self.deps[i] if not done[d]]:
                return f"{self.names[i]} comes before {missing[0]}"
            elif missing := [self.names[c] for c in self.waits[i] if not waited[c]]:
                return f"{self.names[i]} comes before the wait for {missing[0]}"
            seen[i] = True
        missing = [n for n, d in zip(self.names, done, strict=True) if not d]
        missing += [self.names[c] for c in self.starts if self.is_waited[c] and not waited[c]]
        return f"{missing[0]} is missing" if missing else ""


@dataclass(frozen=True, slots=True)
class _Accesses:
    """Pairs of an entry of an order and a storage that is in use until then; by storage its `owner`, the item that
    allocates it (the number of items: none)."""

    entries: Integers
    storages: Integers
    owner: Integers


def _accesses_of(problem: Problem) -> _Accesses:
    items = np.arange(problem.num_items)
    ends = np.where(np.array(problem.channel, dtype=np.int64) < 0, items, ~items)
    makers, results = _pairs(items, problem.allocs)
    readers, operands = _pairs(ends, problem.uses)
    owner = np.full(len(problem.sizes), problem.num_items)
    owner[results] = makers
    return _Accesses(np.concatenate((readers, ends[makers])), np.concatenate((operands, results)), owner)


def _pairs(entries: Integers, storages: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    counts = np.fromiter(map(len, storages), np.int64, len(storages))
    return np.repeat(entries, counts), np.fromiter(chain.from_iterable(storages), np.int64)
