"""The cheapest redistribution by brute force: Dijkstra over all ordered layouts of a tensor, every step from each.

Independent of meshweave: axes are numbers, a layout is a tuple of tuples, a graph is a dense matrix of seconds. The
steps and their prices are those that `Optimum` lists, written down here a second time. Nothing is left out for what
source and target are: a value that is a sum may become partial over any axis that it is not, be reduced over any that
it is, and become partial over that axis again. (A value that is partial over no axis of the source is never summed:
adding zeros would lose the sign of -0.0 where data is only to be moved.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    """All layouts of a tensor of the given shape over axes of the given sizes, and the cheapest way between any two.

    Dims are cut as torch.chunk cuts them, axis after axis, and the largest piece is priced.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        bandwidths: Sequence[float],
        shape: Sequence[int],
        *,
        itemsize: int = 4,
        alpha: float = 10e-6,
        with_permute: bool = True,
    ) -> None:
        self.sizes, self.bandwidths, self.alpha = tuple(sizes), tuple(bandwidths), alpha
        self.shape, self.itemsize = tuple(shape), itemsize
        self.axes = range(len(sizes))
        self.states = list(_all_states(len(sizes), len(shape)))
        self.number = {state: i for i, state in enumerate(self.states)}
        self.bytes = np.array([self._bytes(state) for state in self.states])
        self.replicated = np.array([sum(1 << a for a in self._free(state)) for state in self.states])
        self.plain = self._matrix(self._slices, self._gathers, self._deals, self._opens)
        if with_permute:
            self.plain = np.minimum(self.plain, self._matrix(self._permutes))
        self.reductions = self._matrix(self._reductions)

    # the steps: (state after, seconds)

    def _slices(self, state: State) -> Iterator[tuple[State, float]]:
        for axes in _sequences(self._free(state)):
            for d in range(len(state.cuts)):
                yield _append(state, d, axes), 0.0

    def _gathers(self, state: State) -> Iterator[tuple[State, float]]:
        for d, kept, axes in _suffixes(state):
            yield _with(state, d, kept), self._seconds(axes, (self._size(axes) - 1) * self._bytes(state))

    def _deals(self, state: State) -> Iterator[tuple[State, float]]:
        """All-to-alls. A device hands in a block for each of its group, all as large as the largest."""
        for d, kept, axes in _suffixes(state):
            n = self._size(axes)
            for e in range(len(state.cuts)):
                for order in permutations(axes) if e != d else ():
                    dealt = _append(state, e, order)  # cut on both dims: what goes from one device to another
                    yield _with(dealt, d, kept), self._seconds(axes, (n - 1) * self._bytes(dealt))

    def _permutes(self, state: State) -> Iterator[tuple[State, float]]:
        """Every other way to cut the dims into as many pieces."""
        for after in self.states:
            if after.partial == state.partial and after != state and self._parts(after) == self._parts(state):
                moved = {a for one, other in zip(state.cuts, after.cuts, strict=True) for a in self._moved(one, other)}
                yield after, self._seconds(tuple(moved), max(self._bytes(state), self._bytes(after)))

    def _opens(self, state: State) -> Iterator[tuple[State, float]]:
        """Replicate -> partial over any axes, and shard -> partial by padding of a suffix."""
        free = self._free(state)
        for count in range(1, len(free) + 1):
            for axes in combinations(free, count):
                yield State(state.cuts, state.partial.union(axes)), 0.0
        for d, kept, axes in _suffixes(state):
            yield State(_with(state, d, kept).cuts, state.partial.union(axes)), 0.0

    def _reductions(self, state: State) -> Iterator[tuple[State, float]]:
        """Over every part of the partial axes: all-reduces, and reduce-scatters with blocks as all-to-alls have."""
        for count in range(1, len(state.partial) + 1):
            for axes in combinations(sorted(state.partial), count):
                n, rest = self._size(axes), State(state.cuts, state.partial - set(axes))
                yield rest, self._seconds(axes, 2 * (n - 1) / n * self._bytes(state))
                for d, order in product(range(len(state.cuts)), permutations(axes)):
                    after = _append(rest, d, order)
                    yield after, self._seconds(axes, (n - 1) * self._bytes(after))

    # what they need

    def _free(self, state: State) -> list[int]:
        return [a for a in self.axes if a not in state.partial and not any(a in cut for cut in state.cuts)]

    def _size(self, axes: Sequence[int]) -> int:
        return prod(self.sizes[a] for a in axes)

    def _parts(self, state: State) -> list[int]:
        return [self._size(cut) for cut in state.cuts]

    def _bytes(self, state: State) -> int:
        """Bytes of the largest piece."""
        lengths = list(self.shape)
        for d, cut in enumerate(state.cuts):
            for a in cut:
                lengths[d] = -(-lengths[d] // self.sizes[a])
        return self.itemsize * prod(lengths)

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

    def table(self, order: str = "sound", floor: float | None = None) -> np.ndarray:
        """Seconds from every layout to every other, indexed by their numbers; infinite where there is no way.

        order: a reduction runs only while every axis that is replicated was so in the source ("sound"), while none is
        ("strict"), or at any time ("any"). With a `floor`, input and output of each step hold no more bytes than that
        or twice the larger of source and target, whichever is more.
        """
        count = len(self.states)
        found = np.full((count, count), INF)
        whole = np.array([not state.partial for state in self.states])
        for mask, moves_only in product(np.unique(self.replicated), (True, False)):
            sources = np.flatnonzero((self.replicated == mask) & (whole == moves_only))
            twins = {"sound": int(mask), "strict": 0, "any": -1}[order]
            may_reduce = ((self.replicated & ~twins) == 0) & (not moves_only)
            weights = np.where(may_reduce[:, None], np.minimum(self.plain, self.reductions), self.plain)
            for s in sources:
                caps = np.full(count, INF)
                if floor is not None:
                    caps = np.maximum(2 * np.maximum(self.bytes[s], self.bytes), floor)
                for cap in np.unique(caps):
                    fits = self.bytes[:, None] + self.bytes[None, :] <= cap
                    reached = dijkstra(np.where(fits, weights, INF), int(s))
                    found[s, caps == cap] = reached[caps == cap]
        return found


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


def check_by_hand() -> None:
    """A few moves over axes a (slow) and b, c (fast) whose cheapest way can be seen, in seconds."""
    slow, fast, alpha = 50e9, 400e9, 10e-6
    large, small = (16384, 16384), (64, 32)
    gib, kib8 = float(2**30), float(2**13)
    a, b, c = 0, 1, 2
    two, three = (2, 4), (4, 2, 2)
    cases = [
        # slice dim 1 over a, exchange b
        (two, large, State(((b,), ())), State(((), (a, b))), alpha + 3 / 4 * gib / 8 / fast),
        # exchange b onto dim 1, gather a, gather b: what crosses a is an eighth
        (
            two,
            large,
            State(((a, b), ())),
            State(((), ())),
            3 * alpha + 3 / 4 * gib / 8 / fast + gib / 8 / slow + 3 * gib / 4 / fast,
        ),
        (two, small, State(((a, b), ())), State(((), ())), alpha + 7 * kib8 / 8 / slow),  # one gather over both
        # reduce-scatter b, all-reduce a, gather b
        (
            two,
            large,
            State(((), ()), frozenset({a, b})),
            State(((), ())),
            3 * alpha + 3 / 4 * gib / fast + gib / 4 / slow + 3 * gib / 4 / fast,
        ),
        # the same, but for b, over which the sum is opened again
        (
            two,
            large,
            State(((), ()), frozenset({a, b})),
            State(((), ()), frozenset({b})),
            2 * alpha + 3 / 4 * gib / fast + gib / 4 / slow,
        ),
        (two, small, State(((a, b), ())), State(((b, a), ())), alpha + kib8 / 8 / slow),  # one permute
        (two, large, State(((), ())), State(((b,), ()), frozenset({a})), 0.0),
        (two, large, State(((a,), ())), State(((), ()), frozenset({a})), 0.0),
        # a is opened, to be reduced with b in one all-reduce
        (two, small, State(((a,), ()), frozenset({b})), State(((), ())), alpha + 2 * 7 / 8 * kib8 / slow),
        (three, small, State(((a,), ())), State(((b, c), ())), alpha + kib8 / 4 / slow),  # one permute to other axes
        (three, small, State(((b, a), ())), State(((c, a), ())), alpha + kib8 / 8 / fast),  # a stays where it is
    ]
    for sizes, shape, source, target, expected in cases:
        optimum = Optimum(sizes, (slow, fast, fast)[: len(sizes)], shape, alpha=alpha)
        got = optimum.table()[optimum.number[source], optimum.number[target]]
        assert abs(got - expected) < 1e-12, f"{source} -> {target}: {got} and not {expected}"


if __name__ == "__main__":
    check_by_hand()
