"""Kernels that are called past ATen's own checks give the same whatever the strides of their operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import meshweave.compile  # noqa: F401  (every room that defines an op)
from meshweave.ir.ops import DENSE_OPERANDS, KERNELS

own = torch.ops.meshweave


def reversed_in_memory(x: Tensor) -> Tensor:
    dims = [*reversed(range(x.dim()))]
    return x.permute(dims).contiguous().permute(dims)


def sliced(x: Tensor) -> Tensor:
    """Every second element of the last dim of a larger tensor."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 1, dtype=x.dtype)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def expanded(x: Tensor) -> Tensor:
    """The first rows, in memory that all of them share."""
    return x[:1].expand(x.shape) if x.dim() and x.shape[0] else x


FORMS = {f.__name__: f for f in (reversed_in_memory, sliced, transposed, channels_last)}


def attention(dtype: torch.dtype, bias: bool, is_causal: bool, heads: int = 2, keys: int = 5) -> tuple[Any, ...]:
    q = torch.randn(2, 4, 6, 8, dtype=dtype)
    k, v = (torch.randn(2, heads, keys, 8, dtype=dtype) for _ in range(2))
    return q, k, v, torch.randn(2, 4, 6, keys, dtype=dtype) if bias else None, is_causal, 0.3


def attention_backward(*args: Any) -> tuple[Any, ...]:
    q, k, v, bias, is_causal, scale = attention(*args)
    out, lse = own.attention.default(q, k, v, bias, is_causal, scale)
    return torch.randn_like(out), q, k, v, bias, out, lse, is_causal, scale


def recurrent(kind: str) -> tuple[Any, ...]:
    gates = {"lstm": 4, "gru": 3}.get(kind, 1)
    weights = [torch.randn(gates * 3, 5), torch.randn(gates * 3, 3), torch.randn(gates * 3), torch.randn(gates * 3)]
    cell = torch.randn(2, 3 if kind == "lstm" else 0)
    return torch.randn(4, 2, 5), torch.randn(2, 3), cell, weights, kind, False


def recurrent_backward(kind: str) -> tuple[Any, ...]:
    args = recurrent(kind)
    return [torch.randn_like(x) for x in own.recurrent.default(*args)], *args


ENDS = torch.tensor([2, 5], dtype=torch.int32)
IDS = torch.tensor([[3, 0, 1], [2, 2, 0]])
CASES: dict[Any, list[Callable[[], tuple[Any, ...]]]] = {
    own.pin.default: [lambda: (torch.randn(3, 4), "", False)],
    own.round_parts.default: [lambda: (torch.randn(3, 4), torch.bfloat16)],
    own.square_sum.default: [lambda: (torch.randn(3, 4),)],
    own.uniform.default: [],  # of a number
    own.chance.default: [],
    own.attention.default: [
        lambda: attention(torch.float32, False, True),
        lambda: attention(torch.float32, True, False, 4, 7),
        lambda: attention(torch.float64, True, True),
        lambda: attention(torch.bfloat16, False, False),
    ],
    own.attention_backward.default: [
        lambda: attention_backward(torch.float32, False, True),
        lambda: attention_backward(torch.float32, True, False, 4, 7),
        lambda: attention_backward(torch.float64, True, True),
        lambda: attention_backward(torch.bfloat16, False, False),
    ],
    own.matmul.default: [lambda: (torch.randn(2, 3, 4), torch.randn(2, 4, 5))],
    own.contract.default: [lambda: (torch.randn(2, 3, 4), torch.randn(4, 5, 2), [2, 0], [0, 2])],
    own.ctc_loss.default: [
        lambda: (
            torch.randn(6, 2, 4).log_softmax(-1), torch.randint(1, 4, (2, 3)), torch.tensor([6, 5]),
            torch.tensor([3, 2]), 0, False,
        )
    ],
    own.block_sort.default: [lambda: (torch.randint(9, (6,)), 2, False)],
    own.block_counts.default: [lambda: (torch.randint(4, (6,)), 4, 2)],
    own.block_index.default: [lambda: (torch.randn(6, 4), torch.randint(3, (6,)), 2)],
    own.block_put.default: [lambda: (torch.randn(6, 4), torch.randint(3, (6,)), torch.randn(6, 4), True, 2)],
    own.grouped_mm.default: [lambda: (torch.randn(5, 4), torch.randn(2, 4, 8), ENDS)],
    own.grouped_outer.default: [lambda: (torch.randn(5, 4), torch.randn(5, 8), ENDS)],
    own.enter_rows.default: [lambda: (torch.randn(5, 4), ENDS, 0)],
    own.leave_rows.default: [lambda: (torch.randn(5, 4), ENDS, 0)],
    own.row_owners.default: [],
    own.row_readers.default: [],
    own.recurrent.default: [lambda kind=kind: recurrent(kind) for kind in ("lstm", "gru")],
    own.recurrent_backward.default: [lambda kind=kind: recurrent_backward(kind) for kind in ("lstm", "gru")],
}  # fmt: skip


def test_every_kernel_is_here_or_in_the_operators_of_pytorch() -> None:
    of_aten = {op for op in KERNELS if op.namespace == "aten"}
    assert {op for op in KERNELS if op.namespace == "meshweave"} == {*CASES}
    assert of_aten >= {*DENSE_OPERANDS}  # tests/test_opinfo.py has them in any memory


ROWS = [(op, i) for op, cases in CASES.items() for i in range(len(cases))]


@pytest.mark.parametrize(("op", "number"), ROWS, ids=str)
def test_operands_in_any_memory(op: Any, number: int) -> None:
    torch.manual_seed(0)
    kernel, args = KERNELS[op], CASES[op][number]()
    expected = kernel(*args)
    for name, form in FORMS.items():
        found = kernel(*pytree.tree_map_only(Tensor, form, args))
        torch.testing.assert_close(found, expected, msg=lambda m, name=name: f"{name}: {m}")
        for i, x in enumerate(args):
            if isinstance(x, Tensor):
                found = kernel(*args[:i], form(x), *args[i + 1 :])
                torch.testing.assert_close(found, expected, msg=lambda m, name=name, i=i: f"{name}, {i}: {m}")


FLOATS = [row for row in ROWS if row[0] in (own.attention.default, own.matmul.default, own.contract.default,
          own.grouped_mm.default, own.grouped_outer.default, own.square_sum.default)]  # fmt: skip


@pytest.mark.parametrize(("op", "number"), FLOATS, ids=str)
def test_operands_that_share_memory(op: Any, number: int) -> None:
    torch.manual_seed(0)
    kernel, args = KERNELS[op], CASES[op][number]()
    for i, x in enumerate(args):
        if isinstance(x, Tensor) and x.is_floating_point():
            shared = expanded(x)
            found, expected = (kernel(*args[:i], y, *args[i + 1 :]) for y in (shared, shared.contiguous()))
            torch.testing.assert_close(found, expected)
