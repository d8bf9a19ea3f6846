"""Plans: how they add up, what axis names mean, what globs and styles name, and errors of those that name nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.training import mse, sgd
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import LayoutError, MeshError, PlanError
from meshweave.ir.mesh import Mesh
from meshweave.place.plan_text import plan_of
from meshweave.place.plans import Plan
from meshweave.place.resolve import check_axes, default_plan, hf_tp_plan, resolve

TP, DP_TP = Mesh("tp=2"), Mesh("dp=2,tp=2")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up_proj = nn.Linear(4, 8)
        self.down_proj = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down_proj(torch.relu(self.up_proj(self.norm(x))))


class Model(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.last = nn.LayerNorm(4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


class WithPlan(Model):
    _tp_plan = {"layers.*.up_proj": "colwise", "layers.*.down_proj": "rowwise_rep"}


def shards(plan: Plan, model: nn.Module | None = None, mesh: Mesh = TP) -> dict[str, dict[str, int]]:
    return resolve(plan, model if model is not None else Model(1), mesh).shards


# the algebra


def test_dp_and_fsdp_over_two_axes_cut_the_batch_by_both_and_the_state_by_one() -> None:
    found = resolve(Plan.dp("a") + Plan.fsdp("b") + Plan.dp("a"), Model(), Mesh("a=2,b=2"))
    assert (found.batch_axes, found.state_axes) == (["a", "b"], ["b"])
    assert (found.shards, found.pins) == ({}, [])


# what axis names mean


def test_axis_names_have_their_usual_meaning() -> None:
    mesh = Mesh("dp=2,fsdp=2,tp=2,pp=2")
    usual = Plan.dp("dp") + Plan.fsdp("fsdp") + Plan.auto_tp("tp") + Plan.stages("pp")
    assert default_plan(Model(), mesh) == usual
    mesh = Mesh("dp=2,fsdp=2,tp=2")
    assert default_plan(WithPlan(), mesh) == Plan.dp("dp") + Plan.fsdp("fsdp") + Plan.hf_tp("tp")
    assert default_plan(Model(), Mesh("")) == Plan()


def test_another_axis_name_needs_a_plan_unless_its_size_is_one() -> None:
    assert default_plan(Model(), Mesh("dp=2,pp=1,ep=2")) == Plan.dp("dp")
    one, two = Mesh("dp=2,ep=1"), Mesh("dp=2,ep=2")
    check_axes(resolve(None, Model(), one), one)
    check_axes(resolve(None, Model(), two), two, by_operators=["ep"])
    with pytest.raises(PlanError, match="axis 'ep' has no usual meaning") as error:
        check_axes(resolve(None, Model(), two), two)
    assert (error.value.where, error.value.got) == ("mesh dp=2,ep=2", "ep")
    assert "for models with parameters stacked over experts" in error.value.hint
    three = Mesh("dp=2,sp=2")
    with pytest.raises(PlanError) as error:
        check_axes(resolve(None, Model(), three), three)
    assert error.value.hint == 'pass a plan, for example mw.Plan.dp("sp")'


def test_an_axis_that_the_plan_leaves_out_is_an_error_unless_its_size_is_one() -> None:
    assert resolve(Plan.dp("dp"), Model(), Mesh("dp=2,tp=1")).batch_axes == ["dp"]
    assert resolve(Plan.dp("dp") + Plan.replicate("tp"), Model(), DP_TP).named == {"dp", "tp"}
    check_axes(resolve(Plan.dp("dp"), Model(), DP_TP), DP_TP, by_operators=["tp"])
    with pytest.raises(PlanError, match="the plan does not use axis dp, tp") as error:
        check_axes(resolve(Plan(), Model(), DP_TP), DP_TP)
    assert error.value.where == "mesh dp=2,tp=2"
    assert 'mw.Plan.replicate("dp")' in error.value.hint


@pytest.mark.parametrize("plan", [Plan.dp("data"), Plan.tp("data", {"*.up_proj": "colwise"}), Plan.auto_tp("data")])
def test_an_axis_that_the_mesh_lacks_is_an_error(plan: Plan) -> None:
    with pytest.raises(MeshError, match="data") as error:
        resolve(plan, Model(), TP)
    assert "tp" in str(error.value)


def test_a_layout_over_an_axis_that_the_mesh_lacks_is_an_error() -> None:
    with pytest.raises(MeshError, match="data"):
        resolve(Plan({"*.up_proj.weight": "[{data}, {}]"}), Model(), TP)


# styles


@pytest.mark.parametrize(
    ("style", "hint"), [("colwize", "did you mean colwise?"), ("row_wise", "did you mean rowwise?"), ("zzz", "")]
)
def test_a_style_that_does_not_exist_shows_its_neighbours(style: str, hint: str) -> None:
    with pytest.raises(PlanError, match=f"'{style}' is not a style") as error:
        Plan.tp("tp", {"*.up_proj": style})
    assert error.value.where == "*.up_proj"
    assert (error.value.expected, error.value.hint) == ("colwise, rowwise, sequence, replicate", hint)


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.linear, self.bare = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.embed, self.conv, self.conv1d = nn.Embedding(4, 4), nn.Conv2d(4, 4, 1), Conv1D(4, 4)
        self.norm = nn.LayerNorm(4)


@pytest.mark.parametrize(
    ("module", "style", "dims"),
    [
        ("linear", "colwise", {"weight": 0, "bias": 0}),
        ("linear", "rowwise", {"weight": 1, "bias": -1}),
        ("bare", "colwise", {"weight": 0}),
        ("embed", "colwise", {"weight": 1}),
        ("embed", "rowwise", {"weight": 0}),
        ("conv", "colwise", {"weight": 0, "bias": 0}),
        ("conv", "rowwise", {"weight": 1, "bias": -1}),
        ("conv1d", "colwise", {"weight": 1, "bias": 0}),
        ("conv1d", "rowwise", {"weight": 0, "bias": -1}),
        ("norm", "replicate", {"weight": -1, "bias": -1}),
    ],
)
def test_the_dim_that_a_style_cuts_by_kind_of_module(module: str, style: str, dims: dict[str, int]) -> None:
    found = shards(Plan.tp("tp", {module: style}), Kinds())
    assert found == {f"{module}.{param}": {"tp": dim} for param, dim in dims.items()}


def test_colwise_means_nothing_for_a_norm() -> None:
    with pytest.raises(PlanError, match="colwise means nothing for a LayerNorm") as error:
        shards(Plan.tp("tp", {"*.norm": "colwise"}))
    assert error.value.where == "layers.0.norm (from *.norm)"
    assert error.value.expected == "a module of type Linear, Embedding, Conv1D, Conv2d"


def test_a_glob_names_whole_names_or_their_ends() -> None:
    for glob in ("up_proj", "*.up_proj", "layers.*.up_proj", "layers.[01].up_*"):
        assert sorted(shards(Plan.tp("tp", {glob: "colwise"}), Model())) == [
            f"layers.{i}.up_proj.{p}" for i in (0, 1) for p in ("bias", "weight")
        ]
    assert list(shards(Plan.tp("tp", {"layers.1.up_proj": "colwise"}), Model())) == [
        "layers.1.up_proj.weight",
        "layers.1.up_proj.bias",
    ]


@pytest.mark.parametrize(
    ("glob", "near"),
    [("layers.*.up_prj", "layers.*.up_proj"), ("*.down_pro", "layers.*.down_proj"), ("layer.*.norm", "layers.*.norm")],
)
def test_a_glob_that_names_no_module_shows_near_misses(glob: str, near: str) -> None:
    with pytest.raises(PlanError, match="the plan names no module of the model") as error:
        shards(Plan.tp("tp", {glob: "colwise"}), Model())
    assert error.value.got == glob
    assert near in error.value.expected.removeprefix("one of ").split(", ")
    assert error.value.hint == "globs match whole names; * matches any part"


def test_a_plan_that_contradicts_itself_is_an_error() -> None:
    plan = Plan.tp("tp", {"*.up_proj": "colwise", "layers.0.up_*": "rowwise"})
    with pytest.raises(PlanError, match=re.escape("contradicts itself about layers.0.up_proj.weight over tp")) as error:
        shards(plan)
    assert (error.value.where, error.value.got) == ("layers.0.up_*", "dim 0 and dim 1")
    with pytest.raises(PlanError, match="the plan contradicts itself") as error:
        shards(Plan.tp("tp", {"*.up_proj": "colwise"}) + Plan.tp("tp", {"*.up_proj": "replicate"}))
    assert error.value.got == "dim 0 and replicate"
    same = Plan.tp("tp", {"*.up_proj": "colwise"})
    assert shards(same + same) == shards(same)
    both = resolve(same + Plan.tp("dp", {"*.up_proj": "rowwise"}), Model(1), DP_TP)
    assert both.shards["layers.0.up_proj.weight"] == {"tp": 0, "dp": 1}


@pytest.mark.parametrize(
    "text", ["zero1:dp+fsdp:dp", "shard_state:dp+zero2:dp", "zero1:dp+zero2:dp", "zero1:dp+zero2:tp"]
)
def test_stages_of_zero_exclude_each_other(text: str) -> None:
    with pytest.raises(PlanError, match="stages of ZeRO exclude each other"):
        resolve(plan_of(text), Model(1), DP_TP)
    resolve(plan_of("zero1:dp+shard_state:tp+zero1:dp"), Model(1), DP_TP)


def test_tied_weights_are_named_once_and_contradict_each_other() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "out": nn.Linear(4, 6, bias=False)})
    model["out"].weight = model["embed"].weight
    assert shards(Plan.tp("tp", {"embed": "rowwise", "out": "colwise"}), model) == {"embed.weight": {"tp": 0}}
    with pytest.raises(PlanError, match=re.escape("contradicts itself about embed.weight")):
        shards(Plan.tp("tp", {"embed": "colwise", "out": "colwise"}), model)


# layouts


def test_a_layout_names_parameters_and_leaves_the_other_axes_whole() -> None:
    found = resolve(Plan({"*.up_proj.weight": "[{tp}, {}]"}) + Plan.dp("dp"), Model(1), DP_TP)
    assert found.shards == {"layers.0.up_proj.weight": {"tp": 0, "dp": -1}}
    assert found.pins == []
    both = resolve(Plan({"*.up_proj.weight": "[{tp}, {dp}]"}), Model(1), DP_TP)
    assert both.shards == {"layers.0.up_proj.weight": {"dp": 1, "tp": 0}}


@pytest.mark.parametrize(
    ("glob", "pins"),
    [
        ("layers.*", [("layers.0", "out"), ("layers.1", "out")]),
        ("layers.*:out", [("layers.0", "out"), ("layers.1", "out")]),
        ("layers.1:in", [("layers.1", "in")]),
        ("*.norm", [("layers.0.norm", "out"), ("layers.1.norm", "out")]),
    ],
)
def test_a_layout_names_what_enters_or_leaves_modules(glob: str, pins: list[tuple[str, str]]) -> None:
    glob = glob.replace("layers.*", "layers.[01]")
    found = resolve(Plan({glob: "[{dp}, {tp}, {}]"}), Model(), DP_TP)
    assert found.pins == [(name, side, "dp=0;tp=1") for name, side in pins]
    assert found.shards == {}


def test_a_layout_over_a_module_replicates_over_the_axes_that_it_leaves_out() -> None:
    found = resolve(Plan({"last": "[{dp}, {}, {}]"}) + Plan.replicate("tp"), Model(), DP_TP)
    assert found.pins == [("last", "out", "tp=r;dp=0")]


def test_a_pinned_value_has_its_layout_in_the_placed_graph() -> None:
    plan = Plan({"layers.0:in": "[{dp}, {tp}, {}]", "last": "[{tp}, {}, {}]"}) + Plan.dp("dp")
    model, example = Model(1), {"tokens": torch.zeros(4, 6, dtype=torch.int64), "y": torch.zeros(4, 6, 4)}
    step = mw.compile(model, loss=mse, example=example, optimizer=sgd(model.parameters()), mesh="dp=2,tp=2", plan=plan)
    rows = [(r.kind, r.module, r.source, r.target) for r in step.explain() if r.phase == "forward"]
    assert rows[0] == ("slice", "embed", "[{dp}, {}, {}]", "[{dp}, {tp}, {}]")
    assert rows[3] == ("all_gather+all_to_all", "last", "[{dp}, {tp}, {}]", "[{tp}, {}, {}]")


def test_a_layout_that_names_nothing_shows_near_misses_among_parameters_and_modules() -> None:
    with pytest.raises(PlanError, match="the plan names no parameter or module of the model") as error:
        shards(Plan({"layers.*.up_proj.wieght": "[{tp}, {}]"}), Model())
    assert "layers.*.up_proj.weight" in error.value.expected


def test_a_layout_of_another_rank_than_the_parameter_is_an_error() -> None:
    with pytest.raises(LayoutError, match="differ in their number of dims"):
        shards(Plan({"*.up_proj.bias": "[{tp}, {}]"}))


def test_a_plan_cannot_ask_for_partial_values() -> None:
    with pytest.raises(PlanError, match="cannot ask for partial values"):
        shards(Plan({"*.up_proj.weight": "[{}, {}] partial(sum: tp)"}))


# Hugging Face plans and sequence parallel


def test_a_hugging_face_plan_is_read_from_the_model() -> None:
    assert hf_tp_plan(WithPlan()) == WithPlan._tp_plan
    wrapper = nn.ModuleDict({"model": WithPlan(1), "teacher": WithPlan(1)})
    assert hf_tp_plan(wrapper) == {f"{n}.{g}": s for n in wrapper for g, s in WithPlan._tp_plan.items()}
    assert {n.partition(".")[2]: dims for n, dims in shards(Plan.hf_tp("tp"), wrapper).items()} == shards(
        Plan.hf_tp("tp"), WithPlan(1)
    )
    assert shards(Plan.hf_tp("tp"), WithPlan(1)) == {
        "layers.0.up_proj.weight": {"tp": 0},
        "layers.0.up_proj.bias": {"tp": 0},
        "layers.0.down_proj.weight": {"tp": 1},
        "layers.0.down_proj.bias": {"tp": -1},
    }


@pytest.mark.parametrize(
    ("styles", "message"),
    [
        (None, "the model has no Hugging Face tp plan"),
        ({"layers.*.up_proj": "ep_router"}, "tp style 'ep_router' is not supported"),
        ({"blocks.*.up_proj": "colwise"}, "the model's tp plan matches none of its modules"),
    ],
)
def test_a_hugging_face_plan_that_cannot_be_followed_is_an_error(styles: Any, message: str) -> None:
    model = Model()
    model._tp_plan = styles
    with pytest.raises(PlanError, match=re.escape(message)):
        shards(Plan.hf_tp("tp"), model)


def test_sequence_parallel_pins_layers_and_their_norms_along_dim_1() -> None:
    found = resolve(Plan.sequence_parallel("tp"), Model(), TP)
    assert found.pins == [
        ("layers.0", "in", "tp=1"),
        ("layers.0", "out", "tp=1"),
        ("layers.1", "out", "tp=1"),
        ("layers.0.norm", "out", "tp=1"),
        ("layers.1.norm", "out", "tp=1"),
        ("last", "out", "tp=1"),
    ]


def test_sequence_parallel_needs_a_list_of_layers() -> None:
    with pytest.raises(PlanError, match="sequence parallel needs a list of layers"):
        resolve(Plan.sequence_parallel("tp"), nn.Linear(2, 2), TP)


def test_errors_of_a_plan_reach_the_user_of_compile() -> None:
    model, example = nn.Linear(4, 4), {"input": torch.ones(2, 4), "y": torch.ones(2, 4)}
    with pytest.raises(PlanError, match="the plan names no module"):
        mw.compile(model, loss=mse, example=example, mesh="tp=2", plan=Plan.tp("tp", {"*.q_proj": "colwise"}))


def test_kept_parameters_are_gathered_once_and_train_the_same() -> None:
    def trained(plan: mw.Plan) -> tuple[mw.TrainStep, list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        batch = {"x": torch.arange(32.0).view(4, 8) / 32, "y": torch.ones(4, 8)}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = lambda out, batch: (out - batch["y"]).square().mean()  # noqa: E731
        step = mw.compile(
            model,
            loss=loss,
            example=batch,
            optimizer=optimizer,
            mesh="fsdp=2",
            plan=plan,
            forward=lambda model, batch: model(batch["x"]),
        )
        return step, [float(step(batch)) for _ in range(3)]

    def gathers(step: mw.TrainStep, name: str) -> list[str]:
        return [r.phase for r in step.explain() if r.name == name and r.kind == "all_gather"]

    dropped, losses = trained(mw.Plan.fsdp("fsdp"))
    kept, same = trained(mw.Plan.fsdp("fsdp") + mw.Plan.keep("2"))
    assert losses == same
    assert gathers(dropped, "_2_weight") == ["forward", "backward"]
    assert gathers(kept, "_2_weight") == ["forward"]
    with pytest.raises(PlanError, match="names no parameter or module"):
        trained(mw.Plan.fsdp("fsdp") + mw.Plan.keep("head"))
