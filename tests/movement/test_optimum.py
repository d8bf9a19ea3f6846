"""Plans against a brute force that takes every step from every layout and shares no code with the planner."""

import random
from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from typing import NamedTuple

import pytest
import torch
from benchmarks.optimum import Optimum, State, check_by_hand
from hypothesis import given
from hypothesis import strategies as st
from tests.expand.test_moves import run_rank
from tests.layouts import all_layouts
from tests.steps import Chain, check, program

from meshweave.cost.hardware import AlphaBeta, load_profile
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.movement.plan import plan_move
from meshweave.place.movement.replay import replay
from meshweave.place.movement.search import MoveProblem, cheapest
from meshweave.place.movement.within import MoveSearch, Request

NO_BOUND, LITTLE = 1 << 62, 64 << 20
HIERARCHY, FLAT = (50e9, 400e9, 400e9), (50e9, 50e9, 50e9)


class Setting(NamedTuple):
    """A mesh, a float32 tensor and links, the slowest first."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    bandwidths: tuple[float, ...] = HIERARCHY
    alpha: float = 10e-6

    @property
    def mesh(self) -> Mesh:
        return Mesh(dict(zip("abc", self.sizes, strict=False)))

    @property
    def profile(self) -> AlphaBeta:
        return AlphaBeta(self.alpha, dict(zip(self.mesh.axis_names, self.bandwidths, strict=False)))

    def layout(self, state: State) -> Layout:
        names = self.mesh.axis_names
        cuts = {d: [names[axis] for axis in cut] for d, cut in enumerate(state.cuts)}
        return Layout.of(self.mesh, len(self.shape), cuts, {names[axis]: "sum" for axis in state.partial})


MIB, GIB = (504, 504), (16380, 16380)  # about; 8 devices do not divide the second
NAMED = [Setting((2, 4), MIB), Setting((2, 4), GIB), Setting((3, 4), MIB), Setting((3, 4), GIB)]
NAMED += [Setting((2, 2, 3), MIB), Setting((2, 2, 3), GIB)]
OTHERS = [
    Setting((3, 4), (512, 512)),
    Setting((2, 4), MIB, FLAT),
    Setting((4, 4), GIB, FLAT),
    Setting((2, 3), (7, 5), (1.0, 3.0), 0.5),
    Setting((2, 3), (7, 2), (1.0, 3.0), 1e-9),
    Setting((2, 3), (5,), (2.0, 2.0), 1.0),
    Setting((2, 2, 2), (64,), (1.0, 8.0, 8.0), 20.0),
    Setting((3, 2), (), (1.0, 8.0), 1.0),
    Setting((2, 2, 3), (48, 24), (1.0, 2.0, 3.0), 50.0),
]


@cache
def optimum(setting: Setting) -> Optimum:
    return Optimum(setting.sizes, setting.bandwidths, setting.shape, alpha=setting.alpha)


@cache
def table(setting: Setting, floor: int | None) -> list[list[float]]:
    return optimum(setting).table("sound", floor).tolist()  # type: ignore[no-any-return]


def compare(setting: Setting, pair: tuple[int, int], is_bounded: bool) -> None:
    """The plan takes the seconds of the optimum, does what it should, and does not beat its lower bound."""
    source, target = (setting.layout(optimum(setting).states[i]) for i in pair)
    best = table(setting, LITTLE if is_bounded else None)[pair[0]][pair[1]]
    cap = None if is_bounded else NO_BOUND
    made = plan_move(source, target, setting.shape, torch.float32, setting.profile, memory_cap_bytes=cap)
    if best == inf:  # pieces that are not equal: no plan keeps to twice the larger end, and the least peak is taken
        ends = [4 * torch.Size(layout.local_shape(setting.shape)).numel() for layout in (source, target)]
        assert made.peak_bytes > max(2 * max(ends), LITTLE)
    else:
        assert made.seconds == pytest.approx(best, rel=1e-9, abs=1e-12), str(made)
    assert made.lower_bound_seconds <= made.seconds * (1 + 1e-9)
    if max(setting.shape, default=1) < 1000:
        replay(made, setting.shape)


def test_the_brute_force_by_hand() -> None:
    check_by_hand()


@st.composite
def questions(draw: st.DrawFn) -> tuple[Setting, tuple[int, int], bool]:
    setting = draw(st.sampled_from(NAMED + OTHERS))
    pair = draw(st.tuples(*[st.integers(0, len(optimum(setting).states) - 1)] * 2))
    return setting, pair, draw(st.booleans())


@given(questions())
def test_a_sample_of_all_pairs_is_at_the_optimum(question: tuple[Setting, tuple[int, int], bool]) -> None:
    compare(*question)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", NAMED + OTHERS, ids=str)
def test_all_pairs_are_at_the_optimum(setting: Setting) -> None:
    for pair in product(range(len(optimum(setting).states)), repeat=2):
        compare(setting, pair, is_bounded=False)
        compare(setting, pair, is_bounded=True)


def test_the_default_bound_makes_nothing_of_a_mebibyte_slower() -> None:
    setting = Setting((2, 2, 3), MIB)
    count = len(optimum(setting).states)
    pairs = random.Random(0).sample(list(product(range(count), repeat=2)), 300)
    slower = 0
    for pair in pairs:
        source, target = (setting.layout(optimum(setting).states[i]) for i in pair)
        given = (source, target, MIB, torch.float32, setting.profile)
        twice = 2 * max(4 * torch.Size(one.local_shape(MIB)).numel() for one in (source, target))
        free = plan_move(*given, memory_cap_bytes=NO_BOUND).seconds
        assert plan_move(*given).seconds == free
        slower += plan_move(*given, device_bytes=0).seconds > free * 1.01
        assert plan_move(*given, device_bytes=0).peak_bytes <= twice
    assert slower > 10  # bound by what the value takes alone


# sums that stay


def test_a_sum_that_stays_over_a_fast_axis_is_scattered_over_it_and_opened_again() -> None:
    """An all-reduce over the slow axis alone takes 15.6 ms."""
    mesh = Mesh("a=3,b=4")
    profile = AlphaBeta(10e-6, {"a": 50e9, "b": 400e9})
    source, target = (Layout.parse(f"[{{}}, {{}}] partial(sum: {axes})", mesh) for axes in ("a,b", "b"))
    made = plan_move(source, target, (12096, 12096), torch.float32, profile)
    assert [step.kind for step in made.steps] == ["reduce_scatter", "all_reduce", "to_partial"]
    assert made.seconds == pytest.approx(5.019e-3, rel=1e-3)
    assert made.numerics == "reassociates"
    assert plan_move(source, target, (12096, 12096), torch.int64, profile).numerics == "exact"
    small = plan_move(source, target, (24, 24), torch.float32, profile)
    assert [step.kind for step in small.steps] == ["all_reduce"]


REOPENED = [
    ("[{}, {}] partial(sum: a,b)", "[{}, {}] partial(sum: b)"),
    ("[{a}, {}] partial(sum: b)", "[{}, {}] partial(sum: b)"),
    ("[{}, {}] partial(max: a,b)", "[{}, {}] partial(max: b)"),
    ("[{}, {a}] partial(min: b)", "[{}, {}] partial(min: b)"),
]


@pytest.mark.parametrize("shape", [(12, 12), (7, 5)])
@pytest.mark.parametrize(("source", "target"), REOPENED)
def test_what_is_opened_again_is_the_same_value(source: str, target: str, shape: tuple[int, int]) -> None:
    """Run on devices, against the whole tensor."""
    mesh = Mesh("a=3,b=2")
    start, goal = Layout.parse(source, mesh), Layout.parse(target, mesh)
    made = plan_move(start, goal, shape, torch.float32, AlphaBeta(0.0, {"a": 1e9, "b": 1e12}))
    kinds = [step.kind for step in made.steps]
    assert "reduce_scatter" in kinds
    assert kinds[-1] == "to_partial"
    replay(made, shape)
    check(Chain(start, shape, made.steps), torch.float32, 0)


@pytest.mark.parametrize(("ops", "share"), [("avg: a,b", 1 / 6), ("sum: a; avg: b", 1 / 2), ("avg: a; sum: b", 1 / 3)])
def test_an_average_that_is_opened_again_as_a_sum_is_scaled_once(ops: str, share: float) -> None:
    mesh, made = Mesh("a=3,b=2"), torch.Generator().manual_seed(0)
    source, target = Layout.parse(f"[{{}}, {{}}] partial({ops})", mesh), Layout.parse("[{}, {}] partial(sum: b)", mesh)
    plan = plan_move(source, target, (12, 6), torch.float32, AlphaBeta(0.0, {"a": 1e9, "b": 1e12}))
    assert [step.kind for step in plan.steps] == ["reduce_scatter", "all_reduce", "scale", "to_partial"]
    replay(plan, (12, 6))
    held = [torch.randint(-8, 8, (12, 6), generator=made).float() for _ in range(6)]
    _, (rank,) = program(Chain(source, (12, 6), plan.steps), torch.float32)
    after = run_rank(rank, held)
    for group in mesh.groups(("b",)):
        assert torch.allclose(sum(after[device] for device in group), share * sum(held))  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", ["avg: b", "sum: b; max: c"])
def test_an_average_that_stays_one_and_several_ops_stay_out_of_play(kept: str) -> None:
    mesh = Mesh("a=3,b=2,c=2")
    profile = AlphaBeta(0.0, {"a": 1e9, "b": 1e12, "c": 1e12})
    source, target = (Layout.parse(f"{dims} partial({kept})", mesh) for dims in ("[{a}, {}]", "[{}, {}]"))
    made = plan_move(source, target, (12, 12), torch.float32, profile)
    assert not {axis for step in made.steps for axis in step.axes} & set(source.partial_axes)
    replay(made, (12, 12))


def test_what_is_not_partial_is_never_summed() -> None:
    """Zeros that are added would lose the sign of -0.0, although a sum of padded pieces can be the fastest exchange."""
    for shape, alpha in (((16, 16), 1.0), ((16, 16), 0.0), ((7, 5), 0.0)):
        profile = AlphaBeta(alpha, {"a": 1.0, "b": 8.0})
        layouts = all_layouts(Mesh("a=2,b=4"), 2)
        for source, target in product([one for one in layouts if not one.partial], layouts):
            made = plan_move(source, target, shape, torch.float32, profile)
            assert made.numerics == "exact"


def test_nothing_is_reduced_once_a_value_is_partial_with_another_op() -> None:
    """The minimum over b of zeros, which a sum over a is padded with, would be no part of the value."""
    mesh = Mesh("a=2,b=2")
    source, target = Layout.parse("[{a}, {}] partial(min: b)", mesh), Layout.parse("[{b}, {}] partial(sum: a)", mesh)
    for alpha in (0.0, 1.0):
        made = plan_move(source, target, (7, 5), torch.float32, AlphaBeta(alpha, 1.0))
        check(Chain(source, (7, 5), made.steps), torch.float32, 0)


# the search


def without_looking_ahead(problem: MoveProblem) -> MoveProblem:
    blind = replace(problem)
    blind.heuristic = lambda state, places: 0  # type: ignore[assignment]
    return blind


PROFILES = [load_profile("h100"), load_profile("a100"), AlphaBeta(bandwidth={"a": 5e9, "b": 5e10, "c": 4e11})]


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: str(profile.name))
def test_looking_ahead_changes_no_cost(profile: AlphaBeta) -> None:
    """A* against Dijkstra's algorithm, with even and uneven pieces, units, small and large values, and caps."""
    mesh, rng = Mesh("a=2,b=2,c=4"), random.Random(str(profile))
    layouts = all_layouts(mesh, 2)
    for _ in range(40):
        source, target = rng.sample(layouts, 2)
        shape = rng.choice([(64, 64), (8192, 8192), (7, 5), (4096, 33)])
        if rng.random() < 0.3:
            source = replace(source, dims=tuple(replace(dim, unit=3) if dim.axes else dim for dim in source.dims))
        request = Request(source.normalized(shape), target.normalized(shape), shape, torch.float32, profile)
        problem = MoveSearch.of(request).problem
        for cap in (request.roomy, 1 << 62):
            paths = [cheapest(one, cap) for one in (problem, without_looking_ahead(problem))]
            steps = [None if path is None else MoveSearch.of(request).steps(path) for path in paths]
            seconds = [None if one is None else sum(step.seconds for step in one) for one in steps]
            assert seconds[0] == (None if seconds[1] is None else pytest.approx(seconds[1], rel=1e-9, abs=1e-11))
