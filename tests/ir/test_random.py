"""Random numbers by global index: any box is the box of the whole, and draws look independent."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshweave.ir import random

STEP = torch.tensor(3)


def chance(shape: list[int], p: float, call: int = 1, step: Tensor = STEP) -> Tensor:
    return random.chance(step, 0, call, shape, [0] * len(shape), shape, p)


@pytest.mark.parametrize("p", [0.9, 1e-3])  # of 16 and of 32 bits
def test_a_box_is_the_box_of_the_whole(p: float) -> None:
    shape = [6, 50, 33]
    whole = chance(shape, p)
    assert whole.any()
    assert not whole.all()
    for offset, size in (
        ([2, 1, 7], [3, 4, 11]),
        ([0, 0, 32], [6, 50, 1]),
        ([5, 3, 1], [1, 1, 2]),
        ([0, 0, 5], [6, 50, 0]),
    ):
        box = tuple(slice(at, at + extent) for at, extent in zip(offset, size, strict=True))
        assert torch.equal(random.chance(STEP, 0, 1, shape, offset, size, p), whole[box])


def test_what_is_larger_than_the_cache_is_drawn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chance([64, 30], 0.5)
    monkeypatch.setattr(random, "_WORDS_AT_ONCE", 40)
    assert torch.equal(chance([64, 30], 0.5), whole)


@pytest.mark.parametrize("p", [0.0, 1e-6, 0.001, 0.1, 0.5, 0.9, 1 - 1e-5, 1.0])
def test_the_share_of_true_is_the_probability(p: float) -> None:
    drawn = chance([1024, 2048], p)
    assert drawn.shape == (1024, 2048)
    assert abs(drawn.double().mean().item() - p) <= 4 * math.sqrt(p * (1 - p) / drawn.numel()) + 1e-3 * min(p, 1 - p)


@pytest.mark.parametrize("shape", [[], [5], [0, 3], [3, 0]])
def test_small_shapes(shape: list[int]) -> None:
    assert list(chance(shape, 0.5).shape) == shape


def correlation(a: Tensor, b: Tensor, p: float) -> float:
    """In standard deviations of what independent draws have."""
    return ((a - p) * (b - p)).mean().item() / (p * (1 - p)) * math.sqrt(a.numel())


def test_neighbours_rows_calls_and_steps_are_independent() -> None:
    """Fixed keys: a bound of 4.5 standard deviations fails for what is dependent, never by chance."""
    p, shape = 0.25, [128, 256, 64]
    drawn = chance(shape, p).float()
    for dim in range(3):
        for lag in (1, 2, 3, 32):
            first, second = (drawn.narrow(dim, at, shape[dim] - lag) for at in (0, lag))
            assert abs(correlation(first, second, p)) < 4.5, (dim, lag)
    for other in (chance(shape, p, call=2), chance(shape, p, step=STEP + 1)):
        assert abs(correlation(drawn, other.float(), p)) < 4.5
    for dims in ((0,), (1,), (2,), (0, 1), (1, 2)):  # sums along dims scatter as sums of independent draws do
        sums = drawn.mean(dims)
        share = ((sums - p) ** 2).mean().item() / (p * (1 - p)) * drawn.numel() / sums.numel()
        assert abs(share - 1) < 4.5 * math.sqrt(2 / sums.numel()), dims


def test_a_key_is_the_same_as_number_and_as_tensor() -> None:
    for x in (0, 1, -5, 2**62, -(2**63), 123456789123):
        assert random._mix_number(x) == random._mix(torch.tensor(x)).item()


class Written(TorchDispatchMode):
    """Bytes of the results of all ops that write."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.num_bytes += sum(x.nbytes for x in tree_leaves(result) if isinstance(x, Tensor))
        return result


@pytest.mark.parametrize(("p", "bytes_an_element"), [(0.9, 24), (1e-3, 48)])
def test_a_mask_writes_few_bytes(p: float, bytes_an_element: int) -> None:
    """Halves of words, or words where 16 bits are too coarse. A fifth of the time of torch's mask; bits of `uniform`,
    compared, took twice as long as torch's."""
    shape = [8, 128, 768]
    with Written() as written:
        chance(shape, p)
    assert written.num_bytes < bytes_an_element * math.prod(shape)
