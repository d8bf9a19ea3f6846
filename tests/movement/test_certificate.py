"""What a plan says of itself: its bound, its cap, and the plans that were not taken."""

import itertools
import random
import re

import pytest
import torch
from tests.layouts import all_layouts

from meshweave.cost.hardware import AlphaBeta, load_profile
from meshweave.errors import LayoutError
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.movement.bounds import must_cross
from meshweave.place.movement.plan import MovePlan, plan_move
from meshweave.place.movement.replay import replay

MESH = Mesh("a=2,b=4")
PROFILE = AlphaBeta(bandwidth={"a": 50e9, "b": 400e9})
LARGE = (16384, 16384)


def plan(source: str, target: str, shape: tuple[int, ...] = LARGE, **options: object) -> MovePlan:
    pair = (Layout.parse(source, MESH), Layout.parse(target, MESH))
    return plan_move(*pair, shape, torch.float32, PROFILE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("[{b}, {}]", "[{}, {}]"),
        ("[{a}, {}]", "[{a}, {b}]"),
        ("[{}, {a,b}]", "[{}, {a}]"),
        ("[{}, {b}] partial(sum: a)", "[{}, {b}]"),
        ("[{a}, {}] partial(sum: b)", "[{a}, {b}]"),
        ("[{b}, {}]", "[{}, {}] partial(sum: b)"),
    ],
)
def test_simple_moves_reach_their_bound(source: str, target: str) -> None:
    made = plan(source, target)
    assert made.seconds == pytest.approx(made.lower_bound_seconds, rel=1e-9)


@pytest.mark.parametrize("shape", [(16, 16), (9, 6), (5, 1)])
def test_no_plan_beats_its_bound(shape: tuple[int, ...]) -> None:
    layouts = all_layouts(Mesh("a=2,b=3"), 2)
    profile = AlphaBeta(1e-6, {"a": 1e6, "b": 8e6})
    for source, target in random.Random(0).sample(list(itertools.product(layouts, layouts)), 150):
        made = plan_move(source, target, shape, torch.float32, profile)
        assert made.lower_bound_seconds <= made.seconds * (1 + 1e-9)
        assert (made.lower_bound_seconds == 0) == (made.seconds == 0) or made.lower_bound_seconds == 0


def test_between_meshes_what_no_device_of_the_target_holds_must_enter_it() -> None:
    first, second = Mesh("a=2", devices=[0, 1]), Mesh("b=2", devices=[1, 2])
    whole = Layout.parse("[{}]", first)
    assert must_cross(whole, Layout.parse("[{}]", second), (8,)) == must_cross(
        whole, Layout.parse("[{}]", second), (8,)
    )
    crossing = must_cross(Layout.parse("[{a}]", first), Layout.parse("[{b}]", second), (8,))
    assert (crossing.entering, crossing.receiving) == (
        4,
        4,
    )  # device 0 holds the first half, device 1 gets it from there
    crossing = must_cross(whole, Layout.parse("[{b}]", second), (8,))
    assert (crossing.entering, crossing.receiving) == (0, 4)


# the cap


def test_the_default_bound_is_a_share_of_the_device_or_twice_the_larger_piece() -> None:
    """To gather everything may be fastest for a value that is little to the device."""
    loose = 0
    for source, target in itertools.product(all_layouts(MESH, 2), repeat=2):
        sizes = [4 * torch.Size(layout.local_shape((512, 512))).numel() for layout in (source, target)]
        for device_bytes in (0, 60 << 20):
            made = plan_move(source, target, (512, 512), torch.float32, PROFILE, device_bytes=device_bytes)
            assert made.peak_bytes <= max(device_bytes // 100, 2 * max(sizes))
        made = plan_move(source, target, (512, 512), torch.float32, PROFILE)
        assert (
            made.seconds == plan_move(source, target, (512, 512), torch.float32, PROFILE, device_bytes=1 << 40).seconds
        )
        loose += made.peak_bytes > 2 * max(sizes)
        capped = plan_move(source, target, (512, 512), torch.float32, PROFILE, memory_cap_bytes=2 << 20)
        assert capped.peak_bytes <= 2 << 20
    assert loose > 0


def test_the_memory_of_a_profile_bounds_moves() -> None:
    """A hundredth of an H100 is 0.8 GB: of values of 64 MiB nothing is bound, of 4 GiB what is more than twice as large
    as the ends."""
    machine = load_profile("h100")
    assert machine.usable_bytes > 60e9
    mesh = Mesh("a=2,b=2,c=2")
    source, target = Layout.parse("[{a,b,c}, {}]", mesh), Layout.parse("[{c,b,a}, {}]", mesh)
    for side in (4096, 32768):
        made = plan_move(source, target, (side, side), torch.float32, machine)
        room = max(int(machine.usable_bytes / 100), made.request.bytes_of(source) * 2)
        assert made.request.roomy == room
        assert made.peak_bytes <= room


def test_a_cap_is_kept_and_the_error_names_the_least_that_has_a_plan() -> None:
    """One byte less has no plan; the least has one, which may be slower."""
    tight = 0
    for source, target in random.Random(1).sample(list(itertools.permutations(all_layouts(MESH, 2), 2)), 60):
        with pytest.raises(LayoutError, match="no plan stays under the memory cap") as error:
            plan_move(source, target, (512, 512), torch.float32, PROFILE, memory_cap_bytes=1)
        least = int(re.search(r"allow (\d+) bytes", str(error.value))[1])  # type: ignore[index]
        made = plan_move(source, target, (512, 512), torch.float32, PROFILE, memory_cap_bytes=least)
        assert made.peak_bytes == least
        free = plan_move(source, target, (512, 512), torch.float32, PROFILE)
        assert free.seconds <= made.seconds * (1 + 1e-9) or made.peak_bytes > 2 * free.peak_bytes
        tight += made.seconds > free.seconds
        with pytest.raises(LayoutError, match="no plan stays under the memory cap"):
            plan_move(source, target, (512, 512), torch.float32, PROFILE, memory_cap_bytes=least - 1)
    assert tight > 0


def test_a_cap_holds_between_meshes_too() -> None:
    source, target = Layout.parse("[{}]", Mesh("a=2")), Layout.parse("[{}]", Mesh("b=2", devices=[2, 3]))
    profile = AlphaBeta(bandwidth={"a": 400e9, "b": 400e9, "link": 5e9})
    with pytest.raises(LayoutError, match="no plan stays under the memory cap") as error:
        plan_move(source, target, (1 << 20,), torch.float32, profile, memory_cap_bytes=1 << 20)
    least = int(re.search(r"allow (\d+) bytes", str(error.value))[1])  # type: ignore[index]
    assert plan_move(source, target, (1 << 20,), torch.float32, profile, memory_cap_bytes=least).peak_bytes == least
    with pytest.raises(LayoutError, match="no plan stays under the memory cap"):
        plan_move(source, target, (1 << 20,), torch.float32, profile, memory_cap_bytes=least - 1)


def test_uneven_pieces_may_need_more_than_the_default_bound() -> None:
    """Then the plan is the cheapest under the least bound that has one."""
    for source, target in itertools.product(all_layouts(Mesh("a=2,b=3"), 1), repeat=2):
        replay(plan_move(source, target, (5,), torch.float32, AlphaBeta()), (5,))


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(LayoutError, match="a size is below 0"):
        plan("[{a}, {}]", "[{}, {}]", shape=(-1, 4))
