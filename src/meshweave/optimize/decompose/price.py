"""The gain of a decomposition: seconds of a collective with its matmuls unchanged, and chunk by chunk."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from torch import fx

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.cost.simulate.classify import work_of
from meshweave.cost.simulate.clock import Work, play
from meshweave.ir.collectives import ALL_REDUCE
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.rank import operands_of
from meshweave.ir.work import MemoryWork
from meshweave.optimize.decompose.algorithms import RingStep
from meshweave.optimize.decompose.chains import Downstream, Shapes, Upstream, operand_cuts, part_of, read_outside
from meshweave.optimize.decompose.cut import Cut, Sum, is_same, kind_of
from meshweave.optimize.decompose.find import KINDS
from meshweave.optimize.decompose.rewrite import RingScheme, wait_of
from meshweave.optimize.decompose.writer import Index, Ring


@dataclass(frozen=True, slots=True)
class MessageCost:
    """Seconds of a message, of which the processor itself spends `host` at the wait: 0 if links work on their own.
    Compute takes `slowdown` times as long while a message is in flight."""

    seconds: float
    host: float = 0.0
    slowdown: float = 1.0


@dataclass(slots=True)
class _Steps:
    """The work of the processor, in order, and the messages on the link."""

    slowdown: float
    work: Work = field(default_factory=Work)
    order: list[int] = field(default_factory=list)
    link: list[int] = field(default_factory=list)

    def run(self, seconds: float, needs: Sequence[int] = (), *, is_kernel: bool = False) -> None:
        """Only kernels are slower beside a message."""
        self.order.append(self.work.add(seconds, needs, is_kernel=is_kernel))

    def send(self, message: MessageCost) -> int:
        """Send a message now, as soon as the link is free."""
        self.run(0.0)
        self.link.append(self.work.add(message.seconds - message.host, self.order[-1:], (("link", 1.0),)))
        return self.link[-1]

    def seconds(self) -> float:
        """When the processor is done."""
        return play(self.work, (self.order, self.link), 1, lambda levels: self.slowdown).ends[self.order[-1]]


def play_gather(steps: Sequence[RingStep], ahead: int, chunk: float, message: MessageCost, hidden: float) -> float:
    """Seconds from the wait of a gather to its last product. Its first messages are sent `hidden` seconds earlier."""
    played, sent = _Steps(message.slowdown), list[int]()

    def post(until: int) -> None:
        for step in steps[len(sent) : until]:
            sent.append(played.send(message) if step.has_message else -1)

    post(ahead + int(not steps[0].has_message))
    played.run(hidden)
    for k, step in enumerate(steps):
        if step.has_message:
            played.run(message.host, (sent[k],))
        post(k + 1 + ahead)
        played.run(chunk, is_kernel=True)
    return played.seconds() - hidden


def play_reduce(steps: Sequence[RingStep], chunk: float, message: MessageCost, hidden: float) -> float:
    """Seconds from the first part of a reduction to its result, less `hidden` seconds of other work after the last
    part, beside the messages then in flight."""
    played, sent, last = _Steps(message.slowdown), dict[int, int](), len(steps) - 1
    for k, step in enumerate(steps):
        played.run(chunk, is_kernel=True)
        if k == last and not step.has_message:
            played.run(hidden)
        for earlier in step.adds:
            played.run(message.host, (sent.pop(earlier),))
        if step.has_message:
            sent[k] = played.send(message)
    if steps[last].has_message:
        played.run(hidden)
    for arrival in sent.values():
        played.run(message.host, (arrival,))
    return played.seconds() - hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Seconds before and after.

    Before: `compute` after (or before) `collective`, less what other work between start and wait has `hidden` of it;
    `host` is the processor's own part of the collective, which nothing hides. After: the steps played one by one, with
    one link and one processor: `chunk` is the compute of a step, `message` the time of its message, `losses` are copies
    and sums of results, and any remaining collective.
    """

    compute: float
    collective: float
    host: float
    hidden: float
    chunk: float
    message: float
    num_steps: int
    num_messages: int
    losses: float
    played: float

    @property
    def before(self) -> float:
        return self.compute + max(self.collective - self.hidden, self.host)

    @property
    def after(self) -> float:
        return self.played + self.losses


Kernels = Sequence[tuple[float, float]]  # position (among the nodes) and seconds of each


@dataclass(slots=True)
class RingPrices:
    """The costs of a graph's work and communication on a machine."""

    program: DeviceProgram
    profile: MachineProfile
    shapes: Shapes
    kernels: Kernels
    order: dict[fx.Node, int] = field(init=False)
    known: dict[Hashable, float] = field(default_factory=dict)  # seconds, valid until the graph is rewritten

    def __post_init__(self) -> None:
        self.order = {node: i for i, node in enumerate(self.program.graph.nodes)}

    def between(self, first: fx.Node, last: fx.Node) -> float:
        """Compute between two nodes."""
        low, high = self.order[first], self.order[last]
        if (low, high) not in self.known:
            first_inside = bisect_right(self.kernels, low, key=itemgetter(0))
            behind = bisect_left(self.kernels, high, key=itemgetter(0))
            self.known[low, high] = sum([seconds for _, seconds in self.kernels[first_inside:behind]])
        return self.known[low, high]

    def op(self, node: fx.Node, cuts: Sequence[Cut | None] = (), result: Cut | None = None) -> float:
        """Time of an op, or of the op on chunks of its operands for a chunk of its result."""
        key = (node, tuple(cuts), result)
        if key not in self.known:
            self.known[key] = self._op(node, cuts, result)
        return self.known[key]

    def _op(self, node: fx.Node, cuts: Sequence[Cut | None], result: Cut | None) -> float:
        values, operands = self.shapes.values, operands_of(node)
        if values[node][0].storage in {values[n][0].storage for n in operands}:
            return self.profile.empty_op_s  # a view
        operands_of_part = [
            part_of(values[n][0], cut) for n, cut in zip(operands, cuts or [None] * len(operands), strict=True)
        ]
        works = work_of(node, operands_of_part, [part_of(values[node][0], result)])
        return sum(self.profile.compute_seconds(work) for work in works)

    def chunk(
        self, node: fx.Node, cuts: Sequence[Cut | None], result: Cut | None, inside: Mapping[fx.Node, Cut]
    ) -> float:
        """Time of an op on chunks, and of slicing them; chunks that are not contiguous are copied."""
        pairs = [(n, cut) for n, cut in zip(operands_of(node), cuts, strict=True) if n not in inside]
        slices = sum(
            self.copy(n, 1 / cut.count) if cut.outer > 1 else self.profile.empty_op_s
            for n, cut in pairs
            if cut is not None
        )
        return self.op(node, cuts, result) + slices

    def along(self, cuts: Mapping[fx.Node, Cut]) -> tuple[float, float]:
        """Compute of these nodes, whole and for a chunk."""
        whole = chunk = 0.0
        for node, cut in cuts.items():
            whole += self.op(node)
            if not is_same(node, cut):
                kind = kind_of(node)
                assert kind is not None
                chunk += self.chunk(node, kind.backward(self.shapes.op(node), cut), cut, cuts)
        return whole, chunk

    def copy(self, node: fx.Node, times: float = 1.0, kind: str = "strided") -> float:
        """Time to read and write the value of a node."""
        value = self.shapes.values[node][0]
        work = MemoryWork(kind, int(2 * times * value.bytes), value.num_elements, value.dtype)
        return self.profile.compute_seconds(work)

    def collective(self, start: fx.Node) -> MessageCost:
        return self.named(start, KINDS[start.target], self.bytes(start))

    def named(self, start: fx.Node, op: str, num_bytes: float) -> MessageCost:
        """An op of profiles in the groups of a start: the processor's own work in it (sums, copies, the launch of a
        start and a wait: as in simulate.tasks), and its slowdown of compute beside it."""
        profile, where = self.profile, self.program.group_of(start)
        launches, seconds = 2 * self.profile.empty_op_s, profile.seconds(op, *where, num_bytes)
        levels = frozenset(level for level, _ in profile.usage(op, *where))
        host = profile.host_seconds(op, *where, seconds) + launches
        return MessageCost(seconds + launches, host, profile.compute_slowdown(levels))

    def in_turn(self, start: fx.Node, op: str, num_bytes: float, count: int) -> MessageCost:
        """One of `count` messages of so many bytes each. Links that let a short message through faster than their rate
        (a token bucket does) do so once: all together take at least the time of a single message of all their bytes."""
        message = self.named(start, op, num_bytes)
        if count < 2:
            return message
        return replace(message, seconds=max(message.seconds, self.named(start, op, count * num_bytes).seconds / count))

    def bytes(self, start: fx.Node) -> int:
        """A device's operand bytes of a start."""
        value = self.shapes.values[operands_of(start)[0]][0]
        return value.num_elements * value.dtype.itemsize


def gather_estimate(
    prices: RingPrices, start: fx.Node, chain: Downstream, ring: Ring, scheme: RingScheme, second_half: bool = False
) -> Estimate:
    """Estimate for an all-gather, or for the second half of an all-reduce. Results, and values with other readers, are
    concatenated or added up."""
    wait, steps = wait_of(start), _steps(ring, scheme)
    compute = chunk = losses = 0.0
    results: dict[fx.Node, Cut | Sum] = {**chain.cuts, **chain.consumers}
    for node, result in results.items():
        if node is wait:
            continue
        compute += prices.op(node)
        if isinstance(result, Cut) and is_same(node, result):
            continue
        cuts = operand_cuts(node, result, chain.cuts, prices.shapes)
        chunk += prices.chunk(node, cuts, None if result == "sum" else result, chain.cuts)
        if node in chain.consumers:
            losses += prices.copy(node, (len(steps) + 1) / 2 if result == "sum" else 1.0)
    losses += sum(map(prices.copy, read_outside(chain)))
    if scheme.row is None and chain.cuts[wait].dim:
        losses += prices.copy(start.args[0])  # type: ignore[arg-type]
    num_bytes, hidden = prices.bytes(start) / (ring.size if second_half else 1), prices.between(start, wait)
    message = _message(prices, start, ring, scheme, num_bytes)
    whole = prices.named(start, "all_gather", num_bytes) if second_half else prices.collective(start)
    played = play_gather(steps, scheme.row.ahead if scheme.row is not None else 1, chunk, message, hidden)
    return _estimate(hidden, whole, compute, chunk, message, steps, losses, played)


def reduce_estimate(
    prices: RingPrices, start: fx.Node, chain: Upstream, ring: Ring, scheme: RingScheme, wide_factor: float
) -> Estimate:
    """Estimate for a reduce-scatter or all-reduce. `wide_factor`: bytes of a message per byte of the operand."""
    wait, steps = wait_of(start), _steps(ring, scheme)
    compute, chunk = prices.along(chain.cuts)
    hidden, num_bytes = prices.between(start, wait), prices.bytes(start)
    is_split = scheme.row is not None and start.target is ALL_REDUCE.op
    losses = prices.copy(wait)
    if scheme.row is not None:
        losses = prices.copy(start.args[0], 0.5 + 0.5 / ring.size, "pointwise")  # type: ignore[arg-type]
    if is_split:
        gather = prices.named(start, "all_gather", num_bytes / ring.size)
        losses += max(gather.seconds - hidden, gather.host)
    losses += sum(map(prices.copy, chain.read_outside))
    message = _message(prices, start, ring, scheme, wide_factor * num_bytes / ring.size)
    played = play_reduce(steps, chunk, message, 0.0 if is_split else hidden)
    whole = prices.collective(start)
    return _estimate(hidden, whole, compute, chunk, message, steps, losses, played)


def _estimate(
    hidden: float,
    whole: MessageCost,
    compute: float,
    chunk: float,
    message: MessageCost,
    steps: Sequence[RingStep],
    losses: float,
    played: float,
) -> Estimate:
    return Estimate(
        compute=compute,
        collective=whole.seconds,
        host=whole.host,
        hidden=hidden,
        chunk=chunk,
        message=message.seconds,
        num_steps=len(steps),
        num_messages=sum(step.has_message for step in steps),
        losses=losses,
        played=played,
    )


def _steps(ring: Ring, scheme: RingScheme) -> tuple[RingStep, ...]:
    """The steps of the algorithm, or a message (a collective) for every part."""
    if scheme.row is not None:
        return scheme.row.steps(ring.size)
    return tuple(RingStep(Index(0, i), 1) for i in range(scheme.num_chunks))


def _message(prices: RingPrices, start: fx.Node, ring: Ring, scheme: RingScheme, num_bytes: float) -> MessageCost:
    """A message of a device. Messages share its links, and follow each other."""
    if scheme.row is None:
        parts = scheme.num_chunks
        return prices.in_turn(start, KINDS[start.target], prices.bytes(start) / parts, parts)
    return prices.in_turn(start, "permute", num_bytes, scheme.row.num_messages(ring.size))
