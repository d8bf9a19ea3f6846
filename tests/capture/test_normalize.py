"""The global graph has few kinds of op: no identities, no squeezes, selects or transposes, nothing dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import assert_tensors, train
from torch import Tensor, nn
from torch.nn import functional as F

from meshweave.capture.step import CaptureOptions, capture
from meshweave.ir.graph import Spec, StepGraph, op_name, origin_of
from meshweave.ir.verify import verify_step
from meshweave.runtime.session import RunOptions


class Calls(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.w = nn.Parameter(torch.arange(1.0, 25.0).view(2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.w * x)


def total(out: Tensor, batch: Any) -> Tensor:
    return (out.float() * torch.arange(1.0, 1.0 + out.numel()).view(out.shape)).sum()


def captured(function: Callable[[Tensor], Tensor]) -> StepGraph:
    return verify_step(capture(Calls(function), total, {"x": torch.ones(())}, None, CaptureOptions()))


def forward_ops(function: Callable[[Tensor], Tensor]) -> list[str]:
    """The ops between the product that every model here begins with and the loss."""
    nodes = [n for n in captured(function).graph.nodes if n.op == "call_function" and origin_of(n).phase == "forward"]
    assert op_name(nodes[0].target) == "aten.mul.Tensor"
    shown = []
    for n in nodes[1:]:
        shape = list(n.meta["spec"].shape) if isinstance(n.meta["spec"], Spec) else n.meta["spec"]
        shown.append(f"{op_name(n.target).removeprefix('aten.')} {list(n.args[1:])} {shape}")
    return shown


FORMS: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "clone": (lambda x: x.clone().contiguous().detach() + x, ["add.Tensor [mul_tensor] [2, 3, 4]"]),
    "unsqueeze": (lambda x: x.unsqueeze(-1), ["view [[2, 3, 4, 1]] [2, 3, 4, 1]"]),
    "squeeze": (lambda x: x[:1].squeeze(0), ["slice.Tensor [0, 0, 1] [1, 3, 4]", "view [[3, 4]] [3, 4]"]),
    "squeeze of nothing": (lambda x: x.squeeze(), []),
    "flatten": (lambda x: x.flatten(1), ["view [[2, 12]] [2, 12]"]),
    "reshape of a transpose": (
        lambda x: x.transpose(0, 1).reshape(-1),
        ["permute [[1, 0, 2]] [3, 2, 4]", "view [[24]] [24]"],
    ),
    "view as it is": (lambda x: x.view(2, 3, 4), []),
    "select": (lambda x: x[:, -1], ["slice.Tensor [1, 2, 3] [2, 1, 4]", "view [[2, 4]] [2, 4]"]),
    "transpose": (lambda x: x.transpose(-1, -2), ["permute [[0, 2, 1]] [2, 4, 3]"]),
    "matrix transpose": (
        lambda x: x[0].t(),
        ["slice.Tensor [0, 0, 1] [1, 3, 4]", "view [[3, 4]] [3, 4]", "permute [[1, 0]] [4, 3]"],
    ),
    "permute": (lambda x: x.permute(-1, 0, 1), ["permute [[2, 0, 1]] [4, 2, 3]"]),
    "permute of nothing": (lambda x: x.permute(0, 1, 2), []),
    "slice": (lambda x: x[:, -2:, ::2], ["slice.Tensor [1, 1, 3] [2, 2, 4]", "slice.Tensor [2, 0, 4, 2] [2, 2, 2]"]),
    "slice of all": (lambda x: x[:, 0:99], []),
    "empty slice": (lambda x: x[:, 2:1], ["slice.Tensor [1, 2, 2] [2, 0, 4]"]),
    "split": (lambda x: x.split(3, -1)[1], ["slice.Tensor [2, 3, 4] [2, 3, 1]"]),
    "chunk": (lambda x: x.chunk(2, 1)[0], ["slice.Tensor [1, 0, 2] [2, 2, 4]"]),
    "unbind": (lambda x: x.unbind(1)[2], ["slice.Tensor [1, 2, 3] [2, 1, 4]", "view [[2, 4]] [2, 4]"]),
    "stack": (
        lambda x: torch.stack([x, x], 1),
        ["view [[2, 1, 3, 4]] [2, 1, 3, 4]"] * 2 + ["cat [1] [2, 2, 3, 4]"],
    ),
    "cat with nothing": (lambda x: torch.cat([x.new_empty(0), x], 1), []),
    "cat with an empty piece": (lambda x: torch.cat([x[:, :0], x[:, :2]], 1), ["slice.Tensor [1, 0, 2] [2, 2, 4]"]),
    "zeros": (lambda x: x + torch.zeros(4), ["full [0] [4]", "add.Tensor [full_default] [2, 3, 4]"]),
    "ones_like": (lambda x: x * torch.ones_like(x), ["full [1] [2, 3, 4]", "mul.Tensor [full_default] [2, 3, 4]"]),
    "full_like": (
        lambda x: x * torch.full_like(x, 3.5),
        ["full [3.5] [2, 3, 4]", "mul.Tensor [full_default] [2, 3, 4]"],
    ),
    "new_full": (lambda x: x * x.new_full((4,), 3.5), ["full [3.5] [4]", "mul.Tensor [full_default] [2, 3, 4]"]),
    "arange": (
        lambda x: x + torch.arange(1.0, 9.0, 2.0),
        ["arange.start_step [9.0, 2.0] [4]", "add.Tensor [arange_start_step] [2, 3, 4]"],
    ),
    "mean": (lambda x: x.mean(-1), ["sum.dim_IntList [[2]] [2, 3]", "div.Tensor [4] [2, 3]"]),
    "dead code": (lambda x: (x.exp(), x.sin())[1], ["sin [] [2, 3, 4]"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_form_of_an_op(name: str) -> None:
    function, expected = FORMS[name]
    assert forward_ops(function) == expected


@pytest.mark.parametrize("name", [n for n in FORMS if n not in ("empty slice",)])
def test_the_form_computes_what_torch_does(name: str) -> None:
    function, _ = FORMS[name]
    model = Calls(function)
    batch = {"x": torch.tensor(0.5)}
    step, losses = train(
        model, [batch], loss=total, make=lambda p: torch.optim.SGD(p, lr=0.1), run=RunOptions(keep_gradients=True)
    )
    expected = total(model(**batch), batch)
    expected.backward()
    torch.testing.assert_close(losses[0], expected.item(), rtol=1e-6, atol=0)
    assert_tensors(step.gradients(), {"w": model.w.grad})


def test_unused_constants_and_unchanged_buffers_are_gone() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("table", torch.arange(3.0))

        def forward(self, x: Tensor) -> Tensor:
            unused = torch.tensor([7.0, 8.0, 9.0]) * 2  # noqa: F841
            return x * self.w * self.table * torch.tensor([1.0, 2.0, 3.0])

    step = capture(Reads(), total, {"x": torch.ones(3)}, None, CaptureOptions())
    assert [v.tolist() for v in step.constants.values()] == [[1.0, 2.0, 3.0]]
    assert [i.name for i in step.inputs if i.kind == "constant"] == list(step.constants)
    assert [kind for kind, _ in step.outputs] == ["loss", "grad"]


def test_a_number_is_made_once_per_phase() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.where(x > 0, x, torch.full((), 0.5))
        return x

    made = [n for n in captured(function).graph.nodes if op_name(n.target) == "aten.full" and n.args[1] == 0.5]
    assert [origin_of(n).phase for n in made] == ["forward"]


@pytest.mark.parametrize("bias", [True, False])
def test_the_backward_of_a_convolution_is_one_op_per_gradient(bias: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=bias), nn.ReLU(), nn.Conv2d(4, 2, 1, bias=bias))
    batch = {"input": torch.linspace(-1, 1, 2 * 3 * 5 * 5).view(2, 3, 5, 5)}
    step, losses = train(model, [batch], loss=total, run=RunOptions(keep_gradients=True))
    masks = [n.args[-1] for n in step.program.captured.graph.nodes if op_name(n.target) == "aten.convolution_backward"]
    assert masks == [[True, False, False], [False, True, False], [False, True, False]]
    expected = total(model(**batch), batch)
    expected.backward()
    torch.testing.assert_close(losses[0], expected.item(), rtol=1e-5, atol=0)
    assert_tensors(step.gradients(), {n: p.grad for n, p in model.named_parameters()})


def test_dtypes_are_kept() -> None:
    step = captured(lambda x: F.gelu(x.double()).to(torch.bfloat16) + torch.zeros(4, dtype=torch.bfloat16))
    dtypes = [str(n.meta["spec"].dtype) for n in step.graph.nodes if op_name(n.target) in ("aten.gelu", "aten.full")]
    assert dtypes[:2] == ["torch.float64", "torch.bfloat16"]
