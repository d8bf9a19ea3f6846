"""Rows of experts sorted in blocks of the batch: equal to one device, and no token leaves its data-parallel devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.batch_split.test_captured import COUNT, REFUSED, TOP, Coupled, Rows, back, by_score, ends_of, shared
from tests.experts import mixture, own_loss, tokens
from tests.movement.test_dispatch import MODELS, SLOW_LINKS, WIDTH, Model, batches, sparse_moves
from tests.training import assert_equals_eager, assert_equals_one_device, train
from torch import Tensor, fx

import meshweave as mw
from meshweave.check.completeness import check_complete
from meshweave.ir import ops
from meshweave.ir.graph import spec_of
from meshweave.passes import Split

ours = torch.ops.meshweave
PLANS = {
    "dp=2": "dp:dp",
    "dp=4": "dp:dp",
    "fsdp=2": "fsdp:fsdp",
    "dp=2,fsdp=2": "dp:dp+fsdp:fsdp",
    "dp=2,ep=2": "dp:dp+ep:ep",
    "fsdp=2,ep=2": "fsdp:fsdp+ep:ep",
    "dp=2,ep=3": "dp:dp+ep:ep",  # uneven experts
}
SAMPLE = {("a sum over each token", "dp=4"), ("added rows", "fsdp=2,ep=2"), ("empty experts", "dp=2,ep=3")}
CASES = [
    pytest.param(MODELS[name], mesh, marks=() if (name, mesh) in SAMPLE else pytest.mark.slow, id=name)
    for name in MODELS
    for mesh in PLANS
]


def num_blocks(step: mw.TrainStep) -> set[int]:
    """The numbers of blocks in which rows are sorted."""
    sorts = step.program.captured.graph.find_nodes(op="call_function", target=ours.block_sort.default)
    return {n.args[1] for n in sorts}


def moves_of_tokens(step: mw.TrainStep) -> list[fx.Node]:
    """The moves of rows of a token's width, of which parameters have fewer."""
    moves = step.program.placed.graph.find_nodes(op="call_function", target=ops.move)
    return [n for n in moves if spec_of(n).shape[-1:] == (WIDTH,) and spec_of(n).shape[0] >= 48]


@pytest.mark.parametrize(("settings", "mesh"), CASES)
def test_blocks_equal_one_device_in_float64(settings: dict[str, Any], mesh: str) -> None:
    data, options = batches(3, 48), {"plan": PLANS[mesh], "profile": SLOW_LINKS}
    step = assert_equals_one_device(Model(**settings).double(), data, mesh, **options)
    assert num_blocks(step) == {4 if mesh in ("dp=4", "dp=2,fsdp=2") else 2}
    check_complete(step.program.placed, step.program.optimized.roles)


@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("fsdp=2", marks=pytest.mark.slow)])
def test_data_parallel_devices_exchange_no_tokens(mesh: str) -> None:
    step, _ = train(Model().double(), batches(1, 48), mesh, plan=PLANS[mesh], profile=SLOW_LINKS)
    assert moves_of_tokens(step) == []


def test_tokens_stay_among_the_devices_of_their_block() -> None:
    """With experts over ep only these devices exchange rows: as many as if each block were a batch of its own."""
    options: dict[str, Any] = {"profile": SLOW_LINKS}
    both, _ = train(Model(8).double(), batches(1, 48), "dp=2,ep=2", plan=PLANS["dp=2,ep=2"], **options)
    alone, _ = train(Model(8).double(), batches(1, 24), "ep=2", plan="ep:ep", **options)
    plans = [[n.meta["plan"].steps[0] for n in sparse_moves(step)] for step in (both, alone)]
    assert {step.axes for step in plans[0]} == {("ep",)}
    assert [(s.kind, s.bytes_received) for s in plans[0]] == [(s.kind, s.bytes_received) for s in plans[1]]
    assert len(moves_of_tokens(both)) == len(plans[0]) == 4


@pytest.mark.parametrize("how", [by_score, shared], ids=lambda how: how.__name__)
@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("dp=2,ep=2", marks=pytest.mark.slow)])
def test_what_needs_all_rows_beside_the_experts_has_them(how: Rows, mesh: str) -> None:
    data = batches(2)
    step = assert_equals_one_device(Coupled(how).double(), data, mesh, plan=PLANS[mesh])
    assert num_blocks(step) == {2}


KINDS = [pytest.param(how, marks=() if i < 2 else pytest.mark.slow) for i, how in enumerate(REFUSED)]


@pytest.mark.parametrize("how", KINDS)
def test_rows_that_need_others_are_sorted_as_a_whole(how: Rows) -> None:
    data = batches(2)
    step = assert_equals_one_device(Coupled(how).double(), data, "dp=2,ep=2", plan=PLANS["dp=2,ep=2"])
    assert not num_blocks(step)


@pytest.mark.parametrize(
    ("mesh", "plan", "num_rows"),
    [("ep=2,dp=2", "ep:ep+dp:dp", 16), ("dp=3", "dp:dp", 16), ("ep=2", "ep:ep", 16)],
    ids=["parts of the batch that are not contiguous", "uneven parts", "no data parallelism"],
)
def test_other_batches_are_sorted_as_a_whole(mesh: str, plan: str, num_rows: int) -> None:
    data = batches(2, num_rows)
    step = assert_equals_one_device(Model().double(), data, mesh, plan=plan)
    assert not num_blocks(step)


def test_chunks_of_rows_are_sorted_in_blocks() -> None:
    data = batches(2, 48)
    options: dict[str, Any] = {"plan": PLANS["dp=2,ep=2"], "profile": SLOW_LINKS}
    step = assert_equals_one_device(Model().double(), data, "dp=2,ep=2", passes=[Split((2,), "always")], **options)
    assert num_blocks(step) == {2}
    assert {n.meta["plan"].steps[0].axes for n in sparse_moves(step)} == {("ep",)}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,ep=2", "dp=2,tp=2"])
def test_microbatches_and_clipping(mesh: str) -> None:
    plan = {**PLANS, "dp=2,tp=2": "dp:dp+hf_tp:tp"}[mesh]
    data = [tokens(batch=8), tokens(batch=8, seed=2)]
    assert_equals_eager(mixture("qwen3_moe"), data, mesh, loss=own_loss, plan=plan)


def statistics(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Values that are no integers are counted beside the experts."""
    bins = torch.histc(scores.detach().reshape(-1).abs() * 3, bins=4, min=0, max=3)
    equal = (scores.detach()[:, 0:1] == torch.arange(2)).sum(0)
    return _with_experts(model, x, chosen) * (1 + bins.mean() * bins[0] + equal[0])


def sorts_of_rows(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Each row is sorted by itself."""
    return _with_experts(model, x.sort(1).values, chosen) * scores.sort(-1, descending=True).values[:, :1]


def rounded(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Ends are counted in bfloat16, which rounds those of all rows but not those of a block."""
    experts, order = chosen.reshape(-1).sort(stable=True)
    counts = (experts.unsqueeze(1) == torch.arange(COUNT)).sum(0)
    ends = counts.cumsum(0, dtype=torch.bfloat16).to(torch.int32)
    return back(model.experts(x[order // TOP], ends), order, x)


def small_integers(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    load = torch.histc(chosen.reshape(-1).to(torch.int8).double(), bins=300, min=0, max=299)
    few = (chosen.reshape(-1).to(torch.uint8).unsqueeze(1) == torch.arange(300)).sum(0)
    return _with_experts(model, x, chosen) * (load[0] + few[1])


def _with_experts(model: Coupled, x: Tensor, chosen: Tensor) -> Tensor:
    experts, order = chosen.reshape(-1).sort(stable=True)
    return back(model.experts(x[order // TOP], ends_of(experts)), order, x)


@pytest.mark.slow_rows("small_integers")
@pytest.mark.parametrize("how", [statistics, sorts_of_rows, rounded, small_integers], ids=lambda how: how.__name__)
def test_counts_and_sorts_of_other_values(how: Rows) -> None:
    data = batches(2, 256 if how is rounded else 16)
    step = assert_equals_one_device(Coupled(how).double(), data, "dp=2", plan="dp:dp")
    assert num_blocks(step) == (set() if how is rounded else {2})
