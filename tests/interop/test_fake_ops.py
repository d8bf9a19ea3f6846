"""Results on fake tensors that do not go through torch's mode, against those that do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from meshweave.interop.fake import FakeTensor, FakeTensorMode, result_of
from meshweave.interop.ops import find_operator

BINARY = "add.Tensor sub.Tensor mul.Tensor div.Tensor eq.Tensor maximum.default logical_and.default pow.Tensor_Tensor"
UNARY = "cos.default exp.default relu.default sigmoid.default gt.Scalar add.Scalar pow.Tensor_Scalar clone.default"
SHAPES = ((), (1,), (5,), (4, 5), (1, 5), (4, 1), (3, 4, 5), (0, 5))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool)
MODE = FakeTensorMode()


def fake(shape: tuple[int, ...]) -> Tensor:
    dtype, is_turned = random.choice(DTYPES), len(shape) > 1 and random.random() < 0.3
    with MODE:
        x = torch.empty(shape[::-1] if is_turned else shape, dtype=dtype)
        return x.permute(*reversed(range(len(shape)))) if is_turned else x


def outcome(run: Any) -> Any:
    """Dtype, shape, and strides of dims that have any, or the kind of error."""
    try:
        x = run()
    except (RuntimeError, TypeError) as error:
        return type(error)
    strides = [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    return x if x is NotImplemented else (x.dtype, x.shape, x.device, strides if x.numel() else [])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("names", [BINARY, UNARY], ids=["binary", "unary"])
def test_pointwise_ops_are_as_torch_has_them(names: str, caplog: pytest.LogCaptureFixture) -> None:
    random.seed(0)
    known = 0
    for func in map(find_operator, (f"aten.{name}" for name in names.split() * 12)):
        shape = random.choice(SHAPES)
        others = [shape, shape, (), (1,), shape[1:], tuple(random.choice((1, size)) for size in shape)]
        second = [fake(random.choice(others))] if names == BINARY else []
        args = [fake(shape), *(second or ([2.5] if "Scalar" in str(func) else []))]
        expected = outcome(lambda func=func, args=args: MODE.dispatch(func, (FakeTensor,), args, {}))
        if isinstance(expected, type):
            continue
        result = result_of(MODE, func, args, {})
        if result is not NotImplemented:
            known += 1
            assert outcome(lambda result=result: result) == expected, (func, args)
    assert known > 60


@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("sum.dim_IntList", ([1],)),
        ("sum.dim_IntList", ([-1, 0], True)),
        ("sum.dim_IntList", (None,)),
        ("mean.dim", ([2], True)),
        ("view.default", ([12, 5],)),
        ("transpose.int", (0, 2)),
        ("slice.Tensor", (1, 1, 3)),
        ("select.int", (1, -1)),
        ("unsqueeze.default", (1,)),
        ("expand.default", ([2, 3, 4, 5],)),
    ],
)
def test_reductions_and_views_are_as_torch_has_them(name: str, rest: tuple[Any, ...]) -> None:
    with MODE:
        x = torch.empty(3, 4, 5)
    func = find_operator(f"aten.{name}")
    expected, result = MODE.dispatch(func, (FakeTensor,), (x, *rest), {}), result_of(MODE, func, (x, *rest), {})
    assert outcome(lambda: result) == outcome(lambda: expected)


def test_what_is_not_plain_is_left_to_torch() -> None:
    with MODE:
        x, z = torch.empty(3), torch.empty(3, dtype=torch.complex64)
    add = torch.ops.aten.add.Tensor
    assert result_of(MODE, add, (x, torch.ones(3)), {}) is NotImplemented
    assert result_of(MODE, add, (x, z), {}) is NotImplemented
    assert result_of(MODE, torch.ops.aten.add_.Tensor, (x, x), {}) is NotImplemented
