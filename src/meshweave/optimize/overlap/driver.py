"""The steps of the scheduler in turn, from a device program, or any ATen graph with functional collectives, to its
order: read, price, decide, write."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import fx

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.errors import MeshweaveError, internal_cause
from meshweave.interop.gloo import let_gathers_overlap_in
from meshweave.interop.graphs import lazy_module_like
from meshweave.ir.device_program import DeviceProgram, Donated, graph_program
from meshweave.ir.graph import copied_graph
from meshweave.optimize.overlap.decide import OverlapOptions, decide, report_as_given
from meshweave.optimize.overlap.merge import Merger
from meshweave.optimize.overlap.model import Problem
from meshweave.optimize.overlap.prices import Agree, Cost, CostModel, costs_of, fill_prices
from meshweave.optimize.overlap.read import Reading, read_problem
from meshweave.optimize.overlap.report import OverlapReport
from meshweave.optimize.overlap.waits import with_waits


def order_program(
    program: DeviceProgram,
    costs: CostModel,
    memory_cap_bytes: int | None = None,
    options: OverlapOptions | None = None,
    agree: Agree | None = None,
) -> OverlapReport:
    """Order the graph of a program in place as the scheduler decides, and merge its collectives. It is changed only
    after all decisions.

    Raises VerifyError for a malformed graph, and MeshweaveError if no order is under the cap, for a cost that is not a
    duration and for an unknown group.
    """
    options = options or OverlapOptions()
    options.check()
    with without_collector():
        reading = read_problem(program, costs.kernel_views(program.graph))
        if program.checks_groups:
            for item in reading.rows:
                program.group_of(reading.nodes[item])
        prices = costs.prices(reading)
        merger = Merger(reading, fill_prices(reading, prices, options.communication_factor, agree))
        _keep_even(merger, program.uneven)
        orders = [(f"order {k} handed in", order) for k, order in enumerate(_orders(reading, options))]
        ceiling = costs.capacity if program.is_whole else None
        return decide(merger, costs.slowdown, memory_cap_bytes, options, orders, prices.notes, ceiling)


@contextmanager
def without_collector() -> Iterator[None]:
    """Pauses garbage collection: code that creates many small long-lived objects would spend a tenth to a third of its
    time looking for cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _keep_even(merger: Merger, uneven: Collection[fx.Node]) -> None:
    """Merge only collectives whose shape is the same on every device, because a merged collective has constant
    sizes."""
    for key, starts in list(merger.kinds.items()):
        able = [c for c in starts if merger.reading.nodes[c].args[0] not in uneven]
        if able:
            merger.kinds[key] = able
        else:
            del merger.kinds[key]


def overlap(
    gm: fx.GraphModule,
    *,
    cost: MachineProfile | Cost,
    memory_cap_bytes: int | None = None,
    groups: Mapping[str, Sequence[int]] | None = None,
    options: OverlapOptions | None = None,
    agree: Agree | None = None,
    donated: Donated | None = None,
) -> tuple[fx.GraphModule, OverlapReport]:
    """An equivalent graph in which communication runs beside compute, and a report. `gm` is not changed.

    gm: ATen ops and functional collectives with fake tensors in meta["val"]: as torch.compile passes them to its
        backends, from FSDP, DTensor or by hand, forward, backward or whole steps.
    cost: a machine profile, which prices collectives on the actual ranks of their groups, or a callable: seconds of a
        node, `cost(node)`, or `cost(node, num_bytes)` for collectives that do not exist yet, with a rank's operand
        bytes.
    memory_cap_bytes: no order has a higher peak of live tensors: placeholders, results, and buffers of communication
        until its wait. Default: 5% or 512 MiB above the peak of the input order, whichever is more.
    groups: ranks by group name; default: the groups of torch.distributed.
    agree: called once with all numbers that the decision depends on; returns those that every rank uses.
    donated: placeholders whose memory is free after their last use: their names, or a callable that says so of a node.
        Default: in a backward graph of AOTAutograd (its descriptors are in meta["desc"]) the gradients and saved values
        that it gets in a list that it empties; in any other graph none. Names of placeholders mean nothing.

    Gathers and values of kernels are equal to the bit; an element of a merged reduction is the sum of the same parts
    over the same group. The result depends only on the graph and the costs: equal graphs give equal orders, whatever
    the rank and the names of groups. Once the module runs, all-gathers of CPU tensors in its process use an op of which
    several may be in flight over Gloo (`interop/gloo.py`).
    If the search itself fails, by a fault of meshweave, the graph stays in its order, with a warning that says what
    failed. Raises VerifyError, naming the node, for an unknown collective, a wait without a start, a result that is
    used before its wait, and a buffer that is accessed in flight; MeshweaveError for a cost that is not a duration, an
    unknown group, and when no order is under the cap: it names the least peak found and its tensors.
    """
    options = options or OverlapOptions()
    with without_collector():
        try:
            graph, program = _copy(gm, groups, donated)
            report = order_program(program, costs_of(cost), memory_cap_bytes, options, agree)
        except Exception as error:
            cause = internal_cause(error)
            if not cause:
                raise
            warn_of_failure(cause)
            graph, report = copied_graph(gm.graph), _as_given(gm, groups, donated, cost, memory_cap_bytes, options)
    ordered = lazy_module_like(gm, graph)
    let_gathers_overlap_in(ordered)
    return ordered, report


def _copy(
    gm: fx.GraphModule, groups: Mapping[str, Sequence[int]] | None, donated: Donated | None
) -> tuple[fx.Graph, DeviceProgram]:
    graph = copied_graph(gm.graph)
    graph.owning_module = gm
    return graph, graph_program(graph, groups, donated=donated)


def warn_of_failure(cause: str) -> None:
    """Warn that a graph stays as it is because of a fault of meshweave."""
    warnings.warn(
        f"meshweave leaves a graph in its order, because its search failed: {cause}. This is a bug of meshweave: "
        "please report it with this text",
        stacklevel=3,
    )


def _as_given(
    gm: fx.GraphModule,
    groups: Mapping[str, Sequence[int]] | None,
    donated: Donated | None,
    cost: MachineProfile | Cost,
    memory_cap_bytes: int | None,
    options: OverlapOptions,
) -> OverlapReport:
    """The report of a graph that stays in its order; figures are 0 if not even these can be computed."""
    try:
        _, program = _copy(gm, groups, donated)
        costs = costs_of(cost)
        reading = read_problem(program, costs.kernel_views(program.graph))
        fill_prices(reading, costs.prices(reading), options.communication_factor, None)
        return report_as_given(reading.problem, costs.slowdown, memory_cap_bytes)
    except Exception as error:
        if not internal_cause(error):
            raise
        return report_as_given(Problem(), None, memory_cap_bytes)


def _orders(reading: Reading, options: OverlapOptions) -> list[list[int]]:
    """The caller's orders, as orders of the problem."""
    problem = reading.problem
    number: dict[str, int] = {name: i for i, name in enumerate(problem.names)}
    number |= {wait.name: ~c for c, waits in reading.waits.items() for wait in waits[:1]}
    known = {node.name for node in reading.graph.nodes}.union(number)
    orders = []
    for k, names in enumerate(options.orders):
        if strange := [name for name in names if name not in known]:
            raise MeshweaveError(
                f"order {k} has a name that is not in the graph",
                got=strange[0],
                expected="names of the graph's nodes",
                hint="take them from the graph that the pass gets: [node.name for node in graph.nodes]",
            )
        order = with_waits(problem, [number[name] for name in names if name in number])
        if wrong := problem.check(order):
            raise MeshweaveError(
                f"order {k} is not an order of the graph",
                got=wrong,
                expected="every op once, after all that it needs",
                hint="begin with the names in the graph's own order, and move those that may move",
            )
        orders.append(order)
    return orders
