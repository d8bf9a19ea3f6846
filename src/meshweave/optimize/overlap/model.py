"""A graph in the scheduler's form: items with seconds, dependencies, channels and storages, all as small integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from meshweave.ir.liveness import LiveRange

Order = Sequence[int]  # item i, or ~i: the wait for the communication that item i starts


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

    @property
    def num_items(self) -> int:
        return len(self.names)

    @property
    def base_bytes(self) -> int:
        return sum(size for size, is_before in zip(self.sizes, self.before, strict=True) if is_before)

    @property
    def starts(self) -> list[int]:
        return [i for i, channel in enumerate(self.channel) if channel >= 0]

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

    def live_ranges(self, order: Order) -> Iterator[LiveRange]:
        """When each storage lives, as entries of `order`: a kernel's results beside its operands, a communication's
        operands and results from its start until its wait. Moment len(order) is the end, the next moment means
        never."""
        never = len(order) + 1
        begin = [0 if is_before else never for is_before in self.before]
        end = [never] * len(begin)
        allocs, uses, channel = self.allocs, self.uses, self.channel
        for at, x in enumerate(order):
            if x < 0:
                for s in allocs[~x]:
                    end[s] = at + 1
                for s in uses[~x]:
                    end[s] = at + 1
                continue
            for s in allocs[x]:
                begin[s], end[s] = at, at + 1
            if channel[x] < 0:
                for s in uses[x]:
                    end[s] = at + 1
        for s in self.lasting():
            end[s] = never
        return zip(begin, end, self.sizes, strict=True)

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
