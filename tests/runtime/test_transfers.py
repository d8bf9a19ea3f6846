"""Moves between meshes on virtual devices. tests/runtime/test_cluster.py runs the same on real processes."""

from __future__ import annotations

import pytest
import torch
from tests.transfers import CASES, DTYPES, FOUR, SHAPES, Case, check, mesh, program, sums

from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.runtime.world import LocalWorld


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_every_device_has_its_piece(case: Case, shape: tuple[int, ...]) -> None:
    check(LocalWorld(FOUR), case, shape, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_goes_anywhere(dtype: torch.dtype) -> None:
    for case in CASES:
        if not (sums(case) and dtype is torch.bool):
            check(LocalWorld(FOUR), case, (5, 7), dtype)


def test_a_number_goes_anywhere() -> None:
    for before, after in ((mesh("", 2), FOUR), (FOUR, mesh("t=2", 3, 1)), (mesh("t=2", 0, 1), mesh("", 3))):
        check(LocalWorld(FOUR), ("a number", before, "[]", after, "[]"), (), torch.float32)
    check(LocalWorld(FOUR), ("a sum", mesh("t=2", 0, 1), "[] partial(sum: t)", FOUR, "[]"), (), torch.float32)


def test_what_stays_on_its_device_is_not_sent() -> None:
    source, target = Layout.parse("[{d}, {}]", FOUR), Layout.parse("[{t}, {}]", mesh("t=2", 0, 1))
    held = Layout.replicated(FOUR, 2)
    assert [r.transfers for r in program(FOUR, held, target, Spec((8, 6), torch.float32))] == [{}, {}]
    assert [len(r.transfers) for r in program(FOUR, source, target, Spec((8, 6), torch.float32))] == [1, 1]
