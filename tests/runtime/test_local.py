"""Collectives between virtual devices: what each device gets, group by group, in the order of the axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.collectives import collect, groups
from torch import Tensor

import meshweave as mw
from meshweave.errors import MeshError
from meshweave.ir.collectives import functional, reduce_in_order
from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.runtime.world import MAX_VIRTUAL_DEVICES, LocalWorld

MESH = Mesh("a=2,b=3")  # position of (i, j) is 3 i + j
GATHER = functional.all_gather_into_tensor.default
REDUCE = functional.all_reduce.default
SCATTER = functional.reduce_scatter_tensor.default
EXCHANGE = functional.all_to_all_single.default


def run(op: Any, axes: tuple[str, ...], operands: Sequence[Tensor], *args: Any, mesh: Mesh = MESH) -> list[list[float]]:
    return [v.flatten().tolist() for v in collect(mesh, op, axes, operands, args)]


def ids(num: int = 6) -> list[Tensor]:
    """Device i holds [i]."""
    return [torch.tensor([float(i)]) for i in range(num)]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        (("a",), [[0, 3], [1, 4], [2, 5]]),
        (("b",), [[0, 1, 2], [3, 4, 5]]),
        (("a", "b"), [[0, 1, 2, 3, 4, 5]]),
        (("b", "a"), [[0, 3, 1, 4, 2, 5]]),
    ],
)
def test_groups_follow_the_order_of_the_axes(axes: tuple[str, ...], expected: list[list[int]]) -> None:
    assert sorted(groups(MESH, axes)) == expected
    gathered = run(GATHER, axes, ids())
    for group in expected:
        for device in group:
            assert gathered[device] == [float(i) for i in group]


def test_groups_are_positions_whatever_the_ids() -> None:
    mesh = Mesh("a=2,b=3", devices=(15, 11, 13, 10, 14, 12))
    assert sorted(groups(mesh, ("b", "a"))) == [[0, 3, 1, 4, 2, 5]]
    assert run(GATHER, ("a",), ids(), mesh=mesh)[4] == [1.0, 4.0]


def test_groups_of_one() -> None:
    mesh = Mesh("a=2,b=1")
    assert run(GATHER, ("b",), ids(2), mesh=mesh) == [[0.0], [1.0]]
    assert run(REDUCE, ("b",), ids(2), "sum", mesh=mesh) == [[0.0], [1.0]]


@pytest.mark.parametrize(
    ("op", "expected"),
    [("sum", [3.0, 5.0, 7.0]), ("max", [3.0, 4.0, 5.0]), ("min", [0.0, 1.0, 2.0])],
)
def test_all_reduce(op: str, expected: list[float]) -> None:
    assert run(REDUCE, ("a",), ids(), op) == [[v] for v in expected * 2]


def test_reduce_scatter_gives_part_i_to_the_device_of_index_i() -> None:
    """Over (b, a) device 1 is (0, 1) and so of index 2."""
    operands = [torch.arange(6.0) * 10**i for i in range(6)]
    assert run(SCATTER, ("a", "b"), operands, "sum", 6, "a,b") == [[i * 111111.0] for i in range(6)]
    index = {0: 0, 3: 1, 1: 2, 4: 3, 2: 4, 5: 5}
    assert run(SCATTER, ("b", "a"), operands, "sum", 6, "b,a") == [[index[i] * 111111.0] for i in range(6)]
    assert run(SCATTER, ("b",), [t[:3] for t in operands], "max") == [[0.0], [100.0], [200.0], [0.0], [1e5], [2e5]]


def test_all_to_all_deals_part_i_to_index_i() -> None:
    operands = [torch.tensor([10.0 * i, 10.0 * i + 1]) for i in range(6)]
    assert run(EXCHANGE, ("a",), operands, [1, 1], [1, 1]) == [
        [0.0, 30.0],
        [10.0, 40.0],
        [20.0, 50.0],
        [1.0, 31.0],
        [11.0, 41.0],
        [21.0, 51.0],
    ]


def test_gathers_stack_along_dim_0() -> None:
    operands = [torch.full((2, 1), float(i)) for i in range(6)]
    values = collect(MESH, GATHER, ("a",), operands, [2])
    assert [tuple(v.shape) for v in values] == [(4, 1)] * 6
    assert values[5].flatten().tolist() == [2.0, 2.0, 5.0, 5.0]


@pytest.mark.parametrize("op", [GATHER, REDUCE, SCATTER, EXCHANGE])
def test_operands_are_not_written_to(op: Any) -> None:
    operands = [torch.arange(6.0) + i for i in range(6)]
    before = [o.clone() for o in operands]
    args = {GATHER: [6], REDUCE: ["sum"], SCATTER: ["sum", 6], EXCHANGE: [[1] * 6, [1] * 6]}[op]
    collect(MESH, op, ("a", "b"), operands, args)
    assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_are_taken_in_float32(dtype: torch.dtype) -> None:
    """256 + 1 + 1 is 256 in bfloat16 and 258 when it is rounded once."""
    big = {torch.bfloat16: 256.0, torch.float16: 2048.0}[dtype]
    total = reduce_in_order([torch.tensor(v, dtype=dtype) for v in (big, 1.0, 1.0)], "sum")
    assert (total.dtype, total.item()) == (dtype, big + 2)


def test_float32_sums_are_taken_in_the_order_of_the_group() -> None:
    values = [1e8, 1.0, -1e8]
    assert reduce_in_order([torch.tensor(v) for v in values], "sum").item() == 0.0
    assert reduce_in_order([torch.tensor(v) for v in (1e8, -1e8, 1.0)], "sum").item() == 1.0


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_integers_and_booleans_reduce(dtype: torch.dtype) -> None:
    parts = [torch.tensor([0, 1, 0], dtype=dtype), torch.tensor([0, 1, 1], dtype=dtype)]
    assert reduce_in_order(parts, "max").int().tolist() == [0, 1, 1]
    assert reduce_in_order(parts, "min").int().tolist() == [0, 1, 0]


def test_a_local_world_holds_every_device_and_puts_pieces_together() -> None:
    world = LocalWorld(MESH)
    layout = Layout.parse("[{b,a}, {}]", MESH)
    full = torch.arange(10.0).view(5, 2)
    pieces = [full[layout.box_of(full.shape, device).slices()] for device in world.devices]
    assert [len(p) for p in pieces] == [1, 1, 1, 1, 1, 0]
    assert world.devices == tuple(range(6))
    assert not world.is_distributed
    assert torch.equal(world.assemble(Spec(tuple(full.shape), full.dtype), layout, pieces), full)


def test_a_step_cannot_run_on_meta() -> None:
    with pytest.raises(MeshError) as error:
        LocalWorld(MESH, "meta")
    assert str(error.value).splitlines() == [
        "a step cannot run on this device",
        "  where: device='meta'",
        "  got: a meta device",
        "  hint: omit device, or pass cpu or cuda",
    ]


def test_more_virtual_devices_than_a_process_can_run_are_an_error_at_once() -> None:
    LocalWorld(Mesh(f"dp={MAX_VIRTUAL_DEVICES}"))
    with pytest.raises(MeshError) as error:
        LocalWorld(Mesh("dp=1000000"))
    assert str(error.value).splitlines()[:4] == [
        "too many virtual devices for a single process",
        "  where: mesh dp=1000000",
        "  got: 1,000,000 devices",
        "  expected: at most 1,024",
    ]


def test_state_that_exceeds_the_memory_of_the_machine_is_an_error_before_it_is_allocated() -> None:
    model = torch.nn.Linear(1 << 18, 1 << 18, bias=False, device="meta")  # 256 GiB, and as much on each device
    with pytest.raises(MeshError, match="the virtual devices need more memory than this machine has"):
        mw.compile(model, loss=lambda out, x: out.sum(), example=torch.empty(64, 1 << 18), mesh="dp=64")
