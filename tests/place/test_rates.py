"""Repeated work costs what it costs on the machine at hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshweave as mw
from meshweave.cost.hardware import Matmul
from meshweave.ir.collectives import REDUCE_SCATTER
from meshweave.place.rates import ComputeRate, rates_of


def test_the_rates_of_a_profile_are_those_of_a_large_matmul() -> None:
    profile = mw.load_profile("cpu-gloo")
    rate = rates_of(profile)(torch.float32)
    matmul = Matmul(4096, 4096, 4096, 1, torch.float32, 3 * 4096**2 * 4)
    assert rate.flops_per_second == pytest.approx(matmul.flops / profile.compute_seconds(matmul), rel=0.3)
    slower = rates_of(profile.scaled(compute=0.5))(torch.float32)
    assert slower.flops_per_second == pytest.approx(rate.flops_per_second / 2, rel=0.1)
    assert slower.bytes_per_second == pytest.approx(rate.bytes_per_second, rel=0.1)


def test_a_dtype_without_a_figure_counts_as_float32() -> None:
    rates = rates_of(mw.load_profile("cpu-gloo"))
    assert rates(torch.int64) == rates(torch.float32)


def test_without_a_profile_an_h100_is_assumed() -> None:
    assert rates_of(mw.AlphaBeta())(torch.float32) == ComputeRate()


def reduces_gradient(compute: float) -> bool:
    """Whether data-parallel devices reduce the gradient of a weight, in place of gathering the rows of its layer to
    make it twice: 64 rows of 512 and 1024 numbers, 384 KB, against a gradient of 2 MB."""
    model = nn.Linear(512, 1024, bias=False)
    step = mw.compile(
        model,
        loss=lambda out, _: out.square().mean(),
        example=(torch.randn(64, 512),),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mesh="dp=2",
        profile=mw.load_profile("cpu-gloo").scaled(compute=compute),
    )
    return any(node.target is REDUCE_SCATTER.op for node in step.program.rank.graph.nodes)


def test_a_gradient_is_reduced_where_making_it_twice_takes_longer() -> None:
    assert reduces_gradient(compute=1e-3)
    assert not reduces_gradient(compute=1e6)
