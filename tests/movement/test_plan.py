"""plan_move: goldens of the text, every pair of layouts, the cheapest cost, and what it refuses."""

import itertools
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.layouts import all_layouts

from meshweave.cost.hardware import AlphaBeta
from meshweave.errors import LayoutError, MeshweaveError
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.movement.plan import MovePlan, plan_move
from meshweave.place.movement.replay import replay

DP_TP = Mesh("dp=2,tp=2")
THREE = Mesh("pp=2,dp=2,tp=2")
FAST_TP = AlphaBeta(bandwidth={"pp": 50e9, "dp": 50e9, "tp": 400e9})


def plan(
    source: str,
    target: str,
    shape: tuple[int, ...] = (8, 8),
    mesh: Mesh = DP_TP,
    dtype: torch.dtype = torch.float32,
    profile: AlphaBeta = FAST_TP,
) -> MovePlan:
    made = plan_move(Layout.parse(source, mesh), Layout.parse(target, mesh), shape, dtype, profile)
    if prod(shape) < 1000:
        replay(made, shape)
    return made


GOLDENS = [
    (
        ("[{tp}, {}]", "[{tp}, {}]"),
        """
[{tp}, {}] -> [{tp}, {}]: nothing to do
""",
    ),
    (
        ("[{}, {}] partial(sum: tp)", "[{tp}, {}]"),
        """
[{}, {}] partial(sum: tp) -> [{tp}, {}]: 1 step
  10 us, at best 10 us; 128 B received, peak 384 B, reassociates
  1. reduce_scatter(sum) over tp onto dim 0  -> [{tp}, {}]  10 us, 128 B received
""",
    ),
    (
        ("[{}, {}] partial(sum: dp,tp)", "[{}, {tp}]", (4096, 4096)),
        """
[{}, {}] partial(sum: dp,tp) -> [{}, {tp}]: 2 steps
  775 us, at best 765 us; 64 MiB received, peak 96 MiB, reassociates
  1. reduce_scatter(sum) over tp onto dim 1  -> [{}, {tp}] partial(sum: dp)  93.89 us, 32 MiB received
  2. all_reduce(sum) over dp                 -> [{}, {tp}]                   681.1 us, 32 MiB received
""",
    ),
    (
        ("[{tp}, {}]", "[{}, {tp}]"),
        """
[{tp}, {}] -> [{}, {tp}]: 1 step
  10 us, at best 10 us; 64 B received, peak 256 B, exact
  1. all_to_all over tp from dim 0 onto dim 1  -> [{}, {tp}]  10 us, 64 B received
""",
    ),
    (
        ("[{}, {}]", "[{}, {tp}]"),
        """
[{}, {}] -> [{}, {tp}]: 1 step
  0 us, at best 0 us; 0 B received, peak 384 B, exact
  1. slice dim 1 over tp  -> [{}, {tp}]  0 us, 0 B received
""",
    ),
    (
        ("[{}, {tp}]", "[{}, {}]"),
        """
[{}, {tp}] -> [{}, {}]: 1 step
  10 us, at best 10 us; 128 B received, peak 384 B, exact
  1. all_gather dim 1 over tp  -> [{}, {}]  10 us, 128 B received
""",
    ),
    (
        ("[{dp}, {}]", "[{dp}, {}] partial(max: tp)"),
        """
[{dp}, {}] -> [{dp}, {}] partial(max: tp): 1 step
  0 us, at best 0 us; 0 B received, peak 256 B, exact
  1. to_partial(max) over tp  -> [{dp}, {}] partial(max: tp)  0 us, 0 B received
""",
    ),
    (
        ("[{dp,tp}, {}]", "[{tp,dp}, {}]", (4096, 4096)),
        """
[{dp,tp}, {}] -> [{tp,dp}, {}]: 1 step
  345.5 us, at best 198.7 us; 16 MiB received, peak 32 MiB, exact
  1. permute over dp,tp  -> [{tp,dp}, {}]  345.5 us, 16 MiB received
""",
    ),
    (
        ("[{dp}, {}]", "[{}, {dp,tp}]"),
        """
[{dp}, {}] -> [{}, {dp,tp}]: 2 steps
  10 us, at best 10 us; 48 B received, peak 192 B, exact
  1. slice dim 0 over tp                          -> [{dp,tp}, {}]  0 us, 0 B received
  2. all_to_all over dp,tp from dim 0 onto dim 1  -> [{}, {dp,tp}]  10 us, 48 B received
""",
    ),
    (
        ("[{}, {tp}]", "[{}, {tp}x3]", (8, 9)),
        """
[{}, {tp}] -> [{}, {tp}x3]: 2 steps
  10 us, at best 10 us; 160 B received, peak 480 B, exact
  1. all_gather dim 1 over tp            -> [{}, {}]      10 us, 160 B received
  2. slice dim 1 over tp in blocks of 3  -> [{}, {tp}x3]  0 us, 0 B received
""",
    ),
    (
        ("[{dp}, {}]", "[{dp,tp}x4, {}]", (8, 1)),
        """
[{dp}, {}] -> [{dp,tp}x4, {}]: 1 step
  0 us, at best 0 us; 0 B received, peak 32 B, exact
  1. slice dim 0 over tp in blocks of 4  -> [{dp,tp}x4, {}]  0 us, 0 B received
""",
    ),
    (
        ("[{tp}x3, {}]", "[{}, {tp}x2]", (9, 6)),
        """
[{tp}x3, {}] -> [{}, {tp}x2]: 1 step
  10 us, at best 10 us; 96 B received, peak 288 B, exact
  1. all_to_all over tp from dim 0 onto dim 1 in blocks of 2  -> [{}, {tp}x2]  10 us, 96 B received
""",
    ),
    (
        ("[{}, {}] partial(sum: tp)", "[{}, {}]"),
        """
[{}, {}] partial(sum: tp) -> [{}, {}]: 1 step
  10 us, at best 10 us; 256 B received, peak 512 B, reassociates
  1. all_reduce(sum) over tp  -> [{}, {}]  10 us, 256 B received
""",
    ),
    (
        ("[{}, {}] partial(avg: dp; sum: tp)", "[{}, {}]"),
        """
[{}, {}] partial(avg: dp; sum: tp) -> [{}, {}]: 2 steps
  10.01 us, at best 10 us; 384 B received, peak 512 B, reassociates
  1. all_reduce(sum) over dp,tp  -> [{}, {}]  10.01 us, 384 B received
  2. scale by 0.5 over dp        -> [{}, {}]  0 us, 0 B received
""",
    ),
    (
        ("[{}, {}] partial(avg: dp)", "[{}, {}] partial(sum: dp)"),
        """
[{}, {}] partial(avg: dp) -> [{}, {}] partial(sum: dp): 1 step
  0 us, at best 0 us; 0 B received, peak 512 B, reassociates
  1. scale by 0.5 over dp  -> [{}, {}] partial(sum: dp)  0 us, 0 B received
""",
    ),
    (
        ("[{}, {}] partial(max: tp)", "[{}, {}] partial(sum: tp)"),
        """
[{}, {}] partial(max: tp) -> [{}, {}] partial(sum: tp): 2 steps
  10 us, at best 0 us; 256 B received, peak 512 B, exact
  1. all_reduce(max) over tp  -> [{}, {}]                   10 us, 256 B received
  2. to_partial(sum) over tp  -> [{}, {}] partial(sum: tp)  0 us, 0 B received
""",
    ),
    (
        ("[{pp}, {}] partial(sum: dp,tp)", "[{}, {pp}]", (4096, 4096), THREE),
        """
[{pp}, {}] partial(sum: dp,tp) -> [{}, {pp}]: 5 steps
  616.2 us, at best 429.4 us; 55 MiB received, peak 48 MiB, reassociates
  1. reduce_scatter(sum) over tp onto dim 0          -> [{pp,tp}, {}] partial(sum: dp)  51.94 us, 16 MiB received
  2. reduce_scatter(sum) over dp onto dim 0          -> [{pp,tp,dp}, {}]                177.8 us, 8 MiB received
  3. all_to_all over pp,tp,dp from dim 0 onto dim 1  -> [{}, {pp,tp,dp}]                156.8 us, 7 MiB received
  4. all_gather dim 1 over dp                        -> [{}, {pp,tp}]                   177.8 us, 8 MiB received
  5. all_gather dim 1 over tp                        -> [{}, {pp}]                      51.94 us, 16 MiB received
""",
    ),
    (
        ("[{dp}, {tp}] partial(sum: pp)", "[{pp,dp}, {}]", (4096, 4096), THREE),
        """
[{dp}, {tp}] partial(sum: pp) -> [{pp,dp}, {}]: 3 steps
  386.5 us, at best 198.7 us; 24 MiB received, peak 24 MiB, reassociates
  1. reduce_scatter(sum) over pp onto dim 0  -> [{dp,pp}, {tp}]  177.8 us, 8 MiB received
  2. permute over pp,dp                      -> [{pp,dp}, {tp}]  177.8 us, 8 MiB received
  3. all_gather dim 1 over tp                -> [{pp,dp}, {}]    30.97 us, 8 MiB received
""",
    ),
    (
        ("[{pp}, {dp}, {tp}]", "[{tp}, {dp}, {pp}]", (64, 64, 64), THREE),
        """
[{pp}, {dp}, {tp}] -> [{tp}, {dp}, {pp}]: 1 step
  12.62 us, at best 11.47 us; 128 KiB received, peak 256 KiB, exact
  1. permute over pp,tp  -> [{tp}, {dp}, {pp}]  12.62 us, 128 KiB received
""",
    ),
]


@pytest.mark.parametrize(("move", "text"), GOLDENS)
def test_text(move: tuple[Any, ...], text: str) -> None:
    assert f"\n{plan(*move)}\n" == text


@pytest.mark.parametrize(("spec", "shape"), [("a=2,b=2", (8, 8)), ("a=2,b=3", (7, 2)), ("a=2,b=2", (5,))])
def test_every_pair_plans_and_replays(spec: str, shape: tuple[int, ...]) -> None:
    layouts = all_layouts(Mesh(spec), len(shape))
    for source, target in itertools.product(layouts, layouts):
        made = plan_move(source, target, shape, torch.float32)
        replay(made, shape)
        assert bool(made.steps) == (source != target)


@st.composite
def moves(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...]]:
    """Two layouts that a move may join, on 2 or 3 axes with devices in any order, and a shape that they may not fit."""
    sizes = draw(st.sampled_from([(2, 2), (2, 3), (2, 2, 2), (3, 1, 2)]))
    names = "abc"[: len(sizes)]
    mesh = Mesh(dict(zip(names, sizes, strict=True)), devices=draw(st.permutations(range(prod(sizes)))))
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 8, 13]), max_size=3)))
    op = draw(st.sampled_from(["sum", "max", "min"]))
    source = draw(_layouts(mesh, len(shape), {a: [op, "avg"] if op == "sum" else [op] for a in names}))
    averaged = {axis for axis, its_op in source.partial if its_op == "avg"}
    target = draw(_layouts(mesh, len(shape), {a: ["sum", "max", "avg"] if a in averaged else ["sum"] for a in names}))
    return source, target, shape


@st.composite
def _layouts(draw: st.DrawFn, mesh: Mesh, num_dims: int, ops: dict[str, list[str]]) -> Layout:
    axes: list[list[str]] = [[] for _ in range(num_dims)]
    partial = {}
    for axis in draw(st.permutations(mesh.axis_names)):
        use = draw(st.sampled_from([*range(num_dims), *range(num_dims), "replicated", *ops[axis]]))
        if isinstance(use, int):
            axes[use].append(axis)
        elif use != "replicated":
            partial[axis] = use
    dims = tuple(DimSharding(tuple(a), draw(st.sampled_from([1, 1, 2, 3]))) for a in axes)
    return Layout(mesh, dims, tuple(partial.items()))


@given(moves())
def test_random_pairs_plan_and_replay(move: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    source, target, shape = move
    made = plan_move(source, target, shape, torch.float32)
    replay(made, shape)
    assert made.seconds == sum(step.seconds for step in made.steps)
    assert made.bytes_received == sum(step.bytes_received for step in made.steps)
    start, goal = source.normalized(shape), target.normalized(shape)
    ends = [start, *(step.target for step in made.steps)]
    assert ends[-1] == goal
    assert [step.source for step in made.steps] == ends[:-1]
    held = [4 * prod(layout.local_shape(shape)) for layout in ends]
    assert made.peak_bytes == max(map(sum, itertools.pairwise(held)), default=held[0])


def test_six_axes_are_planned_in_seconds() -> None:
    """Of many axes not all orders are searched; the plan is sound and does what it should."""
    mesh = Mesh(dict.fromkeys("abcdef", 2))
    profile = AlphaBeta(bandwidth={"a": 50e9, **dict.fromkeys("bcdef", 400e9)})
    layouts = ("[{f,a}, {c,b}] partial(sum: d)", "[{b,c}, {a,d,f}]")
    source, target = (Layout.parse(text, mesh) for text in layouts)
    made = plan_move(source, target, (64, 64), torch.float32, profile)
    replay(made, (64, 64))
    assert made.seconds < 60e-6


def test_numerics_follow_the_dtype_and_the_op() -> None:
    total, most = "[{}, {}] partial(sum: tp)", "[{}, {}] partial(max: tp)"
    assert plan(total, "[{}, {}]").numerics == "reassociates"
    assert plan(total, "[{}, {}]", dtype=torch.int64).numerics == "exact"
    assert plan(most, "[{}, {}]").numerics == "exact"
    assert plan("[{}, {}]", total).numerics == "exact"


def test_the_largest_piece_is_priced() -> None:
    made = plan("[{tp}, {}]", "[{}, {}]", shape=(5, 3))
    assert made.bytes_received == 3 * 3 * 4
    assert made.peak_bytes == (3 * 3 + 5 * 3) * 4
    assert plan("[{tp}, {}]", "[{}, {}]", shape=(5, 3), dtype=torch.bfloat16).bytes_received == 3 * 3 * 2


def test_axes_of_size_one_cost_nothing() -> None:
    made = plan("[{a}, {}] partial(avg: b)", "[{}, {b}]", mesh=Mesh("a=1,b=1"), dtype=torch.int32)
    assert made.steps == ()
    assert made.peak_bytes == 8 * 8 * 4


def test_a_tensor_without_dims() -> None:
    made = plan("[] partial(sum: dp,tp)", "[]", shape=())
    assert [step.kind for step in made.steps] == ["all_reduce"]


def test_plans_are_cached_by_value() -> None:
    assert plan("[{tp}, {}]", "[{}, {}]") is plan("[{tp}, {}]", "[{}, {}]")
    assert plan("[{tp}, {}]", "[{}, {}]") is not plan("[{tp}, {}]", "[{}, {}]", profile=AlphaBeta())


@pytest.mark.parametrize(
    ("source", "target", "dtype", "message"),
    [
        ("[{}]", "[{}, {}]", torch.float32, "differ in their number of dims"),
        ("[{}, {}]", "[{}, {}] partial(avg: tp)", torch.float32, "cannot make a value partial"),
        ("[{}, {}] partial(sum: tp)", "[{}, {}] partial(avg: tp)", torch.float32, "cannot make a value partial"),
        ("[{}, {}] partial(avg: dp)", "[{}, {}] partial(avg: tp)", torch.float32, "cannot make a value partial"),
        ("[{}, {}] partial(sum: dp; max: tp)", "[{}, {}]", torch.float32, "partial with several reduce ops"),
        ("[{}, {}] partial(avg: dp; max: tp)", "[{tp}, {}] partial(avg: dp)", torch.float32, "several reduce ops"),
        ("[{}, {}] partial(avg: tp)", "[{}, {}]", torch.int64, "average of integers would be truncated"),
        ("[{}, {}] partial(avg: tp)", "[{}, {}] partial(sum: tp)", torch.bool, "average of integers"),
    ],
)
def test_impossible_moves_are_refused(source: str, target: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        plan(source, target, dtype=dtype)


def test_several_ops_that_stay_may_be_moved_around() -> None:
    both = "partial(sum: pp; max: dp)"
    made = plan(f"[{{tp}}, {{}}] {both}", f"[{{}}, {{tp}}] {both}", mesh=THREE)
    assert [step.kind for step in made.steps] == ["all_to_all"]


def test_integers_keep_an_average_that_stays() -> None:
    made = plan("[{dp}, {}] partial(avg: tp)", "[{}, {}] partial(avg: tp)", dtype=torch.int64)
    assert [step.kind for step in made.steps] == ["all_gather"]


def test_an_axis_without_bandwidth_is_named() -> None:
    with pytest.raises(MeshweaveError, match="no bandwidth for axis 'tp'"):
        plan("[{tp}, {}]", "[{}, {}]", profile=AlphaBeta(bandwidth={"dp": 1e9}))
