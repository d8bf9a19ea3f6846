"""The public entry: any ATen graph with functional collectives in, an equal one, reordered and bucketed, out."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf, isfinite

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.hardware.profile import MachineProfile
from meshweave.overlap.bounds import bound_of
from meshweave.overlap.explain import collective_rows, exposed_of, merge_rows
from meshweave.overlap.figures import Agree, priced
from meshweave.overlap.merge import Merger
from meshweave.overlap.play import Slowdown, peak_of, play
from meshweave.overlap.prices import CallablePrices, Cost, ProfilePrices, ranks_of
from meshweave.overlap.problem import Problem
from meshweave.overlap.read import Reading, read, releasable_of
from meshweave.overlap.report import CandidateRow, OverlapReport
from meshweave.overlap.rewrite import rewrite
from meshweave.overlap.scenarios import SCENARIOS
from meshweave.overlap.search import Candidate, Search, choose
from meshweave.overlap.values import values_of
from meshweave.simulate.shapes import Values

_SLACK = 0.05  # how far above the input order's peak an order may go where the caller says no cap
_SLACK_BYTES = 512 << 20
_INPUT = "the input order"


@dataclass(frozen=True, slots=True)
class OverlapOptions:
    """How the pass looks for an order.

    bucket: whether collectives may be merged; max_bucket_bytes: up to how many bytes, at the larger end of one.
    communication_factor: all estimates of communication are multiplied by it: for those whose estimates are off.
    choose: "regret" takes the order that loses least at worst over the scenarios of `overlap.scenarios`, "nominal" the
        fastest under the costs as said.
    orders: orders to compare with, as names of nodes: the result is never slower than any of them. Starts and kernels
        are named, waits may be; views stand where they are needed.
    releasable: says of a placeholder whether its memory is free after its last use. Default: in graphs with
        placeholders named tangents*, which torch.compile hands over for backward, all but primals*; in others none.
    """

    bucket: bool = True
    max_bucket_bytes: float = inf
    communication_factor: float = 1.0
    choose: str = "regret"
    orders: tuple[tuple[str, ...], ...] = ()
    releasable: Callable[[fx.Node], bool] | None = field(default=None)

    def check(self) -> None:
        if self.choose not in ("regret", "nominal"):
            raise MeshweaveError("unknown rule to choose by", got=repr(self.choose), expected="regret or nominal")
        if not (isfinite(self.communication_factor) and self.communication_factor > 0):
            raise MeshweaveError(
                "communication_factor is no factor", got=f"{self.communication_factor}", expected="more than 0"
            )
        if not self.max_bucket_bytes >= 0:
            raise MeshweaveError("max_bucket_bytes is no size", got=f"{self.max_bucket_bytes}", expected="0 or more")


def overlap(
    gm: fx.GraphModule,
    *,
    cost: MachineProfile | Cost,
    memory_cap_bytes: int | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    options: OverlapOptions | None = None,
    agree: Agree | None = None,
) -> tuple[fx.GraphModule, OverlapReport]:
    """An equal graph in which communication runs beside compute, and what was done. `gm` stays as it is.

    gm: ATen ops and functional collectives with fake tensors in meta["val"]: what torch.compile hands its backends,
        from FSDP, DTensor or by hand, forward, backward or whole steps.
    cost: a machine profile, which prices collectives on the actual ranks of their groups, or a callable: seconds of a
        node, `cost(node)`, or `cost(node, num_bytes)` for collectives that do not exist yet, with the bytes that one
        rank hands in.
    memory_cap_bytes: no order has a higher peak of live tensors: placeholders, results, and what communication
        holds until its wait. Default: 5% or 512 MiB above the peak of the input order, whichever is more.
    groups: ranks by group name; default: the groups that torch.distributed knows.
    agree: called once with all numbers that the decision hangs on; returns those that every rank is to use.

    Gathers and values of kernels are equal to the bit; an element of a merged reduction is the sum of the same parts
    over the same group. The result hangs on the graph and the costs alone: equal graphs give equal orders, whatever the
    rank and the names of groups.
    Raises VerifyError, naming the node, for an unknown collective, a wait without a start, a result that is used
    before its wait, and a buffer that is touched in flight; MeshweaveError for a cost that is no duration, an unknown
    group, and when no order is under the cap: it says the least peak that was found and the tensors that make it.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    returned = graph.graph_copy(gm.graph, copies)
    old = next(iter(reversed(gm.graph.nodes)))
    if old.op == "output":
        graph.output(returned).meta.update(old.meta)
    graph.set_codegen(gm.graph._codegen)
    made = fx.GraphModule(gm, graph)
    made.meta.update(gm.meta)
    report = overlap_graph(
        made.graph, cost=cost, memory_cap_bytes=memory_cap_bytes, groups=groups, options=options, agree=agree
    )
    made.recompile()
    return made, report


def overlap_graph(
    graph: fx.Graph,
    *,
    cost: MachineProfile | Cost,
    memory_cap_bytes: int | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    options: OverlapOptions | None = None,
    agree: Agree | None = None,
    values: Mapping[fx.Node, Values] | None = None,
) -> OverlapReport:
    """As `overlap`, in place: for passes that are handed a graph. It is changed only when all has been decided.

    `values`: what every node makes, where its meta does not say it.
    """
    options = options or OverlapOptions()
    options.check()
    with _without_collector():
        return _overlap(graph, cost, memory_cap_bytes, groups, options, agree, values)


@contextmanager
def _without_collector() -> Iterator[None]:
    """The pass makes many small lists and no cycles: a third of its time would go to looking for them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _overlap(
    graph: fx.Graph,
    cost: MachineProfile | Cost,
    memory_cap_bytes: int | None,
    groups: Mapping[str, Sequence[int]] | None,
    options: OverlapOptions,
    agree: Agree | None,
    values: Mapping[fx.Node, Values] | None,
) -> OverlapReport:
    releasable = options.releasable or releasable_of(graph)
    reading = read(graph, values if values is not None else values_of(graph), releasable)
    prices, slowdown = _prices(reading, cost, groups or {})
    costs = priced(reading, prices, options.communication_factor, agree)
    problem = reading.problem
    before = peak_of(problem, problem.order).peak
    default = max(int(before * (1 + _SLACK)), before + _SLACK_BYTES)
    cap = default if memory_cap_bytes is None else memory_cap_bytes
    orders = [
        (_INPUT, problem.order),
        *((f"order {k} handed in", order) for k, order in enumerate(_orders(reading, options))),
    ]
    search = Search(Merger(reading, costs), cap, slowdown, options.bucket, options.max_bucket_bytes)
    found = search.run(orders)
    if not found:
        raise _no_order(reading, min(search.free, key=lambda c: c.peak), cap)
    names = {name for name, _ in orders}
    protected = sum(c.name in names for c in found)
    choice = choose(found, slowdown, options.choose, protected)
    unknown = prices.unknown if isinstance(prices, ProfilePrices) else {}
    notes = (
        [f"priced by the bytes that they move, having no other cost: {', '.join(sorted(unknown))}"] if unknown else []
    )
    as_given = play(problem, problem.order, slowdown)
    report = OverlapReport(
        as_given.seconds,
        choice.chosen.seconds[0],
        exposed_of(as_given),
        exposed_of(play(choice.chosen.merged.problem, choice.chosen.order, slowdown)),
        bound_of(problem),
        before,
        choice.chosen.peak,
        cap,
        choice.regret,
        collective_rows(search.merger, choice.chosen, slowdown),
        merge_rows(search, choice.chosen),
        tuple(
            CandidateRow(
                c.name,
                tuple((s.name, seconds) for s, seconds in zip(SCENARIOS, c.seconds, strict=True)),
                c.peak,
                c is choice.chosen,
            )
            for c in choice.candidates
        ),
        tuple(notes),
    )
    rewrite(reading, choice.chosen.merged, choice.chosen.order)
    return report


def _prices(
    reading: Reading, cost: MachineProfile | Cost, groups: Mapping[str, Sequence[int]]
) -> tuple[ProfilePrices | CallablePrices, Slowdown | None]:
    """Prices, and by how much compute is slower beside communication where the costs say it."""
    if isinstance(cost, MachineProfile):
        return ProfilePrices(reading, cost, groups), cost.compute_slowdown
    if groups:  # a callable needs no ranks, but a group that the caller's table lacks is a mistake
        for i in reading.rows:
            ranks_of(reading, i, groups)
    return CallablePrices(reading, cost), None


def _orders(reading: Reading, options: OverlapOptions) -> list[list[int]]:
    """The orders that were handed in, as orders of the problem."""
    problem = reading.problem
    number: dict[str, int] = {name: i for i, name in enumerate(problem.names)}
    number |= {wait.name: ~c for c, waits in reading.waits.items() for wait in waits[:1]}
    later = {wait.name for waits in reading.waits.values() for wait in waits[1:]}
    free = {node.name for node in reading.graph.nodes} - set(number) | later
    made = []
    for k, names in enumerate(options.orders):
        if strange := [name for name in names if name not in number and name not in free]:
            raise MeshweaveError(f"order {k} names no node of the graph", got=strange[0])
        order = _with_waits(problem, [number[name] for name in names if name in number])
        if wrong := problem.check(order):
            raise MeshweaveError(f"order {k} is no order of the graph", got=wrong)
        made.append(order)
    return made


def _with_waits(problem: Problem, order: Sequence[int]) -> list[int]:
    """An order with the waits that it leaves out, each before the first item that needs it."""
    found: list[int] = []
    waited = {~x for x in order if x < 0}
    for x in order:
        if x >= 0:
            for c in problem.waits[x]:
                if c not in waited:
                    waited.add(c)
                    found.append(~c)
        found.append(x)
    return [*found, *(~c for c in problem.starts if problem.is_waited[c] and c not in waited)]


def _no_order(reading: Reading, least: Candidate, cap: int) -> MeshweaveError:
    """The error where nothing fits: the least peak that was found, and what lives there."""
    level = peak_of(least.merged.problem, least.order, with_live=True)
    makers = {x.storage: node for node in reversed(list(reading.graph.nodes)) for x in reading.values.get(node, ())}
    sizes = least.merged.problem.sizes
    told = [
        f"{makers[s].name if s in makers else 'a bucket'} {sizes[s] / 1e6:.3f} MB" for s in level.live[:8] if sizes[s]
    ]
    x = least.order[level.at] if least.order else 0
    return MeshweaveError(
        "no order was found whose peak is under the cap",
        where=f"at {least.merged.problem.names[x if x >= 0 else ~x]}",
        got=f"{level.peak} bytes at least ({level.peak / 1e9:.3f} GB, {least.name}); cap {cap}",
        expected=f"memory_cap_bytes={level.peak} or more",
        hint="the largest tensors then: " + ", ".join(told),
    )
