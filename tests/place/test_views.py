"""Views: cutting a factor and reshaping the pieces gives the pieces of the reshaped value."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from meshweave.ir.graph import Spec
from meshweave.ir.mesh import Mesh
from meshweave.ops.shape import split_and_merge
from meshweave.place.assign import Shard, realize

sizes = st.lists(st.sampled_from([1, 2, 3, 4, 5, 6]), min_size=1, max_size=5)


@st.composite
def reshapes(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements: factors of one number merged in two ways, or in two orders."""
    before = draw(sizes)
    primes = [p for n in before for p in _primes(n)]
    other = draw(st.permutations(primes)) if draw(st.booleans()) else primes
    after: list[int] = []
    for p in other:
        if after and draw(st.booleans()):
            after[-1] *= p
        else:
            after.append(p)
    for _ in range(draw(st.integers(0, 2))):
        after.insert(draw(st.integers(0, len(after))), 1)
    return before, after


def _primes(n: int) -> list[int]:
    return {1: [], 4: [2, 2], 6: [2, 3]}.get(n, [n])


@given(reshapes(), st.sampled_from([2, 3, 4]), st.integers(1, 2), st.booleans())
def test_pieces_of_a_view(shapes: tuple[list[int], list[int]], size: int, unit: int, two_axes: bool) -> None:
    before, after = shapes
    build, old, new = split_and_merge(before, after)
    rule = build.rule([old], [new])
    value = torch.arange(prod(before)).reshape(before)
    mesh = Mesh(a=size, b=2)
    spec = [Spec(tuple(before), torch.int64)], [Spec(tuple(after), torch.int64)]
    for factor in filter(rule.is_shardable, range(len(rule.sizes))):
        role = Shard(factor, unit)
        option = realize(rule, mesh, [("a", role), ("b", role if two_axes else None)], *spec)
        for position in range(mesh.num_devices):
            coords = mesh.coordinates(position)
            piece = value[option.operands[0].box(before, coords).slices()]
            box = option.results[0].box(after, coords)
            assert piece.numel() == box.num_elements
            assert torch.equal(piece.reshape(box.size), value.reshape(after)[box.slices()])


def test_what_views_keep() -> None:
    """Merged and split dims keep their outermost factor; where dims do not nest nothing is kept."""
    for before, after, kept in [
        ((8, 12), (8, 3, 4), {8, 3}),
        ((2, 5, 12), (10, 12), {2, 12}),
        ((6, 4), (4, 6), set()),
        ((7, 6, 4), (7, 4, 6), {7}),
        ((5, 1, 3), (5, 3), {5, 3}),
    ]:
        build, old, new = split_and_merge(before, after)
        rule = build.rule([old], [new])
        assert {s for f, s in enumerate(rule.sizes) if rule.is_shardable(f)} == kept, (before, after)
