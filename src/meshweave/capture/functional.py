"""Rewrites a traced graph without ops that write in place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.capture.decompositions import decomposition_table
from meshweave.capture.tracer import GraphTracer, Traced
from meshweave.errors import CaptureError
from meshweave.interop.fake import FakeTensor
from meshweave.interop.ops import find_operator, is_operator
from meshweave.interop.tracing import is_composite
from meshweave.ir.aliases import aliases_of, written_of
from meshweave.ir.graph import Spec, map_nodes
from meshweave.ir.traits import IDENTITIES


def functional(traced: Traced, inputs: Sequence[Tensor]) -> Traced:
    """The same graph without in-place ops. No data is allocated: tensors computed from numbers alone are fake here."""
    renamed = _Renamer(traced).run()
    return _functionalized(traced, inputs) if renamed is None else renamed


class _Renamer:
    """Writes a graph anew, where an op that wrote to a value as a whole returns a new value; None if there are other
    writes. Views of the value that are used later are taken of the new value."""

    def __init__(self, traced: Traced) -> None:
        self.traced, self.graph = traced, fx.Graph()
        self.bases: dict[fx.Node, fx.Node] = {}  # of a view or an alias: the value that it is of
        self.latest: dict[fx.Node, fx.Node] = {}  # of a value, in the new graph
        self.versions: dict[fx.Node, int] = {}
        self.copies: dict[fx.Node, tuple[int, fx.Node]] = {}  # in the new graph, of which version
        self.whole: set[fx.Node] = set()  # values, and aliases of them in the same form

    def run(self) -> Traced | None:
        for node in self.traced.graph.nodes:
            if node.op == "call_function" and is_operator(node.target) and (written := written_of(node.target)):
                if not self._write(node, written):
                    return None
            else:
                self._add(node)
        return Traced(self.graph, self.traced.constants)

    def _add(self, node: fx.Node) -> None:
        source = _source_of(node)
        self.bases[node] = base = node if source is None else self.bases[source]
        if source is None or (source in self.whole and node.target in IDENTITIES):
            self.whole.add(node)
        if source is None:
            self.versions[base], self.latest[base] = 0, self.graph.node_copy(node, self._value)
        else:
            self._value(node)

    def _value(self, node: fx.Node) -> fx.Node:
        """The present value of a node of the old graph."""
        base = self.bases[node]
        if node in self.whole:
            return self.latest[base]
        version, copy = self.copies.get(node, (-1, node))
        if version != self.versions[base]:
            copy = self.graph.node_copy(node, self._value)
            self.copies[node] = self.versions[base], copy
        return copy

    def _write(self, node: fx.Node, written: Sequence[tuple[int, str]]) -> bool:
        """Whether the op is one that writes to its first operand alone, as a whole, and has a form that returns it."""
        value, target = node.args[0] if node.args else None, _returning(node.target)
        if target is None or [position for position, _ in written] != [0] or value not in self.whole:
            return False
        if not _keeps_form(node, target):
            return False
        assert isinstance(value, fx.Node)
        args, kwargs = map_nodes(node, self._value)
        new = self.graph.call_function(target, args, kwargs)
        new.meta = dict(node.meta)
        base = self.bases[node] = self.bases[value]
        self.whole.add(node)
        self.latest[base] = new
        self.versions[base] += 1
        return True


def _source_of(node: fx.Node) -> fx.Node | None:
    """The operand whose memory a node may share; None if it has its own."""
    if node.op != "call_function":
        return None
    if not is_operator(node.target):  # getitem
        return node.args[0] if isinstance(node.args[0], fx.Node) else None
    if node.target in _OF_COPIES:
        return None
    places = [place for each in aliases_of(node.target).values() for place in each]
    operands = [node.args[p] if p < len(node.args) else node.kwargs.get(name) for p, name in dict.fromkeys(places)]
    return next((operand for operand in operands if isinstance(operand, fx.Node)), None)


_OF_COPIES = frozenset({torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.clone.default})


@cache
def _returning(target: Any) -> Any:
    """The op that returns what `target` writes to its first operand; None if there is none that is recorded as it
    is."""
    namespace, name, overload = str(target).split(".")
    try:
        operator = find_operator(f"{namespace}.{name.removesuffix('_')}.{overload}")
    except (AttributeError, ValueError):
        return None
    is_whole = name.endswith("_") and not written_of(operator) and not is_composite(operator)
    return operator if is_whole and operator not in decomposition_table() else None


def _keeps_form(node: fx.Node, target: Any) -> bool:
    """Whether the op returns a value of the shape and dtype of the operand that it replaces."""

    def as_meta(n: fx.Node) -> Any:
        spec = n.meta["spec"]
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta") if isinstance(spec, Spec) else spec

    args, kwargs = map_nodes(node, as_meta)
    try:
        result = target(*args, **kwargs)
    except (RuntimeError, NotImplementedError):
        return False
    return isinstance(result, Tensor) and (result.shape, result.dtype) == (args[0].shape, args[0].dtype)


def _functionalized(traced: Traced, inputs: Sequence[Tensor]) -> Traced:
    module, modes = traced.module(), [x.fake_mode for x in inputs if isinstance(x, FakeTensor)]

    def again(tracer: GraphTracer, *values: Tensor) -> Sequence[Tensor]:
        try:
            return torch.func.functionalize(_Replay(module, tracer).run)(*values)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise CaptureError(
                "an in-place write of the step cannot be expressed by new tensors",
                where=tracer.origin.source,
                got=str(error).splitlines()[0][:200],
                hint="compute a new tensor in this line: torch.where, torch.cat, torch.diag_embed",
            ) from error

    with modes[0] if modes else nullcontext():  # type: ignore[attr-defined]
        return GraphTracer.trace(again, inputs)


class _Replay(fx.Interpreter):
    """Runs a graph under a second trace and gives each node's Origin to the nodes that it becomes."""

    def __init__(self, module: fx.GraphModule, tracer: GraphTracer) -> None:
        super().__init__(module)
        self.tracer = tracer

    def run_node(self, n: fx.Node) -> Any:
        self.tracer.origin = n.meta.get("origin", self.tracer.origin)
        return super().run_node(n)
