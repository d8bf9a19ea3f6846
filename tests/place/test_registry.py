"""The rule table as its users meet it: unknown ops, the registration that the error asks for, and factor texts."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import pytest
import torch
from tests.place.conformance import F, P, Sample, build_case, check, one_axis, roles_of, sample, two_axes
from torch import Tensor, nn

import meshweave
from meshweave.cost.hardware import Matmul
from meshweave.errors import MeshweaveError, RuleError
from meshweave.ir.graph import Spec
from meshweave.ops.factors import parse_factors, rule_from_text
from meshweave.ops.pieces import AS_IT_IS
from meshweave.ops.registry import TABLE, row_for


@torch.library.custom_op("meshweave_tests::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor) -> Tensor:
    """x [b, h] times the sigmoid of gate [h]."""
    return x * torch.sigmoid(gate)


@gated.register_fake
def _(x: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("meshweave_tests::gated_backward", mutates_args=())
def gated_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(gate)
    return grad * s, (grad * x * s * (1 - s)).sum(0)


@gated_backward.register_fake
def _(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(gate)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
    return gated_backward(grad, *ctx.saved_tensors)


gated.register_autograd(_backward, setup_context=_setup)

tests_ops = torch.ops.meshweave_tests
GATED = sample(tests_ops.gated.default, F(5, 4), F(4), exact=False)
GATED_BACKWARD = sample(tests_ops.gated_backward.default, F(5, 4), F(5, 4), F(4), exact=False)


@pytest.fixture(autouse=True)
def own_rows() -> Iterator[None]:
    """Rows that a test registers are gone after it."""
    before = dict(TABLE)
    yield
    TABLE.clear()
    TABLE.update(before)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.gate = nn.Parameter(torch.linspace(-1, 1, 8))
        self.down = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.up(x), self.gate))


def _loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return ((outputs - batch["y"]) ** 2).mean()


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"x": torch.randn(4, 6, generator=generator), "y": torch.randn(4, 3, generator=generator)}


def _compile(mesh: str) -> tuple[Model, meshweave.Step]:
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = meshweave.compile(model, loss=_loss, example=_batch(), optimizer=optimizer, mesh=mesh)
    return model, step


# unknown ops


def test_an_unknown_op_is_named_with_its_line_and_registration() -> None:
    with pytest.raises(RuleError) as caught:
        _compile("dp=2")
    error = caught.value
    assert error.what == "no sharding rule for meshweave_tests.gated"
    assert re.search(r"test_registry\.py:\d+ in forward", error.where)
    line = Model.forward.__code__.co_firstlineno + 1
    assert f"test_registry.py:{line} " in error.where


def _registration(item: Sample) -> str:
    with pytest.raises(RuleError) as caught:
        row_for(build_case(item).node)
    found = re.search(r"meshweave\.register_rule\(.*?\"\)", caught.value.hint)
    assert found is not None, caught.value.hint
    return found.group()


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (GATED, "a0! a1!, b0! -> z0! z1!"),
        (GATED_BACKWARD, "a0! a1!, b0! b1!, c0! -> z0! z1!, y0!"),
        (sample(torch.ops.aten.logdet.default, P(3, 3), exact=False), "a0! a1! -> "),
    ],
    ids=["gated", "gated_backward", "to a scalar"],
)
def test_the_registration_in_the_error_works_as_it_is(item: Sample, text: str) -> None:
    """Copied from the error and run, it makes the op work, if only unsharded."""
    line = _registration(item)
    assert f'"{text}"' in line
    eval(line, {"torch": torch, "meshweave": meshweave})
    case = build_case(item)
    assert row_for(case.node).on_piece is AS_IT_IS
    assert roles_of(case) == [None]
    for option in one_axis(case, 2):
        check(case, option)


def test_strides_are_refused_with_what_to_write_instead() -> None:
    item = sample(torch.ops.aten.as_strided.default, F(4, 6), [3, 2], [1, 2])
    with pytest.raises(RuleError, match="by its strides") as caught:
        roles_of(build_case(item))
    assert caught.value.where.startswith("model.py:7")
    assert "unfold" in caught.value.hint


def test_with_shared_letters_the_op_is_sharded() -> None:
    meshweave.register_rule(tests_ops.gated.default, "b h, h -> b h", linear=(0,))
    case = build_case(GATED)
    assert len(roles_of(case)) == 6  # nothing, b and h alone or in blocks of two, a partial sum of x
    for option in [*one_axis(case, 2), *one_axis(case, 3), *two_axes(case)]:
        check(case, option)


def test_registering_again_replaces_the_row() -> None:
    meshweave.register_rule(tests_ops.gated.default, "b h, h -> b h")
    meshweave.register_rule(tests_ops.gated.default, "b! h!, h! -> b! h!")
    assert roles_of(build_case(GATED)) == [None]


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_a_registered_op_trains(mesh: str) -> None:
    """Two lines of registration, and a model with a custom op trains as it does on one device."""
    meshweave.register_rule(tests_ops.gated.default, "b h, h -> b h", linear=(0,))
    meshweave.register_rule(tests_ops.gated_backward.default, "b h, b h, h -> b h, h", linear=(0,))
    model, step = _compile(mesh)
    model = copy.deepcopy(model)  # the step has parameters of its own, and refuses others in its model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        batch = _batch()
        optimizer.zero_grad()
        loss = _loss(model(batch["x"]), batch)
        loss.backward()
        optimizer.step()
        assert step(batch) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, value in model.named_parameters():
        torch.testing.assert_close(step.parameters()[name], value.detach(), rtol=1e-5, atol=1e-6)
    inside = [n for n in step.program.placed.graph.nodes if n.target is tests_ops.gated.default]
    assert len(inside) == 1
    assert "dp" not in mesh or inside[0].meta["layout"].sharded_axes[:1] == ("dp",)


# one registration: capture, place, run, backward, simulate


@pytest.mark.parametrize("mesh", ["dp=2,tp=2"])
def test_one_registration_is_all_that_an_op_needs(mesh: str) -> None:
    meshweave.register_rule(
        tests_ops.gated.default, "b h, h -> b h", linear=(0,), cost="pointwise",
        backward=tests_ops.gated_backward.default,
    )  # fmt: skip
    case = build_case(GATED_BACKWARD)
    assert len(roles_of(case)) > 3
    for option in [*one_axis(case, 2), *one_axis(case, 3), *two_axes(case)]:
        check(case, option)
    model, step = _compile(mesh)
    model = copy.deepcopy(model)
    loss = _loss(model(_batch()["x"]), _batch())
    assert step(_batch()) == pytest.approx(float(loss.detach()), rel=1e-5)
    found = meshweave.simulate(step.program, "h100")
    spans = [span for span in found.spans if "gated" in span.op]
    assert len(spans) == 2
    assert all(span.seconds > 0 for span in spans)


def test_an_op_without_a_cost_is_priced_by_its_bytes_with_a_note() -> None:
    meshweave.register_rule(tests_ops.gated.default, "b h, h -> b h", backward=tests_ops.gated_backward.default)
    _, step = _compile("dp=2")
    simulation = meshweave.simulate(step.program, "h100")
    (note,) = (note for note in simulation.notes if "priced by bytes" in note)
    assert note.startswith("priced by bytes moved: meshweave_tests.gated, meshweave_tests.gated_backward;")
    assert all(span.seconds > 0 for span in simulation.spans if "gated" in span.op)


def test_a_cost_by_a_function() -> None:
    """The work that it says is what is priced; a function that fails or says nothing is an error."""

    def simulated(cost: object) -> float:
        meshweave.register_rule(
            tests_ops.gated.default, "b h, h -> b h", cost=cost, backward=tests_ops.gated_backward.default
        )  # fmt: skip
        return sum(s.seconds for s in meshweave.simulate(step.program, "h100").spans if "gated" in s.op)

    meshweave.register_rule(tests_ops.gated.default, "b h, h -> b h", backward=tests_ops.gated_backward.default)
    _, step = _compile("dp=2")
    seconds = [simulated(lambda n, x, y, k=k: Matmul(k, k, k, 1, x[0].dtype, 0)) for k in (512, 8192)]
    assert seconds[1] > 10 * seconds[0] > 0
    with pytest.raises(MeshweaveError, match="is not a work"):
        simulated(lambda n, x, y: None)
    with pytest.raises(MeshweaveError, match="failed") as caught:
        simulated(lambda n, x, y: 1 / 0)
    assert "ZeroDivisionError" in caught.value.got


def test_registrations_that_say_too_little() -> None:
    with pytest.raises(RuleError, match="unknown kind of work") as caught:
        meshweave.register_rule(tests_ops.gated.default, "b h, h -> b h", cost="fast")
    assert "pointwise" in caught.value.expected
    rule = row_for(build_case(sample(torch.ops.aten.relu.default, F(3, 4))).node).rule
    with pytest.raises(RuleError, match="can only follow from a text"):
        meshweave.register_rule(tests_ops.gated.default, rule, backward=tests_ops.gated_backward.default)


@pytest.mark.parametrize("op", [gated, tests_ops.gated, tests_ops.gated.default])
def test_an_op_is_named_in_any_way_that_torch_has(op: object) -> None:
    """It was ignored, and compile asked for the registration, unless the overload was named."""
    TABLE.pop(tests_ops.gated.default, None)
    meshweave.register_rule(op, "b h, h -> b h", linear=(0,), cost="pointwise", backward=gated_backward)
    assert len(roles_of(build_case(GATED))) == 6
    assert TABLE[tests_ops.gated_backward.default].cost == "pointwise"


@pytest.mark.parametrize(
    ("op", "hint"), [(torch.sigmoid, ""), ("my::op", ""), (torch.ops.aten.add, "of several overloads name one")]
)
def test_what_is_no_op_gets_no_rule(op: object, hint: str) -> None:
    with pytest.raises(RuleError, match="for an operator of PyTorch") as caught:
        meshweave.register_rule(op, "b h -> b h")
    assert caught.value.hint.startswith(hint)


def test_a_text_that_does_not_fit_names_the_op_and_the_line() -> None:
    with pytest.raises(RuleError, match="not a factor rule"):
        meshweave.register_rule(tests_ops.gated.default, "b h, h - b h")
    meshweave.register_rule(tests_ops.gated.default, "b, h -> b h")
    with pytest.raises(RuleError, match="number of dims") as caught:
        roles_of(build_case(GATED))
    assert "'b, h -> b h' of meshweave_tests.gated" in caught.value.where
    assert "model.py:7" in caught.value.where


# factor texts


def test_a_text_is_read_as_factors() -> None:
    assert parse_factors("m k, k n -> m n") == (((("m",), ("k",)), (("k",), ("n",))), ((("m",), ("n",)),))
    assert parse_factors("b (h d) 1 -> b h! d") == (((("b",), ("h", "d"), ()),), ((("b",), ("h!",), ("d",)),))
    assert parse_factors("a ->") == (((("a",),),), ((),))


def test_a_text_with_merged_and_whole_factors() -> None:
    shapes = [Spec((4, 6), torch.float32)], [Spec((4, 3, 2), torch.float32)]
    rule = rule_from_text("b (h d) -> b h d!", *shapes)
    by_size = {size: rule.is_shardable(f) for f, size in enumerate(rule.sizes)}
    assert by_size == {4: True, 3: True, 2: False}


def _specs(*shapes: tuple[int, ...]) -> list[Spec]:
    return [Spec(shape, torch.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("text", "operands", "results", "message"),
    [
        ("m k, k n", [(2, 3), (3, 4)], [(2, 4)], "not a factor rule"),
        ("m k -> m", [(2, 3), (3, 4)], [(2,)], "number of tensors"),
        ("m k -> m k", [(2, 3)], [(2, 3), (2,)], "number of tensors"),
        ("m k, k n -> m n", [(2, 3), (4,)], [(2, 4)], "number of dims"),
        ("m k, k n -> m n", [(2, 3), (4, 5)], [(2, 5)], "factor k has two sizes"),
        ("(a b) -> (a b)", [(6,)], [(6,)], "are not determined"),
        ("a (b c), b -> a b c", [(2, 6), (4,)], [(2, 4, 2)], "does not divide"),
        ("a 1 -> a", [(2, 3)], [(2,)], "size 1"),
        ("a a -> a", [(3, 3)], [(3,)], "twice in one tensor"),
        ("a (b -> a b", [(3, 3)], [(3, 3)], "parenthesis"),
    ],
)
def test_a_wrong_text_says_what_is_wrong(
    text: str, operands: list[tuple[int, ...]], results: list[tuple[int, ...]], message: str
) -> None:
    with pytest.raises(RuleError, match=message) as caught:
        rule_from_text(text, _specs(*operands), _specs(*results))
    assert text in str(caught.value)


def test_a_text_for_an_op_without_operands() -> None:
    rule = rule_from_text("-> a b!", [], _specs((5, 3)))
    assert rule.operands == ()
    assert [rule.is_shardable(f) for f in range(2)] == [True, False]
