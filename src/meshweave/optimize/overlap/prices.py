"""The seconds of every item: from a machine profile on the actual ranks of each group, or from a caller's callable. All
numbers that a decision depends on form a single value, on which ranks can agree first."""

from __future__ import annotations

import hashlib
import inspect
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import fx

from meshweave.cost.hardware.collective_seconds import collective_seconds, host_seconds
from meshweave.cost.hardware.profile import MachineProfile
from meshweave.cost.simulate.classify import known_kind, memory_work, priced_by_bytes, work_of
from meshweave.cost.simulate.clock import Slowdown
from meshweave.errors import MeshweaveError
from meshweave.interop.ops import is_operator
from meshweave.ir.aliases import is_view_op
from meshweave.ir.collectives import TRANSFER, WAIT
from meshweave.ir.graph import argument, op_name, place_of
from meshweave.ir.work import MemoryWork, Work
from meshweave.optimize.overlap.read import Reading

Cost = Callable[..., float]
SIZES = tuple(float(1 << k) for k in range(10, 34))  # bytes at which a curve is sampled: 1 KiB to 8 GiB
_COPY_RATE = 1.5e12  # bytes/s of a copy if no op of the graph shows one: half of an H100's HBM3 data sheet figure
_FASTEST = 8e12  # bytes/s that no device memory exceeds: HBM3E of a B200 (NVIDIA Blackwell data sheet, 2024)
_LARGE = 1 << 20  # bytes above which an op's launch time is negligible
_COPIED = 1 << 28  # bytes of the timed copy
_QUANTILE = 0.75  # quantile of the rates of ops: some move less than they seem to, others are slower than a copy


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a communication as a function of a rank's operand bytes: sampled at `SIZES`, linear in between."""

    seconds: tuple[float, ...]

    def __call__(self, num_bytes: float) -> float:
        k = min(max(bisect_left(SIZES, num_bytes), 1), len(SIZES) - 1)
        (a, b), (x, y) = SIZES[k - 1 : k + 1], self.seconds[k - 1 : k + 1]
        return max(x + (y - x) * (num_bytes - a) / (b - a), 0.0)

    @property
    def least(self) -> float:
        """A lower bound of seconds per byte for communications of this kind, merged or not."""
        last = (self.seconds[-1] - self.seconds[-2]) / (SIZES[-1] - SIZES[-2])
        return max(min(last, *(s / size for s, size in zip(self.seconds, SIZES, strict=True))), 0.0)


_NOTHING = Curve((0.0,) * len(SIZES))


def handed_in(reading: Reading, item: int) -> float:
    """Operand bytes of a rank in the communication that the item starts."""
    node, row = reading.nodes[item], reading.rows[item]
    operands: list[fx.Node] = []
    fx.map_arg([argument(node, p) for p in row.operands], operands.append)
    return float(sum(x.num_elements * x.dtype.itemsize for n in operands for x in reading.values[n]))


def check_seconds(node: fx.Node, seconds: Any) -> float:
    """`seconds`, any real scalar of Python, NumPy or PyTorch, as a float. Raises MeshweaveError, naming the node, for a
    value that is not a duration."""
    is_scalar = isinstance(seconds, Real) or getattr(seconds, "ndim", None) == 0
    kind = type(seconds).__name__ + str(getattr(seconds, "dtype", ""))
    number = float(seconds) if is_scalar and not re.search("bool|complex|str|object|date|time", kind) else nan
    if not isfinite(number) or number < 0:
        raise MeshweaveError(
            "a cost is not a duration", where=place_of(node), got=repr(seconds), expected="seconds: a number, 0 or more"
        )
    return number


@dataclass(frozen=True, slots=True)
class CheckedCost:
    """A caller's callable, `cost(node)` or `cost(node, num_bytes)`, whose results are checked to be durations."""

    cost: Cost
    needs_bytes: bool  # the callable has a second required argument
    takes_bytes: bool

    def __call__(self, node: fx.Node, num_bytes: int | None = None) -> float:
        arguments = (node,) if num_bytes is None and not self.needs_bytes else (node, num_bytes)
        try:
            seconds = self.cost(*arguments)
        except MeshweaveError:
            raise
        except Exception as error:
            raise MeshweaveError(
                "the cost callable failed", where=place_of(node), got=f"{type(error).__name__}: {error}"
            ) from error
        return check_seconds(node, seconds)


def checked_cost(cost: Cost) -> CheckedCost:
    needed, accepted = _arguments(cost)
    return CheckedCost(cost, needed > 1, accepted > 1)


def priced_views(graph: fx.Graph, ask: CheckedCost) -> frozenset[Any]:
    """The view ops that cost something somewhere in a graph (launches, in eager mode): they are kernels then."""
    views = set[Any]()
    for node in graph.nodes:
        is_view = node.op == "call_function" and node.target not in views and is_view_op(node.target)
        if is_view and ask(node) > 0:
            views.add(node.target)
    return frozenset(views)


@dataclass(slots=True)
class CallablePrices:
    """A caller's costs. A merged collective is priced by the callable with its bytes if it accepts them; else on the
    line through the smallest and the largest collective of the same op and group in the graph."""

    reading: Reading
    ask: CheckedCost
    known: dict[tuple[str, int], list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def compute(self, node: fx.Node) -> float:
        return self.ask(node)

    def start(self, item: int, num_bytes: float) -> float:
        seconds = self.ask(self.reading.nodes[item], int(num_bytes) if self.ask.needs_bytes else None)
        row, channel = self.reading.rows[item], self.reading.problem.channel[item]
        self.known.setdefault((row.name, channel), []).append((num_bytes, seconds))
        return seconds

    def curve(self, item: int) -> Curve:
        node = self.reading.nodes[item]
        if self.ask.takes_bytes:
            return Curve(tuple(self.ask(node, int(size)) for size in SIZES))
        points = self.known[self.reading.rows[item].name, self.reading.problem.channel[item]]
        (low, first), (high, last) = min(points), max(points)
        slope = max((last - first) / (high - low), 0.0) if high > low else first / low if low else 0.0
        base = max(first - slope * low, 0.0)
        return Curve(tuple(base + slope * size for size in SIZES))

    def host(self, item: int) -> Curve:
        return _NOTHING

    def usage(self, item: int) -> tuple[tuple[str, float], ...]:
        return ()

    def copy_rate(self) -> float:
        """Bytes read and written per second by large memory-bound ops. For ops that a compiler may have fused, only
        bytes that are moved in any case count (`_moved`), so that no op seems faster than memory."""
        problem, rates = self.reading.problem, list[float]()
        for node, seconds in zip(self.reading.nodes, problem.seconds, strict=True):
            if seconds > 0 and known_kind(node) in _MEMORY_BOUND:
                moved = self._moved_bytes(node)
                rates += [moved / seconds] if moved > _LARGE else []
        return min(sorted(rates)[int(_QUANTILE * len(rates))], _FASTEST) if rates else _COPY_RATE

    def _moved_bytes(self, node: fx.Node) -> int:
        """Bytes that an op moves even if fused: operands that no memory-bound op computes, and results that another
        kind of op reads."""
        values, kinds = self.reading.values, [known_kind(n) for n in _readers(node, self.reading)]
        read = {n for n in node.all_input_nodes if known_kind(_source(n, self.reading)) not in _MEMORY_BOUND}
        written = [x.bytes for x in values[node]] if any(kind not in _MEMORY_BOUND for kind in kinds) else []
        return sum(x.bytes for n in read for x in values[n]) + sum(written)


_MEMORY_BOUND = frozenset({"pointwise", "strided", "reduction", "gather", "scan"})


def _source(node: fx.Node, reading: Reading) -> fx.Node:
    """The node that computed the tensor that a node is a view of."""
    while node in reading.free and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node, reading: Reading) -> Iterator[fx.Node]:
    """The nodes that read a node, or a view of it."""
    for user in node.users:
        if user in reading.free:
            yield from _readers(user, reading)
        else:
            yield user


def _arguments(cost: Cost) -> tuple[int, int]:
    """How many positional arguments a callable requires, and how many it accepts."""
    try:
        parameters = inspect.signature(cost).parameters.values()
    except (TypeError, ValueError):
        return 1, 1
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in plain), len(plain)


@dataclass(frozen=True, slots=True)
class SimulatedSeconds:
    """The simulator's figures for the nodes of a program: seconds (of starts and kernels; missing nodes cost nothing),
    and for starts the links that they use."""

    seconds: Mapping[fx.Node, float]
    usage: Mapping[fx.Node, tuple[tuple[str, float], ...]]


@dataclass(slots=True)
class ProfilePrices:
    """Costs of a machine profile.

    Communication is priced on the ranks of its group; chains of pointwise ops count as a fused kernel if the profile's
    machine fuses: values that only the chain reads are neither written nor read. Figures in `simulated` take
    precedence."""

    reading: Reading
    profile: MachineProfile
    simulated: SimulatedSeconds | None = None
    unknown: dict[str, None] = field(default_factory=dict)  # ops that were priced only by memory traffic

    @property
    def notes(self) -> tuple[str, ...]:
        return priced_by_bytes(self.unknown)

    def compute(self, node: fx.Node) -> float:
        if self.simulated is not None:
            return self.simulated.seconds.get(node, 0.0)  # a fence, or an op that a compiler computes once
        return sum(self.profile.compute_seconds(work) for work in self.work(node))

    def work(self, node: fx.Node) -> tuple[Work, ...]:
        values = self.reading.values
        inputs: list[fx.Node] = []  # as written: a repeated operand counts twice
        fx.map_arg((node.args, node.kwargs), inputs.append)
        operands = tuple(x for n in inputs for x in values[n])
        results = values[node]
        kind = known_kind(node)
        if kind == "" or not results:
            self.unknown[op_name(node.target)] = None
            return (memory_work("pointwise", operands, results),) if operands or results else ()
        if kind == "pointwise" and self.profile.fusion == "pointwise":
            operands = tuple(x for n in inputs if not self.is_inner(n) for x in values[n])
            results = () if self.is_inner(node) else results
            return (memory_work(kind, operands, results),) if operands or results else ()
        return work_of(node, operands, results)

    def is_inner(self, node: fx.Node) -> bool:
        """Whether only pointwise ops over equally many elements read the result of a pointwise op: it stays in
        registers."""
        results = self.reading.values[node]
        if node.op != "call_function" or len(results) != 1 or known_kind(node) != "pointwise":
            return False
        size = results[0].num_elements
        return all(
            known_kind(user) == "pointwise" and [x.num_elements for x in self.reading.values[user]] == [size]
            for user in node.users
        )

    def start(self, item: int, num_bytes: float) -> float:
        node = self.reading.nodes[item]
        return self.simulated.seconds[node] if self.simulated is not None else self.parts(item, num_bytes)[0]

    def parts(self, item: int, num_bytes: float) -> tuple[float, float]:
        """Seconds of the links, and of the caller."""
        row, node = self.reading.rows[item], self.reading.nodes[item]
        mesh, axes = self.reading.program.group_of(node)
        seconds = collective_seconds(self.profile, node, row, mesh, axes, num_bytes)
        host = host_seconds(self.profile, row, mesh, axes, seconds)
        return seconds - host, host

    def curve(self, item: int) -> Curve:
        if self.reading.rows[item] is TRANSFER:  # it is never merged
            return Curve((self.start(item, 0.0),) * len(SIZES))
        return Curve(tuple(self.parts(item, size)[0] for size in SIZES))

    def host(self, item: int) -> Curve:
        if self.reading.rows[item] is TRANSFER:
            return _NOTHING
        return Curve(tuple(self.parts(item, size)[1] for size in SIZES))

    def usage(self, item: int) -> tuple[tuple[str, float], ...]:
        node = self.reading.nodes[item]
        if self.simulated is not None:
            return self.simulated.usage[node]
        return self.profile.usage(self.reading.rows[item].cost_name, *self.reading.program.group_of(node))

    def copy_rate(self) -> float:
        return copy_rate_of(self.profile)


def copy_rate_of(profile: MachineProfile) -> float:
    """Bytes read and written per second by a copy that is so large that its launch time is negligible."""
    work = MemoryWork("strided", _COPIED, _COPIED // 4, torch.bfloat16)
    return _COPIED / profile.compute_seconds(work)


# The scheduler's interface to the costs of a program. The time that the caller of a communication spends itself, once
# the bytes are there, is in `host`, and neither in `start` nor in `curve`.
Prices: TypeAlias = CallablePrices | ProfilePrices


@dataclass(frozen=True, slots=True)
class ProfileCosts:
    """Costs of a machine profile. `slowdown` is the factor by which compute is slower beside communication, `capacity`
    the bytes of a device; `simulated`: the simulator's figures for the present program."""

    profile: MachineProfile
    simulated: SimulatedSeconds | None = None

    @property
    def slowdown(self) -> Slowdown | None:
        return self.profile.compute_slowdown

    @property
    def capacity(self) -> int | None:
        return int(self.profile.usable_bytes)

    def kernel_views(self, graph: fx.Graph) -> frozenset[Any]:
        """The view ops that cost something."""
        return frozenset()

    def prices(self, reading: Reading) -> Prices:
        return ProfilePrices(reading, self.profile, self.simulated)


@dataclass(frozen=True, slots=True)
class CallableCosts:
    """Costs from a caller's callable, which knows neither slowdown nor capacity."""

    ask: CheckedCost
    slowdown: Slowdown | None = None
    capacity: int | None = None

    def kernel_views(self, graph: fx.Graph) -> frozenset[Any]:
        return priced_views(graph, self.ask)

    def prices(self, reading: Reading) -> Prices:
        return CallablePrices(reading, self.ask)


CostModel: TypeAlias = ProfileCosts | CallableCosts


def costs_of(cost: MachineProfile | Cost) -> CostModel:
    return ProfileCosts(cost) if isinstance(cost, MachineProfile) else CallableCosts(checked_cost(cost))


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
