"""Rank graphs as task graphs: which copies there are, who waits for whom, and what does not belong together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.effort import calls_of
from torch import fx

from meshweave.engine.lower import Lowered, lower, lower_roles
from meshweave.engine.task_graph import ANY_ACTION, cycle, run_order
from meshweave.errors import VerifyError
from meshweave.ir.collectives import WAIT, functional, transfer
from meshweave.ir.graph import Origin, Spec, op_name
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import Box
from meshweave.ir.rank import RankGraph, Transfer, piece_size
from meshweave.ir.routes import Message

REDUCE = functional.all_reduce.default
GATHER = functional.all_gather_into_tensor.default
EXCHANGE = functional.all_to_all_single.default
F32 = torch.float32
Call = tuple[Any, ...]  # ("op", name) for a local op, else a start with its arguments but for the operand


def role(
    mesh: Mesh,
    calls: Sequence[Call],
    devices: Sequence[int] = (),
    meshes: Sequence[Mesh] = (),
    transfers: dict[str, Transfer] | None = None,
) -> RankGraph:
    """A role that does `calls` in this order, each on line 1, 2, ... of its model. ("wait", name) waits for the start
    of that name; what is not waited for is so at the end."""
    graph = fx.Graph()
    value = graph.placeholder("x")
    started: dict[str, fx.Node] = {}
    for line, (target, *args) in enumerate([*calls, *[("rest",)]], 1):
        if target == "rest":
            nodes = [graph.call_function(WAIT, (start,), name="wait") for start in started.values()]
        elif target == "wait":
            nodes = [graph.call_function(WAIT, (started.pop(args[0]),), name="wait")]
        elif target == "op":
            nodes = [graph.call_function(torch.ops.aten.relu.default, (value,), name=args[0])]
        else:
            symbols = [n for a in args if isinstance(a, tuple) for n in [graph.call_function(a[0], a[1:])]]
            given = [symbols.pop(0) if isinstance(a, tuple) else a for a in args]
            start = graph.call_function(target, (value, *given), name=op_name(target).rpartition(".")[2])
            started[start.name] = start
            nodes = [start]
        for node in nodes:
            node.meta["origin"] = Origin("forward", source=f"model.py:{line}")
    graph.output(())
    return RankGraph(graph, mesh, (), (), (), (), {}, tuple(devices), tuple(meshes), transfers or {})


def needs(lowered: Lowered) -> dict[int, tuple[int, ...]]:
    return {task: needs for task, needs in enumerate(lowered.graph.needs) if needs}


def names(lowered: Lowered, stream: int) -> list[str]:
    return [node.name for node in lowered.nodes[stream]]


# devices


def test_a_collective_of_two_devices() -> None:
    lowered = lower([role(Mesh("a=2"), [("op", "f"), (REDUCE, "sum", "a"), ("op", "g"), ("wait", "all_reduce")])])
    assert names(lowered, 0) == names(lowered, 1) == ["f", "all_reduce", "g", "wait"]
    assert lowered.graph.streams == ((0, 1, 2, 3), (4, 5, 6, 7), (8,))
    assert needs(lowered) == {3: (8,), 7: (8,), 8: (1, 5)}
    assert lowered.graph.actions == (*[0] * 8, ANY_ACTION)
    assert lowered.owners == ((0,), (1,))
    (copy,) = lowered.copies
    assert (copy.op, copy.key, copy.args, copy.sources, copy.targets) == (REDUCE, "a", ("sum",), (1, 5), (3, 7))
    assert [lowered.describe(task) for task in (0, 7, 8)] == [
        "aten.relu (f) on device 0 model.py:1 [forward]",
        "_c10d_functional.wait_tensor (wait) on device 1 model.py:4 [forward]",
        "_c10d_functional.all_reduce over a (all_reduce) model.py:2 [forward]",
    ]


def test_every_group_has_a_channel_with_its_members_in_order() -> None:
    """Over (b, a) the members of the whole group stand in another order than the devices."""
    graph = role(Mesh("a=2,b=2"), [(REDUCE, "sum", "a"), (REDUCE, "sum", "b,a"), (REDUCE, "max", "a")])
    lowered = lower([graph])
    assert len(lowered.graph.streams) == 4 + 3
    starts = [[lowered.graph.stream_of[task] for task in copy.sources] for copy in lowered.copies]
    channels = [tuple(t - lowered.first_copy for t in line) for line in lowered.graph.streams[4:]]
    assert channels == [(0, 1), (2,), (3, 4)]
    assert starts == [[0, 2], [0, 2], [0, 2, 1, 3], [1, 3], [1, 3]]
    assert [copy.args for copy in lowered.copies] == [("sum",), ("max",), ("sum",), ("sum",), ("max",)]


def test_actions_are_as_said() -> None:
    made = role(Mesh("a=2"), [("op", "f"), ("op", "g"), ("op", "h")])
    first, *rest = (node for node in made.graph.nodes if node.op == "call_function")
    lowered = lower([made], actions=[([first], [], rest)])
    assert lowered.graph.actions == (0, 2, 2, 0, 2, 2)


# permutes


def turned(source: str, target: str, axes: tuple[str, ...], shape: tuple[int, ...] = (6, 4)) -> RankGraph:
    """A permute of four devices, with an op between its start and its wait."""
    mesh = Mesh("a=2,b=2", devices=[2, 0, 3, 1])
    made = Transfer(Layout.parse(source, mesh), Layout.parse(target, mesh), Spec(shape, F32), axes)
    return role(mesh, [(transfer, "t0"), ("op", "f"), ("wait", "transfer")], transfers={"t0": made})


def test_a_device_waits_only_for_what_a_permute_brings_it_and_takes_from_it() -> None:
    """(a, b) to (b, a): the first and the last device keep what they have, the two between change places."""
    lowered = lower([turned("[{a,b}, {}]", "[{b,a}, {}]", ("a", "b"))])
    assert lowered.owners == ((2,), (0,), (3,), (1,))
    assert lowered.graph.streams[4:] == ((12,), (13,), (14,), (15,))
    assert needs(lowered) == {2: (12,), 5: (13, 14), 8: (13, 14), 11: (15,), 12: (0,), 13: (3, 6), 14: (6, 3), 15: (9,)}
    assert [copy.messages[0].receiver for copy in lowered.copies] == [2, 0, 3, 1]


def test_groups_of_a_permute_do_not_wait_for_each_other() -> None:
    """Within groups of b a channel has the copies of one device, and the starts of its group alone are matched."""
    graph = turned("[{b}, {}]", "[{}, {b}]", ("b",))
    lowered = lower([graph])
    for copy in lowered.copies:
        starts = {lowered.owners[lowered.graph.stream_of[task]][0] for task in copy.sources}
        assert starts in ({2, 0}, {3, 1})
    half = role(graph.mesh, [("op", "f")], [3, 1], transfers=graph.transfers)
    alone = lower([replace(graph, devices=(2, 0)), half])
    assert [copy.messages[0].receiver for copy in alone.copies] == [2, 0]
    missing = role(graph.mesh, [("op", "f")], [0, 3, 1], transfers=graph.transfers)
    with pytest.raises(VerifyError, match="device 0 does not take part in start 1 of transfer t0"):
        lower([replace(graph, devices=(2,)), missing])


def test_roles_that_differ_in_the_groups_of_a_permute_are_refused() -> None:
    first, second = (turned("[{b}, {}]", "[{}, {b}]", axes) for axes in (("b",), ("a", "b")))
    for make in (lower, lower_roles):
        with pytest.raises(VerifyError, match="two roles have different transfers t0") as error:
            make([replace(first, devices=(2, 0)), replace(second, devices=(3, 1))])
        assert error.value.got is not None
        assert error.value.got.endswith("within groups of a, b (so devices 3, 1)")


# transfers

ONE, TWO, ALL = Mesh("", devices=[0]), Mesh("d=2", devices=[1, 2]), Mesh("p=3")


def scatter() -> list[RankGraph]:
    """Device 0 has a vector of 5, of which 1 gets three elements and 2 two."""
    made = Transfer(Layout.parse("[{}]", ONE), Layout.parse("[{d}]", TWO), Spec((5,), F32))
    call = [(transfer, "t0")]
    return [role(ALL, call, mesh.devices, (ALL, ONE, TWO), {"t0": made}) for mesh in (ONE, TWO)]


def test_a_transfer_is_a_copy_per_receiver() -> None:
    """The receiver waits for its own copy, the sender for both."""
    lowered = lower(scatter())
    assert lowered.graph.streams == ((0, 1), (2, 3), (4, 5), (6,), (7,))
    assert needs(lowered) == {1: (6, 7), 3: (6,), 5: (7,), 6: (2, 0), 7: (4, 0)}
    boxes = [Box((0,), (3,)), Box((3,), (2,))]
    assert [copy.messages for copy in lowered.copies] == [(Message(0, 1, boxes[0]),), (Message(0, 2, boxes[1]),)]
    assert [(copy.sources, copy.targets) for copy in lowered.copies] == [((0,), (3,)), ((0,), (5,))]
    assert lowered.describe(7) == "transfer over t0 to device 2 (transfer) model.py:1 [forward]"


def test_what_stays_on_a_device_needs_no_other() -> None:
    """From [0, 1] to [1, 2], both in halves: 1 has the second and wants the first, 2 gets the second."""
    source, target = Mesh("s=2", devices=[0, 1]), Mesh("t=2", devices=[1, 2])
    made = Transfer(Layout.parse("[{s}]", source), Layout.parse("[{}]", target), Spec((4,), F32))
    roles = [role(ALL, [(transfer, "t0")], [d], (ALL, source, target), {"t0": made}) for d in range(3)]
    lowered = lower(roles)
    halves = [Box((0,), (2,)), Box((2,), (2,))]
    assert [copy.messages for copy in lowered.copies] == [
        (Message(0, 1, halves[0]), Message(1, 1, halves[1])),
        (Message(0, 2, halves[0]), Message(1, 2, halves[1])),
    ]
    assert needs(lowered) == {1: (6, 7), 3: (6, 7), 5: (7,), 6: (2, 0), 7: (4, 0, 2)}


# what does not belong together


def two(first: Sequence[Call], second: Sequence[Call]) -> list[RankGraph]:
    mesh = Mesh("a=2,b=2")
    return [role(mesh, first, [0, 1]), role(mesh, second, [2, 3])]


@pytest.mark.parametrize("make", [lower, lower_roles])
@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            [(GATHER, 2, "a")],
            "start 1 of group a{members} differs between its devices\n"
            "  where: model.py:1 [forward]\n"
            "  got: all_gather_into_tensor = _c10d_functional.all_gather_into_tensor(2, a) on {second}\n"
            "  expected: all_reduce = _c10d_functional.all_reduce(sum, a) on {first}, model.py:1 [forward]",
        ),
        (
            [("op", "f"), (REDUCE, "max", "a")],
            "start 1 of group a{members} differs between its devices\n"
            "  where: model.py:2 [forward]\n"
            "  got: all_reduce = _c10d_functional.all_reduce(max, a) on {second}\n"
            "  expected: all_reduce = _c10d_functional.all_reduce(sum, a) on {first}, model.py:1 [forward]",
        ),
        (
            [],
            "{second} does not take part in start 1 of group a{members}\n"
            "  where: model.py:1 [forward]\n"
            "  got: no start of it there\n"
            "  expected: as many as {first} has: all_reduce = _c10d_functional.all_reduce(sum, a) on {first}",
        ),
        (
            [(REDUCE, "sum", "a"), ("op", "f"), (REDUCE, "sum", "a")],
            "{first} does not take part in start 2 of group a{members}\n"
            "  where: model.py:3 [forward]\n"
            "  got: last all_reduce = _c10d_functional.all_reduce(sum, a) on {first}, model.py:1 [forward]\n"
            "  expected: as many as {second} has: all_reduce_1 = _c10d_functional.all_reduce(sum, a) on {second}",
        ),
    ],
)
def test_starts_that_differ_are_refused(make: Any, second: Sequence[Call], message: str) -> None:
    with pytest.raises(VerifyError) as error:
        make(two([(REDUCE, "sum", "a")], second))
    if make is lower:
        shown = {"members": " [0, 2]", "first": "device 0", "second": "device 2"}
    else:
        shown = {"members": "", "first": "devices 0, 1", "second": "devices 2, 3"}
    assert str(error.value) == message.format(**shown)


def test_symbols_of_two_graphs_are_compared_by_what_they_say() -> None:
    size = (piece_size, 5, ("a",), (2,), 1)
    other = (piece_size, 7, ("a",), (2,), 1)
    calls = [[(EXCHANGE, one, one, "a")] for one in (size, other)]
    assert len(lower(two(calls[0], calls[0])).copies) == 2
    with pytest.raises(VerifyError) as error:
        lower(two(*calls))
    assert error.value.got == (
        "all_to_all_single = _c10d_functional.all_to_all_single("
        "piece_size(7, [a], [2], 1), piece_size(7, [a], [2], 1), a) on device 2"
    )


@pytest.mark.parametrize("make", [lower, lower_roles])
def test_roles_that_differ_in_a_transfer_are_refused(make: Any) -> None:
    roles = scatter()
    back = roles[0].transfers["t0"]
    roles[1].transfers = {"t0": Transfer(back.source, back.target, Spec((6,), F32))}
    with pytest.raises(VerifyError) as error:
        make(roles)
    assert str(error.value) == (
        "two roles have different transfers t0\n"
        "  got: float32[6] from [{}] on device 0 to [{d}] on devices 1, 2 (so devices 1, 2)\n"
        "  expected: float32[5] from [{}] on device 0 to [{d}] on devices 1, 2 (so device 0)"
    )


@pytest.mark.parametrize("make", [lower, lower_roles])
def test_a_device_that_takes_part_in_a_transfer_of_others(make: Any) -> None:
    made = Transfer(Layout.parse("[{}]", ONE), Layout.parse("[{}]", Mesh("", devices=[1])), Spec((5,), F32))
    roles = [role(ALL, [(transfer, "t0")], [d], (ALL, *made_meshes(made)), {"t0": made}) for d in range(3)]
    with pytest.raises(VerifyError) as error:
        make(roles)
    assert str(error.value) == (
        "device 2 takes part in transfer t0 but is not a member\n"
        "  where: model.py:1 [forward]\n"
        "  got: transfer = transfer(t0) on device 2\n"
        "  expected: only devices 0, 1"
    )


def made_meshes(made: Transfer) -> tuple[Mesh, Mesh]:
    return made.source.mesh, made.target.mesh


def test_a_start_without_a_wait() -> None:
    graph = role(Mesh("a=2"), [("op", "f"), (REDUCE, "sum", "a")])
    (wait,) = (n for n in graph.graph.nodes if n.target is WAIT)
    graph.graph.erase_node(wait)
    with pytest.raises(VerifyError) as error:
        lower([graph])
    assert str(error.value) == (
        "all_reduce has 0 waits\n  where: model.py:2 [forward]\n  expected: exactly one wait for every start"
    )


# roles


def test_roles_meet_at_every_communication() -> None:
    """Both do t0, role 1 does a reduction of its own, then both do t1; the next start needs the copy before it."""
    made = scatter()[0].transfers["t0"]
    meshes, table = (ALL, ONE, TWO), {"t0": made, "t1": made}
    lowered = lower_roles(
        [
            role(ALL, [(transfer, "t0"), (transfer, "t1")], [0], meshes, table),
            role(ALL, [(transfer, "t0"), (REDUCE, "sum", "m2.d"), (transfer, "t1")], [1, 2], meshes, table),
        ]
    )
    assert lowered.owners == ((0,), (1, 2))
    assert names(lowered, 1) == ["transfer", "all_reduce", "transfer_1"]
    assert lowered.graph.streams == ((0, 1), (2, 3, 4), (5,), (6,), (7,))
    assert needs(lowered) == {1: (5,), 3: (5,), 4: (7,), 5: (0, 2), 6: (1, 4), 7: (3,)}
    assert [str(copy) for copy in lowered.copies] == [
        "transfer over t0",
        "transfer over t1",
        "_c10d_functional.all_reduce over m2.d",
    ]


def test_roles_that_come_in_another_order_do_not_end() -> None:
    made = scatter()[0].transfers["t0"]
    meshes, table = (ALL, ONE, TWO), {"t0": made, "t1": made}
    orders = [[(transfer, "t0"), (transfer, "t1")], [(transfer, "t1"), (transfer, "t0")]]
    lowered = lower_roles(
        [role(ALL, calls, mesh.devices, meshes, table) for calls, mesh in zip(orders, (ONE, TWO), strict=True)]
    )
    circle = cycle(lowered.graph, run_order(lowered.graph))
    assert [lowered.describe(task) for task in circle] == [
        "transfer (transfer_1) on device 0 model.py:2 [forward]",
        "transfer over t0 (transfer) model.py:1 [forward]",
        "transfer (transfer_1) on devices 1, 2 model.py:2 [forward]",
        "transfer over t1 (transfer_1) model.py:2 [forward]",
    ]


def test_the_work_for_roles_of_1024_devices_grows_with_their_nodes() -> None:
    """Four stages of 256 devices, 4,000 nodes each: what a check of it costs."""
    mesh = Mesh("pp=4,dp=256")
    stages = [mesh["pp"][i] for i in range(4)]
    layouts = [Layout.replicated(stage, 1) for stage in stages]
    table = {f"t{k}": Transfer(layouts[k % 3], layouts[k % 3 + 1], Spec((4096,), F32)) for k in range(600)}
    roles = []
    for i, stage in enumerate(stages):
        calls: list[Call] = []
        for k in range(600):
            calls += [("op", f"f{k}"), (REDUCE, "sum", f"m{i + 1}.dp"), ("op", f"g{k}")]
            calls += [(transfer, f"t{k}")] if i in (k % 3, k % 3 + 1) else []
        roles.append(role(mesh, calls, stage.devices, (mesh, *stages), table))
    assert [len(r.graph.nodes) for r in roles] == [2802, 3202, 3202, 2802]
    lowered = lower_roles(roles)

    def run() -> list[int]:
        graph = lower_roles(roles).graph
        return cycle(graph, run_order(graph))

    assert run() == []
    assert calls_of(run) < 100 * 12_000
    assert len(lowered.copies) == 4 * 600 + 600


def test_groups_within_a_role_are_its_own_business() -> None:
    """Both roles have groups b, of their own devices: one gathers where the other reduces, and once more. Groups a
    reach over both."""
    first = [(GATHER, 2, "b"), ("wait", "all_gather_into_tensor"), (REDUCE, "sum", "a"), ("wait", "all_reduce")]
    second = [(REDUCE, "sum", "a"), ("wait", "all_reduce"), (REDUCE, "sum", "b"), (REDUCE, "max", "b")]
    for make in (lower, lower_roles):
        copies = [str(copy) for copy in make(two(first, second)).copies]
        assert sum(text.startswith("_c10d_functional.all_reduce over b") for text in copies) == 2
    mesh = Mesh("a=2,b=2")
    across = [role(mesh, first, [0, 2]), role(mesh, second, [1, 3])]
    with pytest.raises(VerifyError, match="group b"):
        lower_roles(across)
