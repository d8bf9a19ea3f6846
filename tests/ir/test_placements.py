"""Our pieces against DTensor's own, rank by rank in a fake world, and conversions there and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations, product
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshweave.errors import LayoutError
from meshweave.ir.layout import REDUCE_OPS, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.placements import layout_from_placements, placements_from_layout
from meshweave.runtime.dtensor import device_mesh_from_mesh

MESHES = (Mesh("a=3,b=2"), Mesh("a=2,b=3,c=2"), Mesh("a=4,b=2", devices=[5, 3, 1, 7, 0, 2, 6, 4]))
SIZES = (0, 1, 3, 5, 7, 9, 12, 13, 24)


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def one_dim_layouts(mesh: Mesh) -> list[Layout]:
    """Every ordered choice of axes on one dim."""
    names = mesh.axis_names
    return [Layout.of(mesh, 1, {0: axes}) for n in range(len(names) + 1) for axes in permutations(names, n)]


def two_dim_layouts(mesh: Mesh) -> list[Layout]:
    """Every way to give each axis to dim 0, to dim 1 or to none, in mesh order and in its reverse."""
    found = []
    for uses in product((0, 1, None), repeat=len(mesh.axis_names)):
        named = list(zip(mesh.axis_names, uses, strict=True))
        for order in (named, named[::-1]):
            found.append(Layout.of(mesh, 2, {d: [a for a, use in order if use == d] for d in (0, 1)}))
    return list(dict.fromkeys(found))


def cases(mesh: Mesh) -> list[tuple[Layout, tuple[int, ...]]]:
    one = [(layout, (size,)) for layout in one_dim_layouts(mesh) for size in SIZES]
    two = [(layout, shape) for layout in two_dim_layouts(mesh) for shape in ((12, 24), (7, 5), (1, 13))]
    return one + two


def placements_or_none(layout: Layout, shape: tuple[int, ...]) -> tuple[Placement, ...] | None:
    try:
        return placements_from_layout(layout, shape)
    except LayoutError:
        return None


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_pieces_are_those_of_dtensor(mesh: Mesh) -> None:
    """Shape and offset on every rank. An empty dim has no offset to compare; DTensor puts it at the global size."""
    converted = [(layout, shape, p) for layout, shape in cases(mesh) if (p := placements_or_none(layout, shape))]
    assert len(converted) > len(cases(mesh)) // 2
    strided = [p for _, _, placements in converted for p in placements if isinstance(p, _StridedShard)]
    assert strided
    for rank in mesh.devices:
        with fake_world(rank, mesh.num_devices):
            device_mesh = device_mesh_from_mesh(mesh, "cpu")
            for layout, shape, placements in converted:
                box = layout.pieces(shape)[rank]
                size, offset = compute_local_shape_and_global_offset(shape, device_mesh, placements)
                assert tuple(size) == box.size, (layout, shape, rank)
                for ours, theirs, length in zip(box.offset, offset, box.size, strict=True):
                    assert ours == theirs or length == 0, (layout, shape, rank)


@pytest.mark.parametrize("mesh", MESHES[1:2], ids=str)
def test_values_are_those_that_dtensor_distributes(mesh: Mesh) -> None:
    """Every element carries its own index, so that a piece that is right only in shape and start shows."""
    for rank in mesh.devices:
        with fake_world(rank, mesh.num_devices):
            device_mesh = device_mesh_from_mesh(mesh, "cpu")
            for layout in two_dim_layouts(mesh):
                for shape in ((12, 24), (7, 13)):
                    placements = placements_or_none(layout, shape)
                    if placements is None:
                        continue
                    whole = torch.arange(prod(shape)).reshape(shape)
                    local = distribute_tensor(whole, device_mesh, placements, src_data_rank=None).to_local()
                    assert torch.equal(local, whole[layout.pieces(shape)[rank].slices()]), (layout, shape, rank)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_layout_round_trip(mesh: Mesh) -> None:
    for layout in one_dim_layouts(mesh) + two_dim_layouts(mesh):
        placements = placements_from_layout(layout, (24,) * len(layout.dims))
        assert layout_from_placements(placements, mesh, len(layout.dims)) == layout


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_placement_round_trip(mesh: Mesh) -> None:
    kinds = [Shard(0), Shard(1), Replicate(), *(Partial(op) for op in REDUCE_OPS)]
    for placements in product(kinds, repeat=len(mesh.axis_names)):
        assert placements_from_layout(layout_from_placements(placements, mesh, 2), (24, 24)) == placements


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[{a,b,c}]", (Shard(0), Shard(0), Shard(0))),
        ("[{c,b,a}]", (_StridedShard(0, split_factor=6), _StridedShard(0, split_factor=2), Shard(0))),
        ("[{c,a,b}]", (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0))),
        ("[{b,c,a}]", (_StridedShard(0, split_factor=6), Shard(0), Shard(0))),
        ("[{b}] partial(sum: a; max: c)", (Partial("sum"), Shard(0), Partial("max"))),
        ("[{}] partial(avg: b; min: a)", (Partial("min"), Partial("avg"), Replicate())),
    ],
)
def test_golden_placements(text: str, expected: tuple[Placement, ...]) -> None:
    mesh = MESHES[1]
    layout = Layout.parse(text, mesh)
    assert placements_from_layout(layout, (24,)) == expected
    assert layout_from_placements(expected, mesh, 1) == layout


def test_a_unit_that_changes_no_piece_is_dropped() -> None:
    mesh = MESHES[0]
    assert placements_from_layout(Layout.parse("[{a}x4]", mesh), (24,)) == (Shard(0), Replicate())
    assert placements_from_layout(Layout.parse("[{a}x3]", mesh), (7,)) == (Shard(0), Replicate())


def test_mesh_round_trip_in_a_fake_world() -> None:
    mesh = MESHES[2]
    with fake_world(0, 8):
        device_mesh = device_mesh_from_mesh(mesh, "cpu")
        assert (device_mesh.mesh_dim_names, device_mesh.device_type) == (("a", "b"), "cpu")
        assert device_mesh.mesh.tolist() == [[5, 3], [1, 7], [0, 2], [6, 4]]
        assert Mesh.from_device_mesh(device_mesh) == mesh
        assert Mesh.from_device_mesh(device_mesh["b"]) == Mesh("b=2", devices=[0, 2])


def test_unnamed_dims_become_d0_d1() -> None:
    with fake_world(0, 4):
        assert str(Mesh.from_device_mesh(DeviceMesh("cpu", [[0, 1], [2, 3]]))) == "d0=2,d1=2"


ABC = "a=2,b=3,c=2"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: placements_from_layout(Layout.parse("[{a}x4]", MESHES[1]), (12,)),
            f"DTensor cannot cut dim 0 in blocks of 4|layout [{{a}}x4] on mesh {ABC}, shape (12,)|"
            "dim 0 of 12 elements cut as {a}x4: the unit changes the pieces|"
            "a unit of 1, or a size that the blocks of all devices divide",
        ),
        (
            lambda: placements_from_layout(Layout.parse("[{c,b}]", MESHES[1]), (7,)),
            "DTensor may have other pieces of dim 0, because a strided shard has other remainders|"
            f"layout [{{c,b}}] on mesh {ABC}, shape (7,)|"
            "7 elements over {c,b}|a size that the pieces divide, or the axes in mesh order",
        ),
        (
            lambda: layout_from_placements([Shard(0)], MESHES[1], 1),
            f"there must be one placement per mesh axis|mesh {ABC}|1 placements|3",
        ),
        (
            lambda: layout_from_placements([Shard(2), Replicate(), Replicate()], MESHES[1], 2),
            f"there is no dim 2 to shard|axis 'a' of mesh {ABC}|Shard(dim=2)|a dim of a tensor with 2 dims",
        ),
        (
            lambda: layout_from_placements([_StridedShard(0, split_factor=4), Shard(0), Shard(0)], MESHES[1], 1),
            f"no order of the mesh axes matches this strided shard|axis 'a' of mesh {ABC}|"
            "_StridedShard(dim=0, sf=4)|a split factor of 1, 3, 6",
        ),
        (
            lambda: layout_from_placements([Partial("product"), Replicate(), Replicate()], MESHES[1], 1),
            f"no layout corresponds to this placement|axis 'a' of mesh {ABC}|Partial(product)|"
            "Shard, Replicate or Partial with one of sum, avg, max, min",
        ),
        (
            lambda: placements_from_layout(Layout.replicated(MESHES[1], 1), (2, 2)),
            "the layout and the tensor differ in their number of dims|a tensor of shape (2, 2)|[{}] with 1 dims|2 dims",
        ),
    ],
)
def test_layout_errors(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(LayoutError) as caught:
        make()
    error = caught.value
    assert "|".join([error.what, error.where, error.got, error.expected]) == message
