"""What DTensor does with an op whose operands have given placements, asked of its own sharding propagator.

A fake process group stands for the devices: nothing moves and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tests.place.conformance import Case
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshweave.errors import LayoutError
from meshweave.ir.layout import Layout
from meshweave.ir.placements import placements_from_layout
from meshweave.place.assign import Assignment

AGREES, DISAGREES, REDISTRIBUTES = "agrees", "disagrees", "redistributes"
NO_RULE, INEXPRESSIBLE = "no rule", "inexpressible"


@dataclass(frozen=True, slots=True)
class Answer:
    """What DTensor says to one assignment; the two results where they differ."""

    verdict: str
    ours: str = ""
    theirs: str = ""


@contextmanager
def fake_devices(count: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield init_device_mesh("cpu", (count,), mesh_dim_names=("a",))
    finally:
        dist.destroy_process_group()


def ask(case: Case, option: Assignment, devices: DeviceMesh) -> Answer:
    """DTensor's answer to the operand layouts of `option`, a layout over one axis."""
    try:
        operands = [_distributed(v, w, devices) for v, w in zip(case.operands, option.operands, strict=True)]
        ours = [
            _placement(placements_from_layout(w, v.shape)[0])
            for v, w in zip(case.expected, option.results, strict=True)
        ]
    except LayoutError:
        return Answer(INEXPRESSIBLE)
    values = iter(operands)
    args, kwargs = fx.map_arg((case.node.args, case.node.kwargs), lambda _: next(values))
    dispatcher = DTensor._op_dispatcher
    try:
        info = dispatcher.unwrap_to_op_info(case.node.target, args, kwargs)
        found = dispatcher.sharding_propagator.propagate_op_sharding_non_cached(info.schema)
    except (NotImplementedError, RuntimeError, AssertionError, ValueError, IndexError, KeyError, TypeError):
        return Answer(NO_RULE)
    if found.needs_redistribute:
        return Answer(REDISTRIBUTES)
    specs = found.output_spec if isinstance(found.output_spec, (list, tuple)) else [found.output_spec]
    theirs = [_placement(s.placements[0]) for s in specs if s is not None]
    if len(theirs) != len(ours):
        return Answer(NO_RULE)
    return Answer(AGREES) if ours == theirs else Answer(DISAGREES, str(ours), str(theirs))


def _distributed(value: torch.Tensor, layout: Layout, devices: DeviceMesh) -> DTensor:
    box = layout.box(value.shape, {"a": 0})
    placements = placements_from_layout(layout, value.shape)
    piece = value[box.slices()].contiguous()
    return DTensor.from_local(piece, devices, placements, run_check=False, shape=value.shape, stride=value.stride())


def _placement(placement: Placement) -> Placement:
    """Without what only DTensor's runtime needs: a masked partial sum is a partial sum."""
    return Partial(placement.reduce_op) if isinstance(placement, Partial) else placement
