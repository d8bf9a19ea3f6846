"""Which rows of a step are cut: those of the batch, parts of the blocks that devices have, or positions."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.training import assert_equals_eager, batches
from torch import nn

import meshweave as mw
from meshweave.optimize.batch_split import SplitReport
from meshweave.passes import Split
from meshweave.train_step import TrainStep

ALWAYS = [Split((2,), "always", positions=True)]


class Blocks(nn.Module):
    """Layers of tensor parallelism whose norms each device does for rows of its own, a block of them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.up = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))
        self.norm = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down, norm in zip(self.up, self.down, self.norm, strict=True):
            x = x + mw.replicate(norm(mw.repartition(down(up(x).relu()), dim=self.dim, axis="tp")), axis="tp")
        return x


PLAN = mw.Plan.tp("tp", {"up.*": "colwise", "down.*": "rowwise"})


def report_of(step: TrainStep) -> SplitReport:
    (report,) = step.program.optimized.splits
    assert report.is_taken, str(report)
    return report


@pytest.mark.parametrize(
    ("shape", "dim", "rows"),
    [
        ((4, 6, 16), 0, "dim 0 of batch_x inside 2"),
        ((4, 6, 16), 1, "dim 0 of batch_x"),
    ],
)
def test_a_chunk_has_a_part_of_the_block_of_each_device(shape: tuple[int, ...], dim: int, rows: str) -> None:
    torch.manual_seed(0)
    model = Blocks(dim).double()
    data = [{k: v.double() for k, v in batch.items()} for batch in batches(2, shape, shape)]
    step = assert_equals_eager(model, data, "tp=2", plan=PLAN, passes=ALWAYS)
    report = report_of(step)
    assert report.rows == rows
    assert report.num_collectives > 4


class Remembers(nn.Module):
    """Rows pass a layer and are kept in a buffer, which no later op reads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("last", torch.zeros(4, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x).relu())
        self.last = self.last + y.detach()
        return y


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_buffer_of_rows_is_whole_when_its_microbatch_ends(accumulate: int) -> None:
    """The next microbatch reads it, which runs no update."""
    torch.manual_seed(0)
    model, data = Remembers().double(), torch.randn(4 * accumulate, 16, dtype=torch.float64)
    twin = copy.deepcopy(model)
    for micro in data.chunk(accumulate):
        twin(micro)
    step = mw.compile(
        model, loss=lambda out, batch: out.square().mean(), example={"x": data}, mesh="tp=2", passes=ALWAYS,
        plan=mw.Plan.tp("tp", {"up": "colwise", "down": "rowwise"}),
        accumulate=accumulate, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), profile="h100",
    )  # fmt: skip
    step({"x": data})
    report_of(step)
    torch.testing.assert_close(step.buffers()["last"], twin.last)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).view(*x.shape[:2], 4, 4).transpose(1, 2) for w in (self.q, self.k, self.v))
        heads = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(heads.transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm(x)).relu())


def test_of_one_sequence_the_positions_are_cut() -> None:
    """Attention stays whole: its keys are those of all positions."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention()).double()
    data = [{"input": batch["x"].double(), "y": batch["y"].double()} for batch in batches(2, (1, 8, 16), (1, 8, 16))]
    plan = mw.Plan.tp("tp", {"*.[qkv]": "colwise", "*.up": "colwise", "*.o": "rowwise", "*.down": "rowwise"})
    report = report_of(assert_equals_eager(model, data, "tp=2", plan=plan, passes=ALWAYS))
    assert report.rows == "dim 1 of batch_input"
    assert report.num_collectives > 4
    assert any("attention" in whole.op for whole in report.whole)


@pytest.mark.parametrize("shape", [(1, 7, 16), (3, 7, 16)])
def test_rows_that_make_no_equal_chunks_stay_whole(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention()).double()
    data = [{"input": batch["x"].double(), "y": batch["y"].double()} for batch in batches(2, shape, shape)]
    plan = mw.Plan.tp("tp", {"*.[qkv]": "colwise", "*.up": "colwise", "*.o": "rowwise", "*.down": "rowwise"})
    step = assert_equals_eager(model, data, "tp=2", plan=plan, passes=ALWAYS)
    (report,) = step.program.optimized.splits
    assert not report.is_taken
    assert "no input of the batch has rows for 2 equal chunks" in report.reason


def test_positions_are_cut_only_if_asked_for() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention())
    data = [{"input": batch["x"], "y": batch["y"]} for batch in batches(1, (1, 8, 16), (1, 8, 16))]
    plan = mw.Plan.tp("tp", {"*.[qkv]": "colwise", "*.up": "colwise", "*.o": "rowwise", "*.down": "rowwise"})
    step = assert_equals_eager(model, data, "tp=2", plan=plan, passes=[Split((2,), "always")])
    assert not step.program.optimized.splits[0].is_taken
