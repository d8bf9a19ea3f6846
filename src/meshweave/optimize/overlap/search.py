"""A portfolio of orders and buckets, judged by playing them; it includes the input order and the caller's orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from math import inf

from meshweave.cost.simulate.clock import Slowdown
from meshweave.optimize.overlap.improve import fill_stall
from meshweave.optimize.overlap.merge import Bucket, Merged, Merger
from meshweave.optimize.overlap.model import Order
from meshweave.optimize.overlap.outline import FOLDS, Fold, Folded, Outline, fold
from meshweave.optimize.overlap.play import peak_of, play, seconds_of
from meshweave.optimize.overlap.ready_queue import Policy, schedule

Method = tuple[Policy, Fold]  # how an order is computed: a policy, and which items are one

# Figures of the search, and why they are what they are. What was "seen" is of 8 graphs of benchmarks/overlap.py (Llama
# 3 8B and 70B, 1,000 to 8,000 nodes) under the default cap, 2026-11.

# Methods, the first of them for every graph, and as many as `_EFFORT` allows. Windows are in items: a layer of a
# transformer is 60 to 150 items in backward; the best window depends on the ratio of kernels to communications. In
# backward graphs of Llama-8B and DeepSeek-V3 (autoparallel, tools/overlap_simulator) each of the first six was the best
# or close to it for some graph and size of buckets. Patience keeps a weight gradient from delaying the critical path
# where a communication of that is about to end: of 2, 5, 10, 20 and 40 times the wait, 10 was best. `feeds` is for
# graphs whose regions run in chunks, where a chunk's communication hides under another chunk's compute.
_METHODS: tuple[Method, ...] = (
    *((Policy(0), "feeders"), (Policy(256, fit=True), "feeders"), (Policy(0), "inputs")),
    *((Policy(256, fit=True, patience=10), "inputs"), (Policy(128, fit=True), "feeders"), (Policy(64), "feeders")),
    *((Policy(256, fit=True, patience=10), "feeders"), (Policy(256, fit=True, feeds=True), "inputs")),
    *((Policy(64, fit=True), "inputs"), (Policy(64, fit=True, by_path=True), "inputs")),
    *((Policy(512, fit=True), "inputs"), (Policy(256), "feeders")),
    *((Policy(512, fit=True, patience=10), "inputs"), (Policy(128, fit=True, patience=10), "inputs")),
    *((Policy(64), "inputs"), (Policy(1024), "inputs"), (Policy(512), "inputs"), (Policy(256, fit=True), "inputs")),
)
_FOLDED: dict[Fold, str] = {"feeders": "", "inputs": ", starts apart", "nothing": ", nothing folded"}
_NOTHING: Fold = "nothing"
_LEAN = Policy(0, ahead=-inf)
_SHORT = (Policy(64, fit=True), Policy(16, fit=True), _LEAN)  # where memory is short
_FREE = (Policy(256, fit=True, by_path=True), Policy(256, by_path=True), Policy(8))  # where nothing is folded
_CAREFUL = (Policy(256, 2.0, fit=True), Policy(256, 3.0, fit=True))  # links 2 and 3 times slower: scenarios of `choose`
_MOVED = ", moved"

# Sizes of buckets: bytes at the larger end, of gathers and of reductions. Steps by four from those of PyTorch (25 MiB,
# a layer of FSDP2) to everything in one; in a large graph, whose orders take longer, by two around a layer of 8B over 8
# ranks, and if its links have spare time only the first, which costs least memory.
_SIZES = ((32e6, 32e6), (128e6, 128e6), (512e6, 512e6), (inf, inf))
_SIZES_LARGE = ((32e6, 64e6), (64e6, 128e6), (128e6, 128e6), (256e6, 256e6))
# Halvings: the first gather (of a busy link; else the last reduction), which nothing hides, is an eighth of a bucket.
# Seen: without, 8B with short batches is 1.7% slower.
_RAMP = 3

# Shares of the seconds of a graph. Costs are off by several percent, so that orders within ENOUGH are the same but for
# what links carry; the others say how far from the fastest a thing may be that could still become the fastest. Seen:
# half or twice of these others change no graph.
ENOUGH = 1e-3  # orders: the one with less work of links and copies is taken
_GAIN = 2e-4  # a move: many add up (seen: at ENOUGH, 70B is 0.1% slower)
_CLOSE = 5e-3  # sets of buckets: all methods schedule them; sizes: another method tries them again
_FAR = 0.03  # orders, which are given up; methods and larger buckets, which are not tried
_BUSY = 0.9  # of compute, the work of links: below, there is always compute to hide under

# Memory, as parts of the peak of the input order: rungs under which orders are searched, each where orders differ from
# those of the previous rung, and then no limit at all. They do not depend on the cap, and only orders up to it are
# used: so more memory is never slower. Methods and buckets are chosen on the rung `_USUAL`, that of the default cap.
_RUNGS = (1.0, 1.02, 1.1, 1.2, 1.5, 2.0)
_USUAL = 1.05
_STEP = 0.9  # from a rung to the next below the peak of the input order, until nothing fits
_FINER = (1.025, 1.05, 1.08)  # and above that rung, because an order may fit in a little less than the rung above it

# Effort, in items: what a graph gets is a figure divided by its items, so that a search takes seconds in any graph.
# Seen: with half of all, 70B is 0.4% slower; with twice, no graph is faster by more than 0.15%.
SMALL = 600  # up to this size all methods, all sizes and single merges are tried
_STEPS = 12_000  # by single merges
_EFFORT = 24_000  # by `_METHODS` in a large graph, at least the first `_LEAST`
_LEAST = 6
_AGAIN = 6000  # on each rung by the fastest methods, at least two
_TIGHT = 2400  # on each rung below the peak of the input order, beside methods that need little memory
_MOVES = 40_000  # by moves under each limit, which are played, not scheduled
_STALLS = 4  # of an order: the longest, which moves fill
_IMPROVED = 3  # sets of buckets whose fastest order is moved


@dataclass(frozen=True, slots=True)
class OrderCandidate:
    """An order of a merged problem. `seconds` by scenario, the nominal costs first; `needs`: the bytes from which on a
    cap allows it: its peak, or the rung of memory on which it was found, if that is more."""

    name: str
    merged: Merged
    order: tuple[int, ...]
    seconds: tuple[float, ...]
    peak: int
    needs: float

    @property
    def busy(self) -> float:
        return self.merged.busy


@dataclass(slots=True)
class _Shape:
    """A merged problem with its data for scheduling."""

    merged: Merged
    folded: Folded
    outline: Outline
    fold: Fold


@dataclass(slots=True)
class OrderSearch:
    """The candidates of a graph under a cap in bytes."""

    merger: Merger
    cap: float
    slowdown: Slowdown | None
    is_bucketing: bool = True
    is_busy: bool = field(init=False)  # links have about as much work as compute
    is_careful: bool = True  # orders for slower links are hardly slower
    room: float = inf  # bytes under which orders are searched now; independent of the cap
    rung: float = 0.0  # and those that a cap has to allow for this search to happen
    shapes: dict[tuple[tuple[Bucket, ...], Fold], _Shape] = field(default_factory=dict)
    judged: list[OrderCandidate] = field(default_factory=list)  # all of them, whatever their peak
    attempts: list[tuple[OrderCandidate, _Shape, Policy]] = field(default_factory=list)  # of the search itself
    # the order of least peak, independent of the cap: a cap that the user can ask for
    least: OrderCandidate | None = None
    spans: dict[tuple[Policy, int], list[tuple[float, float]]] = field(default_factory=dict)  # of methods, see `span`
    by_size: dict[tuple[float, float], tuple[Bucket, ...]] = field(default_factory=dict)  # sizes -> buckets
    fastest_seconds: dict[tuple[Bucket, ...], float] = field(default_factory=dict)  # of the fastest order of buckets
    sample: tuple[Bucket, ...] = ()  # the buckets by which methods are compared
    improved: set[int] = field(default_factory=set)  # candidates from which moves were tried

    def __post_init__(self) -> None:
        self.is_busy = self.load() > _BUSY

    @property
    def feasible(self) -> list[OrderCandidate]:
        """The candidates under the cap."""
        return [c for c in self.judged if c.peak <= self.cap]

    def run(self, orders: Sequence[tuple[str, Order]]) -> list[OrderCandidate]:
        """All candidates under the cap, `orders` first, the input order among them.

        Nothing that is tried depends on the cap, which only ends the list of limits: what a search finds under a cap,
        it finds under any larger cap, too.
        """
        for name, order in orders:
            self.judge(name, self.shape(()).merged, order)
        usual = self.judged[0].peak
        self.seek(int(usual * _USUAL))
        methods = self.fastest()
        self.descend(usual, methods)
        self.retry(inf, methods)
        self.least = min(self.judged, key=lambda c: c.peak)
        for part in _RUNGS:
            rung: float = int(usual * part)
            if part > _USUAL:
                known = [span[1] for attempt in methods if (span := self.span(attempt))]
                rung = max(rung, min(known, default=rung))  # nothing is known where all orders were given up
            if rung > self.cap or rung == inf:
                break
            self.rung = rung
            self.retry(rung, methods)
            self.improve()
        if self.cap == inf:
            self.room = self.rung = inf
            self.improve()
        return self.feasible

    def descend(self, usual: int, methods: Sequence[tuple[str, _Shape, Policy]]) -> None:
        """Search orders in less memory than `usual`, what the input order needs, by more methods the smaller the graph,
        until nothing fits; then once more where something did, in smaller steps."""
        plain = self.shape(())
        if min(c.peak for c in self.judged) > usual * _STEP:
            self.save_memory(plain)
        tight = [*methods[:2], *((str(policy), plain, policy) for policy in _SHORT)]
        most = _TIGHT // max(1, self.merger.reading.problem.num_items)
        tight += [(name, self.shape((), which), policy) for name, (policy, which) in self.methods().items()][:most]
        room = int(usual * _STEP)
        while room and self.retry(room, tight):
            self.improve()
            room = int(room * _STEP)
        for part in _FINER:
            if self.retry(int(room * part), tight):
                self.improve()

    def seek(self, room: float) -> None:
        """Search orders and buckets under so many bytes."""
        self.room = room
        tried = self.schedule_all(())
        if all(c.peak > room for c in tried):
            self.save_memory(self.shape(()))
        if self.is_bucketing and self.merger.kinds:
            self.bucket()
        best = self.best()
        buckets = min(self.fastest_seconds, key=lambda buckets: self.fastest_seconds[buckets], default=())
        if not buckets or self.fastest_seconds[buckets] > (1 + _CLOSE) * best.seconds[0]:
            buckets = best.merged.buckets
        if buckets and not self.is_small:
            self.schedule_all(buckets)
            if self.is_busy and self.by_size:
                self.resize()  # by a method that is fastest only with these buckets
        for policy in _CAREFUL:
            self.schedule(str(policy), self.shape(buckets), policy)
        self.improve()

    def improve(self) -> None:
        """Fill the longest stalls of the fastest order of each of the fastest sets of buckets, under the present
        limit."""
        fitting = sorted((c for c in self.judged if c.peak <= self.room), key=lambda c: c.seconds[0])
        fastest: dict[tuple[Bucket, ...], OrderCandidate] = {}
        for c in fitting:
            if c.seconds[0] <= (1 + _FAR) * fitting[0].seconds[0]:
                fastest.setdefault(c.merged.buckets, c)
        for c in list(fastest.values())[:_IMPROVED]:
            self.fill_stalls(c)

    def fill_stalls(self, candidate: OrderCandidate) -> None:
        """Moves from an order, and from the faster orders that they give, while that helps."""
        num_moves = _MOVES // max(1, self.merger.reading.problem.num_items)
        best: OrderCandidate | None = candidate
        while best is not None and id(best) not in self.improved:
            self.improved.add(id(best))
            least, name = best.seconds[0] * (1 - _GAIN), best.name.removesuffix(_MOVED) + _MOVED
            problem, better = best.merged.problem, None
            for order in islice(self.moves(best), num_moves):
                num_moves -= 1
                if seconds_of(problem, order, self.slowdown) < least:
                    better = self.judge(name, best.merged, order)
                    if better.peak <= self.room:
                        break
                    better = None
            best = better

    def moves(self, candidate: OrderCandidate) -> Iterator[list[int]]:
        """The order of a candidate with one of its longest stalls filled."""
        problem, stalls = candidate.merged.problem, dict[int, float]()
        for start, begin, end in play(problem, candidate.order, self.slowdown).stalls:
            stalls[start] = stalls.get(start, 0.0) + end - begin
        for start in sorted(stalls, key=lambda c: (-stalls[c], c))[:_STALLS]:
            yield from fill_stall(problem, candidate.order, start, stalls[start])

    def schedule_all(self, buckets: tuple[Bucket, ...]) -> list[OrderCandidate]:
        """Orders of a set of buckets by every method that has not been tried with it; not by methods that are much
        slower than others with the sample of buckets."""
        done = {(policy, shape.fold) for c, shape, policy in self.attempts if c.merged.buckets == buckets}
        seconds = {(policy, shape.fold): c.seconds[0] for c, shape, policy in self.sampled()}
        slowest = (1 + _FAR) * min(seconds.values(), default=inf)
        where = f", {len(buckets)} buckets" if buckets else ""
        return [
            self.schedule(name + where, self.shape(buckets, method[1]), method[0])
            for name, method in self.methods().items()
            if not buckets or (method not in done and seconds.get(method, inf) <= slowest)
        ]

    def sampled(self) -> list[tuple[OrderCandidate, _Shape, Policy]]:
        """The attempts with the sample of buckets."""
        return [attempt for attempt in self.attempts if attempt[0].merged.buckets == self.sample]

    def retry(self, room: float, methods: Sequence[tuple[str, _Shape, Policy]]) -> bool:
        """Search orders by some methods under another limit, if memory was the constraint; returns whether any fits."""
        self.room = room
        rest = [attempt for attempt in methods if not self.span(attempt)]
        where = f"in {room / 1e9:.3f} GB" if room < inf else "without a cap"
        tried = [self.schedule(f"{name}, {where}", shape, policy) for name, shape, policy in rest]
        return len(rest) < len(methods) or any(c.peak <= room for c in tried)

    def span(self, attempt: tuple[str, _Shape, Policy]) -> tuple[float, float] | None:
        """The range of memory in which a method gives the present order; None if unknown."""
        spans = self.spans.get((attempt[2], id(attempt[1])), ())
        return next(
            ((low, high) for low, high in spans if low <= self.room and (self.room < high or high == inf)), None
        )

    def fastest(self) -> list[tuple[str, _Shape, Policy]]:
        """The methods of the fastest orders so far, under the present limit and overall: first that of each set of
        buckets that is hardly slower, then distinct times."""
        most = max(2, _AGAIN // max(1, self.merger.reading.problem.num_items))
        ranked = sorted(self.attempts, key=lambda attempt: attempt[0].seconds[0])
        distinct: dict[tuple[int, Policy], tuple[str, _Shape, Policy]] = {}
        for room in (self.room, inf):
            fitting = [attempt for attempt in ranked if attempt[0].peak <= room]
            least = (1 + _CLOSE) * min((c.seconds[0] for c, *_ in fitting), default=0.0)
            of_set = {c.merged.buckets: c for c, *_ in reversed(fitting) if c.seconds[0] <= least}
            first = {round(c.seconds[0], 9): c for c, *_ in reversed(fitting)}
            fitting.sort(
                key=lambda attempt: (
                    attempt[0] is not of_set.get(attempt[0].merged.buckets),
                    attempt[0] is not first[round(attempt[0].seconds[0], 9)],
                )
            )
            distinct |= {(id(shape), policy): (c.name, shape, policy) for c, shape, policy in fitting[:most]}
        return list(distinct.values())

    def methods(self) -> dict[str, Method]:
        """How the graph is scheduled: a policy, and which items are one."""
        policies = [*dict.fromkeys(policy for policy, _ in _METHODS), *_FREE]
        methods = [*_METHODS, *((policy, _NOTHING) for policy in policies)]
        num_items = self.merger.reading.problem.num_items
        most = len(methods) if self.is_small else max(_LEAST, _EFFORT // num_items)
        return {f"{policy}{_FOLDED[which]}": (policy, which) for policy, which in methods[:most]}

    def save_memory(self, plain: _Shape) -> None:
        """Memory is the constraint: add orders with low peaks, some of which do not depend on the limit."""
        for policy in _SHORT:
            self.schedule(str(policy), plain, policy)
        for policy in (_LEAN, Policy(0), Policy(256, fit=True, patience=10)):
            order, *_ = schedule(plain.outline, policy)
            self.judge(f"{policy}, whatever the cap", plain.merged, plain.folded.unfold(order))

    def best(self) -> OrderCandidate:
        """The fastest candidate so far under the nominal costs; ties go to the least work of links."""
        pool = [c for c in self.judged if c.peak <= self.room] or self.judged
        fastest = min(c.seconds[0] for c in pool)
        return min((c for c in pool if c.seconds[0] <= fastest * (1 + ENOUGH)), key=lambda c: (c.busy, c.seconds[0]))

    @property
    def is_small(self) -> bool:
        return self.merger.reading.problem.num_items <= SMALL

    def shape(self, buckets: tuple[Bucket, ...], which: Fold = "inputs") -> _Shape:
        if (buckets, which) not in self.shapes:
            other = next((self.shapes[buckets, f] for f in FOLDS if (buckets, f) in self.shapes), None)
            merged = other.merged if other is not None else self.merger.merged(buckets)
            folded = fold(merged.problem, which)
            shape = _Shape(merged, folded, Outline(folded.problem), which)
            self.shapes[buckets, which] = self.shapes[merged.buckets, which] = shape
        return self.shapes[buckets, which]

    def schedule(self, name: str, shape: _Shape, policy: Policy) -> OrderCandidate:
        fastest = min((c.seconds[0] for c in self.judged if c.peak <= self.room), default=inf)
        order, *span = schedule(shape.outline, policy, self.room, (1 + _FAR) * fastest)
        self.spans.setdefault((policy, id(shape)), []).append((span[0], span[1]))
        candidate = self.judge(name, shape.merged, shape.folded.unfold(order))
        self.attempts.append((candidate, shape, policy))
        return candidate

    def judge(self, name: str, merged: Merged, order: Order) -> OrderCandidate:
        problem = merged.problem
        seconds = seconds_of(problem, order, self.slowdown)
        peak = peak_of(problem, order)
        candidate = OrderCandidate(name, merged, tuple(order), (seconds,), peak, max(peak, self.rung))
        self.judged.append(candidate)
        return candidate

    def bucket(self) -> None:
        """Buckets of several sizes, then (in a small graph) single merges and splits while they help."""
        sizes = _SIZES if self.is_small else _SIZES_LARGE if self.is_busy else _SIZES_LARGE[:1]
        for gathers, reductions in sizes:
            seconds = self.try_buckets(gathers, reductions)
            buckets = self.shape(self.by_size[gathers, reductions]).merged.buckets
            if buckets and not (self.is_small or self.sample):
                self.schedule_all(buckets)
                self.sample, seconds = buckets, self.try_buckets(gathers, reductions)
            if seconds > (1 + _FAR) * min(self.fastest_seconds.values()) and not self.is_small:
                break
        if self.is_small:
            self.climb()
        elif self.is_busy:
            self.resize()
            self.lighten()

    def load(self) -> float:
        """Work of the busiest channel relative to that of the compute stream."""
        problem = self.merger.reading.problem
        compute = problem.work()[-1]
        return problem.busiest_link() / compute if compute else inf

    def try_buckets(self, gathers: float, reductions: float, methods: Sequence[Method] = ()) -> float:
        """Schedule buckets of these sizes, by `methods` or the leading methods; returns the seconds."""
        ramps = (0, 0) if self.is_small else (_RAMP, 0) if self.is_busy else (0, _RAMP)
        buckets = self.merger.buckets(gathers, reductions, *ramps)
        name = f"buckets of {_size(gathers)}" + (f" and {_size(reductions)}" if gathers != reductions else "")
        merged_buckets = self.shape(buckets).merged.buckets
        done = {(policy, shape.fold) for c, shape, policy in self.attempts if c.merged.buckets == merged_buckets}
        rest = [method for method in methods or self.leading() if method not in done]
        tried = self.all_by(name, buckets, rest) if rest else []
        best, is_new = min(self.fastest_seconds.values(), default=inf), buckets not in self.fastest_seconds
        fastest = min(c.seconds[0] for c, *_ in self.attempts if c.merged.buckets == merged_buckets)
        self.by_size[gathers, reductions], self.fastest_seconds[buckets] = buckets, fastest
        # To choose from: hardly slower, and good on slower links.
        is_close = fastest <= (1 + _FAR) * best and is_new and tried
        if is_close and self.is_careful and self.is_busy and not self.is_small:
            careful = self.schedule(f"{_CAREFUL[0]}, {name}", self.shape(buckets), _CAREFUL[0])
            self.is_careful = careful.seconds[0] <= (1 + _FAR) * fastest
        return fastest

    def why_apart(self, bucket: Bucket, start: int) -> str:
        """Why no tried set of buckets has a start in a bucket."""
        most = max((size for sizes in self.by_size for size in sizes), default=0.0)
        reason = self.merger.why_apart(bucket, start, most, self.merger.span(start, most))
        return reason or "in every set of buckets that was tried either of them is in another bucket"

    def resize(self) -> None:
        """Other sizes, also for gathers than for reductions, by the method of the fastest order, while that helps."""
        most = (1 + _CLOSE) * min(self.fastest_seconds.values())
        for pair in [pair for pair, buckets in self.by_size.items() if self.fastest_seconds[buckets] <= most]:
            self.try_buckets(*pair, self.fastest_method())
        gathers, reductions = min(self.by_size, key=lambda pair: self.fastest_seconds[self.by_size[pair]])
        best = self.fastest_seconds[self.by_size[gathers, reductions]]
        while True:
            around = ((gathers / 1.5, reductions), (gathers, reductions / 1.5))
            methods = list(dict.fromkeys((*self.fastest_method(), *self.leading())))
            seconds, *sizes = min((self.try_buckets(g, r, methods), g, r) for g, r in around)
            if seconds >= best * (1 - ENOUGH):
                return
            best, (gathers, reductions) = seconds, sizes

    def lighten(self) -> None:
        """While the busiest link never pauses in the fastest order, only buckets with less work of that link can be
        faster: the best of them, or larger ones if there are none, are scheduled by all methods."""
        best = self.best()
        while best.seconds[0] <= (1 + _CLOSE) * (busiest := best.merged.problem.busiest_link()):
            light = (1 - ENOUGH) * busiest
            lighter = [b for b in self.fastest_seconds if self.shape(b).merged.problem.busiest_link() < light]
            if not lighter:
                size = 1.5 * max(map(max, self.by_size))
                self.try_buckets(size, size)
                lighter = [self.by_size[size, size]]
            buckets = min(lighter, key=lambda b: self.fastest_seconds[b])
            seconds = [c.seconds[0] for c in self.schedule_all(buckets)]
            self.fastest_seconds[buckets] = min([self.fastest_seconds[buckets], *seconds])
            last, best = best, self.best()
            if best.seconds[0] >= last.seconds[0] * (1 - ENOUGH):
                return

    def fastest_method(self) -> tuple[Method, ...]:
        """The method of the fastest order with buckets so far, if any."""
        bucketed = [attempt for attempt in self.attempts if attempt[0].merged.buckets and attempt[0].peak <= self.room]
        fastest = min(bucketed, key=lambda attempt: attempt[0].seconds[0], default=None)
        return ((fastest[2], fastest[1].fold),) if fastest else ()

    def all_by(self, name: str, buckets: tuple[Bucket, ...], methods: Sequence[Method]) -> list[OrderCandidate]:
        """Schedule a set of buckets by `methods`, or by the best methods without buckets."""
        return [
            self.schedule(f"{policy}{_FOLDED[which]}, {name}", self.shape(buckets, which), policy)
            for policy, which in methods or self.leading()
        ]

    def leading(self) -> list[Method]:
        """The best methods with the sample of buckets, in a large graph of two kinds of items; ties go to the first."""
        methods = self.methods().values()
        fitting = [(c.seconds[0], (policy, shape.fold)) for c, shape, policy in self.sampled() if c.peak <= self.room]
        ranked = sorted((pair for pair in fitting if pair[1] in methods), key=lambda pair: pair[0])
        distinct = {round(seconds, 9): (method, seconds) for seconds, method in reversed(ranked)}
        best = list(reversed(distinct.values())) or [(_METHODS[0], inf)]
        if self.is_small:
            return [method for method, _ in best[:3]]
        (first, least), *others = best
        return [first, *[method for method, s in others if method[1] != first[1] and s <= (1 + ENOUGH) * least][:1]]

    def climb(self) -> None:
        """Move to the best neighbour of the best candidate (buckets merged or split) within a fixed effort."""
        left = _STEPS
        current = self.best()
        while True:
            tried = 0
            for buckets in self.neighbours(current.merged.buckets):
                if any((buckets, which) in self.shapes for which in FOLDS):
                    continue
                left -= self.merger.reading.problem.num_items
                if left < 0:
                    return
                self.all_by("single merges", buckets, ())
                tried += 1
            better = self.best()
            if not tried or better is current:
                return
            current = better

    def neighbours(self, buckets: tuple[Bucket, ...]) -> Iterator[tuple[Bucket, ...]]:
        """All ways to merge two neighbouring buckets or starts of the same kind, and to split a bucket."""
        of = {c: bucket for bucket in buckets for c in bucket}
        for starts in self.merger.kinds.values():
            runs = list(dict.fromkeys(of.get(c, (c,)) for c in starts))
            for a, b in pairwise(runs):
                joined = (*a, *b)
                if not self.merger.can_join(joined[:-1], joined[-1]):
                    yield _sort_buckets([*(x for x in buckets if x not in (a, b)), joined])
        for bucket in buckets:
            for cut in range(1, len(bucket)):
                parts = [part for part in (bucket[:cut], bucket[cut:]) if len(part) > 1]
                yield _sort_buckets([*(x for x in buckets if x != bucket), *parts])


def _sort_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    return tuple(sorted(buckets))


def _size(size: float) -> str:
    return "any size" if size == inf else f"{size / 1e6:.0f} MB"
