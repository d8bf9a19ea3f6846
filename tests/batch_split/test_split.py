"""The batch split on graphs that AOT autograd makes of a transformer under FSDP x TP with sequence parallelism: run for
real on four ranks, forward, backward and both in one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tests.overlap.graphs import ATEN, C10D, RANKS, STARTS, groups_of, handed_in, run, starts
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode

import meshweave as mw
from meshweave.optimize.batch_split.split import SplitReport, split_batch

GATHER = C10D.all_gather_into_tensor.default
TP, FSDP, SIZE = "a", "b", 2  # groups of the mesh of tests/overlap/graphs.py, each of two ranks


def wait(x: Tensor) -> Tensor:
    return C10D.wait_tensor(x)


def gathered(x: Tensor, group: str) -> Tensor:
    return wait(C10D.all_gather_into_tensor(x.contiguous(), SIZE, group))


def scattered(x: Tensor, op: str, group: str) -> Tensor:
    return wait(C10D.reduce_scatter_tensor(x.contiguous(), op, SIZE, group))


class Weight(torch.autograd.Function):
    """A shard to the weight; the gradient is averaged and scattered."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor) -> Tensor:
        return gathered(shard, FSDP)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return scattered(gradient, "avg", FSDP)


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gathered(x, TP)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return scattered(gradient, "sum", TP)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return scattered(x, "sum", TP)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gathered(gradient, TP)


@dataclass(frozen=True)
class Model:
    """[seq * batch] ids to a mean loss. `dropout` follows attention; `has_statistics`: rows are centred over the batch;
    `is_fused`: attention is one op."""

    seq: int = 4
    batch: int = 4
    hidden: int = 8
    heads: int = 2
    layers: int = 1
    vocab: int = 6
    dropout: float = 0.0
    has_statistics: bool = False
    is_fused: bool = False

    @property
    def tokens(self) -> int:
        return self.seq * self.batch

    def shapes(self) -> list[tuple[int, ...]]:
        h = self.hidden
        layer = [(h,), (h, h), (h, h), (h, h), (h, h), (h,), (2 * h, h), (h, 2 * h)]
        return [(n // SIZE, *rest) for n, *rest in [(self.vocab, h), *layer * self.layers, (self.vocab, h)]]

    def __call__(self, *args: Tensor) -> tuple[Tensor]:
        *shards, ids, targets = args
        weights: Iterator[Tensor] = (Weight.apply(shard) for shard in shards)
        x = Scatter.apply(torch.nn.functional.embedding(ids, next(weights)))
        for _ in range(self.layers):
            x = x + self.attend(self.norm(x, next(weights)), [next(weights) for _ in range(4)])
            full = Gather.apply(self.norm(x, next(weights)))
            x = x + Scatter.apply(torch.mm(torch.nn.functional.silu(full @ next(weights).t()), next(weights).t()))
        if self.has_statistics:
            x = (x - x.mean(0)) / (x.var(0) + 0.1)
        logits = torch.mm(Gather.apply(x), next(weights).t())
        return (torch.nn.functional.nll_loss(torch.log_softmax(logits, 1), targets),)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

    def attend(self, x: Tensor, weights: list[Tensor]) -> Tensor:
        full = Gather.apply(x)
        q, k, v = (self.cut(torch.mm(full, w.t())) for w in weights[:3])
        if self.is_fused:
            out = ATEN._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        else:
            out = torch.softmax(q @ k.transpose(2, 3) * 0.5, -1) @ v
        flat = out.permute(2, 0, 1, 3).reshape(self.tokens, -1)
        if self.dropout:
            flat = torch.nn.functional.dropout(flat, self.dropout)
        return Scatter.apply(torch.mm(flat, weights[3].t()))

    def cut(self, x: Tensor) -> Tensor:
        return x.view(self.seq, self.batch, self.heads, -1).permute(1, 2, 0, 3)


@cache
def traced(model: Model, dtype: torch.dtype = torch.float64) -> Mapping[str, fx.GraphModule]:
    """The joint graph, and what the min-cut partitioner makes of it."""
    joint = joint_of(model, dtype)
    return {"joint": joint, **dict(zip(("forward", "backward"), parts_of(joint), strict=True))}


def joint_of(model: Model, dtype: torch.dtype = torch.float64) -> fx.GraphModule:
    table = dict(select_decomp_table())
    table.pop(ATEN._scaled_dot_product_flash_attention_for_cpu.default, None)
    with FakeTensorMode():
        shards = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in model.shapes()]
        args = [*shards, *(torch.empty(model.tokens, dtype=torch.int64) for _ in range(2))]
        joint = aot_export_joint_simple(model, tuple(args), trace_joint=True, decompositions=table)
    for node in joint.graph.find_nodes(op="call_function", target=ATEN._assert_tensor_metadata.default):
        joint.graph.erase_node(node)
    return joint


def parts_of(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder", sort=True)]
    forward, backward = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=1)
    return forward, backward


def inputs_of(gm: fx.GraphModule, vocab: int = 6) -> list[list[Tensor]]:
    """Other values on every rank, laid out as meta["val"] says."""
    generator = torch.Generator().manual_seed(0)

    def one(val: Tensor) -> Tensor:
        if val.dtype.is_floating_point:
            made = torch.randn(val.shape, generator=generator, dtype=val.dtype)
        elif val.dtype is torch.bool:
            made = torch.rand(val.shape, generator=generator) > 0.5
        else:
            made = torch.randint(vocab, val.shape, generator=generator)
        return torch.empty_strided(val.shape, val.stride(), dtype=val.dtype).copy_(made)

    vals = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder", sort=True)]
    return [[one(val) for val in vals] for _ in range(RANKS)]


def assert_close(before: fx.GraphModule, after: fx.GraphModule, rtol: float = 1e-11) -> None:
    """Equal but for the order of sums, in the same layout in memory."""
    inputs = inputs_of(before)
    old, new = run(before, inputs), run(after, inputs)
    for these, those in zip(old.results(), new.results(), strict=True):
        for x, y in zip(these, those, strict=True):
            assert y.stride() == x.stride()
            torch.testing.assert_close(y, x, rtol=rtol, atol=rtol)


def by_group(gm: fx.GraphModule) -> dict[str, int]:
    return {group: sum(n.args[-1] == group for n in starts(gm)) for group in (TP, FSDP)}


def checked(model: Model, part: str, count: int) -> SplitReport:
    gm = traced(model)[part]
    made, report = split_batch(gm, count)
    assert report.is_taken, report
    assert_close(gm, made)
    before, after = by_group(gm), by_group(made)
    assert after == {TP: count * before[TP], FSDP: before[FSDP]}, "weights are gathered, gradients reduced once"
    return report


@pytest.mark.parametrize("part", ["forward", "backward", "joint"])
@pytest.mark.parametrize("count", [2, 4])
def test_transformer(part: str, count: int) -> None:
    report = checked(Model(), part, count)
    assert not report.whole
    assert report.work_share == 1.0
    assert report.num_joins == 0 or part == "forward"


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this torch has fused attention of float64 tell another dtype")
@pytest.mark.parametrize("part", ["forward", "backward", "joint"])
def test_fused_attention_and_dropout(part: str) -> None:
    report = checked(Model(dropout=0.5, is_fused=True), part, 2)
    assert not report.whole


@pytest.mark.parametrize("part", ["forward", "joint"])
def test_statistics_of_the_batch_end_the_region(part: str) -> None:
    gm = traced(Model(has_statistics=True))[part]
    made, report = split_batch(gm)
    assert_close(gm, made)
    assert {w.op for w in report.whole} == {"aten.var.correction"}
    assert report.work_share == 1.0  # it goes on behind them


def test_saved_values_stay_in_chunks_where_the_joint_graph_is_split() -> None:
    """Split before the partitioner cuts it, nothing is joined, and backward starts from chunks."""
    joint = joint_of(Model())
    made, report = split_batch(joint, 2)
    assert report.num_joins == 0
    forward, backward = parts_of(made)
    assert not [n for n in (*forward.graph.nodes, *backward.graph.nodes) if n.target is ATEN.cat.default]
    saved = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    assert sum(bool(re.search(r"_chunk[01]", name)) for name in saved) > len(saved) / 2


def test_chunks_hide_communication() -> None:
    """Tensor-parallel links and matmuls have the same to do: whole, next to nothing of it can run at a time."""

    def cost(node: fx.Node) -> float:
        vals = [n.meta["val"] for n in node.all_input_nodes]
        if node.target in STARTS:
            return 0.0 if node.args[-1] == FSDP else handed_in(node) * (SIZE if node.target is GATHER else 1)
        is_matmul = node.target in (ATEN.mm.default, ATEN.addmm.default, ATEN.bmm.default)
        return vals[-2].numel() * vals[-1].shape[-1] if is_matmul else 0.0

    def seconds(gm: fx.GraphModule) -> float:
        return mw.overlap(gm, cost=cost, groups=groups_of(0), memory_cap_bytes=1 << 30)[1].seconds

    gm = traced(Model())["joint"]
    whole = seconds(gm)
    assert any(seconds(split_batch(gm, count)[0]) < 0.9 * whole for count in (2, 4))


@pytest.mark.slow
def test_gradients_in_half_precision_are_as_good_as_whole_ones() -> None:
    """Errors of all gradients in bfloat16 against float64, whole and in chunks, by either way to add."""
    model = Model(seq=16)
    gm = traced(model, torch.bfloat16)["joint"]
    inputs = inputs_of(gm)
    wide = [[x.double() if x.is_floating_point() else x for x in row] for row in inputs]
    exact = run(traced(model)["joint"], wide).results()[0]

    def error(one: fx.GraphModule) -> float:
        pairs = [
            (x.double(), y) for x, y in zip(run(one, inputs).results()[0], exact, strict=True) if y.is_floating_point()
        ]
        return sum(float((x - y).norm() / y.norm()) for x, y in pairs if y.norm() > 0)

    whole = error(gm)
    for is_fused in (True, False):
        assert error(split_batch(gm, 4, fuse_sums=is_fused)[0]) < 1.25 * whole
