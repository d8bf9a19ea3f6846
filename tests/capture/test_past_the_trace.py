"""What a trace cannot see: values that are written into constants and read again, memory that two tensors share,
addresses, arrays. Each is as in eager PyTorch, or an error that names the line."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import assert_equals_eager
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.errors import CaptureError
from meshweave.interop.fake import FakeTensor

Body = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 4), nn.Linear(4, 4)
        object.__setattr__(self, "listed", [self.a.weight])
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(8, n, generator=generator) for n in (6, 4)) for _ in range(3)]


def _square(out: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(out, batch[1])


def _filled_by_columns(m: Any, x: Tensor) -> Tensor:
    out = torch.zeros(8, 6)
    out[:, 1:5] = m.a(x)
    out[:, 0] = 1
    return out[:, :4] + m.b(m.a(x))


def _empty_filled(m: Any, x: Tensor) -> Tensor:
    out = torch.empty(10, 4)
    out[:8] = m.a(x)
    out[8] = 0
    return out[:8] + m.b(m.a(x))


def _constants_in_a_loop(m: Any, x: Tensor) -> Tensor:
    """Each is written into, and each adds an op before the next."""
    total = torch.zeros(4)
    for i in range(12):
        one = torch.zeros(4)
        one[i % 4] = total.sum() + m.b.bias[i % 4]
        total = total + one
    return m.b(m.a(x)) + total


def _read_then_written(m: Any, x: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    factor = scale[1].item()
    scale += m.a(x).mean(0)
    return m.b(m.a(x)) * factor + scale


def _added_in_place(m: Any, x: Tensor) -> Tensor:
    counts = torch.zeros(8, dtype=torch.long)
    counts += (x > 0).sum(1)
    return m.b(m.a(x)) * counts[:, None]


def _penalty_on_parameters(m: Any, x: Tensor) -> Tensor:
    kept = [p for p in (m.a.weight, m.b.weight) if isinstance(p, nn.Parameter)]
    return m.b(m.a(x)) + sum(p.square().sum() for p in kept)


def _labelled(m: Any, x: Tensor) -> Tensor:
    with torch.profiler.record_function("first"):
        h = m.a(x)
        h = h * 2
        h += 1
    return m.b(h)


def _read_only_array(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * float(torch.arange(4).numpy().sum())


def _logged(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    assert f"{h.mean():.3f}" == "<torch.float32 of shape ()>" or not isinstance(h, FakeTensor)
    return m.b(h)


def _attention_over_one_memory(m: Any, x: Tensor) -> Tensor:
    q, k = m.a(x).view(8, 1, 2, 2), m.b(m.a(x))[:1].view(1, 1, 2, 2)
    return F.scaled_dot_product_attention(q, k, k).reshape(8, 4)


def _attention_of_a_row_that_sees_nothing(m: Any, x: Tensor) -> Tensor:
    q, k = m.a(x).view(8, 2, 2), m.b(m.a(x)).view(8, 2, 2)
    mask = torch.tensor([[True, False], [False, False]])
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask).reshape(8, 4)


@pytest.mark.parametrize(
    "body",
    [
        _filled_by_columns,
        _empty_filled,
        _constants_in_a_loop,
        _added_in_place,
        _penalty_on_parameters,
        _labelled,
        _read_only_array,
        _logged,
        _attention_over_one_memory,
        _attention_of_a_row_that_sees_nothing,
    ],
)
def test_as_in_eager_pytorch(body: Body) -> None:
    assert_equals_eager(Model(body), _data(), "dp=2", loss=_square)


def _count_read(m: Any, x: Tensor) -> Tensor:
    counts = torch.zeros(8, dtype=torch.long)
    counts += (x > 0).sum(1)
    return m.b(m.a(x)) * counts.max().item()


def _branch(m: Any, x: Tensor) -> Tensor:
    seen = torch.zeros(6, dtype=torch.bool)
    seen[:] = (x > 2).any(0)
    return m.b(m.a(x)) * (2.0 if seen.any() else 1.0)


def _out(m: Any, x: Tensor) -> Tensor:
    total = torch.zeros(())
    torch.sum(x, (0, 1), out=total)
    return m.b(m.a(x)) * float(total)


def _listed(m: Any, x: Tensor) -> Tensor:
    counts = torch.zeros(6, dtype=torch.long)
    counts.copy_((x > 0).sum(0))
    return m.b(m.a(x)) * counts.tolist()[0]


def _rounded(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    h.data = h.data.round()
    return m.b(h)


def _address(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * (2.0 if m.a.weight.data_ptr() == m.b.weight.data_ptr() else 1.0)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


def _function_of_a_listed_parameter(m: Any, x: Tensor) -> Tensor:
    return m.b(_Product.apply(x, m.listed[0])) + 0 * m.a.bias.sum()


def _array_written(m: Any, x: Tensor) -> Tensor:
    ones = torch.ones(4)
    ones.numpy()[:] = 3
    return m.b(m.a(x)) * ones


def _handed_over(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(torch.from_dlpack(x.detach())))


def _diagonal(m: Any, x: Tensor) -> Tensor:
    matrix = torch.zeros(4, 4)
    matrix.as_strided((4,), (5,)).fill_(1.0)
    matrix[0] = m.b.bias
    return m.b(m.a(x)) @ matrix


COUNTS = itertools.count(1)


def _more_in_every_run(m: Any, x: Tensor) -> Tensor:
    for _ in range(next(COUNTS)):
        torch.zeros(1)
        one = torch.zeros(4)
        one += m.a(x).mean(0)
    return m.b(m.a(x)) + one


def _hook(m: Any, x: Tensor) -> Tensor:
    m.a.weight.register_hook(lambda grad: grad * 0.1)
    return m.b(m.a(x))


def _as_array(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x)) * float(x.detach().numpy().mean())


DEPENDS = "control flow depends on data|cannot be captured"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (_count_read, DEPENDS),
        (_branch, DEPENDS),
        (_out, DEPENDS),
        (_listed, DEPENDS),
        (_rounded, r"other values by \.data"),
        (_as_array, "turns a tensor into a NumPy array"),
        (_address, "address of a tensor"),
        (_function_of_a_listed_parameter, "parameter 'a.weight' from a list"),
        (_array_written, "read-only"),
        (_handed_over, "DLPack"),
        (_read_then_written, r"before the step writes into it, read a clone\(\)"),
        (_diagonal, "cannot be expressed by new tensors"),
        (_more_in_every_run, "does not repeat itself"),
        (_hook, "leaves a hook on the parameter 'a.weight'"),
    ],
)
def test_an_error_that_names_the_line(body: Body, message: str) -> None:
    with pytest.raises(CaptureError, match=message) as error:
        assert_equals_eager(Model(body), _data(), "dp=2", loss=_square)
    is_about_backward = body in (_function_of_a_listed_parameter, _hook)
    assert is_about_backward or f"in {body.__name__}" in error.value.where


def test_compile_where_tensors_hold_no_data() -> None:
    model, (x, y) = Model(lambda m, x: m.b(m.a(x))), _data()[0]
    with torch.device("meta"), pytest.raises(CaptureError, match="have no data"):
        mw.compile(
            model,
            loss=_square,
            example=(x, y),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            mesh="dp=2",
        )
