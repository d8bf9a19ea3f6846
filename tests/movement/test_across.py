"""Moves between meshes: goldens of the text, every pair of layouts replayed, what crosses, and what is refused."""

import itertools
import random
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import calls_of
from tests.ir.test_routes import bytes_sent
from tests.layouts import all_layouts

from meshweave.cost.hardware import AlphaBeta
from meshweave.errors import LayoutError, VerifyError
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.routes import routes
from meshweave.place.movement.across import transfer_step
from meshweave.place.movement.plan import MovePlan, plan_move
from meshweave.place.movement.replay import replay
from meshweave.place.movement.steps import Step, apply

ONE, TWO, FOUR = Mesh("a=1", devices=[9]), Mesh("dp=2", devices=[0, 1]), Mesh("dp=2,tp=2", devices=[4, 5, 6, 7])
PIPELINE = Mesh("pp=2,dp=2,tp=2")
SLOW_PP = AlphaBeta(bandwidth={"pp": 5e9, "dp": 50e9, "tp": 400e9})


def plan(
    source: str,
    target: str,
    meshes: tuple[Mesh, Mesh],
    shape: tuple[int, ...] = (8, 8),
    profile: AlphaBeta = SLOW_PP,
    dtype: torch.dtype = torch.float32,
) -> MovePlan:
    made = plan_move(Layout.parse(source, meshes[0]), Layout.parse(target, meshes[1]), shape, dtype, profile)
    if prod(shape) < 1000:
        replay(made, shape)
    return made


GOLDENS = [
    (
        ("[{dp}, {}]", "[{dp}, {}]", (TWO, Mesh("dp=2", devices=[2, 3]))),
        """
[{dp}, {}] -> [{dp}, {}]: 1 step
  10.03 us, at best 10.03 us; 128 B received, peak 128 B, exact
  1. transfer to dp=2 on [2, 3]  -> [{dp}, {}]  10.03 us, 128 B received
""",
    ),
    (
        ("[{}, {}]", "[{}, {dp}]", (PIPELINE["pp"][0], TWO)),
        """
[{}, {}] -> [{}, {dp}]: 1 step
  0 us, at best 0 us; 0 B received, peak 384 B, exact
  1. transfer to dp=2 on [0, 1]  -> [{}, {dp}]  0 us, 0 B received
""",
    ),
    (
        ("[{}, {}] partial(sum: tp)", "[{}, {}]", (PIPELINE["pp"][0], PIPELINE["pp"][1])),
        """
[{}, {}] partial(sum: tp) -> [{}, {}]: 2 steps
  20.05 us, at best 10.01 us; 384 B received, peak 384 B, reassociates
  1. reduce_scatter(sum) over tp onto dim 0  -> [{tp}, {}]  10 us, 128 B received
  2. transfer to dp=2,tp=2 on [4, 5, 6, 7]   -> [{}, {}]    10.05 us, 256 B received
""",
    ),
    (
        ("[{}, {}] partial(avg: dp,tp)", "[{}, {}]", (PIPELINE["pp"][0], PIPELINE["pp"][1]), (4096, 4096)),
        """
[{}, {}] partial(avg: dp,tp) -> [{}, {}]: 6 steps
  4244 us, at best 3365 us; 112 MiB received, peak 96 MiB, reassociates
  1. reduce_scatter(sum) over tp onto dim 1  -> [{}, {tp}] partial(avg: dp)  93.89 us, 32 MiB received
  2. reduce_scatter(sum) over dp onto dim 0  -> [{dp}, {tp}]                 345.5 us, 16 MiB received
  3. scale by 0.25 over dp,tp                -> [{dp}, {tp}]                 0 us, 0 B received
  4. transfer to dp=2,tp=2 on [4, 5, 6, 7]   -> [{dp}, {tp}]                 3365 us, 16 MiB received
  5. all_gather dim 0 over dp                -> [{}, {tp}]                   345.5 us, 16 MiB received
  6. all_gather dim 1 over tp                -> [{}, {}]                     93.89 us, 32 MiB received
""",
    ),
    (
        ("[{}, {}]", "[{}, {}]", (ONE, FOUR), (4096, 4096)),
        """
[{}, {}] -> [{}, {}]: 3 steps
  1.387e+04 us, at best 1.343e+04 us; 64 MiB received, peak 96 MiB, exact
  1. transfer to dp=2,tp=2 on [4, 5, 6, 7]  -> [{dp}, {tp}]  1.343e+04 us, 16 MiB received
  2. all_gather dim 0 over dp               -> [{}, {tp}]    345.5 us, 16 MiB received
  3. all_gather dim 1 over tp               -> [{}, {}]      93.89 us, 32 MiB received
""",
    ),
    (
        ("[{dp}, {}]", "[{}, {}] partial(sum: dp; max: tp)", (TWO, FOUR)),
        """
[{dp}, {}] -> [{}, {}] partial(sum: dp; max: tp): 3 steps
  10.03 us, at best 10.03 us; 64 B received, peak 384 B, exact
  1. transfer to dp=2,tp=2 on [4, 5, 6, 7]  -> [{dp,tp}, {}]                       10.03 us, 64 B received
  2. to_partial(max) over tp from dim 0     -> [{dp}, {}] partial(max: tp)         0 us, 0 B received
  3. to_partial(sum) over dp from dim 0     -> [{}, {}] partial(sum: dp; max: tp)  0 us, 0 B received
""",
    ),
    (
        ("[{}]", "[{}]", (TWO, Mesh("pp=2")["pp"][1]), (7,)),
        """
[{}] -> [{}]: 1 step
  0 us, at best 0 us; 0 B received, peak 56 B, exact
  1. transfer to device 1  -> [{}]  0 us, 0 B received
""",
    ),
]


@pytest.mark.parametrize(("move", "text"), GOLDENS)
def test_text(move: tuple[Any, ...], text: str) -> None:
    assert f"\n{plan(*move)}\n" == text


PAIRS = {
    "one to many": (ONE, FOUR),
    "many to one": (FOUR, ONE),
    "other numbers": (TWO, Mesh("a=3", devices=[2, 3, 4])),
    "overlap in part": (Mesh("a=2,b=2"), Mesh("a=2,c=2", devices=[2, 5, 3, 8])),
    "permuted": (Mesh("a=2,b=2"), Mesh("a=2,b=2", devices=[3, 1, 0, 2])),
    "other axes": (Mesh("a=2,b=2"), Mesh("x=4")),
    "whole to part": (Mesh("a=2,b=2"), Mesh("a=2,b=2")["a"][1]),
    "part to whole": (Mesh("a=2,b=2")["b"][1], Mesh("a=2,b=2")),
}


def check(source: Layout, target: Layout, shape: tuple[int, ...], profile: AlphaBeta) -> MovePlan:
    """The plan replays, has one transfer between steps on the two meshes, and adds up."""
    made = plan_move(source, target, shape, torch.float32, profile)
    replay(made, shape)
    kinds = [step.kind for step in made.steps]
    at = kinds.index("transfer")
    assert kinds.count("transfer") == 1
    assert all(step.source.mesh == step.target.mesh == source.mesh for step in made.steps[:at])
    assert all(step.source.mesh == step.target.mesh == target.mesh for step in made.steps[at + 1 :])
    assert made.steps[-1].target == target.normalized(shape)
    assert made.seconds == sum(step.seconds for step in made.steps)
    assert made.bytes_received == sum(step.bytes_received for step in made.steps)
    _check_transfer(made.steps[at], shape, profile)
    return made


def _check_transfer(step: Step, shape: tuple[int, ...], profile: AlphaBeta) -> None:
    """Every device of the target gets what it lacks once, and nothing else; the busiest device sets the price."""
    numbers = np.arange(prod(shape)).reshape(shape)
    had = {device: set(numbers[box.slices()].flat) for device, box in step.source.pieces(shape).items()}
    made, devices = routes(step.source, step.target, shape), {*step.source.mesh.devices, *step.target.mesh.devices}
    for device, box in step.target.pieces(shape).items():
        lacks = set(numbers[box.slices()].flat) - had.get(device, set())
        assert made.bytes_received(device, 4) == 4 * len(lacks)
    busiest = max(max(bytes_sent(made, d, 4), made.bytes_received(d, 4)) for d in devices)
    assert step.bytes_received == max(made.bytes_received(d, 4) for d in devices)
    assert step.seconds == (profile.seconds("transfer", Mesh(), (), busiest) if busiest else 0.0)


@pytest.mark.parametrize("shape", [(4, 8), (5, 3)])
@pytest.mark.parametrize("meshes", PAIRS.values(), ids=PAIRS.keys())
def test_every_pair_plans_and_replays(meshes: tuple[Mesh, Mesh], shape: tuple[int, ...]) -> None:
    """Under a profile without start-up time, so that small values are scattered and gathered too."""
    profile, ops = AlphaBeta(0.0, 1e9), itertools.cycle(["sum", "avg", "max"])
    for source, target in itertools.product(all_layouts(meshes[0], 2), all_layouts(meshes[1], 2)):
        op = next(ops)
        check(replace(source, partial=tuple((axis, op) for axis in source.partial_axes)), target, shape, profile)


@st.composite
def _layouts(draw: st.DrawFn, shape: tuple[int, ...], ops: tuple[str, ...]) -> Layout:
    """A layout on some of the devices 0 to 7 in any order, with axes in any order, units, and one op or avg and sum."""
    sizes = draw(st.sampled_from([(), (1,), (3,), (2, 2), (3, 2), (2, 1, 2), (2, 2, 2)]))
    mesh = Mesh(dict(zip("abc", sizes, strict=False)), devices=draw(st.permutations(range(8)))[: prod(sizes)])
    axes: list[list[str]] = [[] for _ in shape]
    partial = {}
    for axis in draw(st.permutations(mesh.axis_names)):
        use = draw(st.sampled_from([*range(len(shape)), *range(len(shape)), "replicated", *ops]))
        if isinstance(use, int):
            axes[use].append(axis)
        elif use != "replicated":
            partial[axis] = use
    dims = tuple(DimSharding(tuple(a), draw(st.sampled_from([1, 1, 2, 3]))) for a in axes)
    return Layout(mesh, dims, tuple(partial.items()))


@st.composite
def crossings(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 8, 13]), max_size=3)))
    source = draw(_layouts(shape, draw(st.sampled_from([("sum", "avg"), ("max",), ("min",)]))))
    target = draw(_layouts(shape, ("sum", "max")).filter(lambda layout: layout.mesh != source.mesh))
    return source, target, shape


@given(crossings(), st.sampled_from([AlphaBeta(), AlphaBeta(0.0, {"a": 5e9, "b": 400e9, "c": 50e9})]))
def test_random_pairs_plan_and_replay(crossing: tuple[Layout, Layout, tuple[int, ...]], profile: AlphaBeta) -> None:
    check(*crossing, profile)


def wider(source: Layout, target: Layout, shape: tuple[int, ...], profile: AlphaBeta) -> list[float]:
    """Seconds of every candidate: any dim before, any dim after, cut over any set of axes in any order."""

    def cut(layout: Layout, axes: tuple[str, ...]) -> list[Layout]:
        orders = [o for n in range(1, len(axes) + 1) for o in itertools.permutations(axes, n)]
        dims = enumerate(layout.dims)
        longer = [layout.with_dim(d, DimSharding((*dim.axes, *order), dim.unit)) for d, dim in dims for order in orders]
        return [layout, *longer]

    leave, arrive = Layout(source.mesh, source.dims), Layout(target.mesh, target.dims)
    found = []
    for departure, arrival in itertools.product(cut(leave, source.partial_axes), cut(arrive, arrive.replicated_axes)):
        before = plan_move(source, departure, shape, torch.float32, profile)
        after = plan_move(arrival, target, shape, torch.float32, profile)
        made = routes(departure, arrival, shape)
        devices = {*source.mesh.devices, *target.mesh.devices}
        busiest = max(max(bytes_sent(made, d, 4), made.bytes_received(d, 4)) for d in devices)
        crossing = profile.seconds("transfer", Mesh(), (), busiest) if busiest else 0.0
        found.append(before.seconds + crossing + after.seconds)
    return found


@pytest.mark.parametrize("link", [50e9, 5e9])
@pytest.mark.parametrize("shape", [(4096, 4096), (64, 48), (8192, 3)])
@pytest.mark.parametrize("name", ["other numbers", "one to many", "overlap in part", "part to whole"])
def test_no_wider_candidate_is_cheaper(name: str, shape: tuple[int, ...], link: float) -> None:
    """But for 1 in 10,000: the uneven pieces of another dim may be some elements smaller."""
    profile = AlphaBeta(bandwidth=dict.fromkeys("bcx", 400e9) | {"dp": 50e9, "a": 50e9, "tp": 400e9, "link": link})
    sources, targets = (all_layouts(mesh, 2) for mesh in PAIRS[name])
    pairs = list(itertools.product(sources, targets))
    for source, target in random.Random(1).sample(pairs, min(len(pairs), 12)):
        made = plan_move(source, target, shape, torch.float32, profile)
        assert made.seconds <= min(wider(source, target, shape, profile)) * (1 + 1e-4), f"{made}"


def crossing_bytes(made: MovePlan, shape: tuple[int, ...]) -> int:
    """Bytes that the transfer of a float32 plan sends from one device to another."""
    (step,) = (step for step in made.steps if step.kind == "transfer")
    messages = routes(step.source, step.target, shape).messages
    return 4 * sum(m.box.num_elements for m in messages if m.sender != m.receiver)


@pytest.mark.parametrize("source", [ONE, TWO])
def test_over_a_slow_link_each_byte_crosses_once(source: Mesh) -> None:
    shape, num_bytes = (4096, 4096), 4096 * 4096 * 4
    made = plan("[{}, {}]", "[{}, {}]", (source, FOUR), shape)
    assert [step.kind for step in made.steps] == ["transfer", "all_gather", "all_gather"]
    assert crossing_bytes(made, shape) == num_bytes
    assert made.steps[0].seconds == pytest.approx(10e-6 + num_bytes / source.num_devices / 5e9, rel=1e-12)
    direct = transfer_step(Layout.replicated(source, 2), Layout.replicated(FOUR, 2), shape, 4, SLOW_PP)
    assert direct.seconds == pytest.approx(10e-6 + 4 * num_bytes / source.num_devices / 5e9, rel=1e-12)
    assert made.seconds < direct.seconds


def test_where_the_link_is_as_fast_as_the_rest_replicas_send_to_replicas() -> None:
    """2 to 2: scattered, half would cross at the same time, but the other half must be gathered after it."""
    made = plan("[{}, {}]", "[{}, {}]", (TWO, Mesh("dp=2", devices=[2, 3])), (4096, 4096), AlphaBeta())
    assert [step.kind for step in made.steps] == ["transfer"]
    assert made.seconds == AlphaBeta().alpha_s + 4096 * 4096 * 4 / 50e9
    assert crossing_bytes(made, (4096, 4096)) == 2 * 4096 * 4096 * 4


def test_a_small_value_is_sent_directly_even_over_a_slow_link() -> None:
    made = plan("[{}, {}]", "[{}, {}]", (ONE, FOUR))
    assert [step.kind for step in made.steps] == ["transfer"]
    assert crossing_bytes(made, (8, 8)) == 4 * 8 * 8 * 4


def test_what_stays_on_its_device_is_free() -> None:
    turned = Mesh("tp=2,dp=2", devices=[4, 6, 5, 7])
    made = plan("[{dp}, {tp}]", "[{dp}, {tp}]", (FOUR, turned))
    assert [str(step) for step in made.steps] == ["transfer to tp=2,dp=2 on [4, 6, 5, 7]"]
    assert made.seconds == made.bytes_received == 0
    swapped = plan("[{dp}, {tp}]", "[{tp}, {dp}]", (FOUR, turned))
    assert swapped.seconds == SLOW_PP.alpha_s + 4 * 4 * 4 / 5e9
    assert swapped.bytes_received == 4 * 4 * 4


def test_the_peak_counts_both_pieces_where_a_device_has_both() -> None:
    apart, overlapping = Mesh("dp=2", devices=[2, 3]), Mesh("dp=2", devices=[1, 2])
    assert plan("[{dp}, {}]", "[{}, {}]", (TWO, apart)).peak_bytes == 8 * 8 * 4
    assert plan("[{dp}, {}]", "[{}, {}]", (TWO, overlapping)).peak_bytes == (4 * 8 + 8 * 8) * 4


def test_a_small_move_between_stages_is_priced_in_few_calls() -> None:
    """Of shapes that were not asked for before, between stages of 16 devices."""
    first, second = Mesh("dp=4,tp=4", devices=range(100, 116)), Mesh("dp=4,tp=4", devices=range(116, 132))
    source, target = Layout.parse("[{}]", first), Layout.parse("[{tp}]", second)
    plan_move(source, target, (1,), torch.float32, SLOW_PP)
    calls = calls_of(lambda: [plan_move(source, target, (size,), torch.float32, SLOW_PP) for size in range(2, 302)])
    assert calls < 3000 * 300


def test_ops_that_do_not_commute_are_refused_before_they_cross() -> None:
    with pytest.raises(LayoutError, match="partial with several reduce ops cannot be reduced"):
        plan("[{}, {}] partial(sum: dp; max: tp)", "[{}, {}]", (FOUR, TWO))


def test_a_transfer_applies_to_what_is_whole() -> None:
    source, target = Layout.parse("[{dp}, {}]", TWO), Layout.parse("[{}, {tp}]", FOUR)
    step = Step("transfer", (), source, target)
    assert apply(Layout.replicated(ONE, 2), step) is target
    with pytest.raises(VerifyError) as error:
        apply(Layout.parse("[{}, {}] partial(sum: dp)", TWO), step)
    assert str(error.value) == (
        "the step does not fit the layout\n  where: transfer to dp=2,tp=2 on [4, 5, 6, 7]\n"
        "  got: [{}, {}] partial(sum: dp)\n  expected: nothing partial, before and after"
    )
    with pytest.raises(VerifyError, match="expected: 2 dims"):
        apply(Layout.replicated(TWO, 1), step)
