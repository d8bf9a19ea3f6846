"""Steps of moves, made by hand: every kind over any axes, and chains of them, as programs of one move."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice, permutations, product
from typing import Any

import torch
from tests import transfers
from tests.expand.test_moves import check_pieces, full_value, pieces_of, run_rank
from torch import Tensor, fx

from meshweave.check.completeness import check_complete
from meshweave.ir import ops
from meshweave.ir.graph import Input, Origin, Spec, StepGraph
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_rank
from meshweave.place.expand.expand import expand
from meshweave.place.movement.steps import Step, apply
from meshweave.runtime.interfaces import World

MESHES = {
    "2x2": Mesh("a=2,b=2", devices=[3, 0, 2, 1]),
    "2x3": Mesh("a=2,b=3", devices=[4, 0, 5, 1, 3, 2]),
    "2x2x2": Mesh("a=2,b=2,c=2", devices=[6, 1, 0, 7, 4, 2, 3, 5]),
}
EVEN, UNEVEN, EMPTY = (12, 24, 12), (7, 5, 10), (1, 2, 3)
SHAPES = [EVEN, UNEVEN, EMPTY]
DTYPES = [torch.float32, torch.int64, torch.bool]
Pick = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True, slots=True)
class Chain:
    """Steps, each from where the one before leads; the first from `source`."""

    source: Layout
    shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    @property
    def target(self) -> Layout:
        return self.steps[-1].target if self.steps else self.source

    def then(self, step: Step) -> Chain:
        """One more step, with the layouts that it leads from and to."""
        made = replace(step, source=self.target, target=apply(self.target, step).normalized(self.shape))
        return replace(self, steps=(*self.steps, made))

    def __str__(self) -> str:
        steps = "; ".join(f"{step} -> {step.target}" for step in self.steps)
        return f"{self.source} of {self.shape} on {self.source.mesh}: {steps}"


def program(chain: Chain, dtype: torch.dtype, world: Mesh | None = None) -> tuple[StepGraph, tuple[RankGraph, ...]]:
    """A step that is one move, which takes these steps, and its rank graphs on the mesh (or a larger one)."""
    spec, graph = Spec(chain.shape, dtype), fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(spec=spec, origin=Origin("forward"), layout=chain.source)
    y = graph.call_function(ops.move, (x, str(chain.target)))
    y.meta.update(spec=spec, origin=Origin("forward"), layout=chain.target)
    graph.output([y])
    placed = StepGraph(graph, (Input("batch", "x", spec),), (("loss", ""),))
    roles = expand(placed, world or chain.source.mesh, lambda *move: chain)  # type: ignore[arg-type, return-value]
    return placed, tuple(map(verify_rank, roles))


def run(chain: Chain, dtype: torch.dtype, world: World, seed: int = 0) -> dict[int, Tensor]:
    """What each held device has after the chain; floats are random, so that the order of sums shows in their bits."""
    _, roles = program(chain, dtype)
    made = torch.Generator().manual_seed(seed)
    full = full_value(chain.shape, dtype, seed)
    if dtype.is_floating_point:
        full = torch.randn(chain.shape, generator=made)
    return transfers.run(world, roles, chain.source, pieces_of(full, chain.source, seed))


def check(chain: Chain, dtype: torch.dtype, seed: int = 0) -> None:
    """Proven, and run on virtual devices: every device has its piece, to the bit."""
    full = full_value(chain.shape, dtype, seed)
    held = pieces_of(full, chain.source, seed)
    before = [h.clone() for h in held]
    try:
        placed, (rank,) = program(chain, dtype)
        check_complete(placed, [rank])
        check_pieces(run_rank(rank, held), full, chain.target)
    except Exception as error:
        raise AssertionError(f"{chain} ({dtype}): {error}") from error
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True)), f"{chain} wrote to its operand"


def sample(mesh: Mesh, count: int = 60) -> Iterator[tuple[Chain, torch.dtype]]:
    """Steps of every kind over every set of axes, on even, uneven and empty pieces, and random chains."""
    chance = random.Random(str(mesh))
    ways = [(EVEN, torch.int64, "max"), (UNEVEN, torch.float32, "sum"), (EMPTY, torch.bool, "min")]
    for kind, (shape, dtype, op) in product(KINDS, ways):
        yield from ((chain, dtype) for chain in every(kind, mesh, shape, op, chance))
    for shape, dtype, op in islice(cycle(ways), count):
        chain = Chain(Layout.replicated(mesh, 3), shape)
        for _ in range(5):
            chain = chain.then(following(chain, op, chance.choice))
        yield chain, dtype


# every kind


def layout(mesh: Mesh, dims: Sequence[Sequence[str]], partial: Sequence[str], op: str, unit: int = 1) -> Layout:
    cuts = tuple(DimSharding(tuple(axes), unit) for axes in dims)
    return Layout(mesh, cuts, tuple((axis, op) for axis in partial))


@dataclass(slots=True)
class Place:
    """Where a step is taken: over `axes`, on `dim`. The other axes cut a dim from the outside, are partial, or neither,
    as chance will have it."""

    mesh: Mesh
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    dim: int
    op: str
    chance: random.Random

    def around(self) -> tuple[list[list[str]], list[str]]:
        """What the other axes do."""
        dims: list[list[str]] = [[], [], []]
        partial = []
        for axis in self.chance.sample(self.mesh.axis_names, len(self.mesh.axis_names)):
            place = self.chance.randrange(-2, 3)
            if axis in self.axes or place == -2:
                continue
            (dims[place] if place >= 0 else partial).append(axis)
        return dims, partial

    def unit(self, outside: Sequence[str] = ()) -> int:
        """Of the blocks of a dim, which is 1 where axes cut it already."""
        return 1 if outside else self.chance.choice((1, 1, 2))

    def step(self, kind: str, source: Layout, axes: tuple[str, ...] | None = None, **given: Any) -> Chain:
        made = Step(kind, axes or self.axes, source, given.pop("target", source), **given)  # type: ignore[arg-type]
        return Chain(source.normalized(self.shape), self.shape).then(made)


def every(kind: str, mesh: Mesh, shape: tuple[int, ...], op: str, chance: random.Random) -> Iterator[Chain]:
    """A step of this kind over every set of axes, in every order, on every dim."""
    for count in range(1, len(mesh.axis_names) + 1):
        for axes, dim in product(permutations(mesh.axis_names, count), range(3)):
            yield from _MAKERS[kind](Place(mesh, shape, axes, dim, op, chance))


def _slices(at: Place) -> Iterator[Chain]:
    dims, partial = at.around()
    unit = at.unit(dims[at.dim])
    yield at.step("slice", layout(at.mesh, dims, partial, at.op), dim=at.dim, unit=unit)


def _gathers(at: Place) -> Iterator[Chain]:
    dims, partial = at.around()
    dims[at.dim] += at.axes
    yield at.step("all_gather", layout(at.mesh, dims, partial, at.op, at.unit()), dim=at.dim)


def _scatters(at: Place) -> Iterator[Chain]:
    dims, partial = at.around()
    source, unit = layout(at.mesh, dims, [*partial, *at.axes], at.op), at.unit(dims[at.dim])
    yield at.step("reduce_scatter", source, dim=at.dim, op=at.op, unit=unit)


def _reduces(at: Place) -> Iterator[Chain]:
    dims, partial = at.around()
    yield at.step("all_reduce", layout(at.mesh, dims, [*partial, *at.axes], at.op), op=at.op)


def _exchanges(at: Place) -> Iterator[Chain]:
    for to_axes, to_dim in product(permutations(at.axes), {0, 1, 2} - {at.dim}):
        dims, partial = at.around()
        unit = at.unit(dims[to_dim])
        dims[at.dim] += at.axes
        source = layout(at.mesh, dims, partial, at.op)
        yield at.step("all_to_all", source, dim=at.dim, to_dim=to_dim, to_axes=to_axes, unit=unit)


def _partials(at: Place) -> Iterator[Chain]:
    dims, partial = at.around()
    if at.dim == 0:
        yield at.step("to_partial", layout(at.mesh, dims, partial, at.op), op=at.op)
    dims[at.dim] += at.axes
    yield at.step("to_partial", layout(at.mesh, dims, partial, at.op, at.unit()), dim=at.dim, op=at.op)


def _permutes(at: Place) -> Iterator[Chain]:
    """From any place of these axes to any other, inside of the axes that stay."""
    dims, partial = at.around()
    ends = []
    for _ in range(2):
        end = [list(still) for still in dims]
        for axis in at.chance.sample(at.axes, len(at.axes)):
            place = at.chance.randrange(-1, 3)
            if place >= 0:
                end[place].append(axis)
        ends.append(layout(at.mesh, end, partial, at.op, at.unit([*dims[0], *dims[1], *dims[2]])).normalized(at.shape))
    if ends[0] != ends[1]:
        yield at.step("permute", ends[0], target=ends[1])


_MAKERS = {
    "slice": _slices,
    "all_gather": _gathers,
    "reduce_scatter": _scatters,
    "all_reduce": _reduces,
    "all_to_all": _exchanges,
    "to_partial": _partials,
    "permute": _permutes,
}
KINDS = list(_MAKERS)


# chains


def following(chain: Chain, op: str, pick: Pick) -> Step:
    """A step that fits after a chain: of any kind, over any of the axes that it can take."""
    now = chain.target
    free, tails = now.replicated_axes, [d for d, dim in enumerate(now.dims) if dim.axes]
    kinds = ["permute"] * (len(now.partial_axes) < len(now.mesh.axis_names))
    kinds += ["slice", "to_partial"] * bool(free) + ["all_gather", "all_to_all", "to_partial from"] * bool(tails)
    kinds += ["reduce_scatter", "all_reduce"] * bool(now.partial_axes)
    kind = pick(kinds)
    if kind == "permute":
        return _permuted(now, chain.shape, pick)
    if kind in ("all_gather", "all_to_all", "to_partial from"):
        dim = pick(tails)
        axes = now.dims[dim].axes
        axes = axes[pick(range(len(axes))) :]
        if kind != "all_to_all":
            return Step(kind.removesuffix(" from"), axes, now, now, dim=dim, op=op * (kind != "all_gather"))  # type: ignore[arg-type]
        to_dim = pick([d for d in range(len(now.dims)) if d != dim])
        return Step(kind, axes, now, now, dim, to_dim, pick(list(permutations(axes))), _unit(now, to_dim, pick))
    of = free if kind in ("slice", "to_partial") else now.partial_axes
    axes = pick([axes for count in range(1, len(of) + 1) for axes in permutations(of, count)])
    dim = pick(range(len(now.dims))) if kind in ("slice", "reduce_scatter") else -1
    unit = _unit(now, dim, pick) if dim >= 0 else 1
    return Step(kind, axes, now, now, dim=dim, op=op * (kind != "slice"), unit=unit)  # type: ignore[arg-type]


def _unit(now: Layout, dim: int, pick: Pick) -> int:
    return now.dims[dim].unit if now.dims[dim].axes else pick([1, 1, 2])


def _permuted(now: Layout, shape: tuple[int, ...], pick: Pick) -> Step:
    """Some innermost axes of every dim, and the replicated ones, go to other places."""
    kept = [dim.axes[: pick(range(len(dim.axes) + 1))] for dim in now.dims]
    still = {axis for axes in kept for axis in axes} | set(now.partial_axes)
    moved = [axis for axis in now.mesh.axis_names if axis not in still]
    dims: list[tuple[str, ...]] = list(kept)
    for axis in pick(list(permutations(moved))):
        place = pick(range(-1, len(dims)))
        if place >= 0:
            dims[place] = (*dims[place], axis)
    units = [dim.unit if axes else pick([1, 1, 2]) for dim, axes in zip(now.dims, kept, strict=True)]
    target = replace(now, dims=tuple(DimSharding(axes, unit) for axes, unit in zip(dims, units, strict=True)))
    return Step("permute", tuple(moved) or now.replicated_axes or now.sharded_axes, now, target.normalized(shape))
