"""From a device program to its order: read, price, decide, write."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import fx

from meshweave.ir.device_program import DeviceProgram
from meshweave.optimize.overlap.decide import OverlapOptions, decide
from meshweave.optimize.overlap.figures import Agree, fill_prices
from meshweave.optimize.overlap.merge import Merger
from meshweave.optimize.overlap.prices import CostModel
from meshweave.optimize.overlap.read import read_problem
from meshweave.optimize.overlap.report import OverlapReport


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
        ceiling = costs.capacity if program.is_whole else None
        return decide(merger, costs.slowdown, memory_cap_bytes, options, prices.notes, ceiling)


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
