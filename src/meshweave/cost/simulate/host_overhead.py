"""When eager mode launches its ops: one after the other, by a processor that runs ahead of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from meshweave.cost.simulate.kernels import Fusion, is_compiled
from meshweave.ir.collectives import WAIT
from meshweave.ir.graph import origin_of


def launch_times(nodes: Sequence[fx.Node], fusion: Fusion, eager_s: float) -> Iterator[float]:
    """Earliest launch times of a stream's tasks, in seconds from the step's begin; tasks are named by a node.

    An op of eager mode takes `eager_s` of the processor. Compiled code launches at no cost here, optimizers launch all
    parameters at once; a wait is an event, which does not block the processor.
    """
    now = 0.0
    for node in nodes:
        origin = origin_of(node)
        if (
            fusion not in ("ops", "compiled")
            and not is_compiled(origin, fusion)
            and origin.phase != "update"
            and node.target is not WAIT
        ):
            now += eager_s
        yield now
