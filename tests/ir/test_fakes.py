"""What our ops say of their results without data is what their kernels give, in every dtype: capture, costs, buffers
and compiled regions go by it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.place.conformance import Value
from tests.place.test_rules import NAMES, SAMPLES
from torch import Tensor
from torch.utils import _pytree as pytree

from meshweave.ir.ops import KERNELS

OURS = [i for i, s in enumerate(SAMPLES) if str(s.target).startswith("meshweave.")]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]
ROWS = pytest.mark.parametrize("index", OURS, ids=[NAMES[i] for i in OURS])


def arguments(index: int, dtype: torch.dtype, is_dense: bool, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The operands of a sample; unless `is_dense` two of their dims are exchanged in memory."""
    generator = torch.Generator().manual_seed(0)
    item = SAMPLES[index]
    raw = item.args(generator) if callable(item.args) else item.args

    def real(value: Any) -> Any:
        value = value.make(generator) if isinstance(value, Value) else value
        value = value.to(device, dtype if value.is_floating_point() else value.dtype)
        if is_dense or value.dim() < 2:
            return value
        first = min(1, value.dim() - 2)
        return value.transpose(first, first + 1).contiguous().transpose(first, first + 1)

    args, kwargs = pytree.tree_map_only((Value, Tensor), real, (tuple(raw), dict(item.kwargs)))
    return args, kwargs


def forms(target: Any, args: Any, kwargs: Any) -> list[tuple[Any, ...]]:
    """Shape, stride (of dims with more than one element), dtype and operand in the same memory, of each result."""
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    storages = [x.untyped_storage()._cdata for x in tensors]

    def form(x: Tensor) -> tuple[Any, ...]:
        stride = tuple(step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1) if x.numel() else ()
        storage = x.untyped_storage()._cdata
        return tuple(x.shape), stride, x.dtype, storages.index(storage) if storage in storages else None

    return [form(x) for x in pytree.tree_leaves(target(*args, **kwargs)) if isinstance(x, Tensor)]


def skip_unless_implemented(target: Any, args: Any, kwargs: Any) -> None:
    try:
        target(*args, **kwargs)
    except RuntimeError as error:
        if not re.search("not implemented for|expected scalar type", str(error)):
            raise
        pytest.skip("the device has no kernel for these dtypes")


@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:RNN module weights are not part")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_dense", [True, False], ids=["dense", "transposed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@ROWS
def test_results_without_data_are_like_real_ones(index: int, dtype: torch.dtype, is_dense: bool, device: str) -> None:
    target = SAMPLES[index].target
    args, kwargs = arguments(index, dtype, is_dense, device)
    skip_unless_implemented(target, args, kwargs)
    given = forms(target, args, kwargs)

    def without_data(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    assert forms(target, *pytree.tree_map_only(Tensor, without_data, (args, kwargs))) == given
    assert all(operand is None for *_, operand in given)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:LSTM with projections", "ignore:RNN module weights are not part")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_dense", [True, False], ids=["dense", "transposed"])
@ROWS
def test_torch_finds_no_fault_in_our_ops(index: int, is_dense: bool, device: str) -> None:
    args, kwargs = arguments(index, torch.float32, is_dense, device)
    skip_unless_implemented(SAMPLES[index].target, args, kwargs)
    torch.library.opcheck(SAMPLES[index].target, args, kwargs, test_utils=("test_schema", "test_faketensor"))


def test_every_op_of_ours_has_a_sample() -> None:
    sampled = {SAMPLES[i].target for i in OURS} | {torch.ops.meshweave.pin.default}  # of placed graphs only
    assert {op for op in KERNELS if op.namespace == "meshweave"} == sampled
