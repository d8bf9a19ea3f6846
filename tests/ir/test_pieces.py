"""Chunks and boxes: the one source of truth for offsets."""

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshweave.ir.pieces import Box, chunk, is_even, largest_chunk, nested_chunk, unit_matters

PARTS = st.lists(st.integers(1, 4), max_size=3)


def cuts(size: int, parts: list[int], unit: int) -> list[tuple[int, int]]:
    return [
        nested_chunk(size, list(zip(parts, index, strict=True)), unit) for index in product(*(range(n) for n in parts))
    ]


@given(st.integers(1, 60), st.integers(1, 9))
def test_chunk_is_torch_chunk(size: int, parts: int) -> None:
    ours = [chunk(size, parts, i) for i in range(parts)]
    theirs = [(int(t[0]), len(t)) for t in torch.arange(size).chunk(parts)]
    assert ours == theirs + [(size, 0)] * (parts - len(theirs))


@pytest.mark.parametrize(
    ("size", "parts", "unit", "expected"),
    [
        (8, 4, 1, [(0, 2), (2, 2), (4, 2), (6, 2)]),
        (5, 4, 1, [(0, 2), (2, 2), (4, 1), (5, 0)]),
        (0, 2, 1, [(0, 0), (0, 0)]),
        (1, 3, 1, [(0, 1), (1, 0), (1, 0)]),
        (48, 2, 16, [(0, 32), (32, 16)]),
        (40, 2, 16, [(0, 32), (32, 8)]),
        (16, 2, 16, [(0, 16), (16, 0)]),
    ],
)
def test_chunk_table(size: int, parts: int, unit: int, expected: list[tuple[int, int]]) -> None:
    assert [chunk(size, parts, i, unit) for i in range(parts)] == expected


def test_nested_chunks_cut_each_chunk_again() -> None:
    assert cuts(7, [2, 2], 1) == [(0, 2), (2, 2), (4, 2), (6, 1)]
    assert cuts(5, [2, 4], 1) == [(0, 1), (1, 1), (2, 1), (3, 0), (3, 1), (4, 1), (5, 0), (5, 0)]
    assert cuts(48, [2, 2], 16) == [(0, 16), (16, 16), (32, 16), (48, 0)]
    assert cuts(9, [], 1) == [(0, 9)]


@given(st.integers(0, 60), PARTS, st.integers(1, 7))
def test_nested_chunks_lie_end_to_end_in_whole_blocks(size: int, parts: list[int], unit: int) -> None:
    end = 0
    for offset, length in cuts(size, parts, unit):
        assert offset == end
        assert offset % unit == 0 or length == 0
        end += length
    assert end == size


@given(st.integers(0, 60), PARTS, st.integers(1, 7))
def test_largest_chunk_and_evenness_agree_with_the_table(size: int, parts: list[int], unit: int) -> None:
    sizes = [length for _, length in cuts(size, parts, unit)]
    assert largest_chunk(size, parts, unit) == max(sizes) == sizes[0]
    assert is_even(size, parts, unit) == (len(set(sizes)) == 1)


@given(st.integers(0, 60), PARTS, st.integers(1, 7))
def test_unit_matters_exactly_when_a_piece_differs(size: int, parts: list[int], unit: int) -> None:
    plain, in_blocks = ([c for c in cuts(size, parts, u) if c[1]] for u in (1, unit))
    assert unit_matters(size, parts, unit) == (cuts(size, parts, unit) != cuts(size, parts, 1))
    assert unit_matters(size, parts, unit) or plain == in_blocks


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=3))
def test_intersection_holds_the_common_elements(spans: list[tuple[int, int, int, int]]) -> None:
    a = Box(tuple(s[0] for s in spans), tuple(s[1] for s in spans))
    b = Box(tuple(s[2] for s in spans), tuple(s[3] for s in spans))

    def elements(box: Box) -> set[tuple[int, ...]]:
        return set(product(*(range(o, o + s) for o, s in zip(box.offset, box.size, strict=True))))

    assert elements(a.intersect(b)) == elements(a) & elements(b)
    assert elements(b.intersect(a)) == elements(a) & elements(b)
    assert len(elements(a)) == a.num_elements == prod(a.size)


def test_slices_cut_the_box_out() -> None:
    box = Box((1, 2), (2, 1))
    assert box.slices() == (slice(1, 3), slice(2, 3))
    assert torch.arange(12).reshape(3, 4)[box.slices()].tolist() == [[6], [10]]
    assert Box((), ()).num_elements == 1
