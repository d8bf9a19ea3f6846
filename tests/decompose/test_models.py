"""Compiled training steps taken apart: linears of tensor parallelism forward and backward, and whole models."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests.check.devices import inputs_of, run_devices
from tests.decompose.programs import count, num_permutes
from tests.models import hugging_face
from torch import Tensor, nn

import meshweave as mw
from meshweave.check.deadlock import check_deadlock
from meshweave.ir.collectives import functional
from meshweave.optimize.decompose import DecomposeOptions, DecomposeReport, decompose
from meshweave.place.plans import Plan
from meshweave.runtime.session import SessionSettings
from meshweave.runtime.world import LocalWorld
from meshweave.train_step import CompiledStep, TrainStep

GATHER = functional.all_gather_into_tensor.default
SCATTER = functional.reduce_scatter_tensor.default
REDUCE = functional.all_reduce.default
SEQUENCE = Plan.hf_tp("tp") + Plan.sequence_parallel("tp")
ALWAYS = DecomposeOptions(when="always")
WAYS = {
    "direct": replace(ALWAYS, all_gather=("direct",), reduce_scatter=("direct",), all_reduce=("direct",)),
    "ring": replace(ALWAYS, all_gather=("cyclic",), reduce_scatter=("ring",), all_reduce=("ring",)),
    "both ways": replace(ALWAYS, all_gather=("bidirectional",), reduce_scatter=("direct",), all_reduce=()),
    "parts": replace(
        ALWAYS,
        all_gather=("pipelined",),
        reduce_scatter=("pipelined",),
        all_reduce=("pipelined",),
        num_chunks=(2,),
    ),
}


class Linears(nn.Module):
    """Along a sequence that is sharded: a column-parallel linear gathers its rows, a row-parallel one scatters them."""

    def __init__(self, mesh: mw.Mesh) -> None:
        super().__init__()
        self.rows = mw.Layout.parse("[{}, {tp}, {}]", mesh)
        self.pre = nn.Linear(6, 6, bias=False)
        self.up, self.down = nn.Linear(6, 24, bias=False), nn.Linear(24, 6, bias=False)
        made = torch.Generator().manual_seed(0)
        for weight in self.parameters():
            weight.data = torch.randint(-1, 2, weight.shape, generator=made).float()

    def forward(self, x: Tensor) -> Tensor:
        x = mw.move(self.pre(mw.move(x, self.rows)), self.rows)
        return mw.move(self.down(torch.relu(self.up(x))), self.rows) * 2


@cache
def linears(n: int, options: DecomposeOptions | None, batch: int = 1) -> tuple[TrainStep, DecomposeReport | None, Any]:
    mesh = mw.Mesh(f"dp=2,tp={n}", devices=list(reversed(range(2 * n))))
    model, x = Linears(mesh), torch.randint(-1, 2, (batch, 24, 6), generator=torch.Generator().manual_seed(1)).float()
    step = mw.compile(
        model,
        loss=lambda out, _: out.square().sum(),
        example=(x,),
        mesh=mesh,
        plan=Plan.tp("tp", {"up": "colwise", "down": "rowwise"}) + Plan.replicate("dp"),
        run=mw.RunOptions(keep_gradients=True),
    )
    if options is None:
        return step, None, (x,)
    role, report = decompose(step.program.rank, None, options)
    program = replace(step.program, optimized=replace(step.program.optimized, roles=(role,)))
    settings = SessionSettings(run=mw.RunOptions(keep_gradients=True))
    return TrainStep(CompiledStep(program, model, None, LocalWorld(program.mesh), settings)), report, (x,)


@pytest.mark.parametrize(
    ("n", "batch"), [(3, 1), (2, 3), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((2, 1), (3, 3)))]
)
@pytest.mark.parametrize("name", WAYS)
def test_column_and_row_parallel_linears_forward_and_backward(name: str, n: int, batch: int) -> None:
    """Loss and gradients to the bit (all values are integers), on an axis of a mesh of two, in the ways that costs
    choose (where rows are few, the weights are gathered); n - 1 permutes for what is taken apart."""
    plain, _, data = linears(n, None, batch)
    step, report, _ = linears(n, WAYS[name], batch)
    assert report is not None
    assert step(data) == plain(data)
    expected = plain.gradients()
    for key, value in step.gradients().items():
        assert torch.equal(value, expected[key]), key
    before, after = plain.program.rank, step.program.rank
    taken = Counter(row.op for row in report.rows if row.is_taken)
    kinds = {"all_gather": GATHER, "reduce_scatter": SCATTER, "all_reduce": REDUCE}
    assert taken["all_gather"] >= 2
    assert taken["reduce_scatter"] >= 1
    for kind, op in kinds.items():
        left = count(before, op) - sum(row.op == kind and row.is_taken for row in report.rows)
        whole = taken["all_reduce"] if kind == "all_gather" else 0  # the second half of an all-reduce
        assert count(after, op) == left + (2 * taken[kind] if name == "parts" else whole)
    if name == "parts":
        assert num_permutes(after) == 0
    else:
        assert num_permutes(after) == sum(taken.values()) * (n - 1)
    check_deadlock([after])


@pytest.mark.parametrize(
    ("mesh", "plan", "least"),
    [
        pytest.param("tp=2", SEQUENCE, 10, marks=pytest.mark.slow),
        pytest.param("tp=2", None, 9, marks=pytest.mark.slow),
        pytest.param("fsdp=2", None, 10, marks=pytest.mark.slow),
        pytest.param("pp=2,tp=2", None, 0, marks=pytest.mark.slow),
        pytest.param("dp=2,tp=4", SEQUENCE + Plan.dp("dp"), 10, marks=pytest.mark.slow),
        ("fsdp=2,tp=2", SEQUENCE + Plan.fsdp("fsdp"), 10),
    ],
)
def test_models_give_the_same(mesh: str, plan: Plan | None, least: int) -> None:
    """All outputs of a Llama's step, by a runtime that knows nothing of rings but what each op means."""
    layers = 1 if mesh == "fsdp=2,tp=2" else 2
    model, batch, loss = hugging_face("llama", batch=4, heads=4, layers=layers)
    roles = mw.compile(model, loss=loss, example=batch, mesh=mesh, plan=plan).program.roles
    full = inputs_of(roles)
    expected = run_devices(roles, full)
    for options in (WAYS["direct"], WAYS["ring"], WAYS["parts"]):
        made = [decompose(role, None, options) for role in roles]
        check_deadlock([role for role, _ in made])
        found = run_devices([role for role, _ in made], full)
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5)
        assert sum(report.num_taken for _, report in made) >= least


def test_uneven_pieces_are_left_with_a_reason() -> None:
    model, batch, loss = hugging_face("llama", batch=4, heads=4, layers=1)
    roles = mw.compile(model, loss=loss, example=batch, mesh="fsdp=3").program.roles
    _, report = decompose(roles[0], None, ALWAYS)
    reasons = {row.reason for row in report.rows if row.op == "all_gather"}
    assert not report.num_taken
    assert "join_blocks has sizes that differ between devices" in reasons
    assert all(row.reason for row in report.rows)
