"""Random numbers are drawn in the piece that is wanted: no device draws more, and none is moved."""

from __future__ import annotations

import pytest
import torch
from tests.models import hugging_face
from tests.training import batches, mse
from torch import Tensor, fx, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.check.numbers import Numbers
from meshweave.ir import ops
from meshweave.ir.graph import spec_of, tensor_inputs
from meshweave.ir.pieces import Box
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.ir.traits import RANDOM


def drawn_boxes(rank: RankGraph) -> list[tuple[tuple[int, ...], dict[int, Box]]]:
    """Per draw in the order of the graph: global shape, and the box that each device draws."""
    numbers, found = Numbers(rank), []
    for node in rank.graph.nodes:
        if node.target in SYMBOLS:
            numbers.add(node)
        elif node.target in RANDOM:
            shape, offset, size = node.args[3:6]
            wide = [[numbers.wide(x).tolist() for x in part] for part in (offset, size)]
            boxes = {
                d: Box(tuple(o[i] for o in wide[0]), tuple(s[i] for s in wide[1])) for i, d in enumerate(rank.devices)
            }
            found.append((tuple(shape), boxes))
    return found


def moved_random(step: mw.TrainStep) -> list[fx.Node]:
    """Moves in the placed graph of what is drawn, or computed from nothing but drawn numbers."""
    random: set[fx.Node] = set()
    for node in step.program.placed.graph.nodes:
        if node.target in RANDOM or (node.op == "call_function" and tensor_inputs(node) and
                                      all(n in random or not spec_of(n).shape for n in tensor_inputs(node)) and
                                      any(n in random for n in tensor_inputs(node))):  # fmt: skip
            random.add(node)
    return [n for n in random if n.target is ops.move]


SLOW = [pytest.param(mesh, marks=pytest.mark.slow) for mesh in ("tp=2", "fsdp=4")]


@pytest.mark.slow_rows("dp=4")
@pytest.mark.parametrize("mesh", ["dp=4", "dp=2,tp=2", *SLOW])
def test_each_device_draws_its_own_piece_of_every_mask(mesh: str) -> None:
    """gpt2 drops 0.1 of the embeddings, attention scores, and results of attention and MLP."""
    model, batch, loss = hugging_face("gpt2", batch=8, heads=4)
    step = mw.compile(model, loss=loss, example=batch, mesh=mesh)
    assert moved_random(step) == []
    placed = [n for n in step.program.placed.graph.nodes if n.target in RANDOM]
    boxes = drawn_boxes(step.program.rank)
    assert len(boxes) == len(placed) >= 7
    on = step.program.mesh
    num_cuts = {a: on.size(a) for a in on.axis_names if a != "tp"}
    for (shape, drawn), node in zip(boxes, placed, strict=True):
        assert drawn == node.meta["layout"].pieces(shape)
        rows = [range(i * 8 // n, (i + 1) * 8 // n) for n in num_cuts.values() or [1] for i in range(n)]
        assert {range(b.offset[0], b.offset[0] + b.size[0]) for b in drawn.values()} == set(rows)
        assert all(b.size[1] == shape[1] for b in drawn.values())
    if "tp" in mesh:  # summed over tp, the residual stream is cut in forward
        widths = {b.size[-1] for shape, drawn in boxes if len(shape) == 3 for b in drawn.values()}
        assert 32 in widths


class Draws(nn.Module):
    """A mask that is used twice, noise of a normal distribution, and a cast between."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        mask = (torch.rand(8, 8) < 0.5).to(torch.float64).float() * 2
        hidden = torch.tanh(self.up(x)) * mask
        return self.down(hidden + torch.randn_like(hidden)) + F.dropout(x, 0.3) * mask[:, :6]


@pytest.mark.parametrize("mesh", ["dp=3", "fsdp=2,tp=2", *SLOW])
def test_what_is_computed_from_random_numbers_is_computed_on_pieces_and_kept_for_backward(mesh: str) -> None:
    torch.manual_seed(0)
    model, data = Draws(), batches(2, (8, 6), (8, 6))
    steps = [
        mw.compile(model, loss=mse, example=data[0], mesh=m, run=mw.RunOptions(keep_gradients=True), seed=2)
        for m in (mesh, "")
    ]  # fmt: skip
    for batch in data:
        found, expected = (step(batch) for step in steps)
        assert found == pytest.approx(expected.item(), rel=1e-6)
        gradients = [step.gradients() for step in steps]
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)
    assert moved_random(steps[0]) == []
    drawn = [n for n in steps[0].program.placed.graph.nodes if n.target in RANDOM]
    keys = [(n.args[2], n.meta["layout"]) for n in drawn]
    assert len(keys) == len(set(keys)), "backward keeps what forward drew"
    if "tp" not in mesh:  # along tp, what runs on the whole residual stream draws the whole of it
        assert all(len(n.meta["layout"].sharded_axes) == 1 for n in drawn)
