"""Means and variances of numbers of 16 bits: added in float32 and rounded once, on any mesh. Sums round their parts."""

from __future__ import annotations

import pytest
import torch
from tests.training import mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.ir import ops
from meshweave.ir.graph import spec_of
from meshweave.report.moves import rounded_sums

HALVES = [torch.bfloat16, torch.float16]


class Reduces(nn.Module):
    """The reduction of x as a buffer, and a bias, whose gradient is a sum over the batch."""

    def __init__(self, reduce: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(6, dtype=dtype))
        self.reduce = reduce
        self.register_buffer("seen", torch.zeros(6, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.copy_(getattr(x, self.reduce)(0))
        return x + self.bias


@pytest.mark.parametrize("mesh", ["", "dp=4"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("reduce", ["mean", "var", "std"])
def test_reductions_round_once_on_any_mesh(reduce: str, dtype: torch.dtype, mesh: str) -> None:
    """Thousands of numbers of one sign: float16 overflows where the sum is rounded before it is divided."""
    scale = 40.0 if reduce == "mean" else 1.0
    x = (torch.rand(4096, 6, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    model = Reduces(reduce, dtype)
    step = mw.compile(
        model, loss=lambda out, b: (out.float() * b["x"].float()).sum(), example={"x": x}, mesh=mesh,
        run=mw.RunOptions(keep_gradients=True),
    )  # fmt: skip
    step({"x": x})
    model(x)
    exact = getattr(x.double(), reduce)(0)
    assert exact.isfinite().all()
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 0.0}  # one unit in the last place at most
    torch.testing.assert_close(step.buffers()["seen"].double(), model.seen.double(), **tolerance)
    if reduce == "mean":
        assert torch.equal(step.buffers()["seen"], exact.float().to(dtype))


def test_the_parts_of_a_mean_travel_in_float32_those_of_sums_and_matmuls_in_their_own_dtype() -> None:
    model = nn.Linear(6, 6).bfloat16()
    x = torch.randn(8, 6).bfloat16()
    step = mw.compile(
        model, loss=mse, example={"input": x, "y": x}, mesh="dp=2", run=mw.RunOptions(keep_gradients=True)
    )
    step({"input": x, "y": x})
    moved = [n for n in step.program.placed.graph.nodes if n.target is ops.move and n.args[0].meta["layout"].partial]
    assert {(spec_of(n).shape, spec_of(n).dtype) for n in moved} == {
        ((), torch.float32),
        ((6,), torch.bfloat16),
        ((6, 6), torch.bfloat16),
    }
    assert rounded_sums(step.program.placed) == ("bfloat16", 2)
    assert rounded_sums(mw.compile(model.float(), loss=mse, example={"input": x.float(), "y": x.float()}, mesh="dp=2")
                        .program.placed) == ("", 0)  # fmt: skip
