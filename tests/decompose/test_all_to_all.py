"""All-to-alls beside the matmuls of experts, taken apart by peer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.decompose.programs import count, integers, num_permutes, program
from tests.decompose.test_decompose import Call, always, backward, check, order, shapes_of
from torch import Tensor, fx

import meshweave as mw
from meshweave.ir import local_ops
from meshweave.ir.collectives import WAIT, functional, permute
from meshweave.ir.rank import RankGraph
from meshweave.optimize.decompose import decompose
from meshweave.optimize.decompose.algorithms import algorithm
from meshweave.optimize.decompose.price import MessageCost, play_exchange

aten = torch.ops.aten
EXCHANGE = functional.all_to_all_single.default
BMM = aten.bmm.default
EXPERTS, TOKENS, WIDTH, INNER = 2, 3, 4, 5  # experts and tokens per device


def dispatched(call: Call, x: fx.Node, n: int) -> fx.Node:
    """[n * experts, tokens, h] of this device's tokens -> [experts, n * tokens, h] of all tokens for its experts."""
    rows = [EXPERTS] * n
    came = call(WAIT, call(EXCHANGE, call(aten.contiguous.default, x), rows, rows, "d"))
    return call(local_ops.join_blocks, came, (n,), (0,), 1, None)


def combined(call: Call, y: fx.Node, n: int) -> fx.Node:
    """And back."""
    rows = [EXPERTS] * n
    dealt = call(local_ops.deal_blocks, y, (n,), (0,), 1, None, TOKENS)
    return call(WAIT, call(EXCHANGE, call(aten.contiguous.default, dealt), rows, rows, "d"))


def experts(n: int, build: Any, mesh: mw.Mesh | None = None) -> tuple[RankGraph, dict[str, Tensor]]:
    """Tokens x (and gradients g) sharded by token, weights by expert."""
    values = {
        "x": integers(EXPERTS * n, TOKENS * n, WIDTH, seed=1),
        "up": integers(EXPERTS * n, WIDTH, INNER, seed=2),
        "down": integers(EXPERTS * n, INNER, WIDTH, seed=3),
    }
    inputs = {name: (v, "[{}, {d}, {}]" if name == "x" else "[{d}, {}, {}]") for name, v in values.items()}
    return program(mesh or mw.Mesh(d=n), inputs, build), values


def mlp(n: int, mesh: mw.Mesh | None = None) -> tuple[RankGraph, dict[str, Tensor]]:
    def build(call: Call, x: fx.Node, up: fx.Node, down: fx.Node) -> list[fx.Node]:
        hidden = call(aten.relu.default, call(BMM, dispatched(call, x, n), up))
        return [combined(call, call(BMM, hidden, down), n)]

    return experts(n, build, mesh)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_experts_between_two_all_to_alls(n: int) -> None:
    """n chunks, each computed while the next is on its way, and sent back at once: 2 (n - 1) permutes."""
    role, values = mlp(n)
    made, report = check(role, always(), **values)
    assert count(made, EXCHANGE) == 0
    assert num_permutes(made) == 2 * (n - 1)
    assert shapes_of(made, BMM) == [(EXPERTS, TOKENS, INNER), (EXPERTS, TOKENS, WIDTH)] * n
    assert shapes_of(made, permute) == [(EXPERTS, TOKENS, WIDTH)] * 2 * (n - 1)
    assert count(made, local_ops.join_chunks) == 1
    first, second = report.rows
    assert (first.is_taken, first.scheme, first.op, first.num_steps) == (True, "peer", "all_to_all", n)
    assert first.matmuls == ("bmm_default", "bmm_default_1")
    assert first.numerics.startswith("exact: every element is moved once")
    assert second.is_taken
    assert "it returns the chunks of all_to_all_single_default" in second.reason
    if n == 3:  # message k + 1 before chunk k; every chunk is sent back before the next is computed
        step = ["bmm", "bmm", "permute"]
        assert order(made, permute, BMM) == ["permute", *["bmm"] * 2, "permute", *step, *step]


def test_two_matmuls_of_one_chunk_meet_again() -> None:
    """A gate: both operands of the product come from the chunk."""

    def build(call: Call, x: fx.Node, up: fx.Node, down: fx.Node) -> list[fx.Node]:
        came = dispatched(call, x, 4)
        gate = call(aten.relu.default, call(BMM, came, up))
        return [combined(call, call(BMM, call(aten.mul.Tensor, gate, call(BMM, came, up)), down), 4)]

    role, values = experts(4, build)
    made, report = check(role, always(), **values)
    assert report.rows[0].matmuls == ("bmm_default", "bmm_default_1", "bmm_default_2")
    assert (num_permutes(made), count(made, BMM)) == (6, 12)


def test_experts_forward_and_backward() -> None:
    """What backward reads of the chunks is put together; the gradients of weights are sums over all chunks, and whole.
    In backward the hidden values of forward are cut along."""
    n = 3

    def build(call: Call, x: fx.Node, up: fx.Node, down: fx.Node) -> list[fx.Node]:
        came, back = dispatched(call, x, n), backward(call)
        hidden = call(aten.relu.default, call(BMM, came, up))
        out = combined(call, call(BMM, hidden, down), n)
        gradient = dispatched(back, back(aten.neg.default, out), n)
        turned = {w: back(aten.permute.default, w, [0, 2, 1]) for w in (up, down, hidden, came)}
        inner = back(aten.threshold_backward.default, back(BMM, gradient, turned[down]), hidden, 0)
        dx = combined(back, back(BMM, inner, turned[up]), n)
        return [out, dx, back(BMM, turned[hidden], gradient), back(BMM, turned[came], inner)]

    role, values = experts(n, build)
    made, report = check(role, always(), **values)
    assert [row.is_taken for row in report.rows] == [True] * 4
    assert [len(row.matmuls) for row in report.rows] == [2, 0, 2, 0]
    assert num_permutes(made) == 4 * (n - 1)
    assert count(made, BMM) == 4 * n + 2
    # came and hidden for backward, gradient and inner for the weights, and the two results
    assert sorted(shapes_of(made, local_ops.join_chunks)) == sorted(
        [(EXPERTS, n * TOKENS, width) for width in (WIDTH, INNER)] * 2 + [(EXPERTS * n, TOKENS, WIDTH)] * 2
    )


def test_an_all_to_all_before_a_matmul_alone() -> None:
    """Nothing is sent back: products are put together."""

    def build(call: Call, x: fx.Node, up: fx.Node, down: fx.Node) -> list[fx.Node]:
        return [call(aten.exp.default, call(BMM, dispatched(call, x, 4), up))]

    role, values = experts(4, build)
    made, report = check(role, always(), **values)
    assert report.rows[0].matmuls == ("bmm_default",)
    assert (num_permutes(made), count(made, EXCHANGE)) == (3, 0)
    assert shapes_of(made, BMM) == [(EXPERTS, TOKENS, INNER)] * 4
    assert shapes_of(made, local_ops.join_chunks) == [(EXPERTS, 4 * TOKENS, INNER)]


def test_a_matmul_before_an_all_to_all_alone() -> None:
    """The chunk of every other device is sent while the next one is computed, the own chunk last."""

    def build(call: Call, x: fx.Node, up: fx.Node, down: fx.Node) -> list[fx.Node]:
        wide = call(aten.full.default, [EXPERTS, 4 * TOKENS, INNER], 2.0)
        return [combined(call, call(BMM, wide, down), 4)]

    role, values = experts(4, build)
    made, report = check(role, always(), **values)
    assert report.rows[0].matmuls == ("bmm_default",)
    assert order(made, permute, BMM) == ["bmm", "permute"] * 3 + ["bmm"]
    assert shapes_of(made, local_ops.join_chunks) == [(4 * EXPERTS, TOKENS, WIDTH)]


def test_what_is_left_of_all_to_alls() -> None:
    def uneven(call: Call, x: fx.Node, up: fx.Node, down: fx.Node) -> list[fx.Node]:
        start = call(EXCHANGE, call(aten.contiguous.default, x), [1, 3], [1, 3], "d")
        return [call(BMM, call(WAIT, start), call(aten.full.default, [4, WIDTH, INNER], 1.0))]

    def alone(call: Call, x: fx.Node, up: fx.Node, down: fx.Node) -> list[fx.Node]:
        return [call(aten.exp.default, dispatched(call, x, 2))]

    for build, reason in ((uneven, "its blocks have several sizes"), (alone, "no matmul is beside it")):
        made, report = decompose(experts(2, build)[0], None, always())
        assert [row.reason for row in report.rows] == [reason]
        assert count(made, EXCHANGE) == 1
    _, report = decompose(mlp(2)[0], None, always(all_to_all=()))
    assert report.num_taken == 0


def test_the_gate_weighs_both_all_to_alls() -> None:
    """Wide experts hide what is moved; narrow ones do not pay for n messages."""

    def large(tokens: int, inner: int) -> RankGraph:
        n, shapes = 8, {"x": (8, 8 * tokens, 4096), "up": (8, 4096, inner), "down": (8, inner, 4096)}

        def build(call: Call, x: fx.Node, up: fx.Node, down: fx.Node) -> list[fx.Node]:
            rows = [1] * n
            came = call(WAIT, call(EXCHANGE, call(aten.contiguous.default, x), rows, rows, "d"))
            joined = call(local_ops.join_blocks, came, (n,), (0,), 1, None)
            made = call(BMM, call(aten.relu.default, call(BMM, joined, up)), down)
            dealt = call(local_ops.deal_blocks, made, (n,), (0,), 1, None, tokens)
            return [call(WAIT, call(EXCHANGE, call(aten.contiguous.default, dealt), rows, rows, "d"))]

        meta = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
        texts = {"x": "[{}, {d}, {}]", "up": "[{d}, {}, {}]", "down": "[{d}, {}, {}]"}
        return program(mw.Mesh(d=n), {name: (meta[name], texts[name]) for name in shapes}, build)

    profile = mw.load_profile("h100")
    _, report = decompose(large(4096, 14336), profile)
    first, second = report.rows
    assert first.is_taken
    assert second.is_taken
    assert first.seconds_after < first.seconds_before
    _, small = decompose(large(64, 256), profile)
    assert not small.num_taken
    assert "no gain: peer takes" in small.rows[0].reason


def test_steps_of_an_exchange_played() -> None:
    """Of n chunks of 2 s whose messages take 1 s only the last one's way back is not hidden; where messages take 3 s,
    2 (n - 1) of them follow each other after the first chunk, which is computed beside the first message."""
    steps = algorithm("all_to_all", "peer").steps(4)
    fast, slow = MessageCost(1.0), MessageCost(3.0)
    assert play_exchange(steps, 2.0, fast, fast, 0.0, 0.0) == 4 * 2.0 + 1.0
    assert play_exchange(steps, 2.0, fast, fast, 5.0, 5.0) == 4 * 2.0
    assert play_exchange(steps, 0.0, slow, slow, 0.0, 0.0) == 6 * 3.0
    assert play_exchange(steps, 2.0, MessageCost(1.0, host=0.5), MessageCost(1.0), 0.0, 0.0) == 4 * 2.0 + 1.0 + 3 * 0.5
    beside = MessageCost(1.0, slowdown=2.0)
    assert play_exchange(steps, 2.0, beside, beside, 0.0, 0.0) > 4 * 2.0 + 1.0
