"""Steps between two meshes: some on the source's mesh, a transfer, some on the target's mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import permutations, product
from math import prod

from meshweave.cost.hardware import Costs
from meshweave.errors import LayoutError
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.routes import routes
from meshweave.place.movement.search import to_ticks
from meshweave.place.movement.steps import Step
from meshweave.place.movement.within import Request, no_plan, steps_within

_MANY = 3  # with more free axes than this, only whole sets are tried, in mesh order and in reverse


@dataclass(frozen=True, slots=True)
class _Crossing:
    """Layouts in which a value may leave the source's mesh and arrive on the target's: neither is partial."""

    departure: Layout
    arrival: Layout


def steps_across(request: Request) -> tuple[Step, ...]:
    """The cheapest steps from a normal form to another on another mesh, among the crossings that `_crossings` lists.

    A partial value is reduced on its own mesh: whole, or scattered. It arrives in the target's pieces, or cut further
    over axes that the target replicates, to be gathered there: then each byte crosses less often. A partial target
    becomes partial at the end. Ties go to the fewest steps, then to the first.

    Raises LayoutError as `steps_within` does, and for a target that is partial(avg).
    """
    plans = _plans(request)
    if plans:
        return plans[0]
    least = min(request.peak(steps) for steps in _plans(replace(request, cap=None), best_only=False))
    raise no_plan(request, least)


def _plans(request: Request, best_only: bool = True) -> list[tuple[Step, ...]]:
    """The plans for all crossings under the cap, or only the best of them, the cheapest first."""
    _check_average(request)
    rows: list[tuple[int, int, tuple[Step, ...]]] = []
    for via in _crossings(request.source, request.target, request.shape):
        least = _at_least(request, via)
        if best_only and rows and least >= rows[0][0]:
            continue
        steps = _steps(request, via)
        if steps is None:
            continue
        row = (sum(to_ticks(step.seconds) for step in steps), len(steps), steps)
        if best_only:
            rows = [row] if not rows or row[:2] < rows[0][:2] else rows
        elif all(steps != other for _, _, other in rows):
            rows.append(row)
    return [steps for _, _, steps in sorted(rows, key=lambda row: row[:2])]


def _steps(request: Request, via: _Crossing) -> tuple[Step, ...] | None:
    """The plan for a crossing; None if it exceeds the cap."""
    crossing = transfer_step(via.departure, via.arrival, request.shape, request.dtype.itemsize, request.profile)
    cap = request.cap
    if cap is not None and request.bytes_during(crossing) > cap:
        return None
    try:
        before = steps_within(replace(request, target=via.departure))
        after = steps_within(replace(request, source=via.arrival))
    except LayoutError:
        if cap is None:
            raise
        # an error that does not depend on the cap is raised
        steps_within(replace(request, target=via.departure, cap=None))
        steps_within(replace(request, source=via.arrival, cap=None))
        return None
    return (*before, crossing, *after)


def _crossings(source: Layout, target: Layout, shape: tuple[int, ...]) -> Iterator[_Crossing]:
    leave, arrive = Layout(source.mesh, source.dims), Layout(target.mesh, target.dims)
    free = [axis for axis in arrive.replicated_axes if arrive.mesh.size(axis) > 1]
    arrivals = [arrive, *_cut_further(arrive, free, shape)]
    departures = [leave, *_cut_further(leave, list(source.partial_axes), shape)]
    for departure, arrival in product(departures, arrivals):
        yield _Crossing(departure, arrival)


def _cut_further(layout: Layout, axes: Sequence[str], shape: tuple[int, ...]) -> list[Layout]:
    """The layouts that are cut further over some of the `axes`, each on any dim, if all pieces get smaller. Axes in
    either order, because meshes name the slow axes first: the innermost axis is scattered last and gathered first,
    while the pieces are smallest."""
    candidates: dict[Layout, None] = {}
    count = len(axes)
    for number in range(1, count + 1):
        if count > _MANY and number not in (1, count):
            continue
        for some in permutations(axes, number) if count <= _MANY else _few(axes, number):
            for places in _places(len(shape), number, count):
                cut = layout
                for axis, d in zip(some, places, strict=True):
                    before = cut.local_shape(shape)[d]
                    cut = cut.with_dim(d, DimSharding((*cut.dims[d].axes, axis), cut.dims[d].unit))
                    if cut.local_shape(shape)[d] >= before:
                        break
                else:
                    candidates.setdefault(cut.normalized(shape))
    return list(candidates)


def _few(axes: Sequence[str], number: int) -> list[tuple[str, ...]]:
    return [(axis,) for axis in axes] if number == 1 else [tuple(axes), tuple(reversed(axes))]


def _places(num_dims: int, number: int, count: int) -> list[tuple[int, ...]]:
    """The dims that some axes may cut: first all on the same dim."""
    if count > _MANY:
        return [(d,) * number for d in range(num_dims)]
    return sorted(product(range(num_dims), repeat=number), key=lambda places: len(set(places)))


def transfer_step(source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, profile: Costs) -> Step:
    """The transfer between two layouts that are not partial, priced by the device that sends or receives the most. It
    is free if everything stays on its device. `bytes_received` is the most that a device receives.
    """
    sent, received = _busiest(source, target, shape)
    seconds = profile.seconds("transfer", source.mesh, (), itemsize * max(sent, received)) if received else 0.0
    return Step("transfer", (), source, target, seconds=seconds, bytes_received=itemsize * received)


@lru_cache(maxsize=16384)
def _busiest(source: Layout, target: Layout, shape: tuple[int, ...]) -> tuple[int, int]:
    """The most elements that a device sends to others, and the most that it receives from others."""
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for message in routes(source, target, shape).messages:
        if message.sender != message.receiver:
            size = message.box.num_elements
            sent[message.sender] = sent.get(message.sender, 0) + size
            received[message.receiver] = received.get(message.receiver, 0) + size
    return max(sent.values(), default=0), max(received.values(), default=0)


def _at_least(request: Request, via: _Crossing) -> int:
    """A lower bound of the ticks of a crossing, without its steps: start-ups of its reduction and its gathers, and its
    transfer. Every device of the target that is not in the source receives its whole piece: together all pieces of the
    target except those of devices in both meshes, none of which is larger than the first.
    """
    profile, shape = request.profile, request.shape
    gathered = {*via.arrival.sharded_axes} - {*request.target.sharded_axes, *request.target.partial_axes}
    startups = bool(request.source.partial) + bool(gathered)
    ticks = startups * to_ticks(profile.alpha_s)
    source, target = via.departure.mesh, via.arrival.mesh
    num_inside, largest = _num_shared(source, target), prod(via.arrival.local_shape(shape))
    crossing = prod(shape) * target.flat_size(via.arrival.replicated_axes) - num_inside * largest
    if crossing <= 0:
        return ticks
    busiest = crossing / min(source.num_devices, target.num_devices - num_inside)
    busiest = busiest if num_inside else max(busiest, largest)
    return ticks + to_ticks(profile.seconds("transfer", source, (), request.dtype.itemsize * busiest))


@lru_cache(maxsize=1024)
def _num_shared(first: Mesh, other: Mesh) -> int:
    return sum(device in other for device in first.devices)


def _check_average(request: Request) -> None:
    if any(op == "avg" for _, op in request.target.partial):
        raise LayoutError(
            "a move cannot make a value partial(avg)",
            where=request.where,
            got=str(request.target),
            expected="no partial(avg) on another mesh than the source's",
            hint="use partial(sum)",
        )
