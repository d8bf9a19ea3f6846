"""The public entry: any ATen graph with functional collectives in, an equal one, reordered and bucketed, out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from meshweave.hardware.profile import MachineProfile
from meshweave.interop.gloo import let_gathers_overlap_in
from meshweave.interop.graphs import lazy_module_like
from meshweave.ir.from_graph import graph_program
from meshweave.ir.graph import copied_graph
from meshweave.problem.figures import Agree
from meshweave.problem.prices import Cost, costs_of
from meshweave.schedule.decide import OrderOptions
from meshweave.schedule.order import order_program, without_collector
from meshweave.schedule.report import OverlapReport


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
    with without_collector():
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
) -> OverlapReport:
    """As `overlap`, in place: for passes that are handed a graph. It is changed only when all has been decided."""
    with without_collector():
        program = graph_program(graph, groups)
        return order_program(program, costs_of(cost), memory_cap_bytes, options, agree)
