"""Memory as other systems have it: FSDP2's flat buffers, compiled losses, calls of eager mode, layers."""

from __future__ import annotations

import pytest
import torch
from tests.simulate.test_buckets import WIDTH, compiled
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.cost.simulate.step import SimulateOptions, simulate_roles
from meshweave.program import Program
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

    def __init__(self, blocks: int, width: int, vocabulary: int, has_embedding: bool = False) -> None:
        super().__init__()
        self.inp = nn.Embedding(vocabulary, width) if has_embedding else None
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks))
        self.out = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.inp is not None:
            x = x + self.inp(torch.zeros(x.shape[0], dtype=torch.long, device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.out(x)


TOKENS, VOCABULARY = 2**14, 2**17


def headed(
    mesh: str, blocks: int = 1, vocabulary: int = VOCABULARY, plan: mw.Plan | None = None, has_embedding: bool = False
) -> Program:
    with torch.device("meta"):
        model, labels = Head(blocks, 256, vocabulary, has_embedding), torch.empty(TOKENS, dtype=torch.long)
        data = {"x": torch.empty(TOKENS, 256, dtype=torch.bfloat16), "labels": labels}
    model = model.to(torch.bfloat16)
    source = StepSource(model, lambda out, batch: F.cross_entropy(out.float(), batch["labels"]))
    optimizer = read_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    return build_program(source, data, optimizer, Target(mw.Mesh(mesh), plan, load_profile("h100")), CaptureOptions())


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


class Wide(nn.Module):
    """Blocks with three matmuls, of which nobody reads the third's result but the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = (nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.mid(torch.relu(self.up(x)))))


def test_eager_selective_checkpoints_keep_what_their_policy_names_though_nobody_reads_it() -> None:
    """torchtitan's policy saves the first, third, ... matmul: the third of a block here, which only a sum takes."""
    with torch.device("meta"):
        model = nn.Sequential(*(Wide() for _ in range(4)))
        x = torch.empty(TOKENS, 256)
    step = mw.compile(
        model, loss=lambda out, batch: out.square().mean(), example={"input": x}, mesh="", passes="recompute=selective"
    )
    of_eager, of_compiler = (simulate(step.program, "h100", fusion=f).peak_bytes for f in ("eager", "blocks"))  # type: ignore[arg-type]
    read = simulate_roles(step.program.roles, load_profile("h100"), SimulateOptions(fusion="eager")).peak_bytes
    assert of_eager - read == 4 * TOKENS * 256 * 4
    assert of_compiler <= read


def test_tensors_that_fit_without_the_blocks_between_them_are_said_to() -> None:
    program = headed("", 6, 2**12)
    machine = load_profile("h100")
    found = simulate(program, machine, fusion="eager")
    between = (found.peak_bytes + found.reserved_bytes) / 2
    memory = machine.memory
    tight = machine.scaled(memory_bytes=memory.reserved_bytes + between / (1 - memory.reserved_fraction))
    small = simulate(program, tight, fusion="eager")
    assert not small.verdict
    assert any("the allocator would reserve" in note for note in small.notes)
    assert not any("the allocator would reserve" in note for note in found.notes)


def test_the_peak_grows_by_the_same_with_each_layer_and_what_is_reserved_need_not() -> None:
    """Free blocks that some layers leave unused, others fill: reserved bytes are not on a line, so none is drawn."""
    found = [simulate(headed("", blocks, 2**12), "h100", fusion="eager") for blocks in (2, 4, 6)]
    peaks = [one.peak_bytes for one in found]
    assert peaks[2] - peaks[1] == peaks[1] - peaks[0] > 0
    for one in found:
        assert one.peak_bytes <= one.reserved_bytes + 512 * sum(live.count for live in one.roles[0].at_peak)
        assert one.reserved_bytes < 2 * one.peak_bytes
