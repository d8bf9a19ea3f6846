"""List scheduling of compute and communication together: longest remaining path first, in a bounded window, under a
hard memory cap, links never idle while a useful communication is ready."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from meshweave.optimize.overlap.outline import Outline

_MOST_TRIED = 64  # ready kernels that are examined for a better fit: bounds the time of a step
_HORIZON = 64  # items beyond the window whose memory is considered


@dataclass(frozen=True, slots=True)
class Policy:
    """How a candidate order is computed. window: by how many items a kernel may overtake an earlier item. 0 keeps the
    order of kernels. factor: communications are assumed to last that many times as long. ahead: how many seconds of
    compute before its use a communication that needs memory (a gather) may start at the earliest. fit: gaps are filled
    by the longest kernel that fits. by_path: gathers are ordered by longest remaining path, not by first use. feeds:
    ready kernels that lead to a communication soonest come first, then those with the longest remaining path. patience:
    if a more urgent kernel becomes ready soon, the stream idles rather than run a kernel that would delay it by more
    than so many times the wait.
    """

    window: int
    factor: float = 1.0
    ahead: float = inf
    fit: bool = False
    by_path: bool = False
    feeds: bool = False
    patience: float = inf

    def __str__(self) -> str:
        parts = [f"window {self.window}"]
        parts += [f"communication x{self.factor:g}"] if self.factor != 1 else []
        parts += ["gathers as late as possible"] if self.ahead == -inf else []
        parts += ["kernels before communications first"] if self.feeds else []
        parts += ["fitted"] if self.fit else []
        parts += [f"waits up to 1/{self.patience:g}"] if self.patience < inf else []
        return ", ".join([*parts, *(["longest path first"] if self.by_path else [])])


@dataclass(slots=True)
class _Scheduler:
    outline: Outline
    policy: Policy
    cap: float
    path: list[float] = field(init=False)
    rank: list[int] = field(init=False)  # by item: 0 is the most urgent
    ranked: list[int] = field(init=False)  # items, the most urgent first
    copy: list[float] = field(init=False)
    order: list[int] = field(default_factory=list)
    now: float = 0.0
    progress: float = 0.0  # seconds of compute done
    num_run: int = 0
    num_queued: int = 0  # starts that can begin now
    live: int = 0
    base: int = 0  # the first item, in the graph's order, that has not run
    limit: int = 0  # items from here on are outside the window
    missing: list[int] = field(init=False)
    end: list[float] = field(init=False)  # of communications
    is_done: list[bool] = field(init=False)
    is_settled: list[bool] = field(init=False)
    counts: list[int] = field(init=False)
    free: list[float] = field(init=False)  # by channel: when it is idle
    ready: list[int] = field(default_factory=list)  # kernels that can run now, by rank
    pending: list[tuple[float, int]] = field(default_factory=list)  # kernels that wait: (when, rank)
    chained: list[tuple[float, int]] = field(default_factory=list)  # starts that wait for a communication: (when, item)
    outside: list[int] = field(default_factory=list)
    gathers: list[list[tuple[float, int]]] = field(init=False)  # by channel: (need, start)
    other_starts: list[list[tuple[float, int, int]]] = field(init=False)  # by channel: (need, turn, start)
    flying: list[tuple[float, int]] = field(default_factory=list)  # (end, start) of communications without a wait yet
    margin: list[float] = field(init=False)
    coming_at: int = -1  # the item from which `most_coming` counts
    most_coming: int = 0
    spare: float = inf  # seconds that the stream may be idle
    need: float = 0.0  # the most bytes that were requested and available
    lack: float = inf  # the least bytes that were requested and not available

    def __post_init__(self) -> None:
        problem, factor = self.outline.problem, self.policy.factor
        n, channels = problem.num_items, range(len(problem.channels))
        self.path = self.outline.path(factor)
        self.rank, self.ranked = self.outline.ranking(factor, feeds=self.policy.feeds)
        self.copy = [c * factor for c in problem.copy] if factor != 1 else problem.copy
        self.missing = self.outline.missing.copy()
        self.end, self.is_done, self.is_settled = [0.0] * n, [False] * n, [False] * n
        self.counts, self.live = problem.counts(), problem.base_bytes
        self.free = [0.0 for _ in channels]
        self.gathers, self.other_starts = [[] for _ in channels], [[] for _ in channels]
        self.margin = [longest * factor for longest in self.outline.longest]
        self.limit = self.policy.window
        for i in self.outline.first:
            self.enter(i)

    def run(self) -> list[int]:
        seconds, total, ready, ranked = self.outline.problem.seconds, len(self.is_done), self.ready, self.ranked
        pending, chained, is_capped, fits_gaps = self.pending, self.chained, self.cap < inf, self.policy.fit
        while self.num_run < total:
            if ready and not chained and not (pending and (fits_gaps or pending[0][0] <= self.now)):
                kernel, at = ranked[ready[0]], self.now  # what `pick` would return
            else:
                kernel, at = self.pick()
            if kernel < 0:
                if at < inf and not self.feed(at):
                    self.now = max(self.now, at)
                elif at == inf and not self.feed(inf, forced=True):
                    self.widen()
                continue
            if self.num_queued and self.feed(max(at, self.now) + seconds[kernel]):
                continue  # a start may have made items ready
            if is_capped and not self.fits(kernel):
                kernel, at = self.make_room(kernel, at)
            if kernel >= 0:
                self.take(kernel)
                if at > self.now:
                    self.now = at
                self.execute(kernel)
                if self.now - self.progress > self.spare:
                    return self.give_up()
        for _, c in sorted(self.flying):
            if not self.is_settled[c]:
                self.settle(c)
        return self.order

    def give_up(self) -> list[int]:
        """What has not run follows in the graph's order."""
        self.need, self.lack = inf, 0.0
        rest = (x for x in self.outline.problem.order if not (self.is_done[x] if x >= 0 else self.is_settled[~x]))
        return [*self.order, *rest]

    def enter(self, i: int) -> None:
        """Queue an item whose operands are computed, or on their way."""
        problem = self.outline.problem
        at, end = 0.0, self.end
        for c in problem.waits[i]:
            if end[c] > at:
                at = end[c]
        channel = problem.channel[i]
        if channel >= 0:
            if at <= self.now:
                self.queue(i, channel)
            else:
                heappush(self.chained, (at, i))
        elif i > self.limit:
            heappush(self.outside, i)
        elif at <= self.now:
            heappush(self.ready, self.rank[i])
        else:
            heappush(self.pending, (at, self.rank[i]))

    def queue(self, start: int, channel: int) -> None:
        self.num_queued += 1
        if self.outline.grows[start]:
            key = -self.path[start] if self.policy.by_path else self.outline.needs[start]
            heappush(self.gathers[channel], (key, start))
        else:
            heappush(self.other_starts[channel], (self.outline.needs[start], self.num_run, start))

    def arrive(self) -> None:
        """Move items whose wait is over to the ready queue."""
        while self.pending and self.pending[0][0] <= self.now:
            _, rank = heappop(self.pending)
            heappush(self.ready, rank)
        while self.chained and self.chained[0][0] <= self.now:
            i = heappop(self.chained)[1]
            self.queue(i, self.outline.problem.channel[i])

    def pick(self) -> tuple[int, float]:
        """The next kernel, and when it runs: among ready kernels that with the longest remaining path, else that
        that waits least; -1 if there is none. A start that waits for a communication may come before it."""
        if self.pending or self.chained:
            self.arrive()
        while not self.ready and self.chained and (not self.pending or self.chained[0][0] < self.pending[0][0]):
            if self.num_queued:
                return -1, self.chained[0][0]
            self.now = max(self.now, self.chained[0][0])
            self.arrive()
        if self.ready:
            kernel = self.fitting()
            return (kernel, self.now) if kernel >= 0 else (self.ranked[self.pending[0][1]], self.pending[0][0])
        return (self.ranked[self.pending[0][1]], self.pending[0][0]) if self.pending else (-1, inf)

    def fitting(self) -> int:
        """The first of the kernels that can run now; if a more urgent kernel becomes ready soon, the longest that is
        done by then; -1 if it is better to wait for the urgent kernel."""
        first = self.ready[0]
        if not self.policy.fit or not self.pending or self.pending[0][1] >= first:
            return self.ranked[first]
        gap = self.pending[0][0] - self.now
        seconds = self.outline.problem.seconds
        best, longest = -1, 0.0
        for rank in self.ready[:_MOST_TRIED]:
            i = self.ranked[rank]
            if longest < seconds[i] <= gap:
                best, longest = i, seconds[i]
        if best >= 0:
            return best
        over = seconds[self.ranked[first]] - gap
        return -1 if over > self.policy.patience * gap else self.ranked[first]

    def take(self, kernel: int) -> None:
        """Remove a picked kernel from its heap."""
        ready, rank = self.ready, self.rank[kernel]
        if self.pending and self.pending[0][1] == rank:
            heappop(self.pending)
        elif ready[0] == rank:
            heappop(ready)
        else:
            ready.remove(rank)
            heapify(ready)

    def execute(self, kernel: int) -> None:
        problem, counts = self.outline.problem, self.counts
        for c in problem.waits[kernel]:
            if not self.is_settled[c]:
                self.settle(c)
        self.order.append(kernel)
        seconds = problem.seconds[kernel]
        self.now += seconds
        self.progress += seconds
        live = self.live + self.outline.growth[kernel] - self.outline.unused[kernel]
        for s in problem.uses[kernel]:
            counts[s] -= 1
            if not counts[s]:
                live -= problem.sizes[s]
        self.live = live
        self.done(kernel)

    def done(self, i: int) -> None:
        done, missing, waits, limit = self.is_done, self.missing, self.outline.problem.waits, self.limit
        done[i] = True
        self.num_run += 1
        for u in self.outline.users[i]:
            missing[u] -= 1
            if missing[u]:
                continue
            if waits[u] or u > limit or self.outline.problem.channel[u] >= 0:
                self.enter(u)
            else:  # at once, as most items do
                heappush(self.ready, self.rank[u])
        if i == self.base:
            base, n = i, len(done)
            while base < n and done[base]:
                base += 1
            self.base, self.limit = base, base + self.policy.window
            while self.outside and self.outside[0] <= self.limit:
                self.enter(heappop(self.outside))

    def widen(self) -> None:
        """Nothing in the window can run: take the first item outside, or wait for the next communication."""
        if self.outside:
            i = heappop(self.outside)
            self.limit = max(self.limit, i)
            self.enter(i)
            return
        assert self.chained, "an item is ready, pending or outside while any is left"
        self.now = max(self.now, self.chained[0][0])
        self.arrive()

    def feed(self, until: float, forced: bool = False) -> bool:
        """Start communications in every channel that would be idle before `until`. Returns whether any was started.

        Communications needed soon come first, then those that free memory, then gathers for later. `forced`: start at
        least one, because nothing else can proceed.
        """
        is_fed = False
        for channel, (gathers, other_starts) in enumerate(zip(self.gathers, self.other_starts, strict=True)):
            while (gathers or other_starts) and (self.free[channel] < until or forced):
                start = self.next_start(channel, forced and not is_fed)
                if start < 0:
                    break
                self.issue(start, channel)
                is_fed = True
                if forced:
                    break
        return is_fed

    def next_start(self, channel: int, forced: bool) -> int:
        gathers, other_starts = self.gathers[channel], self.other_starts[channel]
        if gathers:
            start = gathers[0][1]
            slack = self.outline.needs[start] - self.progress - self.copy[start]
            is_urgent = slack <= self.margin[channel]
            if (is_urgent or not other_starts) and (forced or self.may_gather(start, slack)):
                return heappop(gathers)[1]
        return heappop(other_starts)[2] if other_starts else -1

    def may_gather(self, start: int, slack: float) -> bool:
        """Whether a gather may start now: not too early, and with room for it until its use, assuming the graph's order
        for what else will live then."""
        if slack > self.policy.ahead:
            return False
        outline, growth = self.outline, self.outline.growth[start]
        if self.cap == inf or not growth:
            return True
        coming = outline.highest(self.base, outline.uses_at[start])
        if coming > self.cap:  # the graph's order does not fit either, so it tells nothing
            self.lack = min(self.lack, coming)
            return self.has(self.live + growth)
        return self.has(max(self.live, coming + self.above()) + growth)

    def has(self, num_bytes: int) -> bool:
        """Whether so much memory is available."""
        if num_bytes <= self.cap:
            self.need = max(self.need, num_bytes)
            return True
        self.lack = min(self.lack, num_bytes)
        return False

    def issue(self, start: int, channel: int) -> None:
        self.num_queued -= 1
        for c in self.outline.problem.waits[start]:
            if not self.is_settled[c]:
                self.settle(c)
        self.now += self.outline.problem.seconds[start]  # of folded items
        self.progress += self.outline.problem.seconds[start]
        begin = max(self.now, self.free[channel])
        self.free[channel] = self.end[start] = begin + self.copy[start]
        self.order.append(start)
        self.live += self.outline.growth[start]
        if self.outline.problem.is_waited[start]:
            heappush(self.flying, (self.end[start], start))
        self.done(start)

    def settle(self, start: int) -> None:
        """Place the wait for a communication here; storages that only it occupied are free."""
        self.is_settled[start] = True
        self.now = max(self.now, self.end[start]) + self.outline.problem.host[start]
        self.order.append(~start)
        counts, sizes = self.counts, self.outline.problem.sizes
        for s in self.outline.holds[start]:
            counts[s] -= 1
            if not counts[s]:
                self.live -= sizes[s]

    def fits(self, kernel: int) -> bool:
        """Whether a kernel may run now: it fits, and the schedule's excess over the graph's order will still fit at
        that order's next peak. The graph's next item, and items that free memory, only have to fit now."""
        if not self.has(self.live + self.outline.peak[kernel]):
            return False
        if kernel == self.base:
            return True
        coming = self.most_coming if self.coming_at == self.base else self.coming()
        net = self.outline.growth[kernel]
        if coming > self.cap:
            self.lack = min(self.lack, coming)
            return True
        for s in self.outline.problem.uses[kernel] if net > 0 else ():
            if self.counts[s] == 1:
                net -= self.outline.problem.sizes[s]
        return net <= 0 or self.has(max(coming, self.above() + net + coming))

    def above(self) -> int:
        """Live bytes in excess of those in the graph's order before its next item."""
        return self.live - self.outline.before[self.base]

    def coming(self) -> int:
        if self.coming_at != self.base:
            self.coming_at = self.base
            self.most_coming = self.outline.highest(self.base, self.base + self.policy.window + _HORIZON)
        return self.most_coming

    def make_room(self, kernel: int, at: float) -> tuple[int, float]:
        """What to do if a kernel does not fit: first waits for finished communications, then another kernel that fits,
        then the graph's next item, then a wait for a communication. Returns the kernel to run and when; -1: pick
        again."""
        settled = False
        while self.flying and self.flying[0][0] <= self.now:
            start = heappop(self.flying)[1]
            if not self.is_settled[start]:
                self.settle(start)
                settled = True
                if self.fits(kernel):
                    return kernel, at
        if settled:
            return -1, at
        ready = [self.ranked[rank] for rank in sorted(self.ready[:_MOST_TRIED])]
        other = next((i for i in ready if i != kernel and self.fits(i)), -1)
        if other >= 0:
            return other, self.now
        while self.flying and self.is_settled[self.flying[0][1]]:
            heappop(self.flying)
        if self.flying and (not self.pending or self.flying[0][0] <= self.pending[0][0]):
            end, start = heappop(self.flying)
            self.now = max(self.now, end)
            self.settle(start)
            self.arrive()
            return -1, at
        if self.base < len(self.rank) and self.rank[self.base] in self.ready:
            return self.base, self.now
        if self.pending and self.ready and at <= self.now:  # no ready item fits: wait for the next communication
            self.now = max(self.now, self.pending[0][0])
            self.arrive()
            return -1, at
        return kernel, at


def schedule(outline: Outline, policy: Policy, cap: float = inf, limit: float = inf) -> tuple[list[int], float, float]:
    """An order of a problem with its waits, and the range of memory (from, below) in which any cap gives this order. It
    stays under `cap` bytes if the scheduler succeeds; the caller checks. An order that takes longer than `limit`
    seconds is given up, and its range is empty."""
    scheduler = _Scheduler(outline, policy, cap)
    if policy.factor == 1:
        scheduler.spare = limit - sum(outline.problem.seconds)
    order = scheduler.run()
    return order, scheduler.need if cap < inf else inf, scheduler.lack
