"""Gradients of several microbatches: where they are added up, and what moves before the last microbatch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.ir import ops
from meshweave.ir.graph import origin_of


class Pair(nn.Module):
    """An MLP whose operands are wide, and whose batch is small: gathers cost more than they would save once."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(65536, 8192)
        up, down = nn.Linear(8192, 8192, bias=False), nn.Linear(8192, 8192, bias=False)
        self.layers = nn.ModuleList([nn.Sequential(up, nn.ReLU(), down)])

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](self.words(ids))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(65536, 256), nn.Linear(256, 8, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


def test_the_gradient_of_an_embedding_that_is_rounded_is_added_up_where_it_is_computed() -> None:
    """A gradient in 16 bits is rounded to that of its float32 parameter before it is added: nothing of it, and none of
    what it is computed from, moves in a microbatch that is not the last."""
    with torch.device("meta"):
        model, ids = Words(), torch.empty(512, 4096, dtype=torch.long)
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters()), model)
    options = CaptureOptions(accumulate=64, precision=mw.Precision(param_dtype=torch.bfloat16))
    target = Target(mw.Mesh("dp=8"), mw.Plan.zero1("dp"), load_profile("h100"))
    source = StepSource(model, lambda out, batch: out.float().square().sum())
    placed = build_program(source, {"ids": ids}, optimizer, target, options).placed
    (computed,) = placed.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding_dense_backward.default)
    assert computed.meta["layout"].partial == (("dp", "sum"),)
    moves = placed.graph.find_nodes(op="call_function", target=ops.move)
    assert not [str(origin_of(node)) for node in moves if origin_of(node).phase == "backward"]


def test_sums_are_cut_as_the_parameters_are_used() -> None:
    """A microbatch adds to its share of a gradient: to a whole one, which is reduced once, it would take tp times as
    long, and as much memory."""
    with torch.device("meta"):
        model, ids = Pair(), torch.empty(512, 4096, dtype=torch.long)
    options = CaptureOptions(accumulate=256, precision=mw.Precision(param_dtype=torch.bfloat16))
    plan = mw.Plan.zero1("dp") + mw.Plan.tp(
        "tp", {"words": "rowwise", "layers.*.0": "colwise", "layers.*.2": "rowwise"}
    )
    target = Target(mw.Mesh("dp=2,tp=8"), plan + mw.Plan.sequence_parallel("tp"), load_profile("h100"))
    source = StepSource(model, lambda out, batch: out.float().square().sum())
    placed = build_program(source, {"ids": ids}, None, target, options).placed
    sums = {name: node.meta["layout"] for (kind, name), node in placed.results.items() if kind == "acc"}
    assert {name: its.dim_of("tp") for name, its in sums.items()} == {
        "words.weight": 0,
        "layers.0.0.weight": 0,
        "layers.0.2.weight": 1,
    }
    assert all(layout.partial == (("dp", "sum"),) for layout in sums.values())
