"""Replicas are equal to the bit: plans from partial sources on random floats, with groups of any order."""

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.layouts import all_layouts

from meshweave.cost.hardware import AlphaBeta
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.movement.plan import plan_move
from meshweave.place.movement.steps import Step, apply

Array = NDArray[np.float32]
PROFILE = AlphaBeta(bandwidth={"a": 50e9, "b": 400e9, "c": 400e9})


class Devices:
    """Arrays by device, on which steps over even pieces run. A group adds up in an order of its own: with `twins`, the
    same as the groups that differ from it only along those axes."""

    def __init__(self, source: Layout, shape: tuple[int, ...], twins: Sequence[str]) -> None:
        self.mesh, self.twins, self.count = source.mesh, twins, 0
        made: dict[tuple[int, ...], Array] = {}
        random_numbers = np.random.default_rng(0)
        self.held: dict[int, Array] = {}
        for position, device in enumerate(self.mesh.devices):
            coords = self.mesh.coordinates(position)
            key = tuple(0 if axis in source.replicated_axes else at for axis, at in coords.items())
            if key not in made:
                made[key] = random_numbers.standard_normal(source.local_shape(shape)).astype(np.float32)
            self.held[device] = made[key]

    def run(self, step: Step) -> None:
        self.count += 1
        before = dict(self.held)
        if step.kind == "permute":
            self._permute(step, before)
            return
        for group in self.mesh.groups(step.axes):
            parts = [before[device] for device in group]
            for i, device in enumerate(group):
                self.held[device] = self._one(step, parts, i, self._seed(step, group))

    def _seed(self, step: Step, group: Sequence[int]) -> tuple[int, ...]:
        coords = self.mesh.coordinates(self.mesh.index(group[0]))
        return (self.count, *(0 if axis in self.twins else at for axis, at in coords.items()))

    def _one(self, step: Step, parts: list[Array], i: int, seed: tuple[int, ...]) -> Array:
        count, sizes = len(parts), [self.mesh.size(axis) for axis in step.axes]
        if step.kind == "slice":
            return np.split(parts[i], count, step.dim)[i]
        if step.kind == "all_gather":
            return np.concatenate(parts, step.dim)
        if step.kind == "all_reduce":
            return _added(parts, seed)
        if step.kind == "reduce_scatter":
            return _added([np.split(part, count, step.dim)[i] for part in parts], (*seed, i))
        if step.kind == "all_to_all":
            assert step.to_dim is not None
            index = dict(zip(step.axes, np.unravel_index(i, sizes), strict=True))
            place = np.ravel_multi_index(
                [int(index[axis]) for axis in step.to_axes], [self.mesh.size(axis) for axis in step.to_axes]
            )
            return np.concatenate([np.split(part, count, step.to_dim)[place] for part in parts], step.dim)
        assert step.kind == "to_partial"
        if step.dim < 0:
            return parts[i] if i == 0 else np.zeros_like(parts[i])
        return np.concatenate([part if j == i else np.zeros_like(part) for j, part in enumerate(parts)], step.dim)

    def _permute(self, step: Step, before: dict[int, Array]) -> None:
        """Each device takes its piece from the first of its group that holds it."""
        shape = tuple(self.mesh.num_devices for _ in step.source.dims)
        pieces = step.source.pieces(shape), step.target.pieces(shape)
        for group in self.mesh.groups(step.axes):
            for device in group:
                self.held[device] = next(before[d] for d in group if pieces[0][d] == pieces[1][device])

    def differing(self, target: Layout) -> float:
        """The part of elements in which replicas differ."""
        groups = self.mesh.groups(target.replicated_axes)
        pairs = [(self.held[group[0]], self.held[device]) for group in groups for device in group[1:]]
        return float(np.mean([np.mean(x != y) for x, y in pairs])) if pairs else 0.0


def _added(parts: list[Array], seed: tuple[int, ...]) -> Array:
    order = list(range(len(parts)))
    random.Random(hash(seed)).shuffle(order)
    total = parts[order[0]]
    for i in order[1:]:
        total = total + parts[i]
    return total


def partial_sources(mesh: Mesh) -> list[Layout]:
    return [layout for layout in all_layouts(mesh, 2) if layout.partial]


@pytest.mark.slow_rows("a=3,b=2,c=3-250-0.0")
@pytest.mark.parametrize("alpha", [0.0, 10e-6])
@pytest.mark.parametrize(("spec", "count"), [("a=3,b=3", None), ("a=3,b=2,c=3", 250)])
def test_replicas_have_the_same_bits(spec: str, count: int | None, alpha: float) -> None:
    """Groups that the source makes twins add alike."""
    mesh, profile = Mesh(spec), AlphaBeta(alpha, dict(PROFILE.bandwidth))  # type: ignore[arg-type]
    shape = (mesh.num_devices,) * 2
    pairs = list(itertools.product(partial_sources(mesh), all_layouts(mesh, 2)))
    for source, target in random.Random(0).sample(pairs, count) if count else pairs:
        devices = Devices(source, shape, source.replicated_axes)
        made = plan_move(source, target, shape, torch.float32, profile)
        for step in made.steps:
            devices.run(step)
        assert devices.differing(target) == 0, str(made)


def chained(source: Layout, *steps: Step) -> list[Step]:
    made = []
    for step in steps:
        target = apply(source, step)
        made.append(Step(step.kind, step.axes, source, target, step.dim, op=step.op))
        source = target
    return made


def test_an_unsound_order_of_reductions_shows() -> None:
    """Facts of the peers: all-reduce, reduce-scatter, all-reduce leaves replicas that differ in most elements."""
    mesh = Mesh("a=3,b=3,c=3")
    source = Layout.parse("[{}, {}] partial(sum: a,b,c)", mesh)
    shape = (27, 27)
    anywhere = Layout.replicated(mesh, 2)
    unsound = chained(
        source,
        Step("all_reduce", ("a",), anywhere, anywhere, op="sum"),
        Step("reduce_scatter", ("b",), anywhere, anywhere, 0, op="sum"),
        Step("all_reduce", ("c",), anywhere, anywhere, op="sum"),
    )
    devices = Devices(source, shape, ())
    for step in unsound:
        devices.run(step)
    assert devices.differing(unsound[-1].target) > 0.2
