"""Every algorithm of the table: what it promises is proven, and run on virtual devices, on every legal dim."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.decompose import conformance
from tests.decompose.programs import num_permutes

import meshweave as mw
from meshweave.check.deadlock import check_deadlock
from meshweave.errors import MeshweaveError, VerifyError
from meshweave.optimize.decompose.algorithms import ALGORITHMS, Algorithm, Index, algorithm
from meshweave.optimize.decompose.proof import prove_rings

MESHES = ["d=4", "a=2,d=3", "d=3,a=2", "a=2,d=2,b=2", "a=3,d=1"]
rows = pytest.mark.parametrize("row", ALGORITHMS, ids=str)


@rows
def test_every_algorithm_is_proven(row: Algorithm) -> None:
    for n in range(2, 33):
        case = next(conformance.cases(row, mw.Mesh(d=n)))
        assert prove_rings(conformance.written(case, conformance.values(case))) == 1
        assert row.num_messages(n) == n - 1


@rows
@pytest.mark.parametrize("n", range(1, 9))
def test_every_algorithm_runs_on_virtual_devices(row: Algorithm, n: int) -> None:
    """Postcondition, values to the bit, n - 1 permutes: along an axis alone."""
    for case in conformance.cases(row, mw.Mesh(d=n)):
        role = conformance.check(case)
        assert num_permutes(role) == n - 1
        check_deadlock([role])


@rows
@pytest.mark.parametrize("mesh", MESHES)
def test_an_algorithm_stays_in_the_groups_of_its_axis(row: Algorithm, mesh: str) -> None:
    """Peers are indices along one axis of a mesh of several: a different value per device shows a swapped one."""
    made = mw.Mesh(mesh)
    shuffled = mw.Mesh(mesh, devices=[(i * 5 + 3) % made.num_devices for i in range(made.num_devices)])
    for on in (made, shuffled) if len(set(shuffled.devices)) == made.num_devices else (made,):
        for case in conformance.cases(row, on):
            conformance.check(case)


@rows
def test_an_algorithm_runs_over_flattened_axes(row: Algorithm) -> None:
    for case in conformance.cases(row, mw.Mesh("a=2,d=3"), "a,d"):
        conformance.check(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
@rows
def test_other_dtypes(row: Algorithm, dtype: torch.dtype) -> None:
    for case in conformance.cases(row, mw.Mesh("a=2,d=3"), dtype=dtype):
        conformance.check(case)


def test_a_step_that_is_wrong_is_found() -> None:
    """The proof sees a message to the wrong device, a chunk that comes twice, a part that is lost."""
    gather, scatter = algorithm("all_gather", "direct"), algorithm("reduce_scatter", "ring")

    def broken(row: Algorithm, k: int, **changes: object) -> Algorithm:
        return replace(
            row,
            steps=lambda n: tuple(
                replace(s, **changes) if i == k else s
                for i, s in enumerate(row.steps(n))  # type: ignore[arg-type]
            ),
        )

    wrong = [
        broken(gather, 1, shift=1),
        broken(gather, 1, chunk=Index(1, 2), shift=-2),
        broken(scatter, 1, adds=()),
        broken(scatter, 2, chunk=Index(1, 0)),
        broken(algorithm("reduce_scatter", "direct"), 3, adds=(0, 1)),
    ]
    for row in wrong:
        case = next(conformance.cases(row, mw.Mesh("d=4")))
        with pytest.raises(VerifyError, match=r"ring 0: |has 0 waits"):
            prove_rings(conformance.written(case, conformance.values(case)))


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(MeshweaveError, match="no algorithm 'tree' for all_gather") as error:
        algorithm("all_gather", "tree")
    assert error.value.expected == "direct, cyclic, bidirectional"


def test_what_the_table_says() -> None:
    """The index math of a group of 4, as text."""
    table = {
        str(row): [(s.chunk.at(0, 4), s.shift % 4 if s.has_message else None) for s in row.steps(4)]
        for row in ALGORITHMS
    }
    assert table == {
        "direct all_gather": [(0, None), (1, 3), (2, 2), (3, 1)],
        "cyclic all_gather": [(0, None), (3, 1), (2, 1), (1, 1)],
        "bidirectional all_gather": [(0, None), (3, 1), (1, 3), (2, 1)],
        "direct reduce_scatter": [(1, 1), (2, 2), (3, 3), (0, None)],
        "ring reduce_scatter": [(3, 1), (2, 1), (1, 1), (0, None)],
    }


@rows
def test_messages_of_a_chain_carry_sums(row: Algorithm) -> None:
    """Between two devices every message goes to the owner of its chunk, who adds it up."""
    assert row.is_chain(4) == (str(row) == "ring reduce_scatter")
    assert not row.is_chain(2)
