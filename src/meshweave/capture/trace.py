"""Tracing with provenance: each node's phase, module and source line; randomness by global index."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from meshweave.capture.constants import is_large, with_positions
from meshweave.capture.decompositions import decomposition_table
from meshweave.capture.functional import functional
from meshweave.capture.random_ops import RANDOM
from meshweave.capture.record import Call, ConstantsWritten, Difference, Record
from meshweave.capture.refusals import CAST_HINT, branch_hint, failure
from meshweave.capture.tracer import GraphTracer, Traced
from meshweave.errors import CaptureError, MeshweaveError
from meshweave.interop.fake import (
    DispatchMode,
    FakeTensor,
    FakeTensorMode,
    device_of,
    run_plain,
    without_functions,
)
from meshweave.interop.tracing import (
    next_sequence_number,
    running_sequence_number,
    without_onednn,
)
from meshweave.ir import ops
from meshweave.ir.graph import Origin
from meshweave.ir.grouped import OF_OTHERS
from meshweave.ir.traits import is_random

aten = torch.ops.aten

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
_STEP = str(Path(__file__).with_name("step.py"))
_CHECKPOINT = torch.utils.checkpoint.__file__
_SITE = str(Path(torch.__file__).parents[1])
_STDLIB = str(Path(os.__file__).parent) + "/"


@cache
def _is_foreign(filename: str) -> bool:
    if filename.startswith(_STDLIB) and not filename.startswith(_SITE):
        return False
    return not filename.startswith((_TORCH, _OURS, "<"))


def _place(filename: str, line: int, function: str) -> str:
    for root in (_SITE, os.getcwd()):
        if filename.startswith(root + "/"):
            filename = filename[len(root) + 1 :]
    return f"{filename}:{line} in {function}"


def user_line(frame: FrameType | None = None) -> str:
    """Source line of the innermost caller (of `frame`) that is in neither torch, meshweave nor the standard library,
    inside the step while one is traced; or ""."""
    frame = frame or sys._getframe(1)
    while frame is not None and not _is_foreign(frame.f_code.co_filename):
        frame = None if frame.f_code.co_filename == _STEP else frame.f_back
    return "" if frame is None else _place(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _runs_again() -> bool:
    """Whether the current op belongs to a checkpointed function that runs again, in backward."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in (_CHECKPOINT, _STEP):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _CHECKPOINT


def line_of(error: BaseException) -> str:
    """Source line at which an error was raised or passed on, neither in torch nor in meshweave; or ""."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_foreign(f.filename)]
    return _place(frames[-1].filename, frames[-1].lineno or 0, frames[-1].name) if frames else ""


# While a GlobalRandom is active, the seed of PyTorch's default generator is a position in the step: these highest bits
# (a seed without them was set by the model), the number of ops before it and, lowest, the number of draws before it.
_PLACE, _OP_BITS, _DRAW_BITS = 0x5EED, 24, 24
_OP = 1 << _DRAW_BITS
_GENERATOR = torch.default_generator


def _is_place(seed: int) -> bool:
    return seed >> (_OP_BITS + _DRAW_BITS) == _PLACE


def _following(seed: int) -> int:
    """The number drawn with a seed that the model has set, and the next seed: splitmix64, without the sign."""
    mixed = (seed + 0x9E3779B97F4A7C15) % (1 << 64)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % (1 << 64)
    return (mixed ^ mixed >> 31) >> 1


def _next_op(func: Any) -> int | None:
    """The number of ops before this op, which is counted; None for a detach (checkpoints add some when they repeat a
    function) and if the model has set the seed."""
    seed = _GENERATOR.initial_seed()
    if func is aten.detach.default or not _is_place(seed):
        return None
    _GENERATOR.manual_seed(seed + _OP)
    return seed % (1 << (_OP_BITS + _DRAW_BITS)) >> _DRAW_BITS


class GlobalRandom(DispatchMode):
    """Random ops as functions of (seed, step, call number, global index): the same values on every mesh.

    The call number is the state of PyTorch's default generator, so that code that saves and restores that state (a
    checkpointed function that runs again in backward, `fork_rng`) repeats numbers as in eager PyTorch. If the model
    itself sets the seed, the numbers follow from it, the same in every step. When the mode ends, the generator is
    restored. It also works around eager code, which then draws the numbers of a captured graph.
    """

    def __init__(self, step: Tensor, seed: int) -> None:
        super().__init__()
        self.step, self.seed = step, seed
        self._before: list[Tensor] = []

    def __enter__(self) -> Any:
        self._before.append(torch.get_rng_state())
        _GENERATOR.manual_seed(_PLACE << (_OP_BITS + _DRAW_BITS))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_rng_state(self._before.pop())

    def uniform(self, shape: Any) -> Tensor:
        """Numbers in [0, 1)."""
        step, call, size = self._draw(shape)
        return ops.uniform(step, self.seed, call, size, [0] * len(size), size)

    def chance(self, shape: Any, p: float) -> Tensor:
        """True with probability p."""
        step, call, size = self._draw(shape)
        return ops.chance(step, self.seed, call, size, [0] * len(size), size, p)

    def _draw(self, shape: Any) -> tuple[Tensor, int, list[int]]:
        seed = _GENERATOR.initial_seed()
        if _is_place(seed):
            step, call, then = self.step, seed % (1 << _DRAW_BITS) + 1, seed + 1
        else:
            step, call, then = torch.zeros_like(self.step), _following(seed), _following(seed)
        _GENERATOR.manual_seed(then)
        return step, call, [int(s) for s in shape]

    def normal(self, shape: Any) -> Tensor:
        radius = (-2.0 * torch.log1p(-self.uniform(shape))).sqrt()
        return radius * torch.cos(2.0 * torch.pi * self.uniform(shape))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        draw = RANDOM.get(func)
        if draw is not None and kwargs.get("generator") is None:
            return draw(self, *args, **kwargs)
        if is_random(func) and "attention" not in str(func):  # tagged because of its dropout, which is 0 here
            raise CaptureError(
                f"{func} has no mesh-independent form",
                where=user_line(),
                got="a generator of its own" if draw is not None else "",
                expected=", ".join(sorted({str(op).split(".")[1] for op in RANDOM}))
                + " with PyTorch's default generator",
                hint="use one of these, or draw the values outside the model and pass them in the batch",
            )
        if func is aten.resize_.default and tuple(args[0].shape) == tuple(args[1]):  # by randn(out=) and others
            return args[0]
        return self.run(func, types, args, kwargs)

    def run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an op that is not random: by a meshweave op if the original supports only some dtypes."""
        return _own_form(func)(*args, **kwargs)


@cache
def _own_form(func: Any) -> Any:
    return OF_OTHERS.get(str(func), func)


_FACTORIES_LIKE = frozenset(
    {aten.new_zeros.default, aten.new_full.default, aten.new_empty.default, aten.new_ones.default}
)
# Uninitialised memory is zeros in capture, as in the graph: two runs are compared by their constants.
_UNINITIALIZED = frozenset(
    {
        aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten.empty_permuted.default,
        aten.new_empty.default, aten.new_empty_strided.default,
    }
)  # fmt: skip


_EQUAL_DTYPES = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default,
        aten.convolution.default, aten.native_layer_norm.default,
    }
)  # fmt: skip


@lru_cache(1 << 16)
def _in_backward(origin: Origin) -> Origin:
    return replace(origin, phase="backward")


class Provenance(GlobalRandom):
    """Writes an Origin on every traced node.

    A node of the backward pass gets the module and line of its forward op, which has the same autograd sequence number.
    An op of a checkpointed function that runs again in backward gets the origin of the op that it repeats, matched by
    position, in phase backward. A constant into which the step writes computed values depends on data from then on:
    results of the calls `overwritten` are fake from the start.
    """

    def __init__(
        self,
        step: Tensor,
        seed: int,
        record: Record,
        tracer: GraphTracer | None = None,
        overwritten: Set[Call] = frozenset(),
    ) -> None:
        super().__init__(step, seed)
        self.record, self.tracer, self.overwritten = record, tracer, overwritten
        self.phase = "forward"
        self.modules: list[str] = []
        self.substituted: dict[int, str] = {}  # the user's parameters and buffers, by id: their names
        self._forward: dict[int, Origin] = {}
        self._at: dict[int, tuple[Any, Origin]] = {}  # number of ops before an op of the model -> the op
        self._first = next_sequence_number() - 2  # 1 is for ops before the first that autograd records
        self._last = -1  # the last number in `_forward`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return device_of(args[0])
        if func is aten._local_scalar_dense.default:
            return self._value(args[0])
        origin = self._origin(func)
        if self.tracer is not None:
            self.tracer.origin = origin
        if self.phase in ("reduce", "update"):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func in _EQUAL_DTYPES:
            self._check_dtypes(func, args)
        with without_functions():
            self.record.before(func, args, kwargs or {}, origin.source)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        with without_functions():
            self.record.after(func, args, kwargs or {}, result, origin.source)
        return result

    def run(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an op like the tracer: in a run that is compared with the trace, constants come from the same
        decompositions."""
        args = with_positions(func, args)
        versions = [_own_form(func)]
        if self.record.expected is not None and FakeTensor not in types:
            versions.insert(0, decomposition_table().get(func, func))
        # What is made like data is often filled with data, piece by piece: numbers are fake from the start. Masks and
        # positions stay real, so that control flow on them is decided.
        like: Any = args[0] if func in _FACTORIES_LIKE else None
        is_like_data = isinstance(like, FakeTensor) and (kwargs.get("dtype") or like.dtype).is_floating_point
        is_data = is_like_data or self.record.call in self.overwritten
        is_fake = is_data or (FakeTensor not in types and is_large(func, args, kwargs))
        with self.step.fake_mode if is_fake else nullcontext():  # type: ignore[attr-defined]
            results = (run_plain(version, types, args, kwargs) for version in versions)  # a decomposition may decline
            result = next(result for result in results if result is not NotImplemented)
        return result if func not in _UNINITIALIZED or isinstance(result, FakeTensor) else result.zero_()

    def _check_dtypes(self, func: Any, args: Any) -> None:
        """CaptureError for operands for which no device has a kernel: a trace would not notice."""
        dtypes = [x.dtype for x in args if isinstance(x, Tensor) and x.is_floating_point()]
        is_norm = func is aten.native_layer_norm.default  # which takes wider weights
        if all(x == dtypes[0] or (is_norm and x.itemsize > dtypes[0].itemsize) for x in dtypes):
            return
        module = self.modules[-1] if self.modules else ""
        raise CaptureError(
            "a tensor and the parameters of a module have different dtypes",
            where=", ".join(filter(None, (user_line(), f"module '{module}'"))),
            got=" and ".join(map(str, dtypes)),
            expected="one dtype, as in eager PyTorch",
            hint=f"{CAST_HINT}; or keep the parameters of this module as they are, "
            f'mw.Precision(param_dtype={{"*": torch.bfloat16, "{module}": None}}), and cast what it returns',
        )

    def _value(self, x: Tensor) -> Any:
        if isinstance(x, FakeTensor):
            constants = "; to read a constant before the step writes into it, read a clone()"
            module = f"module '{self.modules[-1]}'" if self.modules else ""
            raise CaptureError(
                "the model's control flow depends on data",
                where=user_line() or module,
                got="a tensor turned into a Python number (if, .item(), int(), .tolist()) while the step was captured",
                expected="the same ops for every batch",
                hint=branch_hint() + (constants if self.overwritten else ""),
            )
        return aten._local_scalar_dense.default(x)

    def _origin(self, func: Any) -> Origin:
        # Gradients that the model itself computes belong to forward.
        running = running_sequence_number() if self.phase == "backward" else None
        if running is not None and not _runs_again():
            forward_origin = self._forward.get(running - self._first)
            return _in_backward(forward_origin) if forward_origin else Origin("backward")
        module, source = self.modules[-1] if self.modules else "", user_line()
        if running is not None:
            return self._repeated(func, Origin("backward", module, source))
        if self.phase not in ("forward", "loss"):
            return Origin(self.phase, module, source)
        # An op that autograd does not record has the number of the last op that it did; or none, in another module.
        call = next_sequence_number() - 1 - self._first
        if call in self._forward and self._forward[call].module != module:
            call = 0
        origin = Origin(self.phase, module, source, max(call, 0))
        # Autograd numbers the op itself, and then views of a tensor that was written in part, which it records anew.
        self._forward.update((at, origin) for at in range(self._last + 1, call + 1))
        self._last = max(self._last, call)
        if (at := _next_op(func)) is not None:
            self._at[at] = func, origin
        return origin

    def _repeated(self, func: Any, new: Origin) -> Origin:
        """The origin of the op that this op repeats. Ops in between are skipped: a checkpoint may keep some. In a
        function of PyTorch alone (`nn.Sequential`), which no line of the user's calls again, the module tells it."""
        at = _next_op(func)
        while at is not None and at in self._at:
            original, origin = self._at[at]
            is_there = origin.source == new.source if new.source else new.module in ("", origin.module)
            if original is func and is_there:
                return _in_backward(origin)
            at = _next_op(func)
        return new

    def _leave(self, *_: Any) -> None:
        self.modules.pop()

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """While active, the running module is known."""
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
    """Forward pre-hook of a module."""

    def __init__(self, stack: list[str], name: str) -> None:
        self.stack, self.name = stack, name

    def __call__(self, *_: Any) -> None:
        self.stack.append(self.name)


def fake_like(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """A fake CPU tensor with the shape, strides and dtype of `x`; nothing is allocated."""
    return FakeTensor(mode, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), torch.device("cpu"))


def trace(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Traced:
    """`function(tracer, *inputs)` over fake tensors as a functional ATen graph with Origins.

    Raises CaptureError with the user's line.
    """
    with capture_errors():
        traced = GraphTracer.trace(function, inputs)
        return traced if traced.is_functional else functional(traced, inputs)


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Under the model's own autocast, each use of a parameter casts it, in every run."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


@contextmanager
def capture_errors() -> Iterator[None]:
    """The model runs on fake tensors: any error of it becomes a CaptureError with the user's line. oneDNN is off,
    because it runs a float32 recurrent layer as a single op that only CPUs have. Functions under torch.compile run
    eagerly: Dynamo would compile the tracer with them."""
    try:
        with without_onednn(), _without_autocast_cache(), torch.compiler.set_stance("force_eager"):
            yield
    except (MeshweaveError, Difference, ConstantsWritten):
        raise
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        what, hint = failure(error)
        raise CaptureError(what, where=line_of(error), got=got, hint=hint) from error
