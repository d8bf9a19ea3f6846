"""The public entry: any ATen graph with functional collectives in, an equal one, reordered and bucketed, out."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.hardware.profile import MachineProfile
from meshweave.interop.gloo import let_gathers_overlap_in
from meshweave.interop.graphs import lazy_module_like
from meshweave.ir.described import values_of
from meshweave.ir.graph import copied_graph
from meshweave.ir.values import Values
from meshweave.overlap.decide import OrderOptions, decide
from meshweave.overlap.figures import Agree, priced
from meshweave.overlap.merge import Merger
from meshweave.overlap.prices import CallablePrices, Cost, ProfilePrices, asked, priced_views, ranks_of
from meshweave.overlap.problem import Problem
from meshweave.overlap.read import Reading, read, releasable_of
from meshweave.overlap.report import OverlapReport
from meshweave.simulate.clock import Slowdown


def overlap(
    gm: fx.GraphModule,
    *,
    cost: MachineProfile | Cost,
    memory_cap_bytes: int | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    options: OrderOptions | None = None,
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
    rank and the names of groups. Once the module runs, all-gathers of CPU tensors in its process run as an op of which
    several may be in flight over Gloo (`interop/gloo.py`).
    Raises VerifyError, naming the node, for an unknown collective, a wait without a start, a result that is used
    before its wait, and a buffer that is touched in flight; MeshweaveError for a cost that is no duration, an unknown
    group, and when no order is under the cap: it says the least peak that was found and the tensors that make it.
    """
    with _without_collector():
        graph = copied_graph(gm.graph)
    graph.owning_module = gm
    report = overlap_graph(
        graph, cost=cost, memory_cap_bytes=memory_cap_bytes, groups=groups, options=options, agree=agree
    )
    ordered = lazy_module_like(gm, graph)
    let_gathers_overlap_in(ordered)
    return ordered, report


def overlap_graph(
    graph: fx.Graph,
    *,
    cost: MachineProfile | Cost,
    memory_cap_bytes: int | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    options: OrderOptions | None = None,
    agree: Agree | None = None,
    values: Mapping[fx.Node, Values] | None = None,
) -> OverlapReport:
    """As `overlap`, in place: for passes that are handed a graph. It is changed only when all has been decided.

    `values`: what every node makes, where its meta does not say it.
    """
    options = options or OrderOptions()
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
    options: OrderOptions,
    agree: Agree | None,
    values: Mapping[fx.Node, Values] | None,
) -> OverlapReport:
    releasable = options.releasable or releasable_of(graph)
    views = frozenset() if isinstance(cost, MachineProfile) else priced_views(graph, asked(cost))
    reading = read(graph, values if values is not None else values_of(graph), releasable, views)
    prices, slowdown = _prices(reading, cost, groups or {})
    costs = priced(reading, prices, options.communication_factor, agree)
    unknown = prices.unknown if isinstance(prices, ProfilePrices) else {}
    told = f"priced by bytes moved: {', '.join(sorted(unknown))}; mw.register_rule(op, ..., cost=...) says more"
    orders = [(f"order {k} handed in", order) for k, order in enumerate(_orders(reading, options))]
    merger = Merger(reading, costs)
    return decide(merger, slowdown, memory_cap_bytes, options, orders, (told,) if unknown else ())


def _prices(
    reading: Reading, cost: MachineProfile | Cost, groups: Mapping[str, Sequence[int]]
) -> tuple[ProfilePrices | CallablePrices, Slowdown | None]:
    """Prices, and by how much compute is slower beside communication where the costs say it."""
    if isinstance(cost, MachineProfile):
        return ProfilePrices(reading, cost, groups), cost.compute_slowdown
    if groups:  # a callable needs no ranks, but a group that the caller's table lacks is a mistake
        for i in reading.rows:
            ranks_of(reading, i, groups)
    return CallablePrices(reading, asked(cost)), None


def _orders(reading: Reading, options: OrderOptions) -> list[list[int]]:
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
