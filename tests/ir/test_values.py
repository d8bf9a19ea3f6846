"""What a device holds of every value of a graph is inferred once for equal calls of an op, in whatever graph."""

from __future__ import annotations

import pytest
import torch
from tests.training import mse, sgd
from torch import fx, nn

import meshweave as mw
from meshweave.ir import values
from meshweave.ir.rank import RankGraph


def role() -> RankGraph:
    model, x = nn.Linear(6, 4), torch.randn(8, 6)
    example = {"input": x, "y": torch.randn(8, 4)}
    options = {"example": example, "optimizer": sgd(model.parameters()), "mesh": "fsdp=2"}
    return mw.compile(model, loss=mse, **options).program.rank


def test_a_second_graph_of_the_same_calls_runs_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    first = values.local_values(role()).values.values()

    def refuse(*_: object) -> None:
        raise AssertionError("an op ran again")

    monkeypatch.setattr(values._Call, "results", refuse)
    assert list(values.local_values(role()).values.values()) == list(first)


def test_a_call_under_another_default_dtype_is_another_call() -> None:
    integers = values._Operand((2,), (1,), torch.int64)
    node = fx.Graph().call_function(torch.ops.aten.div.Tensor)
    dtypes = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            ((_, _, result, _, _),) = values._evaluate(node, (integers, integers), {})
        finally:
            torch.set_default_dtype(torch.float32)
        dtypes.append(result)
    assert dtypes == [torch.float32, torch.float64]


def test_an_op_that_users_define_runs_for_each_graph() -> None:
    runs = []

    @torch.library.custom_op("values::own", mutates_args=())
    def own(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @own.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        runs.append(x.shape)
        return torch.empty_like(x)

    node = fx.Graph().call_function(torch.ops.values.own.default)
    for _ in range(2):
        values._evaluate(node, (values._Operand((2,), (1,), torch.float32),), {})
    assert len(runs) == 2
