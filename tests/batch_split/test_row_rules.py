"""Row rules against the ops themselves: chunks of operands give chunks of results, or parts that combine to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.decompose.test_cut import all_cuts, chunk
from tests.place.conformance import F, I, Sample, build_case, sample
from torch import Tensor, fx

from meshweave.ir import local_ops
from meshweave.ir.graph import Spec, spec_of
from meshweave.optimize.batch_split.orders import End, RowRule
from meshweave.optimize.batch_split.row_rules import rule_of
from meshweave.optimize.decompose.cut import FIXED, Cut, NoCut

aten = torch.ops.aten
SAMPLES = {
    "relu": sample(aten.relu.default, F(4, 6)),
    "detach": sample(aten.detach.default, F(4, 6)),
    "addition of a row": sample(aten.add.Tensor, F(4, 6), F(6)),
    "t": sample(aten.t.default, F(4, 6)),
    "transpose": sample(aten.transpose.int, F(2, 4, 6), 0, -1),
    "select": sample(aten.select.int, F(4, 2, 6), 1, 1),
    "unbind": sample(aten.unbind.int, F(2, 4, 6)),
    "split": sample(aten.split.Tensor, F(4, 6), 4, 1),
    "split with sizes": sample(aten.split_with_sizes.default, F(4, 6), [2, 4], -1),
    "mean": sample(aten.mean.default, F(4, 6)),
    "mean of a dim": sample(aten.mean.dim, F(4, 6), [0], True),
    "sum": sample(aten.sum.default, F(4, 6)),
    "mm": sample(aten.mm.default, F(4, 6), F(6, 2)),
    "view": sample(aten.view.default, F(4, 6), [2, 12]),
    "expand": sample(aten.expand.default, F(4, 1), [4, 6]),
    "embedding on a piece": sample(local_ops.embedding, F(8, 2), I(4, 6), 0),
    "gather on a piece": sample(local_ops.gather, F(4, 6), 1, I(4, 6), 0),
    "max on a piece": sample(local_ops.extreme, F(4, 2, 6), [1], False, "max"),
}
# A dim of 4 has 3 cuts (1 x 2, 1 x 4, 2 x 2), a dim of 6 has 5; each at the operand and at the result.
NUM_RULES = {"relu": 16, "t": 16, "select": 16, "max on a piece": 16, "mean": 8, "sum": 8}
COMBINED = {"sum": sum, "avg": lambda parts: sum(parts) / len(parts)}


def described(item: Sample) -> tuple[fx.Node, list[Tensor], list[Tensor]]:
    """The op as a node, its operands and its results."""
    case = build_case(item)
    for node in case.node.graph.nodes:
        spec = node.meta.get("spec")
        specs = spec if isinstance(spec, tuple) else (spec,)
        vals = [torch.empty(s.shape, dtype=s.dtype, device="meta") for s in specs if isinstance(s, Spec)]
        node.meta["val"] = vals if isinstance(spec, tuple) else vals[0] if vals else None
    return case.node, case.operands, case.expected


def on_chunks(node: fx.Node, operands: list[Tensor], rule: RowRule, c: int) -> list[Tensor]:
    """The op on chunk c of its operands."""
    chunks = iter([chunk(x, cut, c) for x, cut in zip(operands, rule.operands, strict=True)])
    args: list[Any] = list(fx.map_arg(node.args, lambda _: next(chunks)))  # type: ignore[arg-type]
    (result,) = rule.results[:1]
    if rule.shape_at >= 0 and isinstance(result, Cut):
        args[rule.shape_at] = list(result.chunk(spec_of(node).shape))
    out = node.target(*args, **node.kwargs)  # type: ignore[operator]
    return list(out) if isinstance(out, (list, tuple)) else [out]


@pytest.mark.parametrize("name", SAMPLES)
def test_chunks_give_the_whole(name: str) -> None:
    node, operands, results = described(SAMPLES[name])
    ends = [(End(False, i), x) for i, x in enumerate(operands)] + [(End(True, i), x) for i, x in enumerate(results)]
    num_rules = 0
    for end, x in ends:
        for cut in all_cuts(tuple(x.shape)):
            try:
                rule = rule_of(node, end, cut)
            except NoCut:
                continue
            num_rules += 1
            assert (rule.results if end.is_result else rule.operands)[end.index] == cut
            parts = [on_chunks(node, operands, rule, c) for c in range(cut.count)]
            for i, (result, how) in enumerate(zip(results, rule.results, strict=True)):
                if isinstance(how, Cut):
                    assert all(torch.equal(part[i], chunk(result, how, c)) for c, part in enumerate(parts))
                else:
                    torch.testing.assert_close(COMBINED[how]([part[i] for part in parts]), result)
    assert num_rules == NUM_RULES.get(name, num_rules) > 0


REFUSED = [
    ("select", End(False, 0), Cut(1, 1, 2), "it works along the whole of dim 1"),
    ("split", End(False, 0), Cut(1, 1, 2), "it works along the whole of dim 1"),
    ("relu", End(False, 0), Cut(0, 1, 3), "its rows do not divide into 3 equal chunks"),
    ("view", End(False, 0), Cut(0, 1, 4), "its chunks are not those of a dim of"),
    ("embedding on a piece", End(False, 0), Cut(0, 1, 2), "the rows are the dim that its indices refer to"),
    ("gather on a piece", End(False, 0), Cut(1, 1, 2), "the rows are the dim that its indices refer to"),
    ("max on a piece", End(False, 0), Cut(1, 1, 2), "the rows are reduced by max or min"),
]


@pytest.mark.parametrize(("name", "end", "cut", "why"), REFUSED)
def test_ops_that_couple_rows_say_why(name: str, end: End, cut: Cut, why: str) -> None:
    node, _, _ = described(SAMPLES[name])
    with pytest.raises(NoCut, match=why):
        rule_of(node, end, cut)


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (sample(aten.relu_.default, F(4, 6)), "it writes into an operand"),
        (sample(aten.rrelu.default, F(4, 6), 0.1, 0.3, True), "its random numbers are drawn from a single stream"),
    ],
)
def test_ops_that_write_or_draw_are_not_cut(item: Sample, why: str) -> None:
    node, _, _ = described(item)
    with pytest.raises(NoCut, match=why):
        rule_of(node, End(False, 0), Cut(0, 1, 2))


def test_a_fixed_node_and_an_undescribed_node_are_not_cut() -> None:
    node, _, _ = described(SAMPLES["relu"])
    del node.meta["val"]
    with pytest.raises(NoCut, match="is symbolic, or unknown"):
        rule_of(node, End(False, 0), Cut(0, 1, 2))
    node.meta[FIXED] = "a hook reads it"
    with pytest.raises(NoCut, match="a hook reads it"):
        rule_of(node, End(False, 0), Cut(0, 1, 2))
