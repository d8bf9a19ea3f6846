"""A lower bound of the remaining cost from an intermediate layout to the end of a move, for the A* search."""

from __future__ import annotations

from collections.abc import Sequence

from meshweave.place.movement.space import PARTIAL, REPLICATED, Axes, MoveState

_ROUNDING = 32  # ticks by which the prices of a path may be rounded down: half a tick per step


class Heuristic:
    """Ticks that every path from a state to the end takes at least (an admissible heuristic).

    As in `movement.bounds`, devices that differ only along axes faster than some bandwidth form a node, and the bytes
    that must enter nodes on average take time; any state but the end takes a start-up. `finest` is the bytes of a piece
    that all axes cut, `speeds` are bytes per second by axis, `opened` the bit set of axes over which the value is
    partial at the end. Those count as inside of nodes: the value may be anywhere among them."""

    def __init__(
        self,
        goal: tuple[Axes, ...],
        opened: int,
        sizes: Sequence[int],
        speeds: Sequence[float],
        alpha_s: float,
        finest: float,
        is_even: bool,
    ) -> None:
        self._goal, self._opened, self._is_even = goal, opened, is_even
        self._start_up, self._ticks_per_unit = alpha_s * 1e12 * (1 - 1e-9), finest * 1e12 * (1 - 1e-9)
        ends = {axis: d for d, cut in enumerate(goal) for axis in cut}
        axes = [axis for axis in sorted(range(len(sizes)), key=speeds.__getitem__) if not opened >> axis & 1]
        self._rows = [(axis, sizes[axis], ends.get(axis, REPLICATED), 1 / speeds[axis]) for axis in axes]

    def __call__(self, state: MoveState, places: Sequence[int]) -> int:
        """`places` has for each axis the dim that it cuts, or REPLICATED or PARTIAL."""
        units = self._units(places)
        if not units and not self._is_astray(state):
            return 0
        return max(0, int(self._start_up + units * self._ticks_per_unit) - _ROUNDING)

    def _units(self, places: Sequence[int]) -> float:
        """Seconds for what must enter nodes over slow axes, on average, if the finest piece had 1 byte."""
        parts = copies = nodes = 1
        needed, there = 1.0, 1.0  # shares of the value that a node needs, and the shares of these that it has
        seconds = before = 0.0
        for axis, size, goal, slowness in self._rows:
            place = places[axis]
            nodes *= size
            if place == PARTIAL:
                parts *= size
            elif place >= 0 and place != goal and (self._is_even or goal < 0):
                there /= size
            if goal >= 0:
                needed, there = needed / size, there / size
            else:
                copies *= size
            entering = parts + copies - 2 if parts > 1 else nodes * (needed - there)
            if entering > before:
                seconds, before = seconds + (entering - before) * slowness, entering
        return seconds

    def _is_astray(self, state: MoveState) -> bool:
        """Whether some dim is cut so that slices and partial axes cannot turn it into the end's."""
        for cut, goal in zip(state.cuts, self._goal, strict=True):
            if cut == goal[: len(cut)]:
                continue
            count = len(cut)
            while count and self._opened >> cut[count - 1] & 1:
                count -= 1
            if cut[:count] != goal[:count]:
                return True
        return False
