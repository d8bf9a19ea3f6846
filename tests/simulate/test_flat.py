"""Memory as other systems have it: FSDP2's flat buffers, compiled losses, calls of eager mode, layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.simulate.test_buckets import WIDTH, compiled
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.compile import Program
from meshweave.whatif import simulate


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(prefetch=1)


def test_a_flat_buffer_stands_beside_the_parameters_of_a_block(program: Program) -> None:
    """In forward FSDP2 keeps the buffer of this block while it gathers the next."""
    block = 2 * 2 * 2 * WIDTH * WIDTH
    single, blocks = (simulate(program, "h100", fusion="eager", buckets=b) for b in ("none", "blocks"))  # type: ignore[arg-type]
    assert blocks.peak_bytes >= single.peak_bytes
    assert blocks.reserved_bytes - single.reserved_bytes >= block, "gathers have a memory pool of their own"


class Head(nn.Module):
    """Logits [tokens, vocabulary] of several blocks, in bfloat16."""

    def __init__(self, blocks: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks))
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


TOKENS, VOCABULARY = 2**14, 2**17


def headed(mesh: str, blocks: int = 1, vocabulary: int = VOCABULARY, plan: mw.Plan | None = None) -> Program:
    with torch.device("meta"):
        model, labels = Head(blocks, 256, vocabulary), torch.empty(TOKENS, dtype=torch.long)
        data = {"x": torch.empty(TOKENS, 256, dtype=torch.bfloat16), "labels": labels}
    step = mw.compile(
        model.to(torch.bfloat16),
        loss=lambda out, batch: F.cross_entropy(out.float(), batch["labels"]),
        example=data,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        mesh=mesh,
        plan=plan,
        profile="h100",
    )
    return step.program


def test_a_compiled_loss_holds_logits_and_their_gradient_in_their_own_dtype() -> None:
    """As torch.compile of a loss does: logits and row statistics are saved, all else is made again where it is read."""
    logits = TOKENS * VOCABULARY * 2
    program = headed("")
    found = {f: simulate(program, "h100", fusion=f).peak_bytes for f in ("eager", "blocks", "blocks+loss")}  # type: ignore[arg-type]
    assert found["eager"] == found["blocks"]
    assert 6 * logits < found["eager"] < 6.2 * logits, "log-softmax, the gradient of it and of logits, in float32"
    assert 2 * logits < found["blocks+loss"] < 2.2 * logits


def test_a_call_with_a_collective_inside_runs_op_by_op_and_keeps_what_it_is_given() -> None:
    """The loss of DTensor's loss_parallel: log-softmax, its gradient and two temporaries, each a piece."""
    piece = TOKENS * VOCABULARY // 2 * 4
    found = simulate(headed("tp=2", plan=mw.Plan.tp("tp", {"out": "colwise"})), "h100", fusion="eager")
    assert 4 * piece < found.peak_bytes < 4.2 * piece


@pytest.mark.parametrize("is_expandable", [False, True])
def test_the_peak_grows_by_the_same_with_each_layer_and_what_is_reserved_need_not(is_expandable: bool) -> None:
    """Free blocks that some layers leave unused, others fill: reserved bytes are not on a line, so none is drawn."""
    options: dict[str, Any] = {"fusion": "eager", "expandable_segments": is_expandable}
    found = [simulate(headed("", blocks, 2**12), "h100", **options) for blocks in (2, 4, 6)]
    peaks = [one.peak_bytes for one in found]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0
    for one in found:
        assert one.peak_bytes <= one.reserved_bytes + 512 * len(one.roles[0].at_peak)
        assert one.reserved_bytes < 2 * one.peak_bytes
