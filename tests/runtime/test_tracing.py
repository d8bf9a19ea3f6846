"""Traces of steps that really ran: what is in them, and that they change nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.processes import Job
from tests.training import batches, compile_once, mse, sgd
from torch import fx, nn

import meshweave as mw
from meshweave.capture.batch import Batch
from meshweave.cost.simulate.result import Simulation
from meshweave.engine.for_roles import scheduled
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import STARTS, WAIT, functional
from meshweave.ir.graph import Input, Origin, Spec, op_name
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.runtime import batched_updates
from meshweave.runtime.cluster import shutdown
from meshweave.runtime.executor import Task
from meshweave.runtime.measured import measured
from meshweave.runtime.tracing import Change, DeviceTrace, Event, HostClock, Recorder

MESHES = ["", "dp=2", "tp=2", "fsdp=2,tp=2", "pp=2"]


@pytest.fixture(autouse=True)
def each_op_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_updates, "LARGEST", 0)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compiled(mesh: str, accumulate: int = 1) -> tuple[mw.TrainStep, list[Any]]:
    data = batches(3, (8, 8), (8, 8))
    model = Layers()
    options = {"mesh": mesh, "accumulate": accumulate, "profile": "alpha-beta"}
    optimizer = sgd(model.parameters())
    key = (__name__, mesh, accumulate)
    step = compile_once(key, model, loss=mse, example=data[0], optimizer=optimizer, **options)
    step(data[0])
    return step, data


def traced(step: mw.TrainStep, batch: Any, devices: tuple[int, ...] = ()) -> Simulation:
    _, micros, numbers = step._compiled._prepared(Batch.of(batch))
    return step.session.trace(micros, numbers, devices)


@pytest.mark.parametrize("mesh", MESHES)
def test_every_task_of_a_role_is_a_span_of_its_own(mesh: str) -> None:
    step, data = compiled(mesh)
    found = traced(step, data[1])
    assert found.source == "measured"
    assert found.num_devices == step.program.mesh.num_devices
    for i, role in enumerate(step.program.roles):
        nodes = [n for n in role.graph.nodes if n.op == "call_function" and n.target not in SYMBOLS]
        spans = [s for s in found.spans if s.role == i]
        ran = Counter(s.name for s in spans if s.kind == "compute")
        assert ran == Counter(n.name for n in nodes)
        by_name = {n.name: n for n in nodes}
        for span in spans:
            node = by_name[span.name]
            assert span.names == (node.name,)
            if span.kind == "compute" and node.target not in STARTS and node.target is not WAIT:
                assert span.op == op_name(node.target)
                assert (span.phase, span.module) == (node.meta["origin"].phase, node.meta["origin"].module)
        moved = {s.name for s in spans if s.kind != "compute"}
        assert moved <= {n.name for n in nodes if n.target in STARTS}
        if mesh in ("dp=2", "tp=2", "fsdp=2,tp=2"):
            assert moved == {n.name for n in nodes if n.target in STARTS}


@pytest.mark.parametrize("mesh", MESHES)
def test_times_are_in_order_and_add_up(mesh: str) -> None:
    step, data = compiled(mesh)
    found = traced(step, data[1])
    assert [s.index for s in found.spans] == list(range(len(found.spans)))
    assert [s.start for s in found.spans] == sorted(s.start for s in found.spans)
    for stream in found.streams:
        own = sorted((s for s in found.spans if s.stream == stream), key=lambda s: (s.start, s.end))
        assert own, stream
        for one, other in pairwise(own):
            assert one.end <= other.start + 1e-9
    assert all(s.start >= 0 and s.end <= found.seconds for s in found.spans)
    for role in found.roles:
        assert 0 < role.compute_seconds < found.seconds
        assert 0 <= role.exposed_seconds <= role.communication_seconds <= found.seconds
        assert role.idle_seconds >= 0
    for span in found.spans:
        assert all(found.spans[n].start <= span.end for n in span.needs)
    assert found.edges == tuple((n, s.index) for s in found.spans for n in s.needs)
    assert {s.stream for s in found.spans} == set(found.streams)


def test_communication_knows_its_group_bytes_and_move() -> None:
    step, data = compiled("dp=2")
    found = traced(step, data[1])
    moves = [s for s in found.spans if s.kind == "collective"]
    assert {s.stream for s in moves} == {"comm dp"}
    assert {s.group for s in moves} == {"dp"}
    weights = [s for s in moves if s.op == "all_reduce" and s.bytes == 8 * 8 * 4]
    assert len(weights) == 4  # the gradients of four layers: as many bytes received as they have, 2 (n - 1) / n
    products = [s for s in found.spans if s.flops]
    assert products
    assert all(s.flops == 2.0 * 4 * 8 * 8 for s in products if s.phase == "forward")


@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_a_traced_step_trains_like_any_other(mesh: str) -> None:
    one, data = compiled(mesh)
    other, _ = compiled(mesh)
    traced(one, data[1])
    other(data[1])
    assert one.metrics == other.metrics
    assert one(data[2]) == other(data[2])
    for name, value in one.parameters().items():
        assert torch.equal(value, other.parameters()[name])
    assert one.session.turns.meter is None
    again, once_more = traced(one, data[1]), traced(one, data[1])
    assert [s.name for s in sorted(again.spans, key=lambda s: (s.role, s.kind, s.name))] == [
        s.name for s in sorted(once_more.spans, key=lambda s: (s.role, s.kind, s.name))
    ]


def test_microbatches_are_numbered() -> None:
    step, data = compiled("dp=2", accumulate=2)
    found = traced(step, data[1])
    numbers = {phase: {s.microbatch for s in found.spans if s.phase == phase} for phase in ("forward", "update")}
    assert numbers == {"forward": {0, 1}, "update": {0}}
    assert found.roles[0].exposed_seconds <= found.roles[0].communication_seconds


def test_another_device_may_stand_for_its_role() -> None:
    step, data = compiled("dp=2")
    found = traced(step, data[1], (1,))
    assert found.notes == ("recorded on device 1",)
    with pytest.raises(MeshweaveError, match="this device was not recorded") as caught:
        traced(step, data[1], (7,))
    assert (caught.value.got, caught.value.expected) == ("7", "0, 1")


def test_memory_is_that_of_the_values_that_were_held() -> None:
    step, data = compiled("")
    found = traced(step, data[1])
    (role,) = found.roles
    held = 4 * (8 * 8 + 8) * 4  # bytes of weights and biases
    assert role.persistent_bytes == 2 * held  # and a momentum for each
    assert role.memory[-1][1] >= 2 * held
    assert role.peak_bytes == max(size for _, size in role.memory) > role.persistent_bytes
    assert sum(one.bytes for one in role.at_peak) == role.peak_bytes
    assert {one.kind for one in role.at_peak} >= {"param", "state"}


class LateClock(HostClock):
    """Its marks count up, and works say that they are done only in `settle`, when the step has long ended."""

    def __init__(self) -> None:
        super().__init__()
        self._now, self._late = 0, list[list[Any]]()

    def mark(self) -> int:
        self._now += 10**9
        return self._now

    def when_done(self, work: Any, into: list[Any]) -> None:
        self._late.append(into)

    def settle(self) -> None:
        for into in self._late:
            into.append(self.mark())


def test_a_communication_has_ended_when_its_wait_returns() -> None:
    """However late the backend's thread says so: posted from 1 to 2 and from 3 to 4, waited for from 5 to 6 and from 7
    to 8; the first has a second round, which its wait posts."""
    nodes = {n.name: n for n in waiting().graph.nodes if n.op == "call_function"}
    starts = [n for n in nodes.values() if n.target in STARTS]
    waits = [next(n for n in nodes.values() if n.target is WAIT and n.all_input_nodes == [start]) for start in starts]
    recorder = Recorder(LateClock(), 1)

    def run(node: fx.Node, works: Sequence[str]) -> None:
        began = recorder.mark()
        if works:
            recorder.begun(works)
        recorder.ran(0, Task(node, len, (), {}, 0, (), True, node in starts, node in waits), began)

    for node, works in zip((*starts, *waits), (["a"], ["b"], ["c"], []), strict=True):
        run(node, works)
    (trace,) = recorder.traces([0], 0, recorder.mark())
    assert [(e.name, e.begin, e.end) for e in trace.events if e.is_copy] == [
        (starts[0].name, 1.0, 6.0),
        (starts[1].name, 3.0, 8.0),
    ]


# What is made of given times


def waiting() -> RankGraph:
    """x + x while its sum over d is under way, then the sum plus one."""
    mesh = Mesh("d=2")
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(functional.all_reduce.default, (x, "sum", "d"))
    second = graph.call_function(functional.all_reduce.default, (x, "max", "d"))
    double = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    wait = graph.call_function(WAIT, (second,))
    last = graph.call_function(torch.ops.aten.add.Tensor, (wait, double))
    other = graph.call_function(WAIT, (first,))
    end = graph.call_function(torch.ops.aten.add.Tensor, (other, last))
    for node in (first, second, double, wait, last, other, end):
        node.meta["origin"] = Origin("forward", "layer", "model.py:1")
    graph.output([end])
    layout, item = Layout.replicated(mesh, 1), Input("batch", "x", Spec((4,), torch.float32))
    return RankGraph(graph, mesh, (item,), (layout,), (("loss", ""),), (layout,))


def test_a_wait_exposes_what_its_channel_does() -> None:
    """Posted at 1 and 2, done at 5 and 8 on one channel; compute ends at 3, waits for the second until 9, of which the
    last second is its own work."""
    role = waiting()
    first, second, double, wait, last, other, end = (n.name for n in role.graph.nodes if n.op == "call_function")
    times = [
        (first, 1, 1.5, False), (first, 1, 5, True), (second, 2, 2.25, False), (second, 2, 8, True),
        (double, 2.5, 3, False), (wait, 3, 9, False), (last, 9, 10, False), (other, 10, 10.5, False),
        (end, 10.5, 11, False),
    ]  # fmt: skip
    events = tuple(Event(name, float(a), float(b), is_copy) for name, a, b, is_copy in times)
    changes = (Change("x", 0.5, 16), Change(double, 3.0, 16), Change(double, 10.0, -16))
    traces = [
        DeviceTrace(device=d, began=0.5, ended=11.5, events=events, changes=changes, persistent_bytes=16)
        for d in (0, 1)
    ]
    found = measured(*scheduled([role], None, 1), traces, tokens=3)
    spans = {(s.name, s.kind): s for s in found.spans}
    assert found.seconds == 11.0
    moved = [(s.name, s.start, s.end) for s in found.spans if s.kind == "collective"]
    assert moved == [(first, 0.5, 4.5), (second, 4.5, 7.5)]
    assert spans[first, "collective"].exposed_seconds == 2.0  # from 3 to 5
    assert spans[second, "collective"].exposed_seconds == 3.0  # from 5 to 8
    assert spans[second, "collective"].reasons[0].kind == "dependency"
    assert (spans[wait, "compute"].start, spans[wait, "compute"].end) == (7.5, 8.5)  # the work after it was done
    assert spans[other, "compute"].seconds == 0.5
    (result,) = found.roles
    assert (result.exposed_seconds, result.communication_seconds) == (5.0, 7.0)
    assert result.compute_seconds == 0.5 + 0.25 + 0.5 + 1.0 + 1.0 + 0.5 + 0.5
    assert result.idle_seconds == pytest.approx(11.0 - 4.25 - 5.0)
    assert (result.peak_bytes, result.peak_at, result.persistent_bytes) == (32, 2.5, 16)
    assert found.tokens == 3
    needs = {found.spans[n].name for n in spans[wait, "compute"].needs}
    assert needs == {second}


# Real processes


def job_traced(pipe: Connection, mesh: str) -> dict[str, Any]:
    batched_updates.LARGEST = 0
    step, data = compiled(mesh)
    found = traced(step, data[1])
    after = step(data[2])
    starts = {n.name for n in step.program.roles[0].graph.nodes if n.target in STARTS}
    shutdown(step.session.world)
    return {"found": found, "loss": float(after), "starts": starts}


@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", ["dp=2", "pp=2"])
def test_all_ranks_get_the_whole_picture(start: Callable[..., Job], mesh: str) -> None:
    outcomes = start(f"{__name__}:job_traced", 2, mesh).finish(240)
    assert all("error" not in outcome for outcome in outcomes), outcomes
    (found, other), (loss, other_loss) = ([outcome[key] for outcome in outcomes] for key in ("found", "loss"))
    starts = outcomes[0]["starts"]
    assert found == other
    assert loss == other_loss
    step, data = compiled(mesh)
    local = traced(step, data[1])
    step_loss = step(data[2])
    assert loss == pytest.approx(step_loss.item(), rel=1e-6)
    assert found.source == "measured"
    assert len(found.roles) == len(local.roles)
    compute = [sorted(s.name for s in one.spans if s.kind == "compute") for one in (found, local)]
    assert compute[0] == compute[1]
    assert {s.name for s in found.spans if s.kind != "compute" and s.role == 0} <= starts
    if mesh == "dp=2":
        assert {s.name for s in found.spans if s.kind != "compute"} == starts
    else:
        assert any(s.kind == "transfer" for s in found.spans)
    assert all(s.start >= 0 and s.end <= found.seconds for s in found.spans)
