"""Layouts of results follow from the layouts of operands, by the rule alone; what does not fit together is refused."""

from __future__ import annotations

import pytest
import torch
from tests.place import conformance
from tests.place.test_rules import SAMPLES

from meshweave.check.role_replay import infer
from meshweave.errors import VerifyError
from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ops.factors import rule_from_text, sums

F32 = torch.float32
MM = rule_from_text("m k, k n -> m n", [Spec((4, 6), F32), Spec((6, 8), F32)], [Spec((4, 8), F32)], sums({0}, {1}))
GRID = Mesh("a=2,b=2")


def infer_mm(left: str, right: str) -> str:
    operands = [(Spec((4, 6), F32), Layout.parse(left, GRID)), (Spec((6, 8), F32), Layout.parse(right, GRID))]
    return str(infer(MM, GRID, operands, [Spec((4, 8), F32)])[0])


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("[{a}, {}]", "[{}, {b}]", "[{a}, {b}]"),
        ("[{}, {a}]", "[{a}, {b}]", "[{}, {b}] partial(sum: a)"),
        ("[{a}, {}] partial(sum: b)", "[{}, {}]", "[{a}, {}] partial(sum: b)"),
        ("[{}, {a,b}]", "[{a,b}, {}]", "[{}, {}] partial(sum: a,b)"),
        ("[{}, {}] partial(sum: a)", "[{}, {}] partial(sum: b)", "[{}, {}] partial(sum: a,b)"),
    ],
)
def test_what_a_matmul_makes(left: str, right: str, expected: str) -> None:
    assert infer_mm(left, right) == expected


@pytest.mark.parametrize(
    ("left", "right", "problem"),
    [
        ("[{}, {a}]", "[{}, {}]", "operand 1 is not cut like the others"),
        ("[{}, {a,b}]", "[{b,a}, {}]", "operand 1 is not cut like the others"),
        ("[{a}, {}]", "[{}, {a}]", "a would do two things in the same op"),
        ("[{}, {}] partial(sum: a)", "[{}, {a}]", "a would do two things in the same op"),
        ("[{}, {}] partial(sum: a)", "[{}, {}] partial(sum: a)", "operand 0, 1 is partial over a"),
        ("[{}, {}] partial(max: a)", "[{}, {}]", "operand 0 is partial over a"),
    ],
)
def test_what_a_matmul_cannot_take(left: str, right: str, problem: str) -> None:
    with pytest.raises(VerifyError) as error:
        infer_mm(left, right)
    assert str(error.value).startswith(problem)


def test_a_dim_of_one_element_is_cut_as_any_other() -> None:
    """One device has all of it. All operands that have the dim are cut so; what it is merged with others in is not."""
    one, two = Spec((1, 4), F32), Spec((4,), F32)
    cut, whole = (Layout.parse(text, GRID) for text in ("[{a}, {}]", "[{}, {}]"))
    add = rule_from_text("m n, m n -> m n", [one, one], [one])
    assert infer(add, GRID, [(one, cut), (one, cut)], [one]) == (cut,)
    with pytest.raises(VerifyError, match="operand 1 is not cut like the others"):
        infer(add, GRID, [(one, cut), (one, whole)], [one])
    total = rule_from_text("m n -> n", [one], [two])
    assert [str(made) for made in infer(total, GRID, [(one, cut)], [two])] == ["[{}] partial(sum: a)"]
    for text in ("m n -> (m n)", "1 n -> n", "m! n -> n"):
        with pytest.raises(VerifyError, match="is cut"):
            infer(rule_from_text(text, [one], [two]), GRID, [(one, cut)], [two])


@pytest.mark.parametrize("part", range(4))
def test_layouts_follow_from_the_rule_alone(part: int) -> None:
    """What is inferred from operands is what the assignment that cut them so gives, but for what is made on demand."""
    checked = 0
    for i in range(part, len(SAMPLES), 4):
        case = conformance.build_case(SAMPLES[i])
        specs = [n.meta["spec"] for n in conformance.tensor_inputs(case.node)]
        inside = {f for dims in case.rule.operands for dim in dims for f in dim}
        for option in conformance.one_axis(case, 2):
            role = option.role("a")
            if isinstance(role, conformance.Shard) and role.factor not in inside:
                continue
            operands = list(zip(specs, option.operands, strict=True))
            results = conformance.result_specs(case.node)
            made = infer(case.rule, option.results[0].mesh, operands, results)
            for found, wanted, spec in zip(made, option.results, results, strict=True):
                assert found.partial == wanted.partial, str(SAMPLES[i])
                assert found.pieces(spec.shape) == wanted.pieces(spec.shape), str(SAMPLES[i])
            checked += 1
    assert checked > 100
