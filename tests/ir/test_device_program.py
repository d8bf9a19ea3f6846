"""One form for passes: a role and a graph of others as device programs, and the way back."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.models import mlp
from torch import fx

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import ALL_GATHER, STARTS, WAIT
from meshweave.ir.device_program import DeviceProgram, graph_program
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph
from meshweave.optimize.overlap.steps import form_of


@pytest.fixture(scope="module")
def role() -> RankGraph:
    model, batch, loss = mlp(batch=8)
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return mw.compile(model, loss=loss, example=batch, optimizer=optimizer, mesh="fsdp=4").program.rank


def test_a_role_has_parts_and_comes_back_as_it_was(role: RankGraph) -> None:
    before = role.text()
    form = form_of(role)
    program = form.program({}, (), with_uneven=True)
    assert role.text() == before
    assert list(program.fences.values()) == [True, False]  # backward, update
    position = {node: i for i, node in enumerate(program.graph.nodes)}
    for node, own in form.nodes.items():
        if node.op == "call_function" and node.target in STARTS and origin_of(node).phase == "forward":
            assert position[own] < position[next(iter(program.fences))]
            mesh, axes = program.group_of(own)
            assert [mesh.size(axis) for axis in axes] == [4]
    assert program.is_whole
    assert all(node.graph is program.graph for node in program.uneven)
    names = [n.name for n in program.graph.find_nodes(op="placeholder") if program.is_releasable(n)]
    assert len(names) == sum(item.kind in ("param", "state") for item in role.inputs)
    assert form.role().text() == before


def gathered(size: int = 2) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    x.meta["val"] = torch.empty(4, 8, device="meta")
    start = graph.call_function(ALL_GATHER.op, (x, size, "g"))
    whole = graph.call_function(WAIT, (start,))
    start.meta["val"] = whole.meta["val"] = torch.empty(4 * size, 8, device="meta")
    graph.output((whole,))
    return graph


def test_a_graph_of_others_names_its_groups() -> None:
    program: DeviceProgram = graph_program(gathered(), {"g": (3, 5)})
    (start,) = [n for n in program.graph.nodes if n.target is ALL_GATHER.op]
    mesh, axes = program.group_of(start)
    assert (mesh.devices, [mesh.size(axis) for axis in axes]) == ((3, 5), [2])
    assert not program.fences
    assert not program.is_whole
    assert program.checks_groups
    assert [len(program.values[n]) for n in program.graph.nodes] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    ("size", "groups", "message"),
    [(2, {"h": (0, 1)}, "is unknown"), (2, None, "is unknown"), (4, {"g": (0, 1)}, "contradicts its group")],
)
def test_a_group_that_is_not_known(size: int, groups: dict[str, tuple[int, ...]] | None, message: str) -> None:
    program = graph_program(gathered(size), groups)
    (start,) = [n for n in program.graph.nodes if n.target is ALL_GATHER.op]
    with pytest.raises(MeshweaveError, match=message):
        program.group_of(start)
