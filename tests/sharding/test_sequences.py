"""Context parallelism: the sequence cut over devices, from the batch through attention to the loss and back."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.sequences import Shape, difference, named, plain
from torch import fx, nn

import meshweave as mw
from meshweave.errors import PlanError
from meshweave.ir.attention import backward, blocks, forward, seen_pairs
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.sharding.plan_text import parse_plan
from meshweave.sharding.plans import Plan

EXACT = 1e-10  # of float64


@pytest.mark.parametrize("attention", ["gather", "heads"])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=2,tp=2", "dp=2,cp=2", "fsdp=2,cp=2"])
def test_gradients_are_exact(mesh: str, attention: str) -> None:
    plan = Plan.cp("cp", attention) + sum(
        (_OTHERS[axis](axis) for axis in Mesh.parse(mesh).axis_names if axis != "cp"), Plan()
    )
    assert difference(plain(Shape(key_heads=4)), mesh, torch.float64, plan=plan)[0] < EXACT


_OTHERS = {"dp": Plan.dp, "fsdp": Plan.fsdp, "tp": Plan.auto_tp}


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
    assert difference(named(name), mesh, torch.float32)[0] < 1e-5
    assert difference(named(name), mesh, torch.float64)[0] < 1e-6


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
    with pytest.raises(PlanError, match="no such way"):
        Plan.cp("cp", "head")


def test_an_axis_of_that_name_is_context_parallel() -> None:
    model, batch, loss = named("plain")
    step = mw.compile(model, loss=loss, example=batch, mesh="cp=2")
    assert str(step.program.placement.stored["batch", "ids"]) == "[{}, {cp}]"
    assert parse_plan("dp:dp+cp:cp:gather") == Plan.dp("dp") + Plan.cp("cp", "gather")


def test_a_batch_without_a_sequence_is_an_error() -> None:
    with pytest.raises(PlanError, match="no sequence to cut"):
        mw.compile(nn.Linear(4, 1), loss=lambda out, _: out.sum(), example=(torch.ones(4),), mesh="cp=2")


# Attention on a piece.


def test_blocks_are_what_a_causal_mask_leaves() -> None:
    for queries in range(1, 6):
        for keys in range(1, 6):
            for offset in range(-6, 7):
                seen = torch.zeros(queries, keys, dtype=torch.int64)
                for block in blocks(queries, keys, offset):
                    part = seen[block.rows, block.keys]
                    part += torch.ones_like(part).tril() if block.is_causal else 1
                at = torch.arange(queries)[:, None] + offset >= torch.arange(keys)[None]
                assert torch.equal(seen, at.long())
                assert seen_pairs(queries, keys, offset) == int(at.sum())


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
            out, lse = forward(q[:, :, rows], k, v, own, True, 0.3, rows.start)
            torch.testing.assert_close(out, want[:, :, rows].detach(), rtol=1e-10, atol=1e-12)
            gq, gk, gv = backward(grad[:, :, rows], q[:, :, rows], k, v, own, out, lse, True, 0.3, rows.start)
            totals[0][:, :, rows] += gq
            totals[1] += gk
            totals[2] += gv
        for total, gradient in zip(totals, gradients, strict=True):
            torch.testing.assert_close(total, gradient, rtol=1e-9, atol=1e-11)
