"""Steps from one mesh to another: some on the source's, one transfer, some on the target's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from math import prod

import torch

from meshweave.errors import LayoutError
from meshweave.hardware.alpha_beta import AlphaBeta
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.routes import routes
from meshweave.movement.steps import Step
from meshweave.movement.within import steps_within, to_ticks


def steps_across(
    source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype, profile: AlphaBeta
) -> tuple[Step, ...]:
    """The cheapest steps from one normal form to another on another mesh, among few candidates.

    A partial value is reduced on its own mesh: whole, or scattered onto one dim. It arrives in the target's pieces, or
    with one dim (that dim, if it was scattered) cut further over axes that the target replicates, to be gathered there:
    then each byte crosses less often. A target that is partial becomes so at the end. Of equally cheap candidates the
    one with the fewest steps, then the first.

    Raises LayoutError as `steps_within` does, and for a target that is partial(avg).
    """
    _check_average(source, target)
    best: tuple[int, int, tuple[Step, ...]] | None = None
    for departure, arrival in _candidates(source, target, shape):
        before = steps_within(source, departure, shape, dtype, profile)
        num_gathers = len(arrival.sharded_axes) - len(target.sharded_axes)
        ticks, num_steps = _ticks(before) + num_gathers * to_ticks(profile.alpha_s), len(before) + 1 + num_gathers
        if best is not None and (ticks, num_steps) >= best[:2]:
            continue
        after = steps_within(arrival, target, shape, dtype, profile)
        ticks = _ticks(before) + _at_least(departure, arrival, shape, dtype.itemsize, profile) + _ticks(after)
        if best is not None and (ticks, len(before) + 1 + len(after)) >= best[:2]:
            continue
        steps = (*before, transfer_step(departure, arrival, shape, dtype.itemsize, profile), *after)
        if best is None or (_ticks(steps), len(steps)) < best[:2]:
            best = (_ticks(steps), len(steps), steps)
    assert best is not None, "the first candidate is taken"
    return best[2]


def _candidates(source: Layout, target: Layout, shape: tuple[int, ...]) -> Iterator[tuple[Layout, Layout]]:
    """The pairs of layouts, none partial, in which the value may leave the source's mesh and arrive on the target's."""
    leave, arrive = Layout(source.mesh, source.dims), Layout(target.mesh, target.dims)
    free = [axis for axis in arrive.replicated_axes if arrive.mesh.size(axis) > 1]
    cut = [list(_cut_further(arrive, d, free, shape)) for d in range(len(shape))]
    yield from ((leave, arrival) for arrival in (arrive, *chain(*cut)))
    for d in range(len(shape)):
        for departure in _cut_further(leave, d, source.partial_axes, shape):
            yield from ((departure, arrival) for arrival in (arrive, *cut[d]))


def _cut_further(layout: Layout, d: int, axes: Sequence[str], shape: tuple[int, ...]) -> Iterator[Layout]:
    """The layouts with dim d cut further over one or all of the `axes`; only such as hold less on a device.

    All of them also in reverse, for meshes name the slow axes first: the innermost axis is scattered last and gathered
    first, while the pieces are smallest.
    """
    choices = dict.fromkeys([tuple(axes), tuple(reversed(axes)), *((axis,) for axis in axes)]) if axes else {}
    for more in choices:
        cut = layout.with_dim(d, DimSharding((*layout.dims[d].axes, *more), layout.dims[d].unit))
        if cut.local_shape(shape)[d] < layout.local_shape(shape)[d]:
            yield cut.normalized(shape)


def transfer_step(source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, profile: AlphaBeta) -> Step:
    """The transfer between two layouts that are not partial, priced by the device that sends or receives the most.

    It is free when everything stays on its device. `bytes_received` is the most that one device receives.
    """
    sent, received = _busiest(source, target, shape)
    seconds = profile.seconds("transfer", source.mesh, (), itemsize * max(sent, received)) if received else 0.0
    return Step("transfer", (), source, target, seconds=seconds, bytes_received=itemsize * received)


@lru_cache(maxsize=16384)
def _busiest(source: Layout, target: Layout, shape: tuple[int, ...]) -> tuple[int, int]:
    """The most elements that one device sends to others, and that one receives from others."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for message in routes(source, target, shape).messages:
        if message.sender != message.receiver:
            size = message.box.num_elements
            sent[message.sender] = sent.get(message.sender, 0) + size
            received[message.receiver] = received.get(message.receiver, 0) + size
    return max(sent.values(), default=0), max(received.values(), default=0)


def _at_least(departure: Layout, arrival: Layout, shape: tuple[int, ...], itemsize: int, profile: AlphaBeta) -> int:
    """A lower bound of the ticks of a transfer, from what is known without its routes.

    Every device of the target that is not of the source receives its whole piece. These together are all pieces of the
    target but those of the devices in both meshes, of which none is larger than the first.
    """
    source, target = departure.mesh, arrival.mesh
    num_inside, largest = _num_shared(source, target), prod(arrival.local_shape(shape))
    crossing = prod(shape) * target.flat_size(arrival.replicated_axes) - num_inside * largest
    if crossing <= 0:
        return 0
    busiest = crossing / min(source.num_devices, target.num_devices - num_inside)
    busiest = busiest if num_inside else max(busiest, largest)
    return to_ticks(profile.seconds("transfer", source, (), itemsize * busiest))


@lru_cache(maxsize=1024)
def _num_shared(one: Mesh, other: Mesh) -> int:
    return sum(device in other for device in one.devices)


def _ticks(steps: Sequence[Step]) -> int:
    return sum(to_ticks(step.seconds) for step in steps)


def _check_average(source: Layout, target: Layout) -> None:
    if any(op == "avg" for _, op in target.partial):
        raise LayoutError(
            "a move cannot make a value partial(avg)",
            where=f"{source} -> {target}",
            got=str(target),
            expected="no partial(avg) on another mesh than the source's",
            hint="ask for partial(sum)",
        )
