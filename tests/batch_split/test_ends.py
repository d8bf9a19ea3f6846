"""Mixtures in which experts choose their tokens: ends computed from numbers alone are equal wherever they stand."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.movement.test_dispatch import FOUR, SLOW_LINKS, WIDTH, Experts, batches, sparse_moves
from tests.training import assert_tensors, train, train_eagerly
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

import meshweave as mw
from meshweave.check.completeness import check_complete
from meshweave.ir import ops
from meshweave.ir.graph import origin_of, spec_of
from meshweave.ir.grouped import BY_ROWS

COUNT, CAPACITY, ROWS = 4, 8, 16
PLANS = {"": None, "dp=2": "dp:dp", "ep=2": "ep:ep", "dp=2,ep=2": "dp:dp+ep:ep", "fsdp=2,ep=2": "fsdp:fsdp+ep:ep"}
ENDS: dict[str, Callable[[], Tensor]] = {
    "steps": lambda: torch.arange(CAPACITY, CAPACITY * COUNT + 1, CAPACITY, dtype=torch.int32),
    "products": lambda: ((torch.arange(COUNT) + 1) * CAPACITY).to(torch.int32),
    "sums": lambda: torch.full((COUNT,), CAPACITY).cumsum(0).to(torch.int32),
    "constants": lambda: torch.tensor([8, 16, 24, 32], dtype=torch.int32),
}


def in_a_loop(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """`grouped_mm`, which eager PyTorch does not have in float64."""
    stops = [0, *offs.tolist()]
    return torch.cat([rows[a:b] @ w for a, b, w in zip(stops, stops[1:], weight, strict=False)])


class Choice(nn.Module):
    """Each expert takes its best tokens. Both matmuls take the same ends (`is_once`), or each computes its own."""

    def __init__(self, ends: Callable[[], Tensor], is_once: bool, multiply: Callable[..., Tensor]) -> None:
        super().__init__()
        self.ends, self.is_once, self.multiply = ends, is_once, multiply
        self.router, self.experts = nn.Linear(WIDTH, COUNT), Experts(COUNT)

    def forward(self, x: Tensor) -> Tensor:
        scores, tokens = self.router(x).softmax(-1).topk(CAPACITY, 0)
        at, ends = tokens.t().reshape(-1), self.ends()
        inner = self.multiply(x[at], self.experts.up, offs=ends).tanh()
        rows = self.multiply(inner, self.experts.down, offs=ends if self.is_once else self.ends())
        return x + torch.zeros_like(x).index_add(0, at, rows * scores.t().reshape(-1, 1))


class ByToken(nn.Module):
    """Each token takes its best expert."""

    def __init__(self, multiply: Callable[..., Tensor]) -> None:
        super().__init__()
        self.multiply, self.router, self.experts = multiply, nn.Linear(WIDTH, COUNT), Experts(COUNT)

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        experts, order = chosen.sort(stable=True)
        ends = (experts.unsqueeze(1) == torch.arange(COUNT)).sum(0).cumsum(0).to(torch.int32)
        rows = self.multiply(x[order], self.experts.up, offs=ends) * scores[order].unsqueeze(1)
        return x + torch.zeros_like(x).index_add(0, order, rows)


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def model(
    ends: str, is_once: bool = False, multiply: Callable[..., Tensor] = grouped_mm, layers: str = "c"
) -> nn.Module:
    """`layers`: c for a layer whose experts choose, t for a layer whose tokens do."""
    torch.manual_seed(0)
    kinds = {"c": lambda: Choice(ENDS[ends], is_once, multiply), "t": lambda: ByToken(multiply)}
    return Layers(*(kinds[kind]() for kind in layers)).double()


def assert_alike(mesh: str, ends: str, is_once: bool = False, layers: str = "c") -> mw.TrainStep:
    data = batches(3, ROWS)
    eager, expected = train_eagerly(model(ends, is_once, in_a_loop, layers), data)
    step, losses = train(model(ends, is_once, layers=layers), data, mesh, plan=PLANS.get(mesh))
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in eager.named_parameters()}, 1e-10)
    check_complete(step.program.placed, step.program.optimized.roles)
    return step


SAMPLE = {("steps", ""), ("sums", "dp=2,ep=2"), ("constants", "fsdp=2,ep=2")}
CASES = [
    pytest.param(ends, mesh, marks=() if (ends, mesh) in SAMPLE else pytest.mark.slow)
    for ends in ENDS
    for mesh in PLANS
]


@pytest.mark.parametrize(("ends", "mesh"), CASES)
def test_experts_that_choose_their_tokens_equal_eager_pytorch_in_float64(ends: str, mesh: str) -> None:
    step = assert_alike(mesh, ends)
    assert len(keys(step)) == 1


@pytest.mark.parametrize("mesh", [m if m == "ep=2" else pytest.param(m, marks=pytest.mark.slow) for m in PLANS])
def test_ends_that_both_matmuls_take(mesh: str) -> None:
    assert len(keys(assert_alike(mesh, "steps", is_once=True))) == 1


def keys(step: mw.TrainStep) -> set[str]:
    return {n.meta["key"] for n in step.program.placed.graph.nodes if n.target in BY_ROWS}


def test_layers_on_the_same_devices_share_ends_and_stages_do_not() -> None:
    assert len(keys(assert_alike("ep=2", "steps", layers="cc"))) == 1
    step = assert_alike("pp=2,ep=2", "steps", layers="cc")
    assert len(keys(step)) == 2
    moves = step.program.placed.graph.find_nodes(op="call_function", target=ops.move)
    assert not any(spec_of(n).shape == (COUNT,) and spec_of(n).is_integer for n in moves)


def test_rows_in_blocks_beside_experts_that_choose() -> None:
    step = assert_alike("dp=2,ep=2", "steps", layers="ct")
    targets = {n.target for n in step.program.captured.graph.nodes}
    assert torch.ops.meshweave.block_sort.default in targets
    assert len(keys(step)) == 2


def test_tokens_move_and_the_rows_of_experts_do_not() -> None:
    step, _ = train(model("steps"), batches(1, ROWS), "ep=2", plan="ep:ep", profile=SLOW_LINKS)
    moves = step.program.placed.graph.find_nodes(op="call_function", target=ops.move)
    assert not any(spec_of(n).shape == (CAPACITY * COUNT, WIDTH) for n in moves)
    kinds = [
        ("scatter" if n.args[0].meta["layout"].partial else "gather", origin_of(n).phase) for n in sparse_moves(step)
    ]
    assert kinds == list(FOUR)
