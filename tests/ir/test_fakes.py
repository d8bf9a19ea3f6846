"""What our ops say of their results on fake tensors is what they give on real ones, in every dtype: capture, costs,
buffers and compiled regions go by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.place.conformance import Value
from tests.place.test_rules import NAMES, SAMPLES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

OURS = [i for i, s in enumerate(SAMPLES) if str(s.target).startswith("meshweave.")]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def arguments(index: int, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    item = SAMPLES[index]
    raw = item.args(generator) if callable(item.args) else item.args

    def real(value: Any) -> Any:
        value = value.make(generator) if isinstance(value, Value) else value
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map_only((Value, Tensor), real, (tuple(raw), dict(item.kwargs)))
    return args, kwargs


def forms(results: Any) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tuple(x.shape), x.dtype) for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("index", OURS, ids=[NAMES[i] for i in OURS])
def test_fake_results_are_like_real_ones(index: int, dtype: torch.dtype) -> None:
    args, kwargs = arguments(index, dtype)
    try:
        given = forms(SAMPLES[index].target(*args, **kwargs))
    except (RuntimeError, NotImplementedError):
        pytest.skip("the op does not take this dtype")
    mode = FakeTensorMode()
    fake_args, fake_kwargs = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
    with mode:
        assert forms(SAMPLES[index].target(*fake_args, **fake_kwargs)) == given
