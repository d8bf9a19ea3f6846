"""Parallel operators in a model: layouts, exact values forward and backward, and what misuse says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.training import assert_tensors, batches, mse, sgd, train, train_eagerly
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.errors import LayoutError, MeshError, MeshweaveError, PlanError
from meshweave.ir import ops
from meshweave.ir.graph import origin_of
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.operators import Pin, layout_back, translate
from meshweave.place.plans import Plan

REPLICATE = Plan.replicate("a")
Forward = Callable[["Exact", Tensor], Tensor]


class Exact(nn.Module):
    """A module whose forward is `body(module, x)`; parameters and results are whole numbers, exact in any order."""

    def __init__(self, body: Forward) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.body = body
        for name, shape in {"scale": (8, 12), "weight": (4, 12), "bias": (4,)}.items():
            value = torch.randint(-3, 4, shape, generator=made).float()
            setattr(self, name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x * self.scale)


def weighted(out: Tensor, batch: Any) -> Tensor:
    """Every element of the output counts with its own weight, so that a swapped piece shows."""
    return (out * torch.arange(1, out.numel() + 1, dtype=out.dtype).view(out.shape)).sum()


def exact_batch() -> tuple[Tensor]:
    return (torch.randint(-4, 5, (8, 12), generator=torch.Generator().manual_seed(1)).float(),)


def compiled(model: nn.Module, mesh: str | Mesh, plan: Plan | None = REPLICATE) -> mw.TrainStep:
    return mw.compile(model, loss=weighted, example=exact_batch(), mesh=mesh, plan=plan)


def assert_exact(body: Forward, mesh: str | Mesh, plan: Plan | None = REPLICATE) -> mw.TrainStep:
    """Loss and every gradient equal eager PyTorch to the bit. Returns the step."""
    model, batch = Exact(body), exact_batch()
    eager = copy.deepcopy(model)
    expected = weighted(eager(*batch), batch)
    expected.backward()
    step = compiled(model, mesh, plan)
    assert step(batch) == expected.item()
    found = step.gradients()
    wanted = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    assert set(found) == set(wanted)
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name
    return step


def moves(step: mw.TrainStep, phase: str) -> list[tuple[str, str, str]]:
    """(kind, from, to) of every move of a phase."""
    return [(r.kind, r.source, r.target) for r in step.explain() if r.phase == phase]


# the four operators, each dim, degrees 1, 2 and 4

DEGREES = pytest.mark.parametrize("degree", [1, 2, 4])
DIMS = pytest.mark.parametrize("dim", [0, -1])


def cut(dim: int) -> str:
    return "[{a}, {}]" if dim == 0 else "[{}, {a}]"


@DEGREES
def test_replicate_keeps_the_value_and_sums_the_gradients_of_the_replicas(degree: int) -> None:
    def body(m: Exact, x: Tensor) -> Tensor:
        """Column-parallel: every replica of x meets its own columns, so its gradient is a part of the sum."""
        return F.relu(mw.replicate(x, "a")) @ mw.repartition(m.weight, dim=0, axis="a").t()

    step = assert_exact(body, f"a={degree}")
    reduced = [m for m in moves(step, "backward") if m[0] == "all_reduce"]
    assert reduced == ([("all_reduce", "[{}, {}] partial(sum: a)", "[{}, {}]")] if degree > 1 else [])


@DEGREES
@DIMS
def test_repartition_scatters_and_its_gradient_is_gathered(dim: int, degree: int) -> None:
    step = assert_exact(lambda m, x: F.relu(mw.repartition(x, dim=dim, axis="a")), f"a={degree}")
    if degree > 1:
        assert ("slice", "[{}, {}]", cut(dim)) in moves(step, "forward")
        assert ("all_gather", cut(dim), "[{}, {}]") in moves(step, "backward")
    else:
        assert step.explain() == []


@DEGREES
@DIMS
def test_combine_gathers_and_its_gradient_is_a_slice(dim: int, degree: int) -> None:
    step = assert_exact(
        lambda m, x: F.relu(mw.combine(mw.repartition(x, dim=dim, axis="a") * 3, dim=dim, axis="a")),
        f"a={degree}",
    )
    if degree > 1:
        assert ("all_gather", cut(dim), "[{}, {}]") in moves(step, "forward")
        assert ("slice", "[{}, {}]", cut(dim)) in moves(step, "backward")
    else:
        assert step.explain() == []


@DEGREES
def test_linear_of_a_cut_input_is_partial_and_reduction_adds_it_up(degree: int) -> None:
    def body(m: Exact, x: Tensor) -> Tensor:
        y = F.linear(mw.repartition(x, dim=1, axis="a"), m.weight, m.bias)
        return F.relu(mw.reduction(y, "a"))

    step = assert_exact(body, f"a={degree}")
    if degree > 1:
        assert ("all_reduce", "[{}, {}] partial(sum: a)", "[{}, {}]") in moves(step, "forward")
        assert ("to_partial", "[{}]", "[{}] partial(sum: a)") in moves(step, "forward")  # the bias counts once
        assert not [m for m in moves(step, "backward") if m[0] == "all_reduce"]  # each part gets the whole gradient


@DEGREES
def test_linear_of_a_replicated_input_and_a_cut_weight_is_cut_along_its_features(degree: int) -> None:
    def body(m: Exact, x: Tensor) -> Tensor:
        y = F.linear(mw.replicate(x, "a"), mw.repartition(m.weight, dim=0, axis="a"), m.bias)
        return F.relu(mw.combine(y, dim=1, axis="a"))

    step = assert_exact(body, f"a={degree}")
    if degree > 1:
        assert ("all_gather", "[{}, {a}]", "[{}, {}]") in moves(step, "forward")


@pytest.mark.parametrize("degree", [2, 3, 5, 8, 16])
def test_pieces_may_be_uneven_and_empty(degree: int) -> None:
    def body(m: Exact, x: Tensor) -> Tensor:
        return mw.combine(mw.repartition(F.relu(x), dim=0, axis="a") * 2, dim=0, axis="a")

    step = assert_exact(body, f"a={degree}")
    layout = Layout.parse("[{a}, {}]", Mesh(f"a={degree}"))
    assert sum(box.size[0] for box in layout.pieces((8, 12)).values()) == 8
    assert ("slice", "[{}, {}]", "[{a}, {}]") in moves(step, "forward")


# nested and chained

NESTED = "a=2,b=2"
BOTH = Plan.replicate("a") + Plan.replicate("b")


def test_of_nested_degrees_only_the_part_that_is_named_collapses() -> None:
    def body(m: Exact, x: Tensor) -> Tensor:
        x = mw.repartition(x, dim=0, axis=("a", "b"))  # degree 4
        x = mw.combine(x * 2, dim=0, axis="b")  # 2
        return mw.combine(x * 3, dim=0, axis="a")  # 1

    step = assert_exact(body, NESTED, BOTH)
    gathers = [m for m in moves(step, "forward") if m[0] == "all_gather"]
    assert gathers == [("all_gather", "[{a,b}, {}]", "[{a}, {}]"), ("all_gather", "[{a}, {}]", "[{}, {}]")]


def test_repartitions_of_two_dims_chain() -> None:
    def body(m: Exact, x: Tensor) -> Tensor:
        x = F.relu(mw.repartition(mw.repartition(x, dim=0, axis="a"), dim=1, axis="b"))
        return mw.combine(mw.combine(x, dim=0, axis="a"), dim=1, axis="b")

    step = assert_exact(body, NESTED, BOTH)
    assert ("[{a}, {b}]", "[{}, {b}]") in [(m[1], m[2]) for m in moves(step, "forward")]


def test_repartition_takes_an_axis_from_one_dim_to_another() -> None:
    step = assert_exact(
        lambda m, x: F.relu(mw.repartition(F.relu(mw.repartition(x, dim=0, axis="a")), dim=1, axis="a")), "a=4"
    )
    assert ("all_to_all", "[{a}, {}]", "[{}, {a}]") in moves(step, "forward")
    assert ("all_to_all", "[{}, {a}]", "[{a}, {}]") in moves(step, "backward")


LAYOUTS = ["[{}, {}]", "[{a}, {}]", "[{}, {a}]", "[{a}, {b}]", "[{b,a}, {}]", "[{}, {a,b}]", "[{b}, {}]"]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=5), st.sampled_from(["a=2,b=2", "a=2,b=3", "a=3,b=2"]))
def test_any_chain_of_layouts_keeps_values_and_gradients(texts: list[str], mesh: str) -> None:
    parsed = Mesh(mesh)

    def body(m: Exact, x: Tensor) -> Tensor:
        for text in texts:
            x = mw.move(x, Layout.parse(text, parsed)) * 2
        return x

    step = assert_exact(body, mesh, BOTH)
    asked = ["[{}, {}]", *texts]
    changes = [(a, b) for a, b in zip(asked, texts, strict=False) if a != b]
    assert [(m[1], m[2]) for m in moves(step, "forward") if len(m[1]) > 2 and "partial" not in m[1]][
        : len(changes)
    ] == changes


def test_operators_do_nothing_in_eager_and_on_one_device() -> None:
    def body(m: Exact, x: Tensor) -> Tensor:
        x = mw.on(mw.repartition(x, dim=0, axis="nowhere"), Mesh("", devices=[9]))
        return mw.reduction(mw.combine(x, dim=0, axis="nowhere"), "nowhere")

    step = assert_exact(body, "", None)
    assert step.explain() == []
    x = torch.arange(3.0)
    assert torch.equal(mw.replicate(x, "a"), x)


def test_what_an_operator_pins_is_followed_although_another_way_is_cheaper() -> None:
    """Gathering the small input of one linear layer would cost less than adding up its larger output."""
    wide = nn.Linear(8, 512, bias=False)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = wide

        def forward(self, x: Tensor) -> Tensor:
            return mw.reduction(self.wide(torch.tanh(mw.repartition(x, dim=1, axis="a"))), "a")

    step = mw.compile(Wide(), loss=weighted, example=(torch.randn(64, 8),), mesh="a=2", plan=REPLICATE)
    assert [r.kind for r in step.explain() if r.phase == "forward"].count("all_reduce") == 1


# operators and plans together


@pytest.mark.parametrize(
    "make", [sgd, partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True), partial(torch.optim.AdamW, lr=0.01)]
)
def test_ten_steps_of_a_model_with_operators_equal_eager(make: Any) -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.relu(self.up(mw.replicate(x, "tp")))
            return x + mw.reduction(self.down(mw.repartition(hidden, dim=1, axis="tp")), "tp")

    torch.manual_seed(0)
    model, data = Split(), batches(10, (4, 6), (4, 6))
    eager, expected = train_eagerly(model, data, mse, make)
    step, losses = train(model, data, "dp=2,tp=2", mse, make)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in eager.named_parameters()})


# what misuse says


def fails(body: Forward, kind: type[MeshweaveError], match: str, mesh: str = "a=2") -> MeshweaveError:
    with pytest.raises(kind, match=match) as error:
        compiled(Exact(body), mesh)
    assert "test_operators.py:" in error.value.where, error.value.where
    return error.value


def test_an_axis_that_the_mesh_lacks_names_the_line() -> None:
    error = fails(lambda m, x: mw.repartition(x, dim=0, axis="zz"), MeshError, "the mesh has no axis 'zz'")
    assert error.expected == "one of a"


def test_combining_what_is_not_cut_names_the_line() -> None:
    error = fails(lambda m, x: mw.combine(x, dim=0, axis="a"), LayoutError, "combine over 'a' does not fit the value")
    assert (error.got, error.expected) == ("[{}, {}]", "dim 0 cut over a")

    def twice(m: Exact, x: Tensor) -> Tensor:
        return mw.combine(mw.combine(mw.repartition(x, dim=0, axis="a"), dim=0, axis="a"), dim=0, axis="a")

    fails(twice, LayoutError, "combine over 'a' does not fit the value")


def test_reducing_what_is_not_partial_names_the_line() -> None:
    error = fails(lambda m, x: mw.reduction(x, "a"), LayoutError, "reduction over 'a' does not fit the value")
    assert error.hint == "the value is not partial over it"
    error = fails(lambda m, x: mw.reduction(mw.repartition(x, dim=0, axis="a"), "a"), LayoutError, "reduction over 'a'")
    assert error.hint == "call combine"


def test_replicating_or_cutting_a_partial_value_asks_for_a_reduction() -> None:
    def product(m: Exact, x: Tensor) -> Tensor:
        return mw.repartition(x, dim=1, axis="a") @ m.weight.t()

    fails(lambda m, x: mw.replicate(product(m, x), "a"), LayoutError, "replicate over 'a' does not fit the value")
    fails(lambda m, x: mw.repartition(product(m, x), dim=0, axis="a"), LayoutError, "repartition over 'a'")
    fails(lambda m, x: mw.combine(product(m, x), dim=0, axis="a"), LayoutError, "combine over 'a'")


def test_a_nonlinear_op_on_a_value_that_an_operator_made_partial_names_the_line() -> None:
    def body(m: Exact, x: Tensor) -> Tensor:
        return F.relu(F.linear(mw.repartition(x, dim=1, axis="a"), m.weight, m.bias) * 2)

    error = fails(body, LayoutError, "aten.relu is not linear and takes a value that is partial over 'a'")
    assert error.got.startswith("[{}, {}] partial(sum: a) from ")
    assert error.hint == 'add it up first: mw.reduction(x, "a")'


def test_a_softmax_over_a_cut_dim_adds_up_inside_itself() -> None:
    class Soft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.log_softmax(mw.repartition(self.head(x), dim=1, axis="a"), 1)

    model, data = Soft(), batches(2, (4, 6), (4, 8))
    _, expected = train_eagerly(model, data)
    _, losses = train(model, data, "a=2", plan=REPLICATE)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)


def test_dims_and_axes_that_cannot_be_are_told_before_anything_runs() -> None:
    fails(lambda m, x: mw.repartition(x, dim=5, axis="a"), LayoutError, "the tensor has no dim 5")
    fails(lambda m, x: mw.replicate(x, ()), MeshError, "an operator needs an axis")
    layout = Layout.parse("[{a}]", Mesh("a=2"))
    fails(lambda m, x: mw.move(x, layout), LayoutError, "differ in their number of dims")


def test_devices_that_the_mesh_lacks_name_the_line() -> None:
    error = fails(lambda m, x: mw.on(x, Mesh("", devices=[7])), MeshError, "names devices that the mesh lacks")
    assert error.got == "7"
    with pytest.raises(MeshError, match="a device is twice in the mesh"):
        Mesh("a=2", devices=[1, 1])


def test_an_axis_that_nothing_uses_is_still_an_error() -> None:
    with pytest.raises(PlanError, match="axis 'b' has no usual meaning"):
        compiled(Exact(lambda m, x: mw.replicate(x, "a")), "a=2,b=2", None)


# reading pins


def test_a_pin_says_what_was_asked_for() -> None:
    x, mesh = torch.zeros(2, 2), Mesh("a=2", devices=[5, 3])
    texts: list[str] = []

    class Tap(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            value = mw.repartition(value, dim=-1, axis=("a", "b"))
            return mw.on(value, mesh)

    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(Tap())(x).graph
    texts = [str(n.args[1]) for n in graph.nodes if n.target is torch.ops.meshweave.pin.default]
    first, second = map(Pin.parse, texts)
    assert (first.kind, first.axes, first.dim, first.mesh) == ("repartition", ("a", "b"), 1, None)
    assert (second.kind, second.mesh) == ("on", mesh)
    assert Pin.parse("a=1;b=r").is_operator is False


def test_the_gradient_goes_back_to_where_the_operand_was_along_the_named_axes() -> None:
    mesh = Mesh("a=2,b=2")
    pin = Pin("combine", ("a",), 0)
    grad, operand = Layout.parse("[{b}, {}] partial(sum: a)", mesh), Layout.parse("[{b,a}, {}]", mesh)
    assert str(layout_back(pin, grad, operand)) == "[{b,a}, {}]"
    assert str(layout_back(Pin("replicate", ("a",)), grad, Layout.parse("[{}, {}]", mesh))) == "[{b}, {}]"
    partial_over_b = Layout.parse("[{}, {}] partial(sum: b)", mesh)
    assert str(layout_back(Pin("repartition", ("a",), 0), partial_over_b, operand)) == "[{a}, {}] partial(sum: b)"


def test_a_layout_on_another_mesh_keeps_the_axes_that_both_have() -> None:
    layout = Layout.parse("[{dp}, {tp}] partial(sum: pp)", Mesh("pp=2,dp=2,tp=2"))
    assert str(translate(layout, Mesh("dp=2", devices=[6, 7]))) == "[{dp}, {}]"
    assert str(translate(layout, Mesh("dp=4,tp=2"))) == "[{}, {tp}]"
    assert translate(layout, layout.mesh) == layout


def test_every_pin_of_a_placed_graph_is_gone() -> None:
    step = compiled(Exact(lambda m, x: F.relu(mw.repartition(x, dim=0, axis="a"))), "a=2")
    left = [n for n in step.program.placed.graph.nodes if n.target is torch.ops.meshweave.pin.default]
    assert left == []
    assert all(origin_of(n).source for n in step.program.placed.graph.nodes if n.target is ops.move)
