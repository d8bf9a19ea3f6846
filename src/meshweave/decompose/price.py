"""Is it worth it: seconds of a collective with its matmuls as they are, and chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from torch import fx

from meshweave.decompose.algorithms import Index, Step
from meshweave.decompose.chunks import Downstream, Shapes, Upstream
from meshweave.decompose.cut import Cut, Sum, contraction, is_same, kind_of, operands_of
from meshweave.decompose.rewrite import Way, wait_of
from meshweave.decompose.writer import Ring
from meshweave.hardware.profile import MachineProfile
from meshweave.hardware.work import Memory
from meshweave.ir.rank import RankGraph
from meshweave.simulate.classify import work_of
from meshweave.simulate.kernels import Kernel, kernels_of
from meshweave.simulate.shapes import Value
from meshweave.simulate.tasks import COST_NAMES


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds before and after.

    Before: `compute` after (or before) `collective`, less what other work between start and wait has `hidden` of it.
    After: the steps played one by one, with one link and one processor: `chunk` is the compute of a step, `message`
    that of its message, `losses` are copies and sums of results, and what is left of a collective. That compute
    is slower beside messages is left out: so it is beside collectives.
    """

    compute: float
    collective: float
    hidden: float
    chunk: float
    message: float
    num_steps: int
    num_messages: int
    losses: float
    played: float

    @property
    def before(self) -> float:
        return self.compute + max(self.collective - self.hidden, 0.0)

    @property
    def after(self) -> float:
        return self.played + self.losses


def play_gather(steps: Sequence[Step], ahead: int, chunk: float, message: float, hidden: float) -> float:
    """Seconds from the wait of a gather to its last product. Its first messages are sent `hidden` seconds before."""
    arrived = [0.0] * len(steps)
    link, free, posted = 0.0, hidden, 0
    first = int(not steps[0].has_message)

    def post(until: int, now: float) -> None:
        nonlocal link, posted
        while posted < min(until, len(steps)):
            step = steps[posted]
            if step.has_message:
                link = arrived[posted] = max(now, link, arrived[step.of] if step.of < posted else 0.0) + message
            posted += 1

    post(ahead + first, 0.0)
    for k in range(len(steps)):
        free = max(free, arrived[k])
        post(k + 1 + ahead, free)
        free += chunk
    return free - hidden


def play_reduce(steps: Sequence[Step], chunk: float, message: float, hidden: float) -> float:
    """Seconds from the first part of a reduction to its result, less `hidden` of other work after the last part."""
    arrived, link, free = [0.0] * len(steps), 0.0, 0.0
    for k, step in enumerate(steps):
        free += chunk
        is_last = k == len(steps) - 1
        free = max([free + hidden * is_last, *(arrived[earlier] for earlier in step.adds)])
        if step.has_message:
            link = arrived[k] = max(free, link) + message
    return max(free, link) - hidden


@dataclass(slots=True)
class Prices:
    """What a role's work and communication cost on a machine."""

    role: RankGraph
    profile: MachineProfile
    shapes: Shapes
    order: Mapping[fx.Node, int]
    _kernels: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        fusion = "compiled" if self.profile.fusion == "pointwise" else "ops"
        kernels, _ = kernels_of(self.role, self.shapes.local, fusion)  # type: ignore[arg-type]
        self._kernels = [(kernel.position, self._seconds(kernel)) for kernel in kernels]

    def _seconds(self, kernel: Kernel) -> float:
        return sum(self.profile.compute_seconds(work) for work in kernel.works)

    def between(self, first: fx.Node, last: fx.Node) -> float:
        """Compute that stands between two nodes."""
        low, high = self.order[first], self.order[last]
        return sum(seconds for position, seconds in self._kernels if low < position < high)

    def op(self, node: fx.Node, cuts: Sequence[Cut | None] = (), result: Cut | None = None) -> float:
        """An op, or what it takes on chunks of its operands for a chunk of its result."""
        values, operands = self.shapes.local.values, operands_of(node)
        if values[node][0].storage in {values[n][0].storage for n in operands}:
            return 0.0  # a view
        taken = [_part(values[n][0], cut) for n, cut in zip(operands, cuts or [None] * len(operands), strict=True)]
        works = work_of(node, taken, [_part(values[node][0], result)])
        return sum(self.profile.compute_seconds(work) for work in works)

    def chunk(
        self, node: fx.Node, cuts: Sequence[Cut | None], result: Cut | None, inside: Mapping[fx.Node, Cut]
    ) -> float:
        """An op on chunks, and the copies of those that are cut out of values in which they lie apart."""
        pairs = [(n, cut) for n, cut in zip(operands_of(node), cuts, strict=True) if n not in inside]
        copies = sum(self.copy(n, 1 / cut.count) for n, cut in pairs if cut is not None and cut.outer > 1)
        return self.op(node, cuts, result) + copies

    def copy(self, node: fx.Node, times: float = 1.0, kind: str = "strided") -> float:
        """Reading and writing the value of a node."""
        value = self.shapes.local.values[node][0]
        work = Memory(kind, int(2 * times * value.bytes), value.num_elements, value.dtype)
        return self.profile.compute_seconds(work)

    def collective(self, start: fx.Node, part: float = 1.0) -> float:
        return self.named(start, COST_NAMES[start.target], part * self.bytes(start))

    def named(self, start: fx.Node, op: str, num_bytes: float) -> float:
        """An op of profiles in the groups of a start."""
        return self.profile.seconds(op, *self.role.group_axes(str(start.args[-1])), num_bytes)

    def bytes(self, start: fx.Node) -> int:
        """What a device hands in to a start."""
        value = self.shapes.local.values[operands_of(start)[0]][0]
        return value.num_elements * value.dtype.itemsize


def _part(value: Value, cut: Cut | None) -> Value:
    if cut is None:
        return value
    shape = cut.chunk(value.shape)
    strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
    return replace(value, shape=shape, stride=strides, storage_bytes=prod(shape) * value.dtype.itemsize)


def gather_estimate(prices: Prices, start: fx.Node, found: Downstream, ring: Ring, way: Way, is_kept: bool) -> Estimate:
    """Of an all-gather taken apart. Results are put together or added up; the gathered value, too, if it is kept."""
    wait, steps = wait_of(start), _steps(ring, way)
    compute = chunk = losses = 0.0
    results: dict[fx.Node, Cut | Sum] = {**found.cuts, **found.consumers}
    for node, result in results.items():
        if node is wait:
            continue
        compute += prices.op(node)
        if isinstance(result, Cut) and is_same(node, result):
            continue
        op = prices.shapes.op(node)
        at = next(n for n in operands_of(node) if n in found.cuts)
        kind = kind_of(node)
        assert kind is not None
        cuts = contraction(op, found.cuts[at]) if result == "sum" else kind.backward(op, result)
        chunk += prices.chunk(node, cuts, None if result == "sum" else result, found.cuts)
        if node in found.consumers:
            losses += prices.copy(node, (len(steps) + 1) / 2 if result == "sum" else 1.0)
    losses += prices.copy(wait) if is_kept else 0.0
    if way.row is None and found.cuts[wait].dim:
        losses += prices.copy(start.args[0])  # type: ignore[arg-type]
    message, hidden = _message(prices, start, ring, way, prices.bytes(start)), prices.between(start, wait)
    ahead = way.row.ahead if way.row is not None else 1
    played = play_gather(steps, ahead, chunk, message, hidden)
    return _estimate(prices, start, compute, chunk, message, steps, losses, played)


def reduce_estimate(
    prices: Prices, start: fx.Node, found: Upstream, ring: Ring, way: Way, wide_factor: float
) -> Estimate:
    """Of a reduce-scatter or all-reduce taken apart. `wide_factor`: bytes of a message per byte of the operand."""
    wait, steps = wait_of(start), _steps(ring, way)
    compute = chunk = 0.0
    for node, cut in found.cuts.items():
        compute += prices.op(node)
        if not is_same(node, cut):
            kind = kind_of(node)
            assert kind is not None
            chunk += prices.chunk(node, kind.backward(prices.shapes.op(node), cut), cut, found.cuts)
    hidden, num_bytes = prices.between(start, wait), prices.bytes(start)
    is_split = way.row is not None and COST_NAMES[start.target] == "all_reduce"
    losses = prices.copy(wait)
    if way.row is not None:
        losses = prices.copy(start.args[0], 0.5 + 0.5 / ring.size, "pointwise")  # type: ignore[arg-type]
    if is_split:
        losses += max(prices.named(start, "all_gather", num_bytes / ring.size) - hidden, 0.0)
    message = _message(prices, start, ring, way, wide_factor * num_bytes / ring.size)
    played = play_reduce(steps, chunk, message, 0.0 if is_split else hidden)
    return _estimate(prices, start, compute, chunk, message, steps, losses, played)


def _estimate(
    prices: Prices,
    start: fx.Node,
    compute: float,
    chunk: float,
    message: float,
    steps: Sequence[Step],
    losses: float,
    played: float,
) -> Estimate:
    hidden, num_messages = prices.between(start, wait_of(start)), sum(step.has_message for step in steps)
    whole = prices.collective(start)
    return Estimate(compute, whole, hidden, chunk, message, len(steps), num_messages, losses, played)


def _steps(ring: Ring, way: Way) -> tuple[Step, ...]:
    """Those of the algorithm, or a message (a collective) for every part."""
    if way.row is not None:
        return way.row.steps(ring.size)
    return tuple(Step(Index(0, i), root=0) for i in range(way.num_chunks))


def _message(prices: Prices, start: fx.Node, ring: Ring, way: Way, num_bytes: float) -> float:
    """One message of a device. They share its links, and go one after the other."""
    if way.row is None:
        return prices.collective(start, 1 / way.num_chunks)
    if way.row.name == "broadcast":  # priced as in simulate.tasks
        return prices.named(start, "all_gather", num_bytes / max(ring.size - 1, 1))
    return prices.named(start, "permute", num_bytes)
