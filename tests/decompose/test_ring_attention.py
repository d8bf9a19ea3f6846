"""Attention whose keys and values go round the devices of a sequence."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from tests.sequences import Plain, Shape, difference, named, plain
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import VerifyError
from meshweave.ir.collectives import permute
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph, copied
from meshweave.optimize.decompose import prove_rings
from meshweave.passes import RingAttention

EXACT = 1e-10  # of float64


def permutes(step: mw.TrainStep, phase: str) -> int:
    nodes = step.program.roles[0].graph.nodes
    return sum(n.target is permute and origin_of(n).phase == phase for n in nodes)


@pytest.mark.slow_rows("bool", "none")
@pytest.mark.parametrize("mask", ["causal", "none", "bool", "float", "documents"])
def test_gradients_are_exact_under_every_mask(mask: str) -> None:
    """Pieces of other documents are hidden from some queries, from all, or from none."""
    error, step = difference(plain(Shape(mask=mask, tokens=12)), "cp=4", torch.float64, plan="cp:cp:ring")
    assert error < EXACT
    assert (permutes(step, "forward"), permutes(step, "backward")) == (3, 6)


@pytest.mark.slow_rows("dp=2,cp=2")
@pytest.mark.parametrize("mesh", ["cp=2,tp=2", "dp=2,cp=2", "fsdp=2,cp=2"])
def test_beside_other_axes(mesh: str) -> None:
    others = {"tp": "auto_tp:tp", "dp": "dp:dp", "fsdp": "fsdp:fsdp"}
    plan = "+".join(["cp:cp:ring", *(others[axis] for axis in mw.Mesh.parse(mesh).axis_names if axis != "cp")])
    error, step = difference(plain(Shape()), mesh, torch.float64, plan=plan)
    assert error < EXACT
    assert permutes(step, "forward") == 1


@pytest.mark.slow_rows("gpt2")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_of_hugging_face(name: str) -> None:
    assert difference(named(name), "cp=4", torch.float32, plan="cp:cp:ring")[0] < 1e-5


def test_pieces_of_several_sizes_are_gathered_and_it_says_so() -> None:
    error, step = difference(plain(Shape(tokens=9)), "cp=2", torch.float64, plan="cp:cp:ring")
    assert error < EXACT
    assert permutes(step, "forward") == 0
    (report,) = step.program.optimized.reports["ring"]
    assert [row.reason for row in report.rows] == [
        "its pieces of the sequence have several sizes: the group does not divide it"
    ] * 2


class LearnedBias(Plain):
    """A bias for each pair of positions, which has a gradient."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.bias = nn.Parameter(torch.randn(shape.heads, shape.tokens, shape.tokens))

    def mask(self, ids: Tensor, documents: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return self.bias + torch.full(self.bias.shape[1:], float("-inf"), dtype=dtype).triu(1)


def test_a_bias_with_a_gradient_is_done_over_gathered_keys_and_it_says_so() -> None:
    torch.manual_seed(0)
    model, (_, batch, loss) = LearnedBias(Shape(mask="float")), plain(Shape())
    error, step = difference((model, batch, loss), "cp=2", torch.float64, plan="cp:cp:ring")
    assert error < EXACT
    (report,) = step.program.optimized.reports["ring"]
    (row,) = report.rows
    assert not row.is_taken
    assert "a bias with a gradient" in row.reason


def test_what_is_recomputed_goes_round_again() -> None:
    """The attention that backward repeats, and that of the gradients, read one gather: both become rings."""
    made = plain(Shape(layers=2))
    error, step = difference(made, "cp=2", torch.float64, plan="cp:cp:ring", passes="recompute=full")
    assert error < EXACT
    (report,) = step.program.optimized.reports["ring"]
    assert [row.is_taken for row in report.rows] == [True] * 6
    assert permutes(step, "backward") == 2 * (1 + 2)


def simulated_peak(attention: str, num_devices: int) -> float:
    """Bytes at the peak of a step whose sequence is all there is."""
    model, batch, _ = plain(Shape(tokens=1 << 17, key_heads=1, heads=2, size=32))
    plan = f"cp:cp:{attention}"
    step = mw.compile(model, loss=lambda out, _: (out**2).mean(), example=batch, mesh=f"cp={num_devices}", plan=plan)
    return mw.simulate(step.program, "h100").peak_bytes


@pytest.mark.slow
def test_memory_falls_with_the_number_of_devices() -> None:
    """As one over it, where gathered keys stay."""
    ring, gather = ([simulated_peak(attention, n) for n in (4, 8)] for attention in ("ring", "gather"))
    assert ring[1] < 0.55 * ring[0]
    assert gather[1] > 1.4 * ring[1]


@cache
def ring_graph() -> RankGraph:
    model, batch, loss = plain(Shape())
    step = mw.compile(model, loss=loss, example=batch, mesh="cp=4", plan="cp:cp:ring")
    return step.program.roles[0]


def test_a_ring_that_turns_the_wrong_way_is_refused() -> None:
    role = copied(ring_graph())
    assert prove_rings(role) == 2
    start = next(n for n in role.graph.nodes if n.target is permute)
    start.args = (start.args[0], -1, *start.args[2:])
    with pytest.raises(VerifyError, match="takes keys"):
        prove_rings(role)


def test_a_gradient_for_another_device_is_refused() -> None:
    role = copied(ring_graph())
    last = [n for n in role.graph.nodes if n.target is permute][-1]
    last.args = (last.args[0], last.args[1] + 1, *last.args[2:])
    with pytest.raises(VerifyError, match="results of"):
        prove_rings(role)


def test_it_is_a_pass_that_is_taken_by_gain() -> None:
    model, batch, loss = plain(Shape(tokens=64))
    step = mw.compile(
        model, loss=loss, example=batch, mesh="cp=2", plan="cp:cp:gather", passes=[RingAttention()], profile="h100"
    )
    assert [variant.name for variant in step.program.optimized.variants]
