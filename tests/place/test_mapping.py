"""Which devices every op runs on, and that copies stand where that changes, once per destination."""

from __future__ import annotations

import pytest
import torch
from tests.models import hugging_face
from tests.training import assert_equals_eager, assert_equals_one_device, batches
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.errors import MeshError, PlanError, VerifyError
from meshweave.ir import ops
from meshweave.ir.graph import origin_of
from meshweave.ir.mesh import Mesh
from meshweave.place.plans import Plan
from meshweave.place.resolve import resolve
from meshweave.program import Program
from meshweave.report.moves import move_rows


class MLP(nn.Module):
    """Three layers, of which the second may be put elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(F.relu(self.second(F.relu(self.first(x)))))


def squares(out: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return ((out - batch[1]) ** 2).mean()


BATCH = torch.randn(4, 6), torch.randn(4, 4)


def program(model: nn.Module, mesh: str | Mesh, plan: Plan | None = None, *, trained: bool = True) -> Program:
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    spec = read_optimizer(optimizer, model) if trained else None
    return build_program(StepSource(model, squares), BATCH, spec, Target(mesh, plan, mw.AlphaBeta()), CaptureOptions())


def crossings(made: Program) -> list[tuple[str, str, list[int], list[int]]]:
    """(phase, value, from, to) of every move between meshes in which something crosses."""
    found = []
    for node in made.placed.graph.nodes:
        if node.target is not ops.move or not node.meta["plan"].bytes_received:
            continue
        source, target = node.args[0].meta["layout"].mesh, node.meta["layout"].mesh
        if source != target:
            found.append((origin_of(node).phase, node.args[0].name, list(source.devices), list(target.devices)))
    return found


def places(made: Program, kind: str) -> dict[str, list[int]]:
    inputs = zip(made.placed.inputs, made.placed.placeholders, strict=True)
    return {i.name: list(n.meta["layout"].mesh.devices) for i, n in inputs if i.kind == kind}


def test_layers_on_devices_cross_in_forward_loss_backward_and_update() -> None:
    mesh = Mesh("pp=3")
    plan = Plan.on({"first": 0, "second": 2, "third": 1})
    made = program(MLP(), mesh, plan)
    assert crossings(made) == [
        ("forward", "relu_default", [0], [2]),
        ("forward", "relu_default_1", [2], [1]),
        ("forward", "div_tensor", [1], [0, 1, 2]),
        ("backward", "mm_default_3", [1], [2]),
        ("backward", "mm_default_5", [2], [0]),
    ]
    home = {"first": [0], "second": [2], "third": [1]}
    assert places(made, "param") == {f"{n}.{p}": home[n] for n in home for p in ("weight", "bias")}
    assert {n.partition("/")[2]: d for n, d in places(made, "state").items()} == places(made, "param")
    assert [rank.devices for rank in made.roles] == [(0,), (1,), (2,)]
    assert places(made, "batch") == {"0": [0, 1, 2], "1": [0, 1, 2]}  # every process is handed the batch


def test_one_mapping_gives_no_copies() -> None:
    made = program(MLP(), "pp=1", Plan.on({"*": 0}))
    assert (crossings(made), len(made.roles)) == ([], 1)
    everywhere = program(MLP(), "dp=2")
    assert (crossings(everywhere), len(everywhere.roles)) == ([], 1)
    assert [r for r in move_rows(everywhere.placed, everywhere.mesh, everywhere.expanded) if "transfer" in r.kind] == []


def test_a_value_goes_once_to_a_place_however_many_use_it_in_both_phases() -> None:
    class Shared(MLP):
        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            return self.third(self.second(hidden) * hidden + hidden)

    made = program(Shared(), "pp=2", Plan.on({"first": 0, "second": 1, "third": 1}))
    forward = [c for c in crossings(made) if c[0] == "forward"]
    assert [c[1:] for c in forward] == [("tanh_default", [0], [1]), ("div_tensor", [1], [0, 1])]
    assert [c[2:] for c in crossings(made) if c[0] == "backward"] == [([1], [0])]  # the summed gradient, once


def test_two_values_go_separately_and_partial_overlap_moves_what_is_missing() -> None:
    class Two(MLP):
        def forward(self, x: Tensor) -> Tensor:
            a, b = self.first(x), torch.sin(self.first(x) * 2)
            return self.third(self.second(a) + b)

    wide, high = Mesh("tp=2", devices=[0, 1]), Mesh("tp=2", devices=[1, 2])
    made = program(Two(), "d=3", Plan.on({"first": wide, "second": high, "third": high}))
    forward = [n for n in made.placed.graph.nodes if n.target is ops.move and origin_of(n).phase == "forward"]
    across = [n for n in forward if n.args[0].meta["layout"].mesh == wide and n.meta["layout"].mesh == high]
    assert [n.args[0].name for n in across] == ["add_tensor", "sin_default"]
    received = [n.meta["plan"].steps[0].bytes_received for n in across]
    assert received == [4 * 8 * 4, 4 * 8 * 4]  # device 2 gets the value, device 1 has it


def test_swapped_devices_exchange_pieces() -> None:
    there, back = Mesh("tp=2", devices=[0, 1]), Mesh("tp=2", devices=[1, 0])

    class Swap(MLP):
        def forward(self, x: Tensor) -> Tensor:
            x = mw.on(mw.repartition(mw.on(F.relu(self.first(x)), there), dim=0, axis="tp"), back)
            return self.third(mw.combine(self.second(x), dim=0, axis="tp"))

    made = program(Swap(), "tp=2", Plan.replicate("tp"))
    assert [rank.devices for rank in made.roles] == [(0, 1)]
    keys = {n.args[1] for n in made.rank.graph.nodes if n.op == "call_function" and n.target.__name__ == "transfer"}
    pairs = {(str(t.source), str(t.target)) for k, t in made.rank.transfers.items() if k in keys}
    assert ("[{tp}, {}]", "[{tp}, {}]") in pairs


def test_what_no_plan_names_runs_where_its_operands_are() -> None:
    made = program(MLP(), "pp=2", Plan.on({"second": 1, "first": 0}))
    assert places(made, "param")["third.weight"] == [1]
    first = program(MLP(), "pp=2", Plan.on({"second": 0, "third": 1}))
    assert places(first, "param")["first.weight"] == [0]  # it has only the batch to follow, so it goes where it is used


def test_tied_weights_live_where_they_are_first_used() -> None:
    class Tied(MLP):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.second(F.relu(self.first(x)))
            return self.third(F.linear(hidden, self.second.weight))

    made = program(Tied(), "pp=3", Plan.on({"first": 0, "second": 1, "third": 2}))
    assert places(made, "param")["second.weight"] == [1]
    assert all(places(made, "state")[f"momentum_buffer/{n}"] == d for n, d in places(made, "param").items())


def test_the_devices_of_a_role_share_one_graph_however_many_they_are() -> None:
    layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    small, large = (program(layers, f"pp=2,dp={n}") for n in (2, 4))
    assert [len(r.devices) for r in small.roles] == [2, 2]
    assert [len(r.devices) for r in large.roles] == [4, 4]
    assert [len(r.graph.nodes) for r in small.roles] == [len(r.graph.nodes) for r in large.roles]


def test_overlapping_devices_split_into_roles_by_the_meshes_they_are_of() -> None:
    low, high = Mesh("tp=2", devices=[0, 1]), Mesh("tp=2", devices=[1, 2])
    made = program(MLP(), "d=3", Plan.on({"first": low, "second": high, "third": low}))
    assert sorted(r.devices for r in made.roles) == [(0,), (1,), (2,)]
    assert [m.devices for m in made.rank.meshes] == [(0, 1, 2), (0, 1), (1, 2)]


# what a plan may say


@pytest.mark.parametrize("where", ["pp=1", "1", [1], 1, Mesh("", devices=[1]), "on [1]"])
def test_devices_are_written_in_many_ways(where: str | list[int] | int | Mesh) -> None:
    found = resolve(Plan.on({"second": where}), MLP(), Mesh("pp=2"))
    assert found.homes["second"].devices == (1,)
    assert found.named == {"pp"} or where == [1]


def test_a_mesh_may_stand_where_a_layout_does() -> None:
    mesh = Mesh("pp=2,dp=2")
    found = resolve(Plan({"second": mesh["pp"][1], "third.weight": "[{dp}, {}]"}), MLP(), mesh)
    assert found.homes["second"] == Mesh("dp=2", devices=[2, 3])
    assert found.shards["third.weight"]["dp"] == 0


def test_unknown_devices_globs_and_contradictions_are_errors() -> None:
    mesh = Mesh("pp=2")
    with pytest.raises(MeshError, match="the plan names devices that the mesh lacks") as error:
        resolve(Plan.on({"second": [1, 5]}), MLP(), mesh)
    assert (error.value.where, error.value.got) == ("second", "5")
    with pytest.raises(MeshError, match="a device is twice"):
        Plan.on({"second": [1, 1]})
    with pytest.raises(MeshError, match="no index 2 on axis 'pp'"):
        resolve(Plan.on({"second": "pp=2"}), MLP(), mesh)
    with pytest.raises(PlanError, match="the plan names no module of the model"):
        resolve(Plan.on({"secnd": 0}), MLP(), mesh)
    with pytest.raises(PlanError, match="the plan assigns second to two sets of devices") as clash:
        resolve(Plan.on({"second": 0}) + Plan.on({"sec*": 1}), MLP(), mesh)
    assert clash.value.got == "[0] and [1]"


def test_a_device_without_a_layer_is_an_error() -> None:
    with pytest.raises(PlanError, match="devices of the mesh have no layer") as error:
        program(MLP(), "pp=3", Plan.on({"first": 0, "second": 0, "third": 1}))
    assert error.value.got == "nothing runs on device 2"


# passes refuse what they were applied to


def test_a_placed_graph_is_not_placed_again_and_an_expanded_one_not_expanded_again() -> None:
    from meshweave.place.expand.expand import expand
    from meshweave.place.movement.plan import plan_move
    from meshweave.place.place import place

    made = program(MLP(), "pp=2,dp=2", Plan.on({"first": "pp=0", "second": "pp=1", "third": "pp=1"}) + Plan.dp("dp"))
    with pytest.raises(VerifyError, match="placement: the graph has been placed already") as again:
        place(made.placed, made.placement, lambda source, target, spec: 0.0)
    assert again.value.expected == "a captured graph, without layouts and moves"
    with pytest.raises(VerifyError, match="expansion: the graph has been expanded already"):
        expand(made.placed, made.mesh, plan_move)
    with pytest.raises(VerifyError, match="expansion: a value has no layout") as early:
        expand(made.captured, made.mesh, plan_move)
    assert early.value.where.startswith("first_weight")


class Staged(nn.Module):
    """A model that says itself where its layers run, without any list of layers."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.first, self.second, self.mesh = nn.Linear(6, 6), nn.Linear(6, 6), mesh

    def forward(self, x: Tensor) -> Tensor:
        x = mw.on(x, self.mesh.at(pp=0))
        return self.second(mw.on(torch.tanh(self.first(x)), self.mesh.at(pp=1)))


@pytest.mark.parametrize("text", ["pp=2", "pp=2,dp=2"])
def test_without_a_plan_operators_say_what_an_axis_named_pp_is_for(text: str) -> None:
    mesh = Mesh(text)
    data = batches(2, (5, 6), (5, 6))
    step = assert_equals_eager(Staged(mesh), data, str(mesh))
    assert [role.devices for role in step.program.roles] == [mesh.at(pp=0).devices, mesh.at(pp=1).devices]


def test_what_comes_before_the_first_layer_runs_with_it_where_its_input_is_pinned_too() -> None:
    """A sequence that is sharded between layers pins what enters the first: the embedding stays there all the same."""
    model, batch, loss = hugging_face("llama", layers=2)
    plan = Plan.stages("pp") + Plan.hf_tp("tp") + Plan.sequence_parallel("tp")
    step = mw.compile(model, loss=loss, example=batch, mesh="pp=2,tp=2", plan=plan)
    homes = step.program.placement.homes
    embedding = [n for n in homes if "embed_tokens" in origin_of(n).module and n.op == "call_function"]
    assert {origin_of(n).phase for n in embedding} >= {"forward", "backward"}
    assert {homes[n] for n in embedding} == {step.program.mesh.at(pp=0)}


class Tabled(nn.Module):
    """Four layers that read a table which follows from a buffer and positions, as rotary embeddings do. `counts`: the
    buffer changes in every step."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.register_buffer("rates", torch.arange(1.0, 7.0), persistent=False)
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        table = torch.outer(torch.arange(4.0), self.rates).cos().softmax(-1)
        if self.counts:
            self.rates.add_(1.0)
        for layer in self.layers:
            x = F.relu(layer(x)) * table
        return x


def to_other_stages(made: Program) -> list[str]:
    """The values that are sent in forward, but the loss, which all devices get."""
    whole = made.mesh.num_devices
    return [value for phase, value, _, target in crossings(made) if phase == "forward" and len(target) < whole]


TABLE_BATCH = torch.arange(24.0).view(4, 6), torch.arange(24.0).view(4, 6)


@pytest.mark.parametrize(("mesh", "stages"), [("pp=4,dp=2", 4), ("pp=2", 2), ("dp=2,pp=2", 2)])
def test_tables_of_constants_are_computed_on_every_stage(mesh: str, stages: int) -> None:
    model = Tabled(counts=False)
    step = assert_equals_eager(model, [TABLE_BATCH] * 2, mesh, loss=squares)
    made = step.program
    values = to_other_stages(made)
    assert len(values) == len(set(values)) == stages - 1  # the activations, each to the next stage
    assert all("mul" in value for value in values)
    for role in made.roles:
        assert sum(node.target is torch.ops.aten.cos.default for node in role.graph.nodes) == 1


def test_tables_of_buffers_that_a_step_changes_are_sent() -> None:
    step = assert_equals_eager(Tabled(counts=True), [TABLE_BATCH] * 2, "pp=2", loss=squares)
    assert len(to_other_stages(step.program)) == 2


def test_stages_of_a_llama_send_activations_only() -> None:
    model, batch, loss = hugging_face("llama", layers=4, batch=4)
    made = mw.compile(model, loss=loss, example=batch, mesh="pp=4,dp=2", accumulate=2).program
    assert len(to_other_stages(made)) == 3


def test_a_table_on_all_devices_does_not_hide_a_device_without_a_layer() -> None:
    model = Tabled(counts=False)
    plan = Plan.on({"layers.[01]": 0, "layers.[23]": 1})
    with pytest.raises(PlanError, match="devices of the mesh have no layer"):
        mw.compile(model, loss=squares, example=TABLE_BATCH, mesh="d=3", plan=plan)


class WritesBeforeANorm(nn.Module):
    """Autograd numbers the gradient of a value again after a write to a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        y[:, 0] = x[:, -1]
        return self.layers[1](self.norm(y))


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=2"])
def test_gradients_of_a_stage_that_writes_in_place_are_added_up_on_it(mesh: str) -> None:
    shape = (8, 3, 4)
    data = [{k: v.double() for k, v in batch.items()} for batch in batches(2, shape, shape)]
    made = assert_equals_one_device(WritesBeforeANorm().double(), data, mesh, accumulate=2).program
    norms = [n for n in made.placed.graph.nodes if n.target is torch.ops.aten.native_layer_norm_backward.default]
    home = places(made, "param")["norm.weight"]
    assert [list(layout.mesh.devices) for n in norms for layout in n.meta["layout"]] == [home] * 3
