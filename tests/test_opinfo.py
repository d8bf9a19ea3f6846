"""PyTorch's own database of ops (OpInfo): what an op's sample gives on a mesh is what it gives in eager PyTorch.

Float operands are parameters, the others buffers; the loss weighs every element of every result by another number.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import meshweave as mw

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of ops that are in beta or deprecated

# What does not run, with the beginning of the error that says so.
DATA = "the shape of a result depends on data"
CONTROL = "the model's control flow depends on data"
STRIDES = "aten.as_strided reads memory by its strides"
REFUSED = {
    "allclose": DATA,
    "argwhere": DATA,
    "as_strided": STRIDES,
    "as_strided.partial_views": STRIDES,
    "as_strided_copy": "no sharding rule for aten.as_strided_copy",
    "as_strided_scatter": "no sharding rule for aten.as_strided_scatter",
    "cauchy": "aten.cauchy_.default has no mesh-independent form",
    "combinations": DATA,
    "cov": CONTROL,  # with weights of observations
    "equal": DATA,
    "geometric": "aten.geometric_.default has no mesh-independent form",
    "index_fill": DATA,  # the gradient of a value that is a tensor
    "istft": STRIDES,
    "item": CONTROL,
    "linalg.ldl_factor": "no sharding rule for aten.linalg_ldl_factor_ex",
    "linalg.ldl_factor_ex": "no sharding rule for aten.linalg_ldl_factor_ex",
    "linalg.ldl_solve": "no sharding rule for aten.linalg_ldl_solve",
    "linalg.lstsq": DATA,
    "linalg.lstsq.grad_oriented": DATA,
    "masked_select": "the loss does not depend on any trained parameter",  # selected rows are no tensor
    "narrow": CONTROL,  # with a start that is a tensor
    "nn.functional.fractional_max_pool2d": "no sharding rule for aten.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d": "no sharding rule for aten.fractional_max_pool3d",
    "nn.functional.gaussian_nll_loss": CONTROL,
    "nn.functional.multilabel_margin_loss": "no sharding rule for aten.multilabel_margin_loss_forward",
    "nonzero": DATA,
    "repeat_interleave": DATA,  # with a tensor of repeats
    "tensor_split": "the training step cannot be captured",  # with the places in a tensor
    "unfold_copy": "the model does not repeat itself",  # fake tensors have other strides than real ones
    "to_sparse": "no sharding rule for aten._to_sparse",
}
RANDOM = {
    "bernoulli", "nn.functional.dropout", "nn.functional.rrelu", "uniform", "exponential", "log_normal",
    "multinomial", "normal", "normal.in_place", "normal.number_mean", "randint_like", "svd_lowrank",
}  # fmt: skip
SKIPPED = {"sparse.sampled_addmm", "sparse.mm.reduce"}  # layouts of memory, which are not what a mesh divides


def name_of(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


@cache
def ops() -> dict[str, Any]:
    """By name. The database takes two seconds to import: the quick tests are named without it."""
    from torch.testing._internal.common_methods_invocations import op_db

    return {name_of(op): op for op in op_db if name_of(op) not in SKIPPED}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The names of the whole database where slow tests are asked for."""
    if metafunc.function in (test_the_database, test_operands_in_any_memory):
        is_quick = metafunc.config.option.markexpr == "not slow"
        metafunc.parametrize("name", [] if is_quick else sorted(ops()))


def _reversed(x: Tensor) -> Tensor:
    """x with its dims in reverse order."""
    return x.permute(tuple(reversed(range(x.dim()))))


# How the operands of an op lie in memory: stored by the first function, made from what is stored by the second. Where
# eager PyTorch copies ("copied"), a captured graph does not: its op reads what eager PyTorch never hands to a kernel.
MEMORY: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "contiguous": (lambda x: x, lambda x: x),
    "copied": (lambda x: _reversed(x).contiguous(), lambda x: _reversed(x).contiguous()),
    "reversed": (lambda x: _reversed(x).contiguous(), _reversed),
    "sliced": (lambda x: torch.stack([x, x], -1), lambda x: x[..., 0]),
}


class Sampled(nn.Module):
    """An op on its sample's operands, which lie in memory as `MEMORY` says."""

    def __init__(self, op: Any, sample: Any, memory: str = "contiguous") -> None:
        super().__init__()
        self.op = op
        store, self.read = MEMORY[memory]
        self.leaves, self.tree = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        for i, x in enumerate(self.leaves):
            if isinstance(x, Tensor):
                x = store(x.detach().clone().contiguous())
                if x.is_floating_point():
                    self.register_parameter(f"x{i}", nn.Parameter(x))
                else:
                    self.register_buffer(f"x{i}", x)
                self.leaves[i] = f"tensor x{i}"

    def forward(self, x: Tensor) -> Tensor:
        is_tensor = [isinstance(v, str) and v.startswith("tensor x") for v in self.leaves]
        leaves = [self.read(getattr(self, v[7:])) if t else v for v, t in zip(self.leaves, is_tensor, strict=True)]
        first, args, options = pytree.tree_unflatten(leaves, self.tree)
        total = x.sum() * 0
        for out in pytree.tree_leaves(self.op(first, *args, **options)):
            if isinstance(out, Tensor):
                out = (torch.view_as_real(out) if out.is_complex() else out).float()
                weight = torch.arange(1, out.numel() + 1, dtype=torch.float32) / max(out.numel(), 1)
                total = total + (out.reshape(-1) * weight).sum()
        return total


LARGEST = 20_000  # elements of a sample


def sampled(op: Any, memory: str = "contiguous") -> Sampled | None:
    """The sample with the largest operand of two dims or more, else of any; None where eager PyTorch has no gradient
    for it."""
    if not op.supports_dtype(torch.float32, "cpu"):
        return None
    torch.manual_seed(0)
    samples = list(op.sample_inputs("cpu", torch.float32, requires_grad=False))

    def size(sample: Any) -> tuple[bool, int]:
        leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
        elements = sum(x.numel() for x in leaves if isinstance(x, Tensor))
        return isinstance(sample.input, Tensor) and sample.input.dim() >= 2, elements * (elements < LARGEST)

    def is_filled(x: Any) -> bool:
        return not isinstance(x, Tensor) or bool(x.numel() and x.isfinite().all())

    filled = [s for s in samples if all(map(is_filled, pytree.tree_leaves(s.input)))]
    if not filled:
        return None
    model = Sampled(op, max(filled, key=size), memory)
    try:
        out = model(torch.ones(4))
        out.backward()
    except (RuntimeError, TypeError, AssertionError):  # the last: Jiterator, without a GPU
        return None
    return model if any(p.grad is not None for p in model.parameters()) else None


def compared(name: str, mesh: str, memory: str = "contiguous") -> None:
    """Raises what compile and step raise; fails where loss or gradients are not eager PyTorch's."""
    model = sampled(ops()[name], memory)
    if model is None:
        pytest.skip("eager PyTorch has no gradient for it on this device")
    expected = model(torch.ones(4)).item()
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    batch = {"x": torch.ones(4)}
    precision, run = mw.Precision(loss_scale=None), mw.RunOptions(check_finite=False)
    step = mw.compile(model, loss=lambda out, batch: out, example=batch, mesh=mesh, precision=precision, run=run)
    loss = step(batch)
    if name not in RANDOM:
        assert loss == pytest.approx(expected, rel=1e-4, abs=1e-4, nan_ok=True)
        for key, grad in grads.items():
            torch.testing.assert_close(step.gradients()[key], grad, rtol=1e-3, atol=1e-4, equal_nan=True)


def judged(name: str, mesh: str, memory: str = "contiguous") -> None:
    if name not in REFUSED or memory != "contiguous":
        try:
            return compared(name, mesh, memory)
        except mw.MeshweaveError as error:
            if not str(error).startswith(REFUSED.get(name, "nothing")):
                raise
            return None
    with pytest.raises(mw.MeshweaveError) as raised:
        compared(name, mesh, memory)
    assert str(raised.value).startswith(REFUSED[name])


# One of each kind of decomposition and rule that nothing else in the quick tests covers.
QUICK = [
    "addmv",
    "addbmm",
    "aminmax",
    "block_diag",
    "cholesky_solve",
    "cross",
    "diag_embed",
    "index_copy",
    "index_reduce.amax",
    "linalg.solve",
    "linalg.pinv.hermitian",
    "linalg.svd",
    "nanmedian",
    "nn.functional.bilinear",
    "nn.functional.embedding_bag",
    "nn.functional.max_unpool2d",
    "nn.functional.pixel_shuffle",
    "put",
    "std_mean",
    "take",
    "view_as_complex",
    "as_strided",
    "masked_select",
]


@pytest.mark.parametrize("name", QUICK)
def test_a_sample_of_the_database(name: str) -> None:
    judged(name, "fsdp=2")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "tp=2"])
def test_the_database(name: str, mesh: str) -> None:
    judged(name, mesh)


# Ops whose kernels or backward formulas depend on strides, and one whose decomposition gives others than the op.
@pytest.mark.parametrize("memory", ["copied", "reversed", "sliced"])
@pytest.mark.parametrize(
    "name",
    [
        *("linalg.det", "linalg.slogdet", "masked_fill", "nn.functional.embedding_bag", "nn.functional.pdist"),
        *("nn.functional.adaptive_max_pool3d", "nn.functional.layer_norm"),
        "nn.functional.scaled_dot_product_attention",
    ],
)
def test_a_sample_in_any_memory(name: str, memory: str) -> None:
    judged(name, "dp=2", memory)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["copied", "reversed", "sliced"])
def test_operands_in_any_memory(name: str, memory: str) -> None:
    judged(name, "dp=2", memory)
