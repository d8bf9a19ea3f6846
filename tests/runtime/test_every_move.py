"""Every pair of layouts, planned, proven twice and run on virtual devices against the whole tensor: 0 wrong, 0 errors.

The default run takes a seeded sample; `-m slow` takes all pairs.
"""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from tests.layouts import all_layouts
from tests.steps import Chain, check

from meshweave.cost.hardware import AlphaBeta
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.movement.plan import plan_move
from meshweave.place.movement.replay import replay

MESHES = {
    "2x2": Mesh("a=2,b=2", devices=[3, 0, 2, 1]),
    "2x4": Mesh("a=2,b=4"),
    "4x2": Mesh("a=4,b=2", devices=[5, 0, 7, 2, 1, 4, 3, 6]),
    "2x2x2": Mesh("a=2,b=2,c=2", devices=[6, 1, 0, 7, 4, 2, 3, 5]),
}
SHAPES = {"even": (16, 8), "uneven": (7, 5), "empty": (1, 3)}
SLOW, FREE = (
    AlphaBeta(bandwidth={"a": 50e9, "b": 400e9, "c": 400e9}),
    AlphaBeta(0.0, {"a": 50e9, "b": 400e9, "c": 400e9}),
)


def run(mesh: Mesh, shape: tuple[int, ...], pairs: list[tuple[Layout, Layout]]) -> None:
    """With start-up times (few, merged steps) and without (many, small ones) in turn."""
    for number, (source, target) in enumerate(pairs):
        made = plan_move(source, target, shape, torch.float32, (SLOW, FREE)[number % 2])
        replay(made, shape)
        check(Chain(source.normalized(shape), shape, made.steps), torch.float32, number)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MESHES)
def test_a_sample_of_all_pairs(name: str, shape: str) -> None:
    mesh = MESHES[name]
    pairs = list(product(all_layouts(mesh, 2), repeat=2))
    run(mesh, SHAPES[shape], random.Random(f"{name} {shape}").sample(pairs, 10))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MESHES)
def test_all_pairs(name: str, shape: str) -> None:
    run(MESHES[name], SHAPES[shape], list(product(all_layouts(MESHES[name], 2), repeat=2)))


@pytest.mark.parametrize("count", [15, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize("source_op", ["max", "min", "avg"])
def test_other_reductions(source_op: str, count: int | None) -> None:
    """To every layout that is partial by sum; an average of whole numbers over 2 and 4 is exact."""
    mesh = MESHES["2x2"]
    sources = [layout for layout in all_layouts(mesh, 2, source_op) if layout.partial]
    pairs = list(product(sources, all_layouts(mesh, 2)))
    run(mesh, (7, 5), pairs if count is None else random.Random(source_op).sample(pairs, count))
