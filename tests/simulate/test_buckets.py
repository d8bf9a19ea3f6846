"""Collectives that run as one: what is in a bucket, what it costs, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.cost.simulate.buckets import Member, group_members
from meshweave.cost.simulate.tasks import Tasks, lower_tasks
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import functional
from meshweave.ir.graph import Origin, block_name, origin_of
from meshweave.passes import pass_list_of
from meshweave.program import Program
from meshweave.whatif import simulate

BLOCKS, WIDTH = 4, 4096


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width, bias=False), nn.ReLU(), nn.Linear(2 * width, width, bias=False))
            for _ in range(BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def compiled(prefetch: int, mesh: str = "fsdp=8", width: int = WIDTH) -> Program:
    with torch.device("meta"):
        model, data = Model(width), {"x": torch.empty(2**16, width, dtype=torch.bfloat16)}
    source = StepSource(model, lambda out, batch: out.square().mean())
    optimizer = read_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    target = Target(mw.Mesh(mesh), None, load_profile("h100"))
    options = CaptureOptions(precision=mw.Precision(param_dtype=torch.bfloat16))
    return build_program(source, data, optimizer, target, options, pass_list_of(f"prefetch={prefetch}"))


@pytest.fixture(scope="module")
def program() -> Program:
    return compiled(prefetch=1)


def copies(tasks: Tasks, op: str, phase: str) -> list[tuple[str, float]]:
    """The block and received bytes of every copy of an op in a phase."""
    made = [t for t in tasks.tasks if t.kind == "copy" and t.op == op and origin_of(t.node).phase == phase]
    return [(block_name(origin_of(t.node)), t.received) for t in made]


def test_a_block_is_gathered_as_one(program: Program) -> None:
    machine = load_profile("h100")
    single, blocks = (lower_tasks(program.roles, machine, "eager", buckets=b) for b in ("none", "blocks"))  # type: ignore[arg-type]
    each, together = (copies(tasks, "all_gather", "forward") for tasks in (single, blocks))
    assert len(each) == 2 * BLOCKS
    assert sorted(block for block, _ in together) == [f"blocks.{i}" for i in range(BLOCKS)]
    assert sum(size for _, size in each) == sum(size for _, size in together)


def test_a_bucket_costs_what_a_collective_of_its_bytes_costs(program: Program) -> None:
    machine = load_profile("h100")
    tasks = lower_tasks(program.roles, machine, "eager", buckets="blocks")
    bucket = next(t for t in tasks.tasks if t.op == "all_gather")
    piece = 2 * 2 * 2 * WIDTH * WIDTH / 8  # of a block's parameters in bfloat16
    assert bucket.seconds == machine.seconds("all_gather", mw.Mesh("fsdp=8"), ("fsdp",), piece)


def test_what_is_gathered_as_one_is_copied_out_once(program: Program) -> None:
    tasks = lower_tasks(program.roles, load_profile("h100"), "eager", buckets="blocks").tasks
    waits = [t.seconds for t in tasks if t.kind == "wait" and t.seconds and origin_of(t.node).phase == "forward"]
    moved = 2 * 2 * 2 * 2 * WIDTH * WIDTH  # the parameters of a block in bfloat16, read and written
    assert waits == pytest.approx([3e-6 + moved / (3.35e12 * 0.89)] * BLOCKS)


def test_gradients_that_are_reduced_as_one_are_waited_for_with_the_last_of_them() -> None:
    """A block is reduced over replicas while the next one computes: all but the last are hidden. The first of its
    gradients would be waited for at the begin of the next block."""
    program = compiled(prefetch=1, mesh="dp=2,fsdp=8")
    found = simulate(program, load_profile("h100").scaled(net_bandwidth=0.5), fusion="eager", buckets="blocks")
    reductions = [s for s in found.spans if s.kind == "collective" and s.phase == "backward" and "reduce" in s.op]
    *others, last = sorted(reductions, key=lambda span: span.start)
    assert len(reductions) == BLOCKS
    assert sum(span.exposed_seconds for span in others) < 0.05 * sum(span.seconds for span in others)
    assert last.exposed_seconds > 0.5 * last.seconds


def members(kinds: str, waits: dict[int, int] | None = None) -> list[Member]:
    """Collectives of 100 bytes; a letter is the module, in upper case a reduction."""
    graph, found = fx.Graph(), []
    for i, kind in enumerate(kinds):
        op = functional.reduce_scatter_tensor if kind.isupper() else functional.all_gather_into_tensor
        node = graph.call_function(op.default, ())
        node.meta["origin"] = Origin("backward", f"blocks.{kind.lower()}.weight".replace("x", "0").replace("y", "1"))
        found.append(Member(node, 0, i, (waits or {}).get(i, -1), 100.0))
    return found


@pytest.mark.parametrize(
    ("kinds", "waits", "buckets", "expected"),
    [
        ("xxyy", {}, "none", [[0], [1], [2], [3]]),
        ("xxyy", {}, "blocks", [[0, 1], [2, 3]]),
        ("xxXX", {}, "blocks", [[0, 1], [2, 3]]),  # a gather and a reduction are no bucket
        ("xxxx", {0: 1}, "blocks", [[0, 1], [2, 3]]),  # the first is waited for before the third may start
        ("xxyy", {}, 200, [[0, 1], [2, 3]]),
        ("xxyy", {}, 201, [[0, 1, 2], [3]]),
        ("xxyy", {}, 10**9, [[0, 1, 2, 3]]),
    ],
)
def test_what_belongs_together(kinds: str, waits: dict[int, int], buckets: Any, expected: list[list[int]]) -> None:
    assert list(group_members(members(kinds, waits), buckets)) == expected


def test_where_start_ups_count_a_step_in_buckets_is_faster() -> None:
    far = compiled(prefetch=1, mesh="fsdp=64", width=256)
    single, blocks = (simulate(far, "h100", buckets=b) for b in ("none", "blocks"))  # type: ignore[arg-type]
    assert blocks.exposed_seconds < 0.8 * single.exposed_seconds
    assert any("in buckets per block" in note for note in blocks.notes)


def test_what_is_waited_for_before_the_next_may_start_closes_a_bucket() -> None:
    """Without prefetching every parameter is gathered where it is used: nothing can be joined, and nothing hangs."""
    late = compiled(prefetch=0)
    machine = load_profile("h100")
    forward = [
        copies(lower_tasks(late.roles, machine, "eager", buckets=b), "all_gather", "forward")  # type: ignore[arg-type]
        for b in ("none", "blocks")
    ]
    assert len(forward[1]) > BLOCKS
    assert simulate(late, machine, buckets="blocks").seconds > 0


@pytest.mark.parametrize("buckets", ["block", 0, -1, True])
def test_what_says_no_buckets_is_refused(program: Program, buckets: object) -> None:
    with pytest.raises(MeshweaveError, match="unknown buckets of collectives"):
        simulate(program, "h100", buckets=buckets)  # type: ignore[arg-type]
