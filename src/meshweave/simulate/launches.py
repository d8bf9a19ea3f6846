"""When eager mode launches its ops: one after the other, by a processor that runs ahead of the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from meshweave.ir.collectives import WAIT
from meshweave.ir.graph import origin_of
from meshweave.simulate.kernels import Fusion, is_compiled


def issued(nodes: Sequence[fx.Node], fusion: Fusion, eager_s: float) -> Iterator[float]:
    """Seconds from the step's begin before which each of a stream's tasks, named by a node, has not been launched.

    An op of eager mode takes `eager_s` of the processor. Compilers launch at no cost here, optimizers all parameters at
    once; a wait is an event, which nobody stands still for.
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
