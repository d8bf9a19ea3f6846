"""Permutes as communications of rank graphs: what each stage makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.check.devices import run_devices
from tests.collectives import collect
from tests.decompose.programs import program, run
from torch import Tensor, fx

import meshweave as mw
from meshweave.check.completeness import check_complete
from meshweave.check.deadlock import check_deadlock
from meshweave.cost.simulate.step import simulate_roles
from meshweave.engine.for_roles import scheduled
from meshweave.engine.lower import lower
from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir.collectives import WAIT, destinations, permute
from meshweave.ir.graph import Input, Origin, Spec, StepGraph
from meshweave.ir.layout import Layout
from meshweave.ir.rank import RankGraph, ring_index
from meshweave.ir.values import local_values
from meshweave.runtime.executor import compile_tasks
from meshweave.runtime.measured import measured
from meshweave.runtime.tracing import HostClock, Recorder
from meshweave.runtime.world import LocalWorld

MESH = mw.Mesh("a=2,b=3", devices=[4, 0, 5, 1, 3, 2])


def role(to: Any, group: str = "b", mesh: mw.Mesh = MESH) -> tuple[RankGraph, Tensor]:
    """Every device hands in a row of its own."""
    x = torch.arange(mesh.num_devices * 4.0).view(mesh.num_devices, 4)
    layout = "[{" + ",".join(mesh.axis_names) + "}, {}]"
    return program(mesh, {"x": (x, layout)}, lambda call, x: [call(WAIT, call(permute, x, to, group))]), x


# what a permutation is


def test_a_shift_and_a_permutation() -> None:
    assert destinations(1, 4) == (1, 2, 3, 0)
    assert destinations(-1, 4) == destinations(3, 4) == (3, 0, 1, 2)
    assert destinations((2, 0, 1), 3) == (2, 0, 1)
    assert destinations(5, 1) == (0,)


@pytest.mark.parametrize("to", [(0, 0, 1), (0, 1), (1, 2, 3), (0, 1, 2, 3), ()])
def test_what_is_no_permutation_is_an_error_everywhere(to: tuple[int, ...]) -> None:
    with pytest.raises(MeshweaveError, match="must send every member of its group exactly one block") as error:
        destinations(to, 3)
    assert error.value.expected == "each of 0 to 2 once, in a group of 3"
    with pytest.raises(VerifyError, match="permute \\(permute\\) is not a permutation of its group"):
        role(to)
    with pytest.raises(MeshweaveError):
        collect(MESH, permute, ("b",), [torch.ones(1)] * 6, [to])


def inverse(to: int | Sequence[int]) -> int | tuple[int, ...]:
    """The permute that brings everything back."""
    return -to if isinstance(to, int) else tuple(map(list(to).index, range(len(to))))


def test_indices_on_a_ring() -> None:
    """Peers count along the axes that are named, the first slowest."""
    coords = {"a": 1, "b": 2}
    assert ring_index(coords, ("b",), (3,), 1, 2) == 1
    assert ring_index(coords, ("b",), (3,), -1, 0) == 1
    assert ring_index(coords, ("a", "b"), (2, 3), 1, 1) == 0
    assert ring_index(coords, ("b",), (3,), 0, 4) == 1


# running


@pytest.mark.parametrize("group", ["a", "b", "a,b"])
@pytest.mark.parametrize("shift", [0, 1, -1, 2])
def test_blocks_go_to_indices_along_the_axes_of_the_group(group: str, shift: int) -> None:
    """By hand: member i of each group has afterwards what member i - shift had; ids of devices play no part."""
    made, x = role(shift, group)
    found = run(made, {"x": x})
    for members in MESH.groups(tuple(group.split(","))):
        for i, device in enumerate(members):
            source = MESH.index(members[(i - shift) % len(members)])
            assert torch.equal(found[device][0], x[source : source + 1])
    reference = run_devices([made], {("batch", "x"): x})
    assert all(torch.equal(reference[device, ("loss", "0")], out[0]) for device, out in found.items())


def test_what_stays_is_no_copy_and_what_comes_is_one() -> None:
    values = [torch.tensor([float(i)]) for i in range(3)]
    found = collect(mw.Mesh(b=3), permute, ("b",), values, [(0, 2, 1)])
    assert found[0] is values[0]
    assert found[1].data_ptr() != values[2].data_ptr()
    assert collect(mw.Mesh(b=1), permute, ("b",), values[:1], [3])[0] is values[0]


# what belongs together


def test_roles_that_permute_differently_are_refused() -> None:
    """The two roles are the halves of a mesh of four."""
    mesh = mw.Mesh("a=2,b=2")
    first, second = (replace(role(to, "a", mesh=mesh)[0]) for to in ((1, 0), (0, 1)))
    first.devices, second.devices = (0, 1), (2, 3)
    for check in (lower, check_deadlock):
        with pytest.raises(VerifyError, match="differs between its devices") as error:
            check([first, second])
    assert error.value.got is not None
    assert "permute([0, 1], a)" in error.value.got
    twin = replace(first, devices=(2, 3))
    assert check_deadlock([first, twin]).num_communications == 1
    assert len(lower([first, twin]).copies) == 2


def placed(layout: str) -> StepGraph:
    """A step that gives back its input."""
    spec, graph = Spec((6, 4), torch.float32), fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(spec=spec, origin=Origin("forward"), layout=Layout.parse(layout, MESH))
    graph.output([x])
    return StepGraph(graph, (Input("batch", "x", spec),), (("loss", ""),))


def turned(shifts: list[Any], layout: str) -> RankGraph:
    def build(call: Any, x: fx.Node) -> list[fx.Node]:
        x.meta["global"] = "x"
        for to in shifts:
            x = call(WAIT, call(permute, x, to, "b"))
        return [x]

    made = program(MESH, {"x": (torch.zeros(6, 4), layout)}, build)
    return replace(made, outputs=(("loss", ""),), output_layouts=made.layouts)


def test_what_permutes_bring_is_proven() -> None:
    cut = "[{a,b}, {}]"
    for shifts in ([1, -1], [1, 1, 1], [(1, 0, 2), (1, 0, 2)], [0]):
        assert check_complete(placed(cut), [turned(shifts, cut)]).num_communications == len(shifts)
    for shifts in ([1], [1, 1], [(1, 0, 2)], [(1, 2, 0), 1]):
        with pytest.raises(VerifyError, match="does not have its piece"):
            check_complete(placed(cut), [turned(shifts, cut)])
    assert check_complete(placed("[{a}, {}]"), [turned([1], "[{a}, {}]")]).num_communications == 1


def test_parts_of_a_sum_do_not_change_places() -> None:
    partial = "[{a}, {}] partial(sum: b)"
    with pytest.raises(VerifyError, match="joins parts of different sums over b"):
        check_complete(placed(partial), [turned([1, -1], partial)])
    kept = "[{b}, {}] partial(sum: a)"
    assert check_complete(placed(kept), [turned([1, -1], kept)]).num_communications == 2


# time


def test_a_permute_is_priced_as_one_message() -> None:
    profile, num_bytes = mw.load_profile("h100"), 4 << 20
    mesh = mw.Mesh(b=8)

    def seconds(to: Any) -> float:
        x = torch.empty(8, num_bytes // 4, device="meta")
        inputs = {"x": (x, "[{b}, {}]")}
        made = program(mesh, inputs, lambda call, x: [call(WAIT, call(permute, x, to, "b"))])
        assert local_values(made).single(next(n for n in made.graph.nodes if n.target is WAIT)).shape == (
            1,
            num_bytes // 4,
        )  # type: ignore[union-attr]
        (span,) = (s for s in simulate_roles([made], profile).spans if s.kind != "compute")
        assert (span.op, span.kind) == ("permute", "transfer")
        assert span.bytes == pytest.approx(num_bytes if span.seconds else 0)
        return span.seconds

    assert seconds(1) == seconds((1, 0, 3, 2, 5, 4, 7, 6)) == profile.seconds("permute", mesh, ("b",), num_bytes)
    assert seconds(8) == 0.0


def test_a_permute_is_recorded() -> None:
    made, x = role(1)
    made = replace(made, outputs=(("loss", ""),), output_layouts=made.layouts)
    world = LocalWorld(MESH)
    compiled = compile_tasks(made, world.device)
    executor = world.executor([made], [compiled] * 6, None)
    envs = executor.environment()
    for i, env in enumerate(envs):
        env[compiled.inputs[0]] = x[i : i + 1]
    recorder = Recorder(HostClock(), 6)
    executor.record(recorder)
    began = recorder.mark()
    executor.begin(envs)
    for action in ("forward", "backward", "update"):
        executor.run(action)
    found = measured(*scheduled([made], None, 1), recorder.traces(world.devices, began, recorder.mark()))
    (span,) = (s for s in found.spans if s.kind != "compute")
    assert (span.op, span.kind, span.bytes, span.group) == ("permute", "transfer", 16.0, "b")
    assert [s.op for s in found.spans if s.kind == "compute"] == ["start", "wait"]
