"""The private parts of Inductor and AOTAutograd that the drop-in for torch.compile depends on.

Holds for torch 2.11 to 2.13 (torch/_inductor, torch/_functorch, torch/_dynamo/backends). Backends and Inductor's
options are public in `torch.compile`; passes on its graphs, its scheduler's nodes and the partitioning of forward and
backward are not. Importing this file imports Inductor, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.utils import counters as counters
from torch._guards import TracingContext, tracing
from torch._inductor import config as config
from torch._inductor import custom_graph_pass
from torch._inductor import list_mode_options as list_mode_options
from torch._inductor.compile_fx import compile_fx as compile_fx
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import WeakDep
from torch._inductor.exc import InductorError
from torch._inductor.exc import InvalidCxxCompiler as InvalidCxxCompiler
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.utils import contains_collective as contains_collective
from torch._inductor.utils import contains_wait as contains_wait
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, stride and dtype of a tensor
GraphPass: Any = custom_graph_pass.CustomGraphPass
# Features of torch 2.13 that earlier versions may lack: a pass after the gradients are computed, and one on scheduler
# nodes.
PostGradPass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", GraphPass)
SchedulerPass: Any = getattr(custom_graph_pass, "CustomSchedulerPass", object)


def is_library_call(node: Any) -> bool:
    """Whether a scheduler node runs a kernel that Inductor does not generate from loops."""
    return isinstance(node, ExternKernelSchedulerNode) or node.is_template()


def add_dependency(node: Any, buffer: str, written: str) -> None:
    """Make a scheduler node depend on the writer of `buffer`, as if it wrote `written`, without keeping it alive."""
    node.add_fake_dep(WeakDep(buffer, mutating_buf=written, is_fake=True))


def backward_compiled_with_forward() -> AbstractContextManager[Any]:
    """A context in which backward graphs are compiled with their forward graphs, in the same thread."""
    return torch._functorch.config.patch(force_non_lazy_backward_lowering=True)


def compile_graph(
    function: Callable[..., Any],
    forms: Sequence[Form],
    device: torch.device,
    *,
    joins_kernels: bool = False,
    is_tuned: bool = True,
) -> Callable[[list[Any]], list[Any]]:
    """A function of tensors, without autograd and without effects, compiled for operands of these forms (shape, stride,
    dtype) on a device. The compiled function takes a list, which it empties, so that it can free an operand after its
    last use; results have the strides of `function`'s results. joins_kernels: on a GPU, independent loops become a
    single kernel, as for an update of many parameters, where launching kernels takes longer than running them.
    is_tuned: on a GPU, kernels are chosen by trying them, also where the order of a sum depends on the choice.

    Raises any error of Inductor, InvalidCxxCompiler if there is no compiler.
    """
    # Without a shape environment, even for static shapes, Inductor does not cache on disk.
    with FakeTensorMode(shape_env=ShapeEnv()) as mode, torch.no_grad():
        inputs = [torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype in forms]
        traced = make_fx(
            torch.func.functionalize(function, remove="mutations"),
            decomposition_table=select_decomp_table(),
            _allow_non_fake_inputs=True,
        )(*inputs)
    output = next(iter(reversed(traced.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
    own = {"emulate_precision_casts": True}  # rounds where ops round: results do not depend on fusion
    own |= {"combo_kernels": True} if joins_kernels and device.type == "cuda" else {}
    own |= {"deterministic": True} if not is_tuned and device.type == "cuda" else {}
    context = TracingContext(mode)
    with config.patch(own), torch.no_grad(), tracing(context), V.set_fake_mode(mode):
        try:
            compiled: Any = compile_fx_inner(traced, inputs, is_inference=True)
        except InductorError as error:  # of any kind
            raise error.inner_exception from error
    if device.type == "cpu":
        return compiled  # type: ignore[no-any-return]
    return _WithTracedShapes(compiled, tuple(tuple(x.meta["val"].shape) for x in output.args[0]))


@dataclass(frozen=True, slots=True)
class _WithTracedShapes:
    """A compiled function whose results get the shapes of the traced results: torch 2.11 drops the dims of size 1 of a
    sum over rows that it fuses with a sum over columns (torch/_inductor/codegen/simd.py, mended in 2.13)."""

    compiled: Callable[[list[Any]], Sequence[Any]]
    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, operands: list[Any]) -> list[Any]:
        results = zip(self.compiled(operands), self.shapes, strict=True)
        return [x if x.shape == shape else x.view(shape) for x, shape in results]
