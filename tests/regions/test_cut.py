"""Where a step is cut into regions: what runs together, what a region reads and gives out."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from tests.models import hugging_face, mlp
from torch import fx

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import STARTS, WAIT
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.ir.values import Values, local_values
from meshweave.runtime.regions.compiler import checked_backend, region_function
from meshweave.runtime.regions.cut import UPDATE_BYTES, Region, Step, cut

CPU = torch.device("cpu")


def step_of(model: str, mesh: str, **arguments: object) -> mw.TrainStep:
    module, batch, loss = mlp(batch=4) if model == "mlp" else hugging_face(model, batch=4, heads=4)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    return mw.compile(module, loss=loss, example=batch, optimizer=optimizer, mesh=mesh, **arguments)  # type: ignore[arg-type]


def outputs_of(role: RankGraph) -> set[fx.Node]:
    return set(next(iter(reversed(role.graph.nodes))).args[0])  # type: ignore[arg-type]


def cut_role(role: RankGraph) -> tuple[list[Step], Mapping[fx.Node, Values]]:
    values = local_values(role).values
    nodes = [n for n in role.graph.nodes if n.op == "call_function" and n.target not in SYMBOLS]
    is_update = [origin_of(n).phase == "update" for n in nodes]
    parts = [[n for n, late in zip(nodes, is_update, strict=True) if late is part] for part in (False, True)]
    return [step for part in cut(parts, outputs_of(role), values) for step in part], values


def test_every_value_that_a_step_reads_is_there_and_every_output_is_made() -> None:
    for mesh in ("", "fsdp=2", "tp=2"):
        role = step_of("llama", mesh).program.rank
        steps, _ = cut_role(role)
        known = {n for n in role.graph.nodes if n.op == "placeholder" or n.target in SYMBOLS}
        for step in steps:
            read = step.inputs if isinstance(step, Region) else step.all_input_nodes
            assert known.issuperset(read)
            known |= set(step.outputs) if isinstance(step, Region) else {step}
        assert known >= outputs_of(role)


def test_communication_stands_between_regions_in_the_order_of_the_graph() -> None:
    role = step_of("llama", "fsdp=2").program.rank
    steps, _ = cut_role(role)
    ours = [s for s in steps if isinstance(s, fx.Node) and (s.target in STARTS or s.target is WAIT)]
    assert ours == [n for n in role.graph.nodes if n.target in STARTS or n.target is WAIT]
    assert sum(isinstance(step, Region) for step in steps) > 4


def test_a_region_gives_out_no_view_and_only_what_is_read() -> None:
    role = step_of("gpt2", "dp=2").program.rank
    steps, values = cut_role(role)
    regions = [step for step in steps if isinstance(step, Region)]
    read = outputs_of(role)
    for step in steps:
        read |= set(step.inputs if isinstance(step, Region) else step.all_input_nodes)
    for region in regions:
        storages = [x.storage for node in (*region.inputs, *region.outputs) for x in values[node]]
        assert len(storages) == len(set(storages))
        assert read.issuperset(region.outputs)


@pytest.mark.slow
def test_the_regions_of_twin_layers_are_one_function() -> None:
    keys = []
    for layers in (3, 5):
        model, batch, loss = hugging_face("llama", batch=4, heads=4, layers=layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        role = mw.compile(model, loss=loss, example=batch, optimizer=optimizer, mesh="fsdp=2").program.rank
        steps, values = cut_role(role)
        symbols = local_values(role).symbols
        regions = [step for step in steps if isinstance(step, Region)]
        keys.append({region_function(region, values, symbols, CPU).key for region in regions})
        assert len(keys[-1]) < len(regions) / 2
    assert keys[0] >= keys[1] or len(keys[1] - keys[0]) <= 2  # of the update, which is cut by bytes


def updates_of_large_layers(optimizer: type[torch.optim.Optimizer]) -> RankGraph:
    """The step of six layers of 4 MiB each."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    step = mw.compile(
        model,
        loss=lambda out, batch: (out - batch["y"]).square().mean(),
        example={"x": torch.zeros(2, 1024), "y": torch.zeros(2, 1024)},
        forward=lambda module, batch: module(batch["x"]),
        optimizer=optimizer(model.parameters(), lr=1e-3),  # type: ignore[call-arg]
        mesh="",
    )
    return step.program.rank


def test_a_region_of_the_update_frees_old_parameters_before_long() -> None:
    role = updates_of_large_layers(torch.optim.SGD)
    steps, values = cut_role(role)
    kept = outputs_of(role)
    made = [
        sum(x.storage_bytes for n in s.outputs if n in kept for x in values[n])
        for s in steps
        if isinstance(s, Region) and s.nodes[-1].meta["origin"].phase == "update"
    ]
    assert len(made) == 6
    assert max(made) == UPDATE_BYTES


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_region_of_the_update_has_whole_updates_in_it(optimizer: type[torch.optim.Optimizer]) -> None:
    """A schedule may run the first op of every update before the second of any."""
    role = updates_of_large_layers(optimizer)
    values, kept = local_values(role).values, outputs_of(role)
    nodes = [n for n in role.graph.nodes if n.op == "call_function" and origin_of(n).phase == "update"]
    depth: dict[fx.Node, int] = {}
    for node in nodes:
        depth[node] = 1 + max((depth.get(n, 0) for n in node.all_input_nodes), default=0)
    breadth_first = sorted(nodes, key=depth.__getitem__)
    assert breadth_first != nodes
    (steps,) = cut([breadth_first], kept, values)
    regions = [step for step in steps if isinstance(step, Region)]
    assert len(regions) >= 6
    for region in regions:
        parted = [n for n in region.outputs if n not in kept and values[n][0].storage_bytes >= UPDATE_BYTES]
        assert len(parted) <= 3  # where it ends, within the update of a single parameter


def test_what_a_compiler_must_not_see_runs_by_itself() -> None:
    role = step_of("mlp", "").program.rank
    values = local_values(role).values
    nodes = [n for n in role.graph.nodes if n.op == "call_function"]
    (steps,) = cut([nodes], outputs_of(role), values, lambda node: node.target is not torch.ops.aten.tanh.default)
    assert [s for s in steps if isinstance(s, fx.Node) and s.target is torch.ops.aten.tanh.default]
    assert not any(n.target is torch.ops.aten.tanh.default for s in steps if isinstance(s, Region) for n in s.nodes)


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(MeshweaveError, match="eager, inductor, background, auto"):
        checked_backend("aot")
