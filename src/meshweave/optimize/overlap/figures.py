"""All numbers that a decision depends on, as a single value, so that ranks can agree on them first."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshweave.errors import MeshweaveError
from meshweave.interop.ops import is_operator
from meshweave.ir.collectives import WAIT
from meshweave.optimize.overlap.prices import SIZES, Curve, Prices, handed_in
from meshweave.optimize.overlap.read import Reading

LEVELS = ("node", "net")  # of links, named as in profiles
Agree = Callable[["CostNumbers"], "CostNumbers"]


@dataclass(frozen=True, slots=True)
class CostNumbers:
    """`fingerprint` identifies the structure of the graph, equal on every rank that runs it: ops, dependencies,
    channels in order of appearance. `numbers` are seconds and bytes, which may differ if ranks were measured or have
    uneven pieces."""

    fingerprint: str
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MergeCosts:
    """The costs of merging. `moved` are operand bytes by item; by (op, channel) `curves` are the seconds on the
    channel, `hosts` those on the stream; `copy_rate` in bytes read and written per second."""

    moved: dict[int, float]
    curves: dict[tuple[str, int], Curve]
    hosts: dict[tuple[str, int], Curve]
    copy_rate: float


def fill_prices(reading: Reading, prices: Prices, factor: float, agree: Agree | None) -> MergeCosts:
    """Fill the problem of a reading with seconds. With `agree`, all ranks use the numbers that it returns.

    `factor` scales all communication. Raises MeshweaveError, naming the node, for a cost that is not a duration.
    """
    problem = reading.problem
    problem.seconds = [0.0] * problem.num_items
    moved: dict[int, float] = {}
    own: dict[int, float] = {}
    for i, node in enumerate(reading.nodes):
        if i in reading.rows:
            moved[i] = handed_in(reading, i)
            own[i] = prices.start(i, moved[i])
        elif node.target is not WAIT:  # a wait for an earlier graph's communication
            problem.seconds[i] = prices.compute(node)
    kinds: dict[tuple[str, int], int] = {}
    for i in reading.rows:
        kinds.setdefault((str(reading.nodes[i].target), problem.channel[i]), i)
    curves = [*map(prices.curve, kinds.values()), *map(prices.host, kinds.values())]
    mine = [*problem.seconds, *own.values(), *moved.values(), *map(float, problem.sizes), prices.copy_rate()]
    mine += [s for curve in curves for s in curve.seconds]
    mine += [dict(prices.usage(i)).get(level, 0.0) for i in own for level in LEVELS]
    numbers = iter(agree_on(reading, mine, agree))
    problem.seconds = [next(numbers) for _ in reading.nodes]
    own = {i: next(numbers) * factor for i in own}
    moved = {i: next(numbers) for i in moved}
    problem.sizes = [int(next(numbers)) for _ in problem.sizes]
    copy_rate = next(numbers)
    measured, hosts = ({key: Curve(tuple(next(numbers) * factor for _ in SIZES)) for key in kinds} for _ in range(2))
    problem.copy = [own.get(i, 0.0) for i in range(problem.num_items)]
    problem.host = [0.0] * problem.num_items
    for i in own:
        problem.host[i] = hosts[str(reading.nodes[i].target), problem.channel[i]](moved[i])
    problem.startup = [0.0] * problem.num_items
    problem.usage = [()] * problem.num_items
    for i in own:
        shares = [(level, next(numbers)) for level in LEVELS]
        problem.usage[i] = tuple((level, share) for level, share in shares if share)
    for i, row in reading.rows.items():
        if row.bucket:
            curve = measured[str(reading.nodes[i].target), problem.channel[i]]
            problem.startup[i] = max(problem.copy[i] - moved[i] * curve.least, 0.0)
    return MergeCosts(moved, measured, hosts, copy_rate)


def agree_on(reading: Reading, numbers: Sequence[float], agree: Agree | None) -> Sequence[float]:
    """The numbers that all ranks use."""
    if agree is None:
        return numbers
    mine = CostNumbers(fingerprint(reading), tuple(numbers))
    common = agree(mine)
    if common.fingerprint != mine.fingerprint or len(common.numbers) != len(mine.numbers):
        raise MeshweaveError(
            "ranks compile different graphs: their communications would not meet",
            got=f"figures of graph {common.fingerprint}, {len(common.numbers)} numbers",
            expected=f"graph {mine.fingerprint}, {len(mine.numbers)} numbers",
            hint="call `agree` only among ranks that run the same graph",
        )
    return common.numbers


def fingerprint(reading: Reading) -> str:
    problem = reading.problem
    parts: list[Any] = [
        [_name(n.target) for n in reading.nodes],
        problem.deps,
        problem.waits,
        problem.channel,
        problem.order,
        problem.uses,
        problem.kept,
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def _name(target: Any) -> str:
    return str(target) if is_operator(target) else getattr(target, "__name__", "")
