"""From a device program to its order: read, price, decide, write."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir.device_program import DeviceProgram
from meshweave.optimize.overlap.decide import OverlapOptions, decide
from meshweave.optimize.overlap.figures import Agree, fill_prices
from meshweave.optimize.overlap.merge import Merger
from meshweave.optimize.overlap.prices import CostModel
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
    if options.releasable is not None:
        program = replace(program, is_releasable=options.releasable)
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
