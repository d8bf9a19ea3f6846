"""The cheapest redistribution by brute force: Dijkstra over all ordered layouts of an evenly cut tensor.

Independent of meshweave: axes are numbers, a layout is a tuple of tuples, a graph is a dense matrix of seconds. The
steps and their prices are those that `Optimum` lists, written down here a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise, permutations, product
from math import prod

import numpy as np

INF = float("inf")


@dataclass(frozen=True)
class State:
    """Per dim the axes that cut it, outermost first, and those over which the value is partial."""

    cuts: tuple[tuple[int, ...], ...]
    partial: frozenset[int] = frozenset()


class Optimum:
    """All layouts of a tensor of `total` bytes over axes of the given sizes, and the cheapest way between any two."""

    def __init__(
        self,
        sizes: Sequence[int],
        bandwidths: Sequence[float],
        total: float,
        *,
        alpha: float = 10e-6,
        num_dims: int = 2,
        with_permute: bool = True,
    ) -> None:
        self.sizes, self.bandwidths, self.total, self.alpha = tuple(sizes), tuple(bandwidths), total, alpha
        self.axes = range(len(sizes))
        self.states = list(_all_states(len(sizes), num_dims))
        self.number = {state: i for i, state in enumerate(self.states)}
        self.bytes = np.array([total / prod(self._size(cut) for cut in s.cuts) for s in self.states])
        self.partial = np.array([_bits(s.partial) for s in self.states])
        self.cut = np.array([_bits(a for cut in s.cuts for a in cut) for s in self.states])
        self.replicated = (1 << len(sizes)) - 1 - self.partial - self.cut
        self.plain = self._matrix(self._slices, self._gathers, self._deals, *([self._permutes] * with_permute))
        masks = range(1, 1 << len(sizes))
        self.scatters = {mask: self._matrix(lambda s, m=mask: self._scatters(s, m)) for mask in masks}
        self.all_reduces = {mask: self._matrix(lambda s, m=mask: self._all_reduces(s, m)) for mask in masks}
        self.opens = {mask: self._matrix(lambda s, m=mask: self._opens(s, m)) for mask in masks}

    # the steps: (state after, seconds)

    def _slices(self, state: State) -> Iterator[tuple[State, float]]:
        for axes in _sequences(self._free(state)):
            for d in range(len(state.cuts)):
                yield _append(state, d, axes), 0.0

    def _gathers(self, state: State) -> Iterator[tuple[State, float]]:
        for d, kept, axes in _suffixes(state):
            yield _with(state, d, kept), self._seconds(axes, (self._size(axes) - 1) * self._bytes(state))

    def _deals(self, state: State) -> Iterator[tuple[State, float]]:
        for d, kept, axes in _suffixes(state):
            n = self._size(axes)
            for e in range(len(state.cuts)):
                for order in permutations(axes) if e != d else ():
                    after = _append(_with(state, d, kept), e, order)
                    yield after, self._seconds(axes, (n - 1) / n * self._bytes(state))

    def _permutes(self, state: State) -> Iterator[tuple[State, float]]:
        """Every other way to cut the dims into as many pieces."""
        for after in self.states:
            if after.partial == state.partial and after != state and self._parts(after) == self._parts(state):
                moved = {a for one, other in zip(state.cuts, after.cuts, strict=True) for a in self._moved(one, other)}
                yield after, self._seconds(tuple(moved), self._bytes(state))

    def _scatters(self, state: State, mask: int) -> Iterator[tuple[State, float]]:
        axes = _axes(mask)
        if not state.partial.issuperset(axes):
            return
        n, rest = self._size(axes), State(state.cuts, state.partial - set(axes))
        for d in range(len(state.cuts)):
            for order in permutations(axes):
                yield _append(rest, d, order), self._seconds(axes, (n - 1) / n * self._bytes(state))

    def _all_reduces(self, state: State, mask: int) -> Iterator[tuple[State, float]]:
        axes = _axes(mask)
        if state.partial.issuperset(axes):
            n = self._size(axes)
            after = State(state.cuts, state.partial - set(axes))
            yield after, self._seconds(axes, 2 * (n - 1) / n * self._bytes(state))

    def _opens(self, state: State, mask: int) -> Iterator[tuple[State, float]]:
        """Replicate -> partial, and shard -> partial by padding of a suffix."""
        axes = frozenset(_axes(mask))
        if axes.issubset(self._free(state)):
            yield State(state.cuts, state.partial | axes), 0.0
        for d, kept, suffix in _suffixes(state):
            if axes == frozenset(suffix):
                yield State(_with(state, d, kept).cuts, state.partial | axes), 0.0

    # what they need

    def _free(self, state: State) -> list[int]:
        return [a for a in self.axes if a not in state.partial and not any(a in cut for cut in state.cuts)]

    def _size(self, axes: Sequence[int]) -> int:
        return prod(self.sizes[a] for a in axes)

    def _parts(self, state: State) -> list[int]:
        return [self._size(cut) for cut in state.cuts]

    def _bytes(self, state: State) -> float:
        return self.total / prod(self._parts(state))

    def _seconds(self, axes: Sequence[int], received: float) -> float:
        return self.alpha + received / min(self.bandwidths[a] for a in axes)

    def _moved(self, one: Sequence[int], other: Sequence[int]) -> set[int]:
        """Axes of the stretches, between common boundaries of the pieces, in which two cuts differ."""

        def boundaries(cut: Sequence[int]) -> list[int]:
            return [self._size(cut[:i]) for i in range(len(cut) + 1)]

        ends, moved = sorted(set(boundaries(one)) & set(boundaries(other))), set[int]()
        for start, end in pairwise(ends):
            stretches = [
                [a for a, at in zip(cut, boundaries(cut), strict=False) if start <= at < end] for cut in (one, other)
            ]
            if stretches[0] != stretches[1]:
                moved.update(*stretches)
        return moved

    def _matrix(self, *rules: Callable[[State], Iterator[tuple[State, float]]]) -> np.ndarray:
        made = np.full((len(self.states), len(self.states)), INF)
        for i, state in enumerate(self.states):
            for rule in rules:
                for after, seconds in rule(state):
                    j = self.number[after]
                    made[i, j] = min(made[i, j], seconds)
        return made

    # the search

    def table(self, *, sound: bool = True, bounded: bool = True) -> np.ndarray:
        """Seconds from every layout to every other, indexed by their numbers.

        sound: a reduction runs only while every axis that is replicated was so in the source; an all-reduce only over
        all that is still to be reduced. bounded: input and output of each step hold no more than twice the larger
        of source and target.
        """
        found = np.full((len(self.states),) * 2, INF)
        graph = cache(lambda *key: self._graph(*key))
        for s in range(len(self.states)):
            caps = 2 * np.maximum(self.bytes[s], self.bytes) if bounded else np.full(len(self.states), INF)
            for wanted in range(1 << len(self.sizes)):
                ends = self.partial == wanted
                for cap in np.unique(caps[ends]):
                    key = (int(self.partial[s]), wanted, float(cap), int(self.replicated[s]) if sound else -1)
                    _, where, weights = graph(*key)
                    reached = dijkstra(weights, int(where[s]))
                    for t in np.flatnonzero(ends & (caps == cap)):
                        found[s, t] = reached[where[t]]
        return found

    def _graph(self, before: int, after: int, cap: float, replicated: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(the layouts that moves between these partial axes may pass, their places, seconds between them)."""
        pending, added = before & ~after, after & ~before
        nodes = np.flatnonzero(((self.partial & ~(before | after)) == 0) & ((before & after & ~self.partial) == 0))
        where = np.full(len(self.states), -1)
        where[nodes] = np.arange(len(nodes))
        square = np.ix_(nodes, nodes)
        weights = self.plain[square].copy()
        may_reduce = (self.replicated[nodes] & ~replicated) == 0 if replicated >= 0 else np.ones(len(nodes), bool)
        for mask in range(1, 1 << len(self.sizes)):
            if not mask & ~pending:
                rows = np.flatnonzero(may_reduce)
                weights[rows] = np.minimum(weights[rows], self.scatters[mask][square][rows])
                if replicated >= 0:
                    rows = np.flatnonzero(may_reduce & ((self.partial[nodes] & pending) == mask))
                weights[rows] = np.minimum(weights[rows], self.all_reduces[mask][square][rows])
            if not mask & ~added:
                weights = np.minimum(weights, self.opens[mask][square])
        held = self.bytes[nodes]
        weights[held[:, None] + held[None, :] > cap * (1 + 1e-12)] = INF
        return nodes, where, weights


def dijkstra(weights: np.ndarray, source: int) -> np.ndarray:
    """Least sums of weights from the source to all nodes."""
    least = np.full(len(weights), INF)
    least[source] = 0.0
    waiting = least.copy()
    while True:
        here = int(waiting.argmin())
        seconds = waiting[here]
        if seconds == INF:
            return least
        through = seconds + weights[here]
        better = through < least
        least[better] = waiting[better] = through[better]
        waiting[here] = INF


def _all_states(num_axes: int, num_dims: int) -> Iterator[State]:
    """Each axis cuts a dim, makes the value partial or does nothing; those of a dim in any order."""
    for uses in product(range(-2, num_dims), repeat=num_axes):
        groups = [[a for a, use in enumerate(uses) if use == d] for d in range(num_dims)]
        partial = frozenset(a for a, use in enumerate(uses) if use == -1)
        for cuts in product(*(permutations(group) for group in groups)):
            yield State(cuts, partial)


def _sequences(axes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for count in range(1, len(axes) + 1):
        for some in combinations(axes, count):
            yield from permutations(some)


def _suffixes(state: State) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(dim, the axes that stay, the innermost axes)."""
    for d, cut in enumerate(state.cuts):
        for at in range(len(cut)):
            yield d, cut[:at], cut[at:]


def _with(state: State, d: int, cut: tuple[int, ...]) -> State:
    return State((*state.cuts[:d], cut, *state.cuts[d + 1 :]), state.partial)


def _append(state: State, d: int, axes: Sequence[int]) -> State:
    return _with(state, d, (*state.cuts[d], *axes))


def _bits(axes: Iterator[int] | frozenset[int]) -> int:
    return sum(1 << a for a in axes)


def _axes(mask: int) -> tuple[int, ...]:
    return tuple(a for a in range(mask.bit_length()) if mask >> a & 1)


def check_by_hand() -> None:
    """A few moves over axes a (slow) and b, c (fast) whose cheapest way can be seen, in seconds."""
    slow, fast, alpha = 50e9, 400e9, 10e-6
    large, small = float(2**30), float(2**13)
    a, b, c = 0, 1, 2
    two, three = (2, 4), (4, 2, 2)
    cases = [
        # slice dim 1 over a, exchange b
        (two, large, State(((b,), ())), State(((), (a, b))), alpha + 3 / 4 * large / 8 / fast),
        # exchange b onto dim 1, gather a, gather b: what crosses a is an eighth
        (
            two,
            large,
            State(((a, b), ())),
            State(((), ())),
            3 * alpha + 3 / 4 * large / 8 / fast + large / 8 / slow + 3 * large / 4 / fast,
        ),
        (two, small, State(((a, b), ())), State(((), ())), alpha + 7 * small / 8 / slow),  # one gather over both
        # reduce-scatter b, all-reduce a, gather b
        (
            two,
            large,
            State(((), ()), frozenset({a, b})),
            State(((), ())),
            3 * alpha + 3 / 4 * large / fast + large / 4 / slow + 3 * large / 4 / fast,
        ),
        (two, small, State(((a, b), ())), State(((b, a), ())), alpha + small / 8 / slow),  # one permute
        (two, large, State(((), ())), State(((b,), ()), frozenset({a})), 0.0),
        (two, large, State(((a,), ())), State(((), ()), frozenset({a})), 0.0),
        (three, small, State(((a,), ())), State(((b, c), ())), alpha + small / 4 / slow),  # one permute to other axes
        (three, small, State(((b, a), ())), State(((c, a), ())), alpha + small / 8 / fast),  # a stays where it is
    ]
    for sizes, total, source, target, expected in cases:
        optimum = Optimum(sizes, (slow, fast, fast)[: len(sizes)], total, alpha=alpha)
        got = optimum.table()[optimum.number[source], optimum.number[target]]
        assert abs(got - expected) < 1e-12, f"{source} -> {target}: {got} and not {expected}"


if __name__ == "__main__":
    check_by_hand()
