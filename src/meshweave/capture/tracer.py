"""Records the ops of a function into a graph as they run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.weak import TensorWeakRef

from meshweave.capture.constants import is_computed_at_capture, is_large
from meshweave.capture.decompositions import decomposition_table
from meshweave.capture.record import SILENT, tensors_in
from meshweave.errors import CaptureError
from meshweave.interop import pytree
from meshweave.interop.fake import DispatchMode, FakeTensor, run_plain
from meshweave.interop.ops import is_mutable, is_operator, returns_of
from meshweave.interop.tracing import decomposes_itself
from meshweave.ir.graph import Origin, specs_of
from meshweave.ir.traits import is_random, reads_data

aten = torch.ops.aten

_PLAIN = frozenset({Tensor, nn.Parameter, nn.Buffer, FakeTensor})  # other subclasses decompose their ops themselves
_QUESTIONS = frozenset({aten.size.default, aten.stride.default, aten.storage_offset.default})


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph of ops. Every node has its Specs and, except placeholders, an Origin.

    Tensors that are neither inputs nor results of ops are get_attr nodes; `constants` are these by target."""

    graph: fx.Graph
    constants: Mapping[str, Tensor]

    @property
    def is_functional(self) -> bool:
        """Whether no op writes to an operand."""
        return not any(is_operator(n.target) and is_mutable(n.target) for n in self.graph.nodes)

    def module(self) -> fx.GraphModule:
        """The graph as a module that runs it."""
        return fx.GraphModule(dict(self.constants), self.graph)


class GraphTracer(DispatchMode):
    """While active, every op is recorded into `graph` and runs.

    Ops of the table of decompositions, and composites that autograd decomposes at run time, are replaced by their
    parts. Tensors are identified by identity and not kept alive: PyTorch returns a copy of a new tensor that has
    another reference. Fake tensors stay fake, and real tensors are computed: masks and positions can be read while the
    function runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.origin = Origin("forward")  # for the nodes recorded next
        self._nodes: dict[int, tuple[TensorWeakRef, fx.Node]] = {}
        self._fakes: AbstractContextManager[Any] = nullcontext()  # the mode of the inputs

    @classmethod
    def trace(cls, function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Traced:
        """The graph of `function(tracer, *inputs)`."""
        tracer = cls()
        tracer._fakes = next((x.fake_mode for x in inputs if isinstance(x, FakeTensor)), tracer._fakes)
        for i, tensor in enumerate(inputs):
            tracer._track(tensor, tracer.graph.placeholder(f"input_{i}"))
        with tracer:
            results = function(tracer, *inputs)
        tracer.graph.output([tracer._node(result) for result in results])
        return Traced(tracer.graph, tracer.constants)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in SILENT:
            return func(*args, **kwargs)
        if not _PLAIN.issuperset(types):
            return NotImplemented
        versions = [decomposition_table().get(func)]
        if func not in _QUESTIONS and decomposes_itself(func, args, kwargs):
            versions.append(func.decompose)
        for decomposition in filter(None, versions):
            with self:
                result = decomposition(*args, **kwargs)
            if result is not NotImplemented:  # some decline operands that are not of their form
                return self._restrided(result, func, types, args, kwargs)
        if reads_data(func):  # an error for a fake tensor, a number for a real tensor
            return func(*args, **kwargs)
        if is_computed_at_capture(func, args, kwargs):
            return self._kept(func(*args, **kwargs))
        if func is aten.lift_fresh.default:  # the constant must not change when the result is written
            func = aten.lift_fresh_copy.default
        node = self.graph.create_node("call_function", func, tuple(self._written(args)), self._written(kwargs), "op")
        node.meta["origin"] = self.origin
        # decompositions fill a gradient with zeros, and the like
        with self._fakes if FakeTensor not in types and is_large(func, args, kwargs) else nullcontext():
            result = run_plain(func, types, args, kwargs)
        self._track(result, node)
        return result

    def _restrided(self, result: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """The result of a decomposition, copied where that of the op itself has other strides: they decide whether the
        model's next reshape copies. Contiguous operands give a contiguous result, a view has the strides of its base.
        """
        operands, tensors = list(tensors_in((args, kwargs))), list(tensors_in(result))
        is_view = any(each.alias_info for each in returns_of(func))
        if all(x.is_contiguous() for x in operands) or is_random(func) or is_view or not tensors:
            return result
        strides = {
            id(x): like.stride()
            for x, like in zip(tensors, tensors_in(run_plain(func, types, args, kwargs)), strict=True)
        }

        def copied(x: Tensor) -> Tensor:
            wanted = strides[id(x)]
            return x if x.stride() == wanted else torch.ops.prims.copy_strided.default(x, wanted)  # type: ignore[no-any-return]

        with self:
            return pytree.tree_map_only(Tensor, copied, result)

    def _kept(self, value: Any) -> Any:
        """Constants, each with a node of a copy of its own: it stays as it is, whatever is written into the result."""
        for tensor in tensors_in(value):
            node = self.graph.call_function(aten.lift_fresh_copy.default, (self._node(tensor.clone()),))
            node.meta["origin"] = self.origin
            self._track(tensor, node)
        return value

    def _written(self, value: Any) -> Any:
        """An operand as an argument of a node."""
        if isinstance(value, Tensor):
            return self._node(value)
        if isinstance(value, list | tuple):
            return [self._written(item) for item in value]
        if isinstance(value, dict):
            return {key: self._written(item) for key, item in value.items()}
        if isinstance(value, torch.UntypedStorage | torch.ScriptObject):
            raise CaptureError(
                "an op takes an argument that no graph can represent",
                where=self.origin.source,
                got=type(value).__name__,
                expected="tensors and numbers",
                hint="compute with tensors instead of their storages",
            )
        return value

    def _node(self, tensor: Tensor) -> fx.Node:
        known = self._nodes.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if isinstance(tensor, FakeTensor):
            raise CaptureError(
                "the step uses a tensor that is neither an input nor computed in it",
                where=self.origin.source,
                got="a fake tensor of another capture, of a copy.deepcopy or of another thread",
                hint="rebuild the model if it keeps values of a capture; copy by x.clone(), and start no threads",
            )
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor.detach() if tensor.requires_grad else tensor
        node = self.graph.create_node("get_attr", name)
        node.meta["origin"] = self.origin
        self._track(tensor, node)
        return node

    def _track(self, value: Any, node: fx.Node) -> None:
        node.meta["spec"] = specs_of(value)
        if isinstance(value, Tensor):
            self._nodes[id(value)] = TensorWeakRef(value), node
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                if isinstance(item, Tensor | list | tuple):
                    part = self.graph.call_function(operator.getitem, (node, i))
                    part.meta["origin"] = self.origin
                    self._track(item, part)
