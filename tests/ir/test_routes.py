"""routes: every pair of layouts on any two meshes against arrays of element numbers, and who sends to whom."""

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.effort import calls_of

from meshweave.errors import LayoutError
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.routes import Routes, routes, routes_within

FIRST, SECOND = Mesh("dp=2", devices=[0, 1]), Mesh("dp=2", devices=[2, 3])


def between(source: str, target: str, shape: tuple[int, ...], meshes: tuple[Mesh, Mesh] = (FIRST, SECOND)) -> Routes:
    return routes(Layout.parse(source, meshes[0]), Layout.parse(target, meshes[1]), shape)


def bytes_sent(made: Routes, device: int, itemsize: int) -> int:
    """Bytes that the device sends to others."""
    return itemsize * sum(m.box.num_elements for m in made.sent_by(device) if m.receiver != device)


def lines(made: Routes) -> list[str]:
    """Each message as "sender -> receiver: the elements per dim"."""
    return [
        f"{m.sender} -> {m.receiver}: "
        + ", ".join(f"{o}..{o + s - 1}" for o, s in zip(m.box.offset, m.box.size, strict=True))
        for m in made.messages
    ]


def test_replicas_pair_up() -> None:
    assert lines(between("[{}]", "[{}]", (4,))) == ["0 -> 2: 0..3", "1 -> 3: 0..3"]
    assert lines(between("[{dp}]", "[{dp}]", (4,))) == ["0 -> 2: 0..1", "1 -> 3: 2..3"]


def test_one_sends_to_many_and_many_to_one() -> None:
    one, many = Mesh("a=1", devices=[7]), Mesh("a=3", devices=[0, 1, 2])
    scatter = ["7 -> 0: 0..1", "7 -> 1: 2..3", "7 -> 2: 4..4"]
    gather = ["0 -> 7: 0..1", "1 -> 7: 2..3", "2 -> 7: 4..4"]
    assert lines(between("[{}]", "[{a}]", (5,), (one, many))) == scatter
    assert lines(between("[{a}]", "[{}]", (5,), (many, one))) == gather
    assert lines(between("[{}]", "[{}]", (5,), (many, one))) == ["0 -> 7: 0..4"]


def test_replicas_share_the_sending() -> None:
    many = Mesh("a=2,b=2", devices=[4, 5, 6, 7])
    assert lines(between("[{}]", "[{a,b}]", (8,), (FIRST, many))) == [
        "0 -> 4: 0..1",
        "1 -> 5: 2..3",
        "0 -> 6: 4..5",
        "1 -> 7: 6..7",
    ]
    assert lines(between("[{}]", "[{}]", (8,), (FIRST, many))) == [
        "0 -> 4: 0..7",
        "1 -> 5: 0..7",
        "0 -> 6: 0..7",
        "1 -> 7: 0..7",
    ]


def test_the_one_that_sent_less_comes_before_the_one_opposite() -> None:
    """A tile that a device keeps (the first one here on device 3, in the second case) does not count as sent."""
    target = Mesh("a=3", devices=[1, 2, 4])
    source = Mesh("a=2", devices=[0, 3])
    made = between("[{}]", "[{a}x3]", (7,), (source, target))
    assert lines(made) == ["0 -> 1: 0..2", "3 -> 2: 3..5", "0 -> 4: 6..6"]
    made = between("[{}, {}]", "[{a}x3, {}]", (8, 1), (source, Mesh("a=3", devices=[3, 2, 4])))
    assert lines(made) == ["3 -> 3: 0..2, 0..0", "0 -> 2: 3..5, 0..0", "3 -> 4: 6..7, 0..0"]


def test_what_a_device_holds_stays() -> None:
    turned = Mesh("dp=2", devices=[1, 0])
    assert lines(between("[{dp}]", "[{dp}]", (4,), (FIRST, turned))) == ["0 -> 1: 0..1", "1 -> 0: 2..3"]
    assert lines(between("[{}]", "[{dp}]", (4,), (FIRST, turned))) == ["1 -> 1: 0..1", "0 -> 0: 2..3"]
    overlapping = Mesh("dp=2", devices=[1, 2])
    made = between("[{dp}]", "[{}]", (4,), (FIRST, overlapping))
    assert lines(made) == ["0 -> 1: 0..1", "0 -> 2: 0..1", "1 -> 1: 2..3", "1 -> 2: 2..3"]
    assert not made.is_local
    assert (bytes_sent(made, 0, 4), bytes_sent(made, 1, 4), bytes_sent(made, 2, 4)) == (16, 8, 0)
    assert (made.bytes_received(0, 4), made.bytes_received(1, 4), made.bytes_received(2, 4)) == (0, 8, 16)


@pytest.mark.parametrize(("source", "target"), [("[{}] partial(sum: dp)", "[{}]"), ("[{}]", "[{}] partial(max: dp)")])
def test_partial_values_are_refused(source: str, target: str) -> None:
    with pytest.raises(LayoutError) as error:
        between(source, target, (4,))
    partial = max(source, target, key=len)
    assert str(error.value) == (
        f"a partial value cannot go to another mesh\n  where: {source} -> {target}\n  got: {partial}\n"
        "  expected: no partial axes\n  hint: reduce it on its own mesh first"
    )


@st.composite
def _layouts(draw: st.DrawFn, shape: tuple[int, ...]) -> Layout:
    """A layout on some of the devices 0 to 9 in any order, each axis on a dim (in any order, in any unit) or none."""
    sizes = draw(st.sampled_from([(), (1,), (2,), (3,), (5,), (2, 2), (3, 2), (2, 1, 2), (2, 2, 2)]))
    devices = draw(st.permutations(range(10)))[: prod(sizes)]
    mesh = Mesh(dict(zip("abc", sizes, strict=False)), devices=devices)
    axes: list[list[str]] = [[] for _ in shape]
    for axis in draw(st.permutations(mesh.axis_names)):
        use = draw(st.sampled_from([*range(len(shape)), *range(len(shape)), -1]))
        if use >= 0:
            axes[use].append(axis)
    return Layout(mesh, tuple(DimSharding(tuple(a), draw(st.sampled_from([1, 1, 2, 3]))) for a in axes))


@st.composite
def crossings(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...]]:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 8, 13]), max_size=3)))
    return draw(_layouts(shape)), draw(_layouts(shape)), shape


@given(crossings())
def test_random_crossings_carry_every_element_once(crossing: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    source, target, shape = crossing
    numbers = np.arange(prod(shape)).reshape(shape)
    held = {device: set(numbers[box.slices()].flat) for device, box in source.pieces(shape).items()}
    wanted = {device: numbers[box.slices()] for device, box in target.pieces(shape).items()}
    made = routes(source, target, shape)
    assert sorted(made.messages, key=str) == sorted((m for d in range(10) for m in made.sent_by(d)), key=str)
    assert {m.receiver for m in made.messages} == {device for device, piece in wanted.items() if piece.size}
    for device, piece in wanted.items():
        got = [(m, numbers[m.box.slices()]) for m in made.received_by(device)]
        assert all(m.receiver == device and part.size and set(part.flat) <= held[m.sender] for m, part in got)
        assert sorted(n for _, part in got for n in part.flat) == sorted(piece.flat)
        kept = sorted(n for m, part in got if m.sender == device for n in part.flat)
        assert kept == sorted(held.get(device, set()).intersection(piece.flat))
        assert made.bytes_received(device, 4) == 4 * (piece.size - len(kept))
    remote = [m for m in made.messages if m.sender != m.receiver]
    assert made.is_local == (not remote)
    assert sum(m.box.num_elements for m in remote) == sum(bytes_sent(made, d, 1) for d in range(10))


@given(crossings())
def test_random_crossings_are_balanced(crossing: tuple[Layout, Layout, tuple[int, ...]]) -> None:
    """Greedy: no replica has sent more than another that could have sent its last message instead, but for that one."""
    source, target, shape = crossing
    made, boxes = routes(source, target, shape), source.pieces(shape)
    for device, box in boxes.items():
        remote = [m.box.num_elements for m in made.sent_by(device) if m.receiver != device]
        for other in (d for d, its_box in boxes.items() if its_box == box and box.num_elements):
            assert bytes_sent(made, device, 1) - (remote[-1] if remote else 0) <= bytes_sent(made, other, 1)


# within a mesh

SQUARE = Mesh("a=2,b=2", devices=[4, 5, 6, 7])


def within(source: str, target: str, shape: tuple[int, ...], axes: str, mesh: Mesh = SQUARE) -> Routes:
    return routes_within(Layout.parse(source, mesh), Layout.parse(target, mesh), shape, tuple(axes.split(",")))


def test_axes_change_places_with_a_message_each() -> None:
    """Who has its piece keeps it."""
    assert lines(within("[{a,b}]", "[{b,a}]", (8,), "a,b")) == [
        "4 -> 4: 0..1",
        "5 -> 6: 2..3",
        "6 -> 5: 4..5",
        "7 -> 7: 6..7",
    ]
    assert within("[{a,b}]", "[{b,a}]", (8,), "b,a").messages == within("[{a,b}]", "[{b,a}]", (8,), "a,b").messages


def test_a_replicated_axis_takes_the_place_of_another() -> None:
    """Both replicas send half of what is lacking."""
    assert lines(within("[{a}, {}]", "[{b}, {}]", (4, 1), "a,b")) == [
        "4 -> 4: 0..1, 0..0",
        "5 -> 6: 0..1, 0..0",
        "6 -> 5: 2..3, 0..0",
        "7 -> 7: 2..3, 0..0",
    ]


def test_messages_stay_in_their_groups() -> None:
    """Along b everybody has the same, or parts of one sum: nobody sends there."""
    same = ["4 -> 4: 0..0", "6 -> 6: 1..1", "5 -> 5: 0..0", "7 -> 7: 1..1"]
    for rest in ("", " partial(sum: b)"):
        made = within(f"[{{}}]{rest}", f"[{{a}}]{rest}", (2,), "a")
        assert sorted(lines(made)) == sorted(same)
    made = within("[{a}, {}] partial(max: b)", "[{}, {a}] partial(max: b)", (2, 2), "a")
    assert {(m.sender, m.receiver) for m in made.messages if m.sender != m.receiver} == {(4, 6), (6, 4), (5, 7), (7, 5)}


@pytest.mark.parametrize(
    ("source", "target", "axes"),
    [
        ("[{a}, {}]", "[{b}, {}]", "b"),
        ("[{a}, {}]", "[{}, {}]", "b"),
        ("[{a}, {}] partial(sum: b)", "[{}, {a}] partial(sum: b)", "a,b"),
        ("[{a}, {}] partial(sum: b)", "[{}, {a}]", "a"),
        ("[{a}, {}] partial(sum: b)", "[{}, {a}] partial(max: b)", "a"),
    ],
)
def test_what_a_group_does_not_have_is_refused(source: str, target: str, axes: str) -> None:
    with pytest.raises(LayoutError, match="the pieces cannot be exchanged inside groups of these axes") as error:
        within(source, target, (4, 4), axes)
    assert error.value.got == f"groups of {', '.join(axes.split(','))}"


@st.composite
def turns(draw: st.DrawFn) -> tuple[Layout, Layout, tuple[int, ...], tuple[str, ...]]:
    """Some axes stay, partial, replicated or outermost on a dim; the others go from any places to any others."""
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 6, 8, 13]), min_size=1, max_size=3)))
    sizes = draw(st.sampled_from([(2,), (3,), (2, 2), (3, 2), (2, 1, 2), (2, 2, 2), (2, 3, 2)]))
    mesh = Mesh(dict(zip("abc", sizes, strict=False)), devices=draw(st.permutations(range(prod(sizes)))))
    axes = draw(st.permutations(mesh.axis_names))[: draw(st.integers(1, len(sizes)))]
    places = st.integers(-1, len(shape) - 1)
    still: list[list[str]] = [[] for _ in shape]
    partial = []
    for axis in mesh.axis_names:
        if axis not in axes:
            place = draw(places)
            if place >= 0:
                still[place].append(axis)
            elif draw(st.booleans()):
                partial.append((axis, "sum"))
    units = [draw(st.sampled_from([1, 1, 2])) for _ in shape]
    ends = []
    for _ in range(2):
        dims = [list(outside) for outside in still]
        for axis in draw(st.permutations(axes)):
            place = draw(places)
            if place >= 0:
                dims[place].append(axis)
        cuts = tuple(DimSharding(tuple(names), unit) for names, unit in zip(dims, units, strict=True))
        ends.append(Layout(mesh, cuts, tuple(partial)))
    return ends[0], ends[1], shape, tuple(axes)


@given(turns())
def test_random_turns_carry_every_element_once(turn: tuple[Layout, Layout, tuple[int, ...], tuple[str, ...]]) -> None:
    source, target, shape, axes = turn
    numbers, mesh = np.arange(prod(shape)).reshape(shape), source.mesh
    held = {device: set(numbers[box.slices()].flat) for device, box in source.pieces(shape).items()}
    group_of = {device: set(group) for group in mesh.groups(axes) for device in group}
    made = routes_within(source, target, shape, axes)
    assert all(m.sender in group_of[m.receiver] and m.box.num_elements for m in made.messages)
    assert all(set(numbers[m.box.slices()].flat) <= held[m.sender] for m in made.messages)
    for device, box in target.pieces(shape).items():
        got = [(m.sender, numbers[m.box.slices()]) for m in made.received_by(device)]
        assert sorted(n for _, part in got for n in part.flat) == sorted(numbers[box.slices()].flat)
        kept = sorted(n for sender, part in got if sender == device for n in part.flat)
        assert kept == sorted(held[device].intersection(numbers[box.slices()].flat))
    for device, box in source.pieces(shape).items():
        remote = [m.box.num_elements for m in made.sent_by(device) if m.receiver != device]
        for other in (d for d in group_of[device] if source.box_of(shape, d) == box and box.num_elements):
            assert bytes_sent(made, device, 1) - (remote[-1] if remote else 0) <= bytes_sent(made, other, 1)


@pytest.mark.parametrize("size", [32768, 32773])
def test_turns_of_large_meshes_take_little_time(size: int) -> None:
    mesh = Mesh("a=128,b=128")
    start, goal = Layout.parse("[{a,b}]", mesh), Layout.parse("[{b,a}]", mesh)
    assert len(routes_within.__wrapped__(start, goal, (size,), ("a", "b")).messages) <= 16384
    assert calls_of(lambda: routes_within.__wrapped__(start, goal, (size,), ("a", "b"))) < 100 * 16384


SMALL, LARGE = Mesh("dp=128,tp=2"), Mesh("a=16384")


@pytest.mark.parametrize(
    ("source", "target", "shape", "num_messages"),
    [
        (
            ("[{dp}, {tp}]", SMALL),
            ("[{dp}, {tp}]", Mesh("dp=128,tp=2", devices=range(256, 512))),
            (4096, 512),
            256,
        ),
        (("[{dp}, {}]", SMALL), ("[{dp}, {}]", Mesh("tp=2,dp=128")), (4096, 512), 256),
        (("[]", Mesh("a=1024")), ("[]", Mesh("a=1024", devices=range(1023, -1, -1))), (), 1024),
        (("[{}]", LARGE), ("[{}]", Mesh("a=128,b=128")), (8,), 16384),
    ],
)
def test_large_meshes_take_little_time(
    source: tuple[str, Mesh], target: tuple[str, Mesh], shape: tuple[int, ...], num_messages: int
) -> None:
    """Calls grow with the messages, not with pairs of devices."""
    start, goal = Layout.parse(*source), Layout.parse(*target)
    assert len(routes.__wrapped__(start, goal, shape).messages) == num_messages
    assert calls_of(lambda: routes.__wrapped__(start, goal, shape)) < 40 * num_messages
