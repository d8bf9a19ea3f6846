"""The planner under machine profiles: plans exist, bounds hold, and the machine's shape shows in the plan."""

import random

import pytest
import torch
from tests.effort import calls_of

import meshweave as mw
from meshweave.cost.hardware import load_profile
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh

SHAPES = ((64, 64), (4096, 4096), (1024, 512), (7, 33), (16384, 8192))


def random_layout(rng: random.Random, mesh: Mesh, may_be_partial: bool) -> Layout:
    dims: list[list[str]] = [[], []]
    partial = []
    for axis in rng.sample(mesh.axis_names, len(mesh.axis_names)):
        draw = rng.random()
        if draw < 0.5:
            rng.choice(dims).append(axis)
        elif draw < 0.7 and may_be_partial:
            partial.append(axis)
    text = "[" + ", ".join("{" + ", ".join(axes) + "}" for axes in dims) + "]"
    return Layout.parse(text + (f" partial(sum: {', '.join(partial)})" if partial else ""), mesh)


@pytest.mark.parametrize("name", ["h100", "gb200", "cpu-gloo"])
@pytest.mark.parametrize("spec", ["a=2,b=4", "a=2,b=8", "a=4,b=4", "a=16", "a=16,b=2", "a=2,b=2,c=8", "a=32"])
def test_no_plan_beats_its_bound(name: str, spec: str) -> None:
    profile, mesh, rng = load_profile(name), Mesh(spec), random.Random(spec)
    bounds = 0
    for _ in range(25):
        source, target = random_layout(rng, mesh, True), random_layout(rng, mesh, False)
        plan = mw.plan_move(source, target, shape=rng.choice(SHAPES), dtype=torch.float32, profile=profile)
        assert plan.lower_bound_seconds <= plan.seconds * (1 + 1e-9), f"{source} -> {target}"
        bounds += plan.lower_bound_seconds > 0
    assert bounds > 5


@pytest.mark.parametrize(
    ("source_mesh", "target_mesh"),
    [
        (Mesh("a=8"), Mesh("b=8", devices=range(8, 16))),
        (Mesh("a=4"), Mesh("b=4", devices=range(4, 8))),
        (Mesh("a=2,b=2"), Mesh("c=2,d=2", devices=range(8, 12))),
    ],
)
def test_no_plan_between_meshes_beats_its_bound(source_mesh: Mesh, target_mesh: Mesh) -> None:
    rng = random.Random(0)
    for _ in range(20):
        source, target = random_layout(rng, source_mesh, True), random_layout(rng, target_mesh, False)
        plan = mw.plan_move(source, target, shape=rng.choice(SHAPES), dtype=torch.float32, profile=load_profile("h100"))
        assert 0 < plan.lower_bound_seconds <= plan.seconds * (1 + 1e-9), f"{source} -> {target}"


def test_an_all_reduce_over_both_levels_is_one_or_is_taken_apart_by_its_price() -> None:
    """The plan is never slower than the all-reduce over all devices at once."""
    profile, mesh = load_profile("h100"), Mesh("dp=4,tp=8")
    source, target = (Layout.parse(text, mesh) for text in ("[{}] partial(sum: dp, tp)", "[{}]"))
    for size in (2**12, 2**20, 2**28):
        plan = mw.plan_move(source, target, shape=(size,), dtype=torch.float32, profile=profile)
        assert plan.seconds <= profile.seconds("all_reduce", mesh, ("dp", "tp"), 4 * size)


def test_a_question_asked_before_is_answered_at_once() -> None:
    profile, mesh = load_profile("h100"), Mesh("a=128,b=128")
    profile.seconds("all_gather", mesh, ("a", "b"), 1)
    assert calls_of(lambda: profile.seconds("all_gather", mesh, ("a", "b"), 1000)) < 20  # about 2 us
