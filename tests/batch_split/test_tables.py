"""Tables of experts (a bias per expert) that are read at the sorted experts of rows: no rows move, and values stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.batch_split.test_ends import in_a_loop
from tests.movement.test_dispatch import WIDTH, batches
from tests.training import assert_tensors, train, train_eagerly
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

import meshweave as mw
from meshweave.check.completeness import check_complete
from meshweave.ir import ops
from meshweave.ir.graph import spec_of

COUNT, TOP, TOKENS = 4, 2, 16
PLANS = {"ep=2": "ep:ep", "dp=2,ep=2": "dp:dp+ep:ep", "fsdp=2,ep=2": "fsdp:fsdp+ep:ep"}
OUTER = torch.ops.meshweave.grouped_outer.default


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(COUNT, WIDTH, WIDTH) / 2)
        self.bias = nn.Parameter(torch.randn(COUNT, WIDTH))
        self.scale = nn.Parameter(torch.randn(COUNT, 1))


class Biased(nn.Module):
    """`read` is how rows read the bias and the scale: (table, experts) -> rows; `columns` of the router beyond the
    experts are of no expert, `is_descending` sorts the experts the other way round."""

    def __init__(
        self,
        multiply: Callable[..., Tensor],
        read: Callable[[Tensor, Tensor], Tensor] = lambda table, experts: table[experts],
        columns: int = COUNT,
        is_descending: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.multiply, self.read, self.is_descending = multiply, read, is_descending
        self.first, self.router, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, columns), Experts()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scores, chosen = self.router(x).softmax(-1).topk(TOP, -1)
        ids, order = chosen.reshape(-1).sort(stable=True, descending=self.is_descending)
        ends = torch.histc(ids.float(), COUNT, 0, COUNT - 1).cumsum(0, dtype=torch.int32)
        rows = self.multiply(x[order // TOP], self.experts.up, offs=ends) + self.read(self.experts.bias, ids)
        rows = (rows * self.read(self.experts.scale, ids)).tanh() * scores.reshape(-1)[order].unsqueeze(1)
        return x + torch.zeros_like(x).index_add(0, order // TOP, rows)


def trained(mesh: str, **settings: object) -> mw.TrainStep:
    """A step that is equal to eager PyTorch in float64, and proven."""
    data = batches(3, TOKENS)
    eager, expected = train_eagerly(Biased(in_a_loop, **settings).double(), data)  # type: ignore[arg-type]
    step, losses = train(Biased(grouped_mm, **settings).double(), data, mesh, plan=PLANS[mesh])  # type: ignore[arg-type]
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in eager.named_parameters()}, 1e-10)
    check_complete(step.program.placed, step.program.optimized.roles)
    return step


def num_sums(step: mw.TrainStep) -> int:
    """How many gradients are sums over each expert's rows."""
    return len(step.program.captured.graph.find_nodes(op="call_function", target=OUTER))


@pytest.mark.parametrize("mesh", [m if m == "dp=2,ep=2" else pytest.param(m, marks=pytest.mark.slow) for m in PLANS])
def test_rows_read_and_sum_the_tables_of_their_own_experts(mesh: str) -> None:
    step = trained(mesh)
    assert num_sums(step) == 3
    moves = step.program.placed.graph.find_nodes(op="call_function", target=ops.move)
    assert not any(spec_of(n).shape == (TOKENS * TOP, WIDTH) for n in moves)
    names = ("experts.up", "experts.bias", "experts.scale")
    assert {str(step.program.placement.used[name])[:5] for name in names} == {"[{ep}"}


OTHERS = {
    "clamped": {"read": lambda table, experts: table[experts.clamp(max=1)]},
    "next": {"read": lambda table, experts: table[(experts + 1) % COUNT]},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_positions_stay_lookups(name: str) -> None:
    assert num_sums(trained("ep=2", **OTHERS[name])) == 1


def test_numbers_that_may_be_too_large_for_the_table_stay_positions() -> None:
    """A position that the table lacks is an IndexError in eager PyTorch, not a row of zeros."""
    model = Biased(grouped_mm, columns=COUNT + 2).double()
    step = mw.compile(
        model,
        loss=lambda out, b: ((out - b["y"]) ** 2).mean(),
        example=batches(1, TOKENS)[0],
        mesh="ep=2",
        plan="ep:ep",
    )
    assert num_sums(step) == 1


def test_descending_experts_stay_lookups() -> None:
    model = Biased(grouped_mm, is_descending=True).double()
    step, _ = train(model, batches(1, TOKENS), "ep=2", plan="ep:ep")
    assert num_sums(step) == 1


def test_without_expert_parallelism_nothing_changes() -> None:
    step, _ = train(Biased(grouped_mm).double(), batches(1, TOKENS), "dp=2", plan="dp:dp")
    assert num_sums(step) == 1
