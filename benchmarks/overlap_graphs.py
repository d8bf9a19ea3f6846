"""Graphs as torch.compile hands them to a post-grad pass: Llama-3-8B under FSDP x TP with sequence parallelism, and a
mixture of experts beside it.

A local model of one rank is written with functional collectives, traced forward and backward by AOT autograd with
Inductor's decompositions, and cut by its min-cut partitioner; the gathers of parameters are marked as recomputed, as
SimpleFSDP marks them, so that backward gathers them again. Nothing is computed: tensors are fake, ranks are those of
the fake process group. Every node has meta["val"] on the meta device: Inductor's pass counts no memory of a CPU, and
traces what it inserts, which needs a GPU where tensors claim to be on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy

from meshweave.optimize.batch_split import split_batch

c10d = torch.ops._c10d_functional
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama and how it is trained. Defaults: Llama 3 8B, Llama Team, arXiv:2407.21783, table 3; 8,192 tokens each."""

    layers: int = 8
    batch: int = 4  # sequences per data-parallel rank
    fsdp: int = 8
    tp: int = 8
    dp: int = 1  # replicas of the fsdp x tp mesh (HSDP): gradients are reduced over fsdp, then over dp
    seq: int = 8192
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    ffn: int = 14336
    vocab: int = 128256
    experts: int = 0  # routed experts, over all ranks; 0: a dense MLP
    top_k: int = 8
    expert_ffn: int = 2048

    @property
    def num_ranks(self) -> int:
        return self.dp * self.fsdp * self.tp

    @property
    def tokens(self) -> int:
        return self.seq * self.batch


@dataclass(frozen=True, slots=True)
class Groups:
    """Names of the process groups of rank 0, as collectives carry them, and the ranks of each."""

    fsdp: str
    tp: str
    dp: str
    experts: str
    ranks: dict[str, tuple[int, ...]]


@contextmanager
def world(shape: Shape) -> Iterator[Groups]:
    """The fake process groups of a mesh dp x fsdp x tp (tp innermost: the 8 ranks of a node), as long as it is open."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=shape.num_ranks)
    try:
        tp = tuple(range(shape.tp))
        fsdp = tuple(range(0, shape.fsdp * shape.tp, shape.tp))
        dp = tuple(range(0, shape.num_ranks, shape.fsdp * shape.tp))
        members = (fsdp, tp, dp, tuple(range(shape.num_ranks)))
        names = [dist.new_group(list(ranks)).group_name for ranks in members]
        yield Groups(*names, dict(zip(names, members, strict=True)))
    finally:
        dist.destroy_process_group()


def _wait(started: Tensor) -> Tensor:
    return c10d.wait_tensor(started)


def _gather(x: Tensor, size: int, group: str) -> Tensor:
    return _wait(c10d.all_gather_into_tensor(x.contiguous(), size, group))


def _scatter(x: Tensor, op: str, size: int, group: str) -> Tensor:
    return _wait(c10d.reduce_scatter_tensor(x.contiguous(), op, size, group))


class _GatherParameter(torch.autograd.Function):
    """A shard in float32 to the parameter in bfloat16; its gradient is reduced in float32, as FSDP2 with
    MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32) does."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, sizes: tuple[int, int], groups: Groups) -> Tensor:
        ctx.sizes, ctx.groups = sizes, groups
        return _gather(shard.to(torch.bfloat16), sizes[0], groups.fsdp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (fsdp, dp), groups = ctx.sizes, ctx.groups
        reduced = _scatter(gradient.to(torch.float32), "avg", fsdp, groups.fsdp)
        return _wait(c10d.all_reduce(reduced, "avg", groups.dp)) if dp > 1 else reduced, None, None


class _GatherSequence(torch.autograd.Function):
    """[tokens / tp, n] to [tokens, n]; the gradient is summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _gather(x, size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scatter(gradient, "sum", ctx.size, ctx.group), None, None


class _ScatterSequence(torch.autograd.Function):
    """Partial sums [tokens, n] to their sum, [tokens / tp, n]; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        return _scatter(x, "sum", size, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.size, ctx.group), None, None


class _Shared(torch.autograd.Function):
    """A norm's weight, used on each rank's part of the sequence: its gradient is summed over tp."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: str) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _wait(c10d.all_reduce(gradient.contiguous(), "sum", ctx.group)), None


class _Sum(torch.autograd.Function):
    """Partial sums to their sum on every rank; every rank's part of it has the sum's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return _wait(c10d.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Exchange(torch.autograd.Function):
    """[rows, n] dealt evenly to all ranks of a group; the gradient is dealt back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int, group: str) -> Tensor:
        ctx.size, ctx.group = size, group
        splits = [x.shape[0] // size] * size
        return _wait(c10d.all_to_all_single(x.contiguous(), splits, splits, group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Exchange.apply(gradient, ctx.size, ctx.group), None, None


class LocalLlama:
    """One rank's part of the model as a function of flat tensors: shards of parameters, token ids, targets."""

    def __init__(self, shape: Shape, groups: Groups) -> None:
        self.shape, self.groups = shape, groups

    def parameters(self) -> list[tuple[int, ...]]:
        """Shapes of the shards: embedding; per layer norm, q, k, v, o, norm, gate, up, down; norm, head. With experts
        gate, up and down are those of the shared expert, not cut by tp, and the router and a rank's experts follow."""
        s = self.shape
        head_dim = s.hidden // s.heads
        q, kv, ffn, vocab = s.hidden // s.tp, s.kv_heads * head_dim // s.tp, s.ffn // s.tp, s.vocab // s.tp
        attention = [(s.hidden,), (q, s.hidden), (kv, s.hidden), (kv, s.hidden), (s.hidden, q)]
        mlp = [(s.hidden,), (ffn, s.hidden), (ffn, s.hidden), (s.hidden, ffn)]
        own: list[tuple[int, ...]] = []
        if s.experts:
            mlp = [(s.hidden,), *[(s.expert_ffn, s.hidden)] * 2, (s.hidden, s.expert_ffn), (s.experts, s.hidden)]
            held = s.experts // s.num_ranks
            own = [(held, s.hidden, s.expert_ffn), (held, s.hidden, s.expert_ffn), (held, s.expert_ffn, s.hidden)]
        cut = [[(first // s.fsdp, *rest) for first, *rest in some] for some in (attention + mlp, [(vocab, s.hidden)])]
        return [*cut[1], *(cut[0] + own) * s.layers, (s.hidden // s.fsdp,), *cut[1]]

    def inputs(self) -> list[Tensor]:
        shards = [torch.empty(size, requires_grad=True) for size in self.parameters()]
        return [*shards, *(torch.empty(self.shape.tokens, dtype=torch.int64) for _ in range(2))]

    def __call__(self, *args: Tensor) -> tuple[Tensor]:
        *shards, ids, targets = args
        parameters = iter(shards)
        x = self.scatter(self.embed(ids, next(parameters)))
        for _ in range(self.shape.layers):
            x = (self.route if self.shape.experts else self.mlp)(self.attend(x, parameters), parameters)
        x = self.gather(self.norm(x, next(parameters)))
        return (self.loss(self.linear(x, next(parameters)), targets),)

    def weight(self, shard: Tensor) -> Tensor:
        return _GatherParameter.apply(shard, (self.shape.fsdp, self.shape.dp), self.groups)

    def linear(self, x: Tensor, shard: Tensor) -> Tensor:
        return torch.mm(x, self.weight(shard).t())

    def gather(self, x: Tensor) -> Tensor:
        return x if self.shape.tp == 1 else _GatherSequence.apply(x, self.shape.tp, self.groups.tp)

    def scatter(self, x: Tensor) -> Tensor:
        return x if self.shape.tp == 1 else _ScatterSequence.apply(x, self.shape.tp, self.groups.tp)

    def norm(self, x: Tensor, shard: Tensor) -> Tensor:
        weight = self.weight(shard) if self.shape.tp == 1 else _Shared.apply(self.weight(shard), self.groups.tp)
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return scaled.to(x.dtype) * weight

    def owned(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Rank 0's part of the vocabulary: ids in it (0 where not), and where they are not."""
        outside = ids >= self.shape.vocab // self.shape.tp
        return torch.where(outside, 0, ids), outside

    def embed(self, ids: Tensor, shard: Tensor) -> Tensor:
        if self.shape.tp == 1:
            return torch.nn.functional.embedding(ids, self.weight(shard))
        local, outside = self.owned(ids)
        return torch.where(outside.unsqueeze(1), 0.0, torch.nn.functional.embedding(local, self.weight(shard)))

    def attend(self, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
        full = self.gather(self.norm(x, next(parameters)))
        q, k, v = (self.heads(self.linear(full, next(parameters))) for _ in range(3))
        out = torch.ops.aten._scaled_dot_product_flash_attention(
            self.rotate(q), self.rotate(k), v, 0.0, is_causal=True
        )[0]
        flat = out.permute(2, 0, 1, 3).reshape(self.shape.tokens, -1)
        return x + self.scatter(self.linear(flat, next(parameters)))

    def heads(self, x: Tensor) -> Tensor:
        """[seq * batch, n * head_dim] to [batch, n, seq, head_dim]."""
        s = self.shape
        return x.view(s.seq, s.batch, -1, s.hidden // s.heads).permute(1, 2, 0, 3)

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        places = torch.arange(self.shape.seq, dtype=torch.float32, device=x.device)
        rates = 500000.0 ** -(torch.arange(half, dtype=torch.float32, device=x.device) / half)
        angles = torch.outer(places, rates).repeat(1, 2)
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return (x * angles.cos() + turned * angles.sin()).to(x.dtype)

    def mlp(self, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
        full = self.gather(self.norm(x, next(parameters)))
        gate, up = self.linear(full, next(parameters)), self.linear(full, next(parameters))
        return x + self.scatter(self.linear(torch.nn.functional.silu(gate) * up, next(parameters)))

    def route(self, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
        """The shared expert and top_k routed ones for this rank's part of the sequence. Every expert is dealt as many
        tokens as every other (what a capacity factor of 1 makes of any routing), so that shapes are known."""
        s, group = self.shape, self.groups.experts
        normed = self.norm(x, next(parameters))
        gate, up = self.linear(normed, next(parameters)), self.linear(normed, next(parameters))
        shared = self.linear(torch.nn.functional.silu(gate) * up, next(parameters))
        scores, chosen = self.linear(normed, next(parameters)).float().sigmoid().topk(s.top_k, dim=1)
        order = chosen.flatten().argsort()
        dealt = _Exchange.apply(normed[order // s.top_k], s.num_ranks, group)
        done = _Exchange.apply(self.experts(dealt, *(next(parameters) for _ in range(3))), s.num_ranks, group)
        weighted = done * scores.flatten()[order].unsqueeze(1).to(done.dtype)
        return x + shared + torch.zeros_like(x).index_add(0, order // s.top_k, weighted)

    def experts(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """[rank * expert * tokens, hidden] through this rank's experts."""
        s = self.shape
        gate, up, down = (weight.to(x.dtype) for weight in (gate, up, down))
        mine = x.view(s.num_ranks, gate.shape[0], -1, s.hidden).transpose(0, 1).reshape(gate.shape[0], -1, s.hidden)
        out = torch.bmm(torch.nn.functional.silu(torch.bmm(mine, gate)) * torch.bmm(mine, up), down)
        return out.view(gate.shape[0], s.num_ranks, -1, s.hidden).transpose(0, 1).reshape(x.shape)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of logits [tokens, vocab / tp], of which no rank has all."""
        wide = logits.float()
        if self.shape.tp == 1:
            return torch.nn.functional.cross_entropy(wide, targets)
        top = _wait(c10d.all_reduce(wide.detach().amax(1), "max", self.groups.tp))
        shifted = wide - top.unsqueeze(1)
        total = _Sum.apply(shifted.exp().sum(1), self.groups.tp)
        local, outside = self.owned(targets)
        own = torch.where(outside, 0.0, shifted.gather(1, local.unsqueeze(1)).squeeze(1))
        return (total.log() - _Sum.apply(own, self.groups.tp)).mean()


def trace(shape: Shape, groups: Groups, num_chunks: int = 1) -> dict[Direction, fx.GraphModule]:
    """The forward and the backward graph of rank 0, inside `world(shape)`; with several chunks, of the joint graph with
    its batch split."""
    model = LocalLlama(shape, groups)
    with FakeTensorMode():
        args = model.inputs()
        joint = aot_export_joint_simple(model, tuple(args), trace_joint=True, decompositions=select_decomp_table())
        if num_chunks > 1:
            _erase_checks(joint.graph)
            joint, report = split_batch(joint, num_chunks)
            assert report.is_taken, report
        _mark_gathers(joint.graph, groups)
        inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
        forward, backward = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=1)
        made: dict[Direction, fx.GraphModule] = {"forward": forward, "backward": backward}
    for module in made.values():
        _place_on_device(module, FakeTensorMode())
    return made


def build(direction: Direction, layers: int, batch: int, groups: Groups | None = None, **sizes: int) -> fx.GraphModule:
    """One graph. Without `groups` its process groups are gone when it returns, and only their names are left."""
    shape = Shape(layers, batch, **sizes)
    if groups is not None:
        return trace(shape, groups)[direction]
    with world(shape) as made:
        return trace(shape, made)[direction]


def _mark_gathers(graph: fx.Graph, groups: Groups) -> None:
    """Backward gathers parameters again: cast, gather and wait are not saved (reshard after forward)."""
    for node in graph.nodes:
        if node.target is c10d.all_gather_into_tensor.default and node.args[2] == groups.fsdp:
            again: Sequence[Any] = (node.args[0], node, *node.users)
            for one in again:
                one.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                one.meta["ac_graph_id"] = 0


def _erase_checks(graph: fx.Graph) -> None:
    """Checks of dtypes, which only export traces."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        graph.erase_node(node)


def _place_on_device(module: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Write every tensor of the graph anew as a fake one of another device, with the same storages shared."""
    device = torch.device("meta")

    def moved(value: Any) -> Any:
        if not isinstance(value, FakeTensor):
            return value
        where = (value.untyped_storage(), value.storage_offset(), value.shape, value.stride())
        return FakeTensor(mode, torch.empty(0, dtype=value.dtype, device="meta").set_(*where), device)

    _erase_checks(module.graph)
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and not node.users:  # parameters that backward does not read
            module.graph.erase_node(node)
            continue
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
        node.meta = {"val": tree_map(moved, node.meta["val"])} if "val" in node.meta else {}
    module.recompile()
