"""Tracing with provenance: which phase, module and source line made each node; randomness by global index."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_innermost_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from meshweave.capture.decompositions import decomposition_table
from meshweave.errors import CaptureError, MeshweaveError
from meshweave.ir import ops
from meshweave.ir.graph import Origin

aten = torch.ops.aten

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_STEP = str(Path(__file__).with_name("step.py"))
_SITE = str(Path(torch.__file__).parents[1])


def _is_foreign(filename: str) -> bool:
    return not filename.startswith((_TORCH, _OURS, "<")) and "contextlib" not in filename


def _place(filename: str, line: int, function: str) -> str:
    for root in (_SITE, str(Path.cwd())):
        if filename.startswith(root + "/"):
            filename = filename[len(root) + 1 :]
    return f"{filename}:{line} in {function}"


def user_line() -> str:
    """Source line of the innermost caller inside the traced step that is neither torch nor meshweave, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_foreign(frame.f_code.co_filename):
        frame = None if frame.f_code.co_filename == _STEP else frame.f_back
    return "" if frame is None else _place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _line_of(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_foreign(f.filename)]
    return _place(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name) if frames else ""


class GlobalRandom(TorchDispatchMode):
    """Random ops as functions of (seed, step, call number, global index): the same values on every mesh.

    Also usable around eager code, which then draws what a captured graph draws.
    """

    def __init__(self, step: Tensor, seed: int) -> None:
        super().__init__()
        self.step, self.seed, self.calls = step, seed, 0

    def uniform(self, shape: Any) -> Tensor:
        self.calls += 1
        size = [int(s) for s in shape]
        return ops.uniform(self.step, self.seed, self.calls, size, [0] * len(size), size)

    def normal(self, shape: Any) -> Tensor:
        radius = (-2.0 * torch.log1p(-self.uniform(shape))).sqrt()
        return radius * torch.cos(2.0 * torch.pi * self.uniform(shape))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draw = _RANDOM.get(func)
        if draw is not None:
            return draw(self, *args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags and not _is_silent_random(func, args):
            raise CaptureError(
                f"{func} has no mesh-independent form",
                where=user_line(),
                expected=", ".join(sorted(str(op) for op in _RANDOM)),
                hint="use one of these, or draw the values outside the model and pass them in the batch",
            )
        return func(*args, **kwargs)


def _is_silent_random(func: Any, args: Any) -> bool:
    """Attention kernels are tagged random for their dropout, which is 0 when they get here."""
    return "attention" in str(func)


def _like(options: dict[str, Any], x: Tensor | None = None) -> torch.dtype:
    return options.get("dtype") or (x.dtype if x is not None else torch.get_default_dtype())


def _dropout(mode: GlobalRandom, x: Tensor, p: float, train: bool | None = True) -> tuple[Tensor, Tensor]:
    if train is False:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    keep = mode.uniform(x.shape) >= p
    return x * keep * (0.0 if p == 1 else 1.0 / (1.0 - p)), keep


_RANDOM: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.float: lambda m, x, p=0.5, **_: x.copy_(m.uniform(x.shape) < p),
    aten.bernoulli.default: lambda m, x, **_: (m.uniform(x.shape) < x).to(x.dtype),
    aten.bernoulli.p: lambda m, x, p=0.5, **_: (m.uniform(x.shape) < p).to(x.dtype),
    aten.native_dropout.default: _dropout,
    aten.rand.default: lambda m, size, **o: m.uniform(size).to(_like(o)),
    aten.rand_like.default: lambda m, x, **o: m.uniform(x.shape).to(_like(o, x)),
    aten.randn.default: lambda m, size, **o: m.normal(size).to(_like(o)),
    aten.randn_like.default: lambda m, x, **o: m.normal(x.shape).to(_like(o, x)),
    aten.uniform_.default: lambda m, x, low=0.0, high=1.0, **_: x.copy_(m.uniform(x.shape) * (high - low) + low),
    aten.normal_.default: lambda m, x, mean=0.0, std=1.0, **_: x.copy_(m.normal(x.shape) * std + mean),
}


class Provenance(GlobalRandom):
    """Writes an Origin on every node that tracing makes.

    A node of the backward pass gets the module and line of the forward op whose gradient it is, found by the
    sequence number that autograd gave to both.
    """

    def __init__(self, step: Tensor, seed: int) -> None:
        super().__init__(step, seed)
        self.phase = "forward"
        self.modules: list[str] = []
        self._forward: dict[int, Origin] = {}
        self._before = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        self._seen: fx.Node | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return self._value(args[0])
        origin = self._origin()
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._mark(origin)

    def _value(self, x: Tensor) -> Any:
        if isinstance(x, FakeTensor):
            raise CaptureError(
                "the model's control flow depends on data",
                where=user_line(),
                got="a tensor turned into a Python number (if, .item(), int(), .tolist()) while the step was captured",
                expected="the same ops for every batch",
                hint="use torch.where or a mask instead of a branch, or move the decision into the data loader",
            )
        with disable_proxy_modes_tracing():
            return aten._local_scalar_dense.default(x)

    def _origin(self) -> Origin:
        running = torch._C._current_autograd_node()
        if running is not None:
            made = self._forward.get(running._sequence_nr() - self._before)
            return replace(made, phase="backward") if made else Origin("backward")
        module, source = self.modules[-1] if self.modules else "", user_line()
        if self.phase not in ("forward", "loss"):
            return Origin(self.phase, module, source)
        # An op that autograd does not record goes by the number of the last one that it did.
        call = torch.autograd._get_sequence_nr() - 1 - self._before  # type: ignore[attr-defined]
        origin = Origin(self.phase, module, source, max(call, 0))
        self._forward.setdefault(call, origin)
        return origin

    def _mark(self, origin: Origin) -> None:
        mode = get_innermost_proxy_mode()
        if mode is None:
            return
        last = mode.tracer.graph._root._prev
        node = last
        while node is not self._seen and node.op != "root" and "origin" not in node.meta:
            node.meta["origin"] = origin
            node = node._prev
        self._seen = last

    def _leave(self, *_: Any) -> None:
        self.modules.pop()

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """While active, the module that runs is known."""
        handles = []
        for name, module in model.named_modules():
            enter = _Enter(self.modules, name)
            handles.append(module.register_forward_pre_hook(enter, prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.modules.clear()


class _Enter:
    """Forward pre-hook of one module."""

    def __init__(self, stack: list[str], name: str) -> None:
        self.stack, self.name = stack, name

    def __call__(self, *_: Any) -> None:
        self.stack.append(self.name)


def fake_like(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """A fake CPU tensor with the shape, strides and dtype of `x`; nothing is allocated."""
    with mode:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def trace(function: Callable[..., Any], inputs: list[Tensor]) -> fx.GraphModule:
    """`function(*inputs)` over fake tensors as a functional ATen graph with Origins.

    Raises CaptureError with the user's line.
    """
    try:
        module = make_fx(function, decomposition_table=decomposition_table())(*inputs)
    except MeshweaveError:
        raise
    except Exception as error:
        where = _line_of(error)
        dynamic = type(error).__name__ in ("DynamicOutputShapeException", "DataDependentOutputException")
        raise CaptureError(
            "the shape of a result depends on data" if dynamic else "the training step cannot be captured",
            where=where,
            got=f"{type(error).__name__}: {error}",
            hint="use fixed shapes and masks (no nonzero, unique or boolean indexing)"
            if dynamic
            else "run the model once in eager mode on this batch to see whether it works there",
        ) from error
    return _functional(module, inputs)


def _functional(module: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
    """The same graph without in-place ops; the graph itself where it has none."""
    if not any(isinstance(n.target, torch._ops.OpOverload) and n.target._schema.is_mutable for n in module.graph.nodes):
        return module
    replay = _Replay(module)
    return make_fx(torch.func.functionalize(replay.run), decomposition_table=decomposition_table())(*inputs)


class _Replay(fx.Interpreter):
    """Runs a graph under a second trace and hands each node's Origin to the nodes that it becomes."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        mode = get_innermost_proxy_mode()
        node = None if mode is None else mode.tracer.graph._root._prev
        while node is not None and node.op not in ("root", "placeholder") and "origin" not in node.meta:
            node.meta["origin"] = n.meta.get("origin", Origin("forward"))
            node = node._prev
        return result
