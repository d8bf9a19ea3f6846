"""Context parallelism: the sequence cut over devices, from the batch through attention to the loss and back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.models import hugging_face
from tests.sequences import Shape, difference, named, plain
from tests.training import assert_equals_eager, assert_equals_one_device, batches
from torch import Tensor, fx, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.errors import PlanError
from meshweave.ir.attention import backward, forward
from meshweave.ir.causal import Causal, head_tail
from meshweave.ir.graph import origin_of
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.plan_text import parse_plan
from meshweave.place.plans import Plan

EXACT = 1e-10  # of float64


@pytest.mark.slow_rows(
    "cp=2,tp=2-heads", "cp=2-gather", "dp=2,cp=2-gather", "dp=2,cp=2-heads", "fsdp=2,cp=2-gather", "fsdp=2,cp=2-heads"
)
@pytest.mark.parametrize("attention", ["gather", "heads"])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=2,tp=2", "dp=2,cp=2", "fsdp=2,cp=2"])
def test_gradients_are_exact(mesh: str, attention: str) -> None:
    plan = Plan.cp("cp", attention) + sum(
        (_OTHERS[axis](axis) for axis in Mesh.parse(mesh).axis_names if axis != "cp"), Plan()
    )
    assert difference(plain(Shape(key_heads=4)), mesh, torch.float64, plan=plan)[0] < EXACT


_OTHERS = {"dp": Plan.dp, "fsdp": Plan.fsdp, "tp": Plan.auto_tp}


@pytest.mark.slow_rows(
    "gpt2-cp=2,tp=2", "llama-cp=2", "llama-cp=4", "llama-dp=2,cp=2", "llama-fsdp=2,cp=2", "qwen2-cp=2"
)
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", "cp=2"),
        ("llama", "cp=4"),
        ("llama", "cp=2,tp=2"),
        ("llama", "dp=2,cp=2"),
        ("llama", "fsdp=2,cp=2"),
        ("gpt2", "cp=2"),
        ("gpt2", "cp=2,tp=2"),
        ("qwen2", "cp=2"),
    ],
)
def test_models_of_hugging_face(name: str, mesh: str) -> None:
    """They compute norms and the loss in float32, whatever their dtype."""
    assert difference(named(name), mesh, torch.float64)[0] < 1e-6


def test_sequence_parallelism_over_another_axis() -> None:
    """Before a linear layer the sequence is gathered over tp alone: each device does its share of the products."""
    plan = parse_plan("cp:cp+hf_tp:tp+sequence:tp")
    assert difference(named("llama"), "tp=2,cp=2", torch.float64, plan=plan)[0] < 1e-6
    assert _flops("cp=2,tp=2", plan) == _flops("cp=2,tp=2", parse_plan("cp:cp+hf_tp:tp"))


def _flops(mesh: str, plan: Plan) -> float:
    """Of the products of one device in a Llama with long sequences."""
    model, batch, loss = named("llama", tokens=1024)
    step = mw.compile(model, loss=loss, example=batch, mesh=mesh, plan=plan, profile="h100")
    spans = mw.simulate(step.program, "h100").spans
    return sum(span.flops for span in spans if span.op in ("aten.mm", "meshweave.contract"))


@pytest.mark.slow_rows("9")
@pytest.mark.parametrize("tokens", [7, 9, 3])
def test_sequences_that_do_not_divide(tokens: int) -> None:
    assert difference(plain(Shape(tokens=tokens)), "cp=4", torch.float64)[0] < EXACT


@pytest.mark.parametrize("mask", ["none", "bool", "float", "documents"])
def test_masks_go_by_the_position_in_the_sequence(mask: str) -> None:
    assert difference(plain(Shape(mask=mask, tokens=9)), "cp=2", torch.float64)[0] < EXACT


def test_state_is_sharded_over_the_devices_of_a_sequence() -> None:
    error, step = difference(named("plain"), "cp=2", torch.float64, plan="cp:cp+shard_state:cp")
    assert error < EXACT
    assert all(layout.sharded_axes for (kind, _), layout in step.program.placement.stored.items() if kind == "param")


def whole_values(shape: Shape, **options: Any) -> list[fx.Node]:
    """The larger values of a placed step on cp=4 that a device holds without a cut."""
    model, batch, _ = plain(shape)
    step = mw.compile(model, loss=lambda out, _: (out**2).mean(), example=batch, mesh="cp=4", profile="h100", **options)
    nodes = [n for n in step.program.placed.graph.nodes if isinstance(n.meta.get("layout"), Layout)]
    large = [n for n in nodes if n.meta["spec"].num_elements > 1 << 18]
    return [n for n in large if "cp" not in n.meta["layout"].sharded_axes]


def test_gather_has_whole_keys_and_values_alone() -> None:
    """Their gradients are scattered as soon as they are made; logits and whatever else are cut by the sequence."""
    for node in whole_values(Shape(tokens=4096, heads=2, key_heads=1, size=64)):
        (source,) = node.all_input_nodes
        assert "attention" in str((source.target, *(user.target for user in node.users)))


def test_heads_are_exchanged_where_that_costs_less() -> None:
    assert not [n for n in whole_values(Shape(tokens=8192, size=32, key_heads=4)) if n.meta["spec"].shape[0] == 2]


def test_heads_that_do_not_divide_are_an_error() -> None:
    model, batch, loss = plain(Shape(key_heads=2))
    with pytest.raises(PlanError, match="key heads do not divide"):
        mw.compile(model, loss=loss, example=batch, mesh="cp=4", plan="cp:cp:heads")
    with pytest.raises(PlanError, match="unknown way"):
        Plan.cp("cp", "head")


def test_an_axis_of_that_name_is_context_parallel() -> None:
    model, batch, loss = named("plain")
    step = mw.compile(model, loss=loss, example=batch, mesh="cp=2")
    assert str(step.program.placement.stored["batch", "ids"]) == "[{}, {}]"  # and dealt out from head and tail
    step = mw.compile(model, loss=loss, example=batch, mesh="cp=2", plan=Plan.cp("cp", balance="none"))
    assert str(step.program.placement.stored["batch", "ids"]) == "[{}, {cp}]"
    assert parse_plan("dp:dp+cp:cp:gather") == Plan.dp("dp") + Plan.cp("cp", "gather")


def test_a_batch_without_a_sequence_is_an_error() -> None:
    with pytest.raises(PlanError, match="no sequence to cut"):
        mw.compile(nn.Linear(4, 1), loss=lambda out, _: out.sum(), example=(torch.ones(4),), mesh="cp=2")


# Attention on a piece.


def positions(first: int, length: int, starts: tuple[int, ...] | None) -> torch.Tensor:
    """The positions of places in a sequence that is held as chunks from `starts` on."""
    if starts is None:
        return torch.arange(first, first + length)
    size = sorted(starts)[1]
    return torch.cat([torch.arange(start, start + size) for start in starts])[first : first + length]


def check_blocks(queries: tuple[int, int], keys: tuple[int, int], starts: tuple[int, ...] | None = None) -> None:
    """Every pair that a causal mask leaves is in one block."""
    causal = Causal.of(queries[1], keys[1], queries[0], keys[0], starts)
    seen = torch.zeros(queries[1], keys[1], dtype=torch.int64)
    for block in causal.blocks:
        part = seen[block.rows, block.keys]
        part += torch.ones_like(part).tril() if block.is_causal else 1
    at = positions(*queries, starts)[:, None] >= positions(*keys, starts)[None]
    assert torch.equal(seen, at.long()), causal
    assert sum(block.pairs for block in causal.blocks) == int(at.sum())


def test_blocks_are_what_a_causal_mask_leaves() -> None:
    for queries in range(1, 6):
        for keys in range(1, 6):
            for offset in range(7):
                check_blocks((offset, queries), (0, keys))
                check_blocks((0, queries), (offset, keys))


def test_blocks_of_any_places_in_a_balanced_sequence() -> None:
    pick = random.Random(0)
    for _ in range(300):
        n, size = pick.choice([2, 3, 4]), pick.choice([1, 2, 3])
        length = 2 * n * size
        pieces = [(first, pick.randint(1, length - first)) for first in (pick.randrange(length) for _ in range(2))]
        check_blocks(pieces[0], pieces[1], head_tail(length, n))


@pytest.mark.parametrize("num_devices", [2, 4])
def test_head_and_tail_are_balanced(num_devices: int) -> None:
    """Each device has two chunks from the two ends; over keys of each device, and of all, they see the same number."""
    n, length = num_devices, 32
    own, starts = length // n, head_tail(length, n)
    assert starts[:2] == (0, length - own // 2)
    pairs = [
        [sum(block.pairs for block in Causal.of(own, own, r * own, key * own, starts).blocks) for key in range(n)]
        for r in range(n)
    ]
    assert len({sum(row) for row in pairs}) == 1
    assert {pairs[r][key] for r in range(n) for key in range(n) if r != key} == {own * own // 2}


def test_blocks_side_by_side_are_one_call() -> None:
    """Of a ring's step all queries see the first chunk of keys, or the later queries both."""
    starts = head_tail(32, 4)
    shapes = [Causal.of(8, 8, 8, first, starts).blocks for first in (0, 16)]
    assert [[(b.rows, b.keys) for b in blocks] for blocks in shapes] == [
        [(slice(0, 8), slice(0, 4))],
        [(slice(4, 8), slice(0, 8))],
    ]


@pytest.mark.parametrize("value_size", [8, 6], ids=["flash", "spelled"])
def test_attention_of_queries_that_begin_later(value_size: int) -> None:
    """A piece of the queries over all keys gives that piece of the whole, and its part of the gradients."""
    pick, made = random.Random(0), torch.Generator().manual_seed(0)
    for _ in range(20):
        groups, members, tokens = pick.choice([1, 2]), pick.choice([1, 3]), pick.randint(2, 9)
        q, k, v = (
            torch.randn(2, heads, tokens, size, dtype=torch.float64, generator=made)
            for heads, size in ((groups * members, 8), (groups, 8), (groups, value_size))
        )
        bias = (
            torch.randn(tokens, tokens, dtype=torch.float64, generator=made)
            if value_size == 8 and pick.random() < 0.5
            else None
        )
        grad = torch.randn(2, groups * members, tokens, value_size, dtype=torch.float64, generator=made)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        seen = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        mask = seen if bias is None else bias.masked_fill(~seen, float("-inf"))
        want = nn.functional.scaled_dot_product_attention(*leaves, mask, scale=0.3, enable_gqa=True)
        gradients = torch.autograd.grad(want, leaves, grad)
        at = pick.randint(0, tokens)
        totals = [torch.zeros_like(x) for x in (q, k, v)]
        for rows in (slice(0, at), slice(at, tokens)):
            own = None if bias is None else bias[rows]
            where = Causal.of(rows.stop - rows.start, tokens, rows.start)
            out, lse = forward(q[:, :, rows], k, v, own, where, 0.3)
            torch.testing.assert_close(out, want[:, :, rows].detach(), rtol=1e-10, atol=1e-12)
            gq, gk, gv = backward(grad[:, :, rows], q[:, :, rows], k, v, own, out, lse, where, 0.3)
            totals[0][:, :, rows] += gq
            totals[1] += gk
            totals[2] += gv
        for total, gradient in zip(totals, gradients, strict=True):
            torch.testing.assert_close(total, gradient, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("bias_size", [0, 8])
@pytest.mark.parametrize("value_size", [8, 6], ids=["flash", "spelled"])
def test_attention_of_a_balanced_sequence(value_size: int, bias_size: int) -> None:
    """Queries and keys as head-tail chunks: whole, and a device's queries over the keys of all, as in order."""
    made, starts = torch.Generator().manual_seed(0), head_tail(8, 2)
    order = positions(0, 8, starts)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=made)

    q, k, v, grad = some(2, 4, 8, 8), some(2, 2, 8, 8), some(2, 2, 8, value_size), some(2, 4, 8, value_size)
    bias = some(8, 8) if bias_size else None
    out, lse = forward(q, k, v, bias, Causal.of(8, 8), 0.3, True)
    wanted = backward(grad, q, k, v, bias, out, lse, Causal.of(8, 8), 0.3)
    held = [x[:, :, order] for x in (grad, q, k, v)]
    own_bias = None if bias is None else bias[order][:, order]
    totals = [torch.zeros_like(x) for x in held[1:]]
    for first, size in ((0, 4), (4, 4), (0, 8)):
        rows, where = slice(first, first + size), Causal.of(size, 8, first, 0, starts)
        part_bias = None if own_bias is None else own_bias[rows]
        got, got_lse = forward(held[1][:, :, rows], held[2], held[3], part_bias, where, 0.3, True)
        torch.testing.assert_close(got, out[:, :, order][:, :, rows], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(got_lse, lse[:, :, order][:, :, rows], rtol=1e-10, atol=1e-12)
        grads = backward(held[0][:, :, rows], held[1][:, :, rows], *held[2:], part_bias, got, got_lse, where, 0.3)
        totals[0][:, :, rows] += grads[0]
        for total, more in zip(totals[1:], grads[1:], strict=True):
            total += more
    for total, want in zip(totals, wanted, strict=True):  # of the halves, and once more of the whole
        torch.testing.assert_close(total, 2 * want[:, :, order], rtol=1e-9, atol=1e-11)


def test_stages_of_a_cut_sequence_keep_the_gradients_of_their_weights() -> None:
    """What a weight's gradient goes through is written anew for a cut sequence, and still runs where its stage is."""
    model, batch, loss = hugging_face("llama", batch=2, seq=8, heads=4, layers=2)
    step = mw.compile(model, loss=loss, example=batch, mesh="pp=2,cp=2", plan=parse_plan("stages:pp+cp:cp"))
    nodes = [n for n in step.program.placed.graph.nodes if n.op == "call_function" and "layout" in n.meta]
    gradients = [n for n in nodes if origin_of(n).phase == "backward" and isinstance(n.meta["layout"], Layout)]
    assert gradients
    assert not [n.name for n in gradients if n.meta["layout"].dims and "pp" in n.meta["layout"].mesh.axis_names]


class Reshaped(nn.Module):
    """Its views move elements between the sequence and the features."""

    def __init__(self, num_layers: int, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            batch, length, features = x.shape
            x = layer(x).flatten(1).view(batch, features, length).transpose(1, 2).contiguous()
        return x


@pytest.mark.slow_rows("cp=2-1-2-6", "cp=2,pp=2-1-2-4")
@pytest.mark.parametrize(
    ("mesh", "accumulate", "num_layers", "length"),
    [("cp=2", 2, 1, 4), ("cp=2", 1, 1, 4), ("cp=2", 1, 2, 6), ("cp=2,pp=2", 1, 2, 4)],
)
def test_views_that_mix_the_sequence_with_features(mesh: str, accumulate: int, num_layers: int, length: int) -> None:
    torch.manual_seed(0)
    model = Reshaped(num_layers, 12).double()
    shape = (8, length, 12)
    data = [{k: v.double() for k, v in batch.items()} for batch in batches(2, shape, shape)]
    plan = Plan.cp("cp") + (Plan.stages("pp") if "pp" in mesh else Plan())
    assert_equals_one_device(model, data, mesh, plan=plan, accumulate=accumulate)


class Remembers(nn.Module):
    """Buffers along the sequence, and of all tokens, that forward updates and reads."""

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.layer, self.is_causal = nn.Linear(6, 6), is_causal
        self.register_buffer("average", torch.zeros(4, 6))
        self.register_buffer("tokens", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        heads = x[:, None]
        x = x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=self.is_causal)[:, 0]
        self.average.mul_(0.5).add_(x.detach().mean(0))
        self.tokens.copy_(0.5 * self.tokens + x.detach().flatten(0, 1).sum(-1))
        return x + self.average + self.tokens.view(4, 4, 1)


@pytest.mark.parametrize("is_causal", [False, True])
def test_buffers_of_a_cut_sequence_are_there_before_the_update(is_causal: bool) -> None:
    data = [{k: v.double() for k, v in batch.items()} for batch in batches(3, (4, 4, 6), (4, 4, 6))]
    step = assert_equals_eager(Remembers(is_causal).double(), data, "cp=2", plan=Plan.cp("cp"))
    assert ("from head and tail" in step.program.sequence) == is_causal
