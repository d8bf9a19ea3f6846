"""What is saved if elementwise ops are recomputed is the least possible, found by trying every set."""

from __future__ import annotations

from itertools import chain, combinations
from math import prod

import pytest
import torch
from torch import Tensor, fx, nn

from meshweave.capture.blocks import is_ahead, is_back
from meshweave.capture.recompute import fewest_bytes, is_recomputable, parameter_forms
from meshweave.capture.step import CaptureOptions, capture
from meshweave.ir.graph import StepGraph, op_name, spec_of, tensor_inputs
from meshweave.ir.traits import MATMULS
from meshweave.passes import CapturedProgram, Recompute


class Gated(nn.Module):
    """The product of two branches, in half precision: casts, and values that several ops read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 12, bias=False), nn.Linear(4, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.sigmoid(self.a(x)).double() * torch.tanh(self.b(x)).double()).float()[:, :4] + x


class Wide(nn.Module):
    """Elementwise ops to and from a wide value, which is not worth saving."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.down = nn.Parameter(torch.ones(6, 1)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(x.unsqueeze(1) * self.scale)
        return self.down(torch.exp(wide).mean(1))


def step_of(block: type[nn.Module]) -> StepGraph:
    torch.manual_seed(0)
    model = nn.Sequential(block(), block())
    loss = lambda out, batch: (out - batch["y"]).square().mean()  # noqa: E731
    return capture(model, loss, {"input": torch.randn(3, 4), "y": torch.randn(3, 4)}, None, CaptureOptions())


def num_bytes(nodes: tuple[fx.Node, ...]) -> int:
    return sum(prod(spec_of(n).shape) * spec_of(n).dtype.itemsize for n in nodes)


def suffices(saved: set[fx.Node], own: list[fx.Node], free: set[fx.Node]) -> bool:
    """Whether elementwise ops compute from `saved` what backward reads."""
    known = saved | free
    for node in own:
        if is_recomputable(node) and all(x in known or x.op == "placeholder" for x in tensor_inputs(node)):
            known.add(node)
    return all(n in known for n in own if any(map(is_back, n.users)))


@pytest.mark.parametrize("block", [Gated, Wide])
def test_no_other_set_has_fewer_bytes(block: type[nn.Module]) -> None:
    step = step_of(block)
    free = set(parameter_forms(step))
    ahead = [n for n in step.graph.nodes if is_ahead(n) and n not in free]
    own = ahead[: len(ahead) // 2]
    entering = {x: None for n in own if is_recomputable(n) for x in tensor_inputs(n) if x not in {*own, *free}}
    entering = {x: None for x in entering if x.op != "placeholder"}
    chosen = tuple(fewest_bytes(own, free, ()))
    assert suffices({*chosen, *entering}, own, free)
    subsets = chain.from_iterable(combinations(own, count) for count in range(len(chosen) + 2))
    least = min(num_bytes(s) for s in subsets if suffices({*s, *entering}, own, free))
    assert num_bytes(chosen) == least


def test_nothing_but_elementwise_ops_is_recomputed() -> None:
    for block in (Gated, Wide):
        step = step_of(block)
        after = Recompute("pointwise").run(CapturedProgram(step, {}), None)[0].step
        again = [n for n in after.graph.nodes if n.name.endswith("_again")]
        assert again
        assert all(is_recomputable(n) for n in again)
        assert not any(n.target in MATMULS for n in again), [op_name(n.target) for n in again]
