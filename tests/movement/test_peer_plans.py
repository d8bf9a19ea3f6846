"""What DTensor's planners would do: goldens, every pair of placements, and agreement with DTensor on a real mesh."""

from itertools import combinations, product
from math import isinf

import pytest
import torch
import torch.distributed as dist
from benchmarks.peer_plans import VARIANTS, PeerPlan, Question, peer_plans
from torch.distributed.tensor import _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.testing._internal.distributed.fake_pg import FakeStore

from meshweave.cost.hardware import AlphaBeta
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.placements import placements_from_layout
from meshweave.place.movement.plan import plan_move
from meshweave.runtime.dtensor import device_mesh_from_mesh

MESH = Mesh("a=2,b=4")
PROFILE = AlphaBeta(10e-6, {"a": 50e9, "b": 400e9, "c": 400e9})


def plans(
    source: str,
    target: str,
    *,
    mesh: Mesh = MESH,
    shape: tuple[int, ...] = (512, 512),
    profile: AlphaBeta = PROFILE,
) -> dict[str, PeerPlan]:
    """Variant without "DTensor " -> its plan."""
    found = peer_plans(Layout.parse(source, mesh), Layout.parse(target, mesh), shape, torch.float32, profile)
    assert [plan.variant for plan in found] == [name for name, _, _ in VARIANTS]
    return {plan.variant.removeprefix("DTensor "): plan for plan in found}


def texts(found: dict[str, PeerPlan]) -> dict[str, list[str]]:
    return {variant: list(map(str, plan.steps)) for variant, plan in found.items()}


def layouts(mesh: Mesh, uses: str = "01RP") -> list[Layout]:
    """Every list of placements on a matrix."""
    found = []
    for chosen in product(uses, repeat=len(mesh.axis_names)):
        named = list(zip(mesh.axis_names, chosen, strict=True))
        shards = {d: [axis for axis, use in named if use == str(d)] for d in (0, 1)}
        found.append(Layout.of(mesh, 2, shards, {axis: "sum" for axis, use in named if use == "P"}))
    return found


def legal_pairs(mesh: Mesh) -> list[tuple[Layout, Layout]]:
    return [(s, t) for s, t in product(layouts(mesh), repeat=2) if set(t.partial) <= set(s.partial)]


def test_greedy_gathers_what_one_exchange_would_do():
    shape = (16384, 16384)
    found = plans("[{}, {b}]", "[{a,b}, {}]", shape=shape)
    assert texts(found)["greedy"] == ["all_gather dim 1 over b", "slice dim 0 over a", "slice dim 0 over b"]
    source, target = (Layout.parse(text, MESH) for text in ("[{}, {b}]", "[{a,b}, {}]"))
    best = plan_move(source, target, shape, torch.float32, PROFILE)
    assert [step.kind for step in best.steps] == ["slice", "all_to_all"]
    assert found["greedy"].seconds > 6 * best.seconds


@pytest.mark.parametrize(
    ("source", "target", "shape", "message"),
    [
        ("[{a}, {}]", "[{}, {}] partial(sum: a)", (8, 8), r"cannot make a value partial \(sum: a\)"),
        ("[{}, {}] partial(avg: a)", "[{}, {}] partial(sum: a)", (8, 8), r"cannot make a value partial \(sum: a\)"),
        ("[{}, {}] partial(sum: a; max: b)", "[{}, {}]", (8, 8), r"several reduce ops \(max, sum\)"),
        ("[{a}x3, {}]", "[{}, {}]", (9, 8), "in blocks of 3"),
    ],
)
def test_what_dtensor_refuses(source, target, shape, message):
    for plan in plans(source, target, shape=shape).values():
        assert plan.steps == ()
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(plan.refusal)


@pytest.mark.slow_rows("a=2,b=2,c=2")
@pytest.mark.parametrize("spec", ["a=2,b=4", "a=2,b=2,c=2"])
def test_every_pair_of_placements_arrives(spec):
    mesh = Mesh(spec)
    pairs = legal_pairs(mesh)[:: 1 if len(mesh.shape) == 2 else 23]
    for source, target in pairs:
        for plan in peer_plans(source, target, (64, 64), torch.float32, PROFILE):
            assert not plan.refusal
            assert not isinf(plan.seconds)
            last = plan.steps[-1].target if plan.steps else source
            assert last == target


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this torch merges other steps")
def test_the_planners_do_as_dtensor_does_on_a_mesh_with_process_groups():
    """Greedy steps and merged steps are those of DTensor in a (fake) world where every set of axes is flattened."""
    mesh, pairs = Mesh("a=2,b=2,c=2"), legal_pairs(Mesh("a=2,b=2,c=2"))[::17]
    assert not dist.is_initialized()
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        real = device_mesh_from_mesh(mesh, "cpu")
        for count in (2, 3):
            for axes in combinations(mesh.axis_names, count):
                real[axes]._flatten()
        for source, target in pairs:
            asked = Question.of(source, target, (16, 16), torch.float32, PROFILE)
            before, after = (
                DTensorSpec(real, placements_from_layout(layout, (16, 16)), tensor_meta=asked.before.tensor_meta)
                for layout in (source, target)
            )
            infos = _redistribute._gen_transform_infos_non_cached(before, after)
            merged = _redistribute._optimize_transform_infos(infos, real, before.placements, after.placements)
            assert asked.transforms(graph=False, merged=False) == infos
            assert list(map(_seen, asked.transforms(graph=False, merged=True))) == list(map(_seen, merged))
    finally:
        dist.destroy_process_group()


def _seen(info):
    return info.mesh_dim, info.src_dst_placements, getattr(info, "original_mesh_dims", None)
